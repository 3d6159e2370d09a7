"""Graphs in place of a model: whatever calls the model, such as `generate` or a pipeline, runs on them unchanged."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Any, Literal, Self, get_args

import torch

from exportkit._torch_compat.modules import CALL_WITH_HOOKS
from exportkit._torch_compat.tracing import autocast_dtypes, is_tracing
from exportkit.calls.application import module_at, modules_in, require_distinct, require_parameters
from exportkit.calls.method_wrapper import attach
from exportkit.errors import ArgumentError, ExportkitError, InvalidRequestError, InvalidTypeError
from exportkit.onnx_files.runner import OnnxRunner
from exportkit.plan.tables import count

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
                "The model keeps a state from call to call, so it cannot go on from the state that the graph left.",
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
            "torch.autocast is not what it was in the recorded calls.",
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
