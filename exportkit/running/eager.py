"""Runs the model itself and leaves no trace: no gradients, no recording, random state and modules as they were."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from exportkit._torch_compat.modules import buffer_table
from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.calls.recorder import recording_paused
from exportkit.trees import flatten

Around = Callable[[dict[str, Any], Callable[[Mapping[str, Any]], Any]], Any]


def run_eager(model: torch.nn.Module, method: str, arguments: Call, around: Around | None = None) -> Any:
    """Returns what ``model.<method>`` returns for copies of the arguments.

    Args:
        model: The model.
        method: The method.
        arguments: Its arguments.
        around: Gets the arguments by name and a function that calls the method with such, and returns the result.

    Raises:
        Exception: whatever the model raises.
    """
    target = model if method == "forward" else getattr(model, method)

    def call(values: Mapping[str, Any]) -> Any:
        args, kwargs = arguments.signature.unbind(values)
        return target(*args, **kwargs)

    values = arguments.copies()
    devices = sorted({t.device.index or 0 for t in arguments.tensors().values() if t.device.type == "cuda"})
    with torch.no_grad(), recording_paused(), torch.random.fork_rng(devices=devices), _modules_kept(model):
        return call(values) if around is None else around(values, call)


def replayed(observation: Observation, model: torch.nn.Module, method: str) -> Observation:
    """Returns the calls with outputs that belong to their inputs.

    Where only shapes were saved, the values of the inputs are made up, and so are those of the outputs: then the model
    runs again. Calls that it refuses are left as they are.
    """
    if observation.has_values:
        return observation
    calls = []
    for call in observation.calls:
        try:
            outputs = flatten(run_eager(model, method, call))
        except Exception:
            calls.append(call)
            continue
        calls.append(replace(call, outputs=outputs))
    return replace(observation, calls=tuple(calls), has_values=True)


def replaced_buffer(model: torch.nn.Module, method: str, arguments: Call) -> str | None:
    """Returns the name of a buffer that the model replaces by another one for these arguments; None if there is none.

    An example is a table of positions that is made longer when it is needed. A graph has the one that it was traced
    with.

    Args:
        model: The model.
        method: The method.
        arguments: Its arguments.

    Raises:
        Exception: whatever the model raises.
    """
    before = {name: id(buffer) for name, buffer in model.named_buffers()}
    found: list[str] = []

    def around(values: dict[str, Any], call: Callable[[Mapping[str, Any]], Any]) -> None:
        call(values)
        found.extend(name for name, buffer in model.named_buffers() if before.get(name, id(buffer)) != id(buffer))

    run_eager(model, method, arguments, around)
    return next(iter(found), None)


@contextlib.contextmanager
def _modules_kept(model: torch.nn.Module) -> Iterator[None]:
    """Puts back what a model replaces as it runs, attributes and buffers, and the values of batch statistics."""
    tables = [table for module in model.modules() for table in (vars(module), buffer_table(module))]
    tables = [table for table in tables if isinstance(table, dict)]  # a scripted module shows its buffers otherwise
    before = [dict(table) for table in tables]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()] if model.training else []
    try:
        yield
    finally:
        for table, entries in zip(tables, before, strict=True):
            if len(table) != len(entries) or any(map(operator.is_not, table.values(), entries.values())):
                table.clear()
                table.update(entries)
        with torch.no_grad():
            for buffer, copy in values:
                buffer.copy_(copy)
