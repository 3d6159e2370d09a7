"""OnnxModel: an exported model in ONNX that is called like the model, proven, and located where it differs.

`InPlace` lets everything that calls the model run on the graphs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self, get_args

import torch

from exportkit._torch_compat.modules import CALL_WITH_HOOKS
from exportkit._torch_compat.tracing import autocast_dtypes, is_tracing
from exportkit.calls.application import module_at, modules_in, require_distinct, require_parameters
from exportkit.calls.call import Call
from exportkit.calls.method_wrapper import attach
from exportkit.calls.observation import Observation
from exportkit.calls.observer import Observer
from exportkit.errors import ArgumentError, ExportkitError, InvalidRequestError, InvalidTypeError
from exportkit.onnx_files.runner import OnnxRunner
from exportkit.plan.tables import count
from exportkit.proof.calls import given_calls
from exportkit.proof.prove import prove
from exportkit.proof.report import Divergence, Report
from exportkit.running.compare import Tensors


class OnnxModel(OnnxRunner):
    """One or several ONNX graphs with the calling convention of the model; `Exported.to_onnx` and `load` return it.

    Call it like the model: it returns what the model returns, computed by onnxruntime. ``domain`` says which calls it
    accepts, ``path``, ``inputs`` and ``outputs`` describe the file, and ``parts`` contains the graphs that feed the
    model. Several modules that were exported together are all ``parts``: call one of them, or use `in_place_of`.
    """

    @classmethod
    def of(cls, runner: OnnxRunner) -> OnnxModel:
        """Returns the graphs of a runner as a public model."""
        return runner.copied(cls, runner.graphs, {name: cls.of(part) for name, part in runner.parts.items()})

    def verify(
        self,
        unseen: bool = True,
        *,
        data: Observer | Observation | None = None,
        runtime: Literal["onnxruntime", "openvino"] = "onnxruntime",
    ) -> Report:
        """Returns the proof: a row for each recorded call, and for calls at sizes that were never run.

        The latest result of `compare_runs` has a row as well.

        Sizes that turn out wrong leave the domain. The metadata of the ONNX file say so, too, unless it belongs to a
        saved folder, which stays as it is.

        Args:
            unseen: Also try sizes that were not recorded. The model runs them in eager mode as the reference; for a
                model that was loaded from a folder, the reference is what the model returned when the folder was saved.
            data: Further calls of the model, recorded by another observer; each gets a row.
            runtime: What computes the rows. With "openvino", calls run on the CPU in float32, the domain and the
                metadata stay as they are (what OpenVINO does not serve is in the report), and differences are not
                located.

        Raises:
            DestinationError: if a file of the folder that this was loaded from is not the one that was saved.
            InvalidRequestError: if the runtime is unknown.
            MissingPackageError: if the runtime is not installed.
        """
        if runtime == "openvino":
            from exportkit.running.openvino import OpenVinoSession, require_openvino

            require_openvino()
            notes = self.check_files() if self.check_files is not None else ()
            return prove(self.opened_by(OpenVinoSession), unseen, notes, given=given_calls(observation_of(data)))
        if runtime != "onnxruntime":
            raise InvalidRequestError(
                "Unsupported runtime.",
                where="runtime",
                expected='"onnxruntime" or "openvino"',
                got=repr(runtime),
            )
        notes = self.check_files() if self.check_files is not None else ()
        self.reopen_changed()
        before = {graph: graph.contract.domain for graph in self.all_graphs()}
        report = prove(self, unseen, notes, _located, given_calls(observation_of(data)))
        for graph, domain in before.items():
            if graph.contract.domain != domain:
                from exportkit.folder.folder import MANIFEST  # only where the proof found something
                from exportkit.onnx_files.translate import write_domain

                if not (graph.path.parent / MANIFEST).exists():
                    try:
                        write_domain(graph.contract)
                    except OSError as error:
                        text = "could not be written, so its metadata still describe the larger domain"
                        report = replace(report, findings=(*report.findings, f"{graph.path} {text}: {error}"))
        return report

    def in_place_of(self, model: torch.nn.Module | object, *, outside: Outside = "raise") -> InPlace:
        """Returns a context manager inside which the model computes with these graphs.

        Only the observed methods of the model, and of the parts, are replaced: ``generate``, pipelines and any other
        code that calls the model run unchanged, and its configuration, device and hooks stay the same.

        Args:
            model: The model that was exported, or one like it; its weights are not used, so it may be on the meta
                device. The pipeline or dict if several modules were exported.
            outside: What to do with calls outside of the domain: "raise" an ArgumentError, or run the model ("eager").

        Raises:
            InvalidTypeError: if ``model`` is not a ``torch.nn.Module``, and holds none.
            InvalidRequestError: if ``outside`` is neither, or is "eager" although the graph keeps state between calls,
                which the model does not share.
            UnknownMethodError: if the model does not have the method that was exported.

        Example:
            >>> import tempfile, torch, exportkit
            >>> model, observer = torch.nn.Linear(4, 2), exportkit.InputObserver()
            >>> with observer(model):
            ...     expected = model(torch.ones(3, 4))
            >>> folder = tempfile.TemporaryDirectory()
            >>> onnx_model = exportkit.export(model, observer).to_onnx(f"{folder.name}/model.onnx")
            >>> with onnx_model.in_place_of(model) as calls:
            ...     torch.allclose(model(torch.ones(5, 4)), expected[:1], atol=1e-5)
            True
            >>> calls
            InPlace(1 call inside, 0 outside)
        """
        return InPlace(self, model, outside)

    def locate(self, model: torch.nn.Module | None = None) -> Divergence | None:
        """Returns the module, line and node where the first call that is not proven begins to differ, or None.

        Args:
            model: The model in PyTorch; only needed if the graph was loaded from a folder.

        Raises:
            DestinationError: if a file of the folder that this was loaded from is not the one that was saved.
            RuntimeFailure: if onnxruntime refuses the graph.
        """
        return self.verify().locate(model)


def observation_of(data: Observer | Observation | None) -> Observation | None:
    """Returns what an observer recorded; None for no observer.

    Raises:
        InvalidTypeError: if this is something else.
    """
    if not isinstance(data, Observer | Observation | None):
        raise InvalidTypeError(
            "Additional calls must have been recorded by an observer.",
            where="data",
            expected="an InputObserver or its observation",
            got=type(data).__name__,
        )
    return data.observation if isinstance(data, Observer) else data


def _located(
    runner: OnnxRunner,
    call: Call,
    expected: Tensors,
    wrong: Sequence[str],
    where: str,
    model: torch.nn.Module | None = None,
) -> Divergence:
    from exportkit.divergence.locate_call import locate_call  # much code, and only for what is not proven

    return locate_call(runner, call, expected, wrong, where, model)


def load(directory: str | os.PathLike[str], *, check_weights: bool = True) -> OnnxModel:
    """Returns the exported model of a folder that `Exported.save` wrote, to be called like the model.

    The model itself is not needed. ``verify()`` replays the recorded calls and those at unseen sizes, and compares with
    what the model returned when the folder was saved.

    Every file of the folder must be unchanged since it was saved. Files that clients and people read may be edited,
    such as ``genai_config.json`` and ``report.txt``; a RuntimeWarning says so.

    Args:
        directory: The folder.
        check_weights: Also read the weights to see whether they were changed. Without it, only the sizes of their files
            are checked, until ``verify()`` reads them.

    Raises:
        DestinationError: if this is not such a folder, or a file of it is missing, damaged, or not the one that was
            saved.
        InvalidTypeError: if ``directory`` is not a path.
        TreeError: if a class that the model takes or returns cannot be found.

    Example:
        >>> import tempfile, torch, exportkit
        >>> model, observer = torch.nn.Linear(4, 2), exportkit.InputObserver()
        >>> with observer(model):
        ...     expected = model(torch.ones(3, 4))
        >>> folder = tempfile.TemporaryDirectory()
        >>> _ = exportkit.export(model, observer).save(folder.name)
        >>> loaded = exportkit.load(folder.name)
        >>> torch.allclose(loaded(torch.ones(3, 4)), expected, atol=1e-5), loaded.verify().ok
        (True, True)
    """
    from exportkit.folder.folder import load_folder

    return OnnxModel.of(load_folder(directory, check_weights))


# Graphs in place of a model: whatever calls the model, such as `generate` or a pipeline, runs on them unchanged


Outside = Literal["raise", "eager"]
_Autocast = tuple[tuple[str, str], ...]  # types of devices with their dtypes


class InPlace:
    """Runs the observed methods of a model on exported graphs for the time of a ``with`` block.

    Blocks may be nested, overlap in any order, and be used from several threads.

    Attributes:
        inside: Number of calls that the graphs served, those of parts included.
        outside: Number of calls outside of the domain, which the model ran or which raised.
        last_refusal: Why the latest call outside of the domain was refused; None if there was none.
    """

    def __init__(self, runner: OnnxRunner, model: torch.nn.Module | object, outside: Outside) -> None:
        if not isinstance(model, torch.nn.Module) and not isinstance(model, Mapping) and not modules_in(model):
            raise InvalidTypeError(
                "Graphs can only take the place of a torch.nn.Module.",
                where="model",
                expected="the model that was exported, or the pipeline or dict of modules",
                got=type(model).__name__,
                hint="for a pipeline, pass the model inside: `in_place_of(pipe.model)`.",
            )
        if outside not in get_args(Outside):
            raise InvalidRequestError(
                "Unsupported value of `outside`.",
                where="outside",
                expected="'raise' or 'eager'",
                got=repr(outside),
            )
        runners = [*runner.parts.values(), *([runner] if runner.graphs else [])]
        if outside == "eager" and any(one.contract.stateful for one in runners):
            raise InvalidRequestError(
                "The model keeps state between calls, and cannot continue from the state that the graph left.",
                where="outside",
                expected="'raise'",
                got="'eager'",
            )
        self._places = [_place(one, model) for one in runners]
        require_distinct((runner.contract.target, module) for runner, module, _ in self._places)
        self._autocasts: dict[OnnxRunner, set[_Autocast]] = {
            one: {call.autocast for graph in one.graphs.values() for call in graph.observation.calls} for one in runners
        }
        self._is_single = bool(runner.graphs)
        self._runs_model = outside == "eager"
        self._entered: list[contextlib.ExitStack] = []
        self._lock = threading.Lock()
        self.inside = self.outside = 0
        self.last_refusal: ExportkitError | None = None

    @property
    def places(self) -> list[tuple[torch.nn.Module, str]]:
        """The module and the name of its method that the graphs, apart from parts, take the place of; or several."""
        return [place[1:] for place in (self._places[-1:] if self._is_single else self._places)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({count(self.inside, 'call')} inside, {self.outside} outside)"

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for runner, module, method in self._places:
                stack.callback(attach(module, method, functools.partial(self.run, runner)).leave)
            self._entered.append(stack.pop_all())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered.pop().close()

    def run(self, runner: OnnxRunner, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what the graphs of a runner return, or the method for a call outside of their domain.

        Raises:
            ArgumentError: if the call is outside of the domain, and the model is not to be run.
        """
        if is_tracing():
            return method(*args, **kwargs)
        try:
            _require_autocast(self._autocasts[runner])
            result = runner(*args, **kwargs)
        except ArgumentError as error:
            with self._lock:
                self.outside += 1
                self.last_refusal = error
            if not self._runs_model:
                raise
        else:
            with self._lock:
                self.inside += 1
            return result
        return method(*args, **kwargs)


def _require_autocast(recorded: Collection[_Autocast]) -> None:
    """Raises ArgumentError if the model would compute in other dtypes than in every recorded call."""
    now = autocast_dtypes()
    if recorded and now not in recorded:
        raise ArgumentError(
            "torch.autocast is set differently from the recorded calls.",
            expected=" or ".join(sorted(map(_autocast_text, recorded))),
            got=_autocast_text(now),
            hint="run the graphs as the calls were recorded, or record calls like this one and export again.",
        )


def _autocast_text(dtypes: _Autocast) -> str:
    return ", ".join(f"torch.autocast({device!r}, torch.{dtype})" for device, dtype in dtypes) or "no autocast"


def _place(runner: OnnxRunner, model: torch.nn.Module | object) -> tuple[OnnxRunner, torch.nn.Module, str]:
    """A runner with the module and the method that it takes the place of."""
    path, _, name = runner.contract.target.rpartition(".")
    name = CALL_WITH_HOOKS if name == "__call__" else name
    module = module_at(model, path, name, runner.contract.model_name)
    if not runner.contract.stateful:  # otherwise the state is among the arguments
        given = dict.fromkeys(leaf.argument for leaf in runner.contract.plan.leaves)
        require_parameters(module, name, given, runner.contract.model_name)
    return runner, module, name
