"""Buffers that a model reads as numbers: a flag in an ``if``, a length with ``item()``.

In a trace tensors have no values, but a graph has the buffers as they are, and the tensors that the model holds in
other objects. What follows from small ones alone is computed beside the trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from exportkit._torch_compat.tracing import apart_from_modes

_LARGEST = 1024
_READS = {"__bool__", "__float__", "__index__", "__int__", "__len__", "item", "tolist"}


class KnownValues(TorchFunctionMode):
    """Answers with the value of a buffer, or of what was computed from buffers alone, where it is read as a number.

    Args:
        buffers: Pairs of a buffer as the trace has it, and the buffer with its values.
    """

    def __init__(self, buffers: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        # by identity of a traced tensor, which is kept with its value so that no other takes its place
        self._known = {id(traced): (traced, real) for traced, real in buffers if real.numel() <= _LARGEST}
        self._is_read = self._is_written = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        tensors = [item for value in (*args, *kwargs.values()) for item in _tensors_in(value)]
        for tensor in tensors:
            if type(tensor) is torch.Tensor and tensor.device.type != "meta" and tensor.numel() <= _LARGEST:
                self._known.setdefault(
                    id(tensor), (tensor, tensor)
                )  # no tensor of the trace: the model holds it itself
        known = [tensor for tensor in tensors if id(tensor) in self._known]
        if not known:
            return func(*args, **kwargs)
        self._is_written |= _writes(name, kwargs)
        is_number = name in _READS and len(known) == len(tensors)
        self._is_read |= is_number
        if self._is_written and self._is_read:
            raise TypeError("a buffer is read as a number, and buffers are changed: a graph cannot follow both")
        value = None
        if len(known) == len(tensors) and not self._is_written:
            # a symbolic size has no value, and whatever a function raises, it raises in the trace
            with apart_from_modes(), contextlib.suppress(Exception):
                value = func(*self._real(args), **self._real(kwargs))
        if is_number and value is not None:
            return value
        result = func(*args, **kwargs)
        for traced, real in zip(_tensors_in(result), _tensors_in(value), strict=False):
            if real.numel() <= _LARGEST:
                self._known[id(traced)] = traced, real
        return result

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._known[id(value)][1]
        if isinstance(value, Mapping):
            return {key: self._real(item) for key, item in value.items()}
        return type(value)([self._real(item) for item in value]) if type(value) in (list, tuple) else value


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors_in(item)] if isinstance(value, list | tuple) else []


def _writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    in_place = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__", "__iter__")
    return in_place or name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs
