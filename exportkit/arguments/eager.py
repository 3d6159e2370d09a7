"""Runs the model itself, without leaving a trace: no gradients, no recording, no change of random state or buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from exportkit.arguments.build import Arguments
from exportkit.observe import Observation
from exportkit.observe.recorder import recording_paused
from exportkit.trees import flatten

Around = Callable[[dict[str, Any], Callable[[Mapping[str, Any]], Any]], Any]


def run_eager(model: torch.nn.Module, method: str, arguments: Arguments, around: Around | None = None) -> Any:
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
        args, kwargs = arguments.observation.signature.unbind(values)
        return target(*args, **kwargs)

    values = arguments.copies()
    devices = sorted({t.device.index or 0 for t in arguments.tensors().values() if t.device.type == "cuda"})
    with torch.no_grad(), recording_paused(), torch.random.fork_rng(devices=devices), _buffers_kept(model):
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
            outputs = flatten(run_eager(model, method, Arguments(call.arguments, observation)))
        except Exception:
            calls.append(call)
            continue
        calls.append(replace(call, outputs=outputs))
    return replace(observation, calls=tuple(calls), has_values=True)


@contextlib.contextmanager
def _buffers_kept(model: torch.nn.Module) -> Iterator[None]:
    """Puts buffers back that a model in training mode changes as it runs (batch statistics)."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()] if model.training else []
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, copy in kept:
                buffer.copy_(copy)
