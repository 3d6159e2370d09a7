"""OnnxModel: an exported model in ONNX that is called like the model, proven, and located where it differs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from exportkit.api.in_place import InPlace, Outside
from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.calls.observer import Observer
from exportkit.errors import InvalidRequestError, InvalidTypeError
from exportkit.onnx_files.runner import OnnxRunner
from exportkit.proof.calls import given_calls
from exportkit.proof.prove import prove
from exportkit.proof.report import Divergence, Report
from exportkit.running.compare import Tensors


class OnnxModel(OnnxRunner):
    """One or several ONNX graphs with the calling convention of the model; `Exported.to_onnx` and `load` return it.

    Call it like the model: it returns what the model returns, computed by onnxruntime. ``domain`` says where it may be
    used, ``path``, ``inputs`` and ``outputs`` describe the file, ``parts`` has the graphs that feed the model. Several
    modules that were exported together are all ``parts``: call one of them, or use `in_place_of`.
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

        The latest run of an application that `compare_runs` compared has a row, too.

        Sizes that turn out wrong leave the domain. The metadata of the ONNX file say so, too, unless it belongs to a
        saved folder, which stays as it is.

        Args:
            unseen: Also try sizes that were not recorded. The model runs them in eager mode as the truth; a model that
                was loaded from a folder has what the model returned when it was saved.
            data: What another observer recorded of the model: further calls, each with a row.
            runtime: What computes the rows. In "openvino", calls run on the CPU in float32, the domain and the metadata
                stay as they are (what OpenVINO does not serve is in the report), and differences are not located.

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
        code that calls the model go on unchanged, and find its configuration, device and hooks where they were.

        Args:
            model: The model that was exported, or one like it; its weights are not used, so it may be on the meta
                device. The pipeline or dict if several modules were exported.
            outside: What to do with calls outside of the domain: "raise" an ArgumentError, or run the model ("eager").

        Raises:
            InvalidTypeError: if ``model`` is not a ``torch.nn.Module``, and holds none.
            InvalidRequestError: if ``outside`` is neither, or cannot be "eager", since the graph keeps a state from
                call to call that the model would not know.
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

    Every file of the folder has to be as it was saved. Files that clients and people read may be edited, such as
    ``genai_config.json`` and ``report.txt``; a RuntimeWarning says so.

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
