"""Runs the model itself, without leaving a trace: no gradients, no recording, no change of random state or buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from exportkit.arguments.build import Arguments
from exportkit.observe.recorder import recording_paused


def run_eager(model: torch.nn.Module, method: str, arguments: Arguments) -> Any:
    """Returns what ``model.<method>`` returns for copies of the arguments.

    Raises:
        Exception: whatever the model raises.
    """
    args, kwargs = arguments.call()
    call = model if method == "forward" else getattr(model, method)
    devices = sorted({t.device.index or 0 for t in arguments.tensors().values() if t.device.type == "cuda"})
    with torch.no_grad(), recording_paused(), torch.random.fork_rng(devices=devices), _buffers_kept(model):
        return call(*args, **kwargs)


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
