"""Tensors that a model reads as numbers: a flag in an ``if``, a length with ``item()``.

In a trace tensors have no values, but a graph has the buffers as they are, and the tensors that the model holds in
other objects. What follows from small ones alone is computed beside the trace. So is what follows from them and from
sizes, as long as it has a single element: it is a symbolic number then.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from exportkit._torch_compat.tracing import apart_from_modes

_LARGEST = 1024
_READS = {"__bool__", "__float__", "__index__", "__int__", "__len__", "item", "tolist"}
_MADE = ("tensor", "as_tensor", "scalar_tensor")
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Functions with arguments that are sizes, or places along an axis.
_CREATES = {"arange", "zeros", "ones", "full", "empty", "rand", "randn"}
_TAKES_SIZES = _CREATES | {
    "pad", "view", "reshape", "expand", "repeat", "narrow", "split", "new_zeros", "new_ones", "new_full", "new_empty",
    "unflatten", "roll", "interpolate", "__getitem__",
}  # fmt: skip


class KnownValues(TorchFunctionMode):
    """Answers with the value of a buffer, or of what was computed from buffers alone, where it is read as a number.

    Args:
        buffers: Pairs of a buffer as the trace has it, and the buffer with its values.
    """

    def __init__(self, buffers: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        # by identity of a traced tensor, which is kept with its value so that no other takes its place
        self._known: dict[int, tuple[torch.Tensor, Any]] = {
            id(traced): (traced, real) for traced, real in buffers if real.numel() <= _LARGEST
        }
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
        if name in _TAKES_SIZES:
            first = 0 if name in _CREATES else 1  # the tensor itself stays one
            args = (*args[:first], *self._with_sizes(args[first:], name))
            kwargs = self._with_sizes(kwargs, name)
        if not known and not (name in _MADE and args and isinstance(args[0], _SYMBOLIC)):
            return func(*args, **kwargs)
        self._is_written |= _writes(name, kwargs)
        is_number = name in _READS and len(known) == len(tensors)
        self._is_read |= is_number
        if self._is_written and self._is_read:
            raise TypeError("a buffer is read as a number, and buffers are changed: a graph cannot follow both")
        value = None
        if len(known) == len(tensors) and not self._is_written:
            value = self._computed(func, name, args, kwargs)
        if is_number and value is not None:
            return value
        result = func(*args, **kwargs)
        if isinstance(value, (int, float, *_SYMBOLIC)) and isinstance(result, torch.Tensor):
            if result.ndim == 0:
                is_whole = result.dtype is not torch.bool and not result.is_floating_point()
                self._known[id(result)] = result, _integer(value) if is_whole else value
            return result
        for traced, real in zip(_tensors_in(result), _tensors_in(value), strict=False):
            if real.numel() <= _LARGEST:
                self._known[id(traced)] = traced, real
        return result

    def _computed(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """What a function returns for the values: a tensor, or a symbolic number; None if that is not known."""
        # a symbolic size has no value, and whatever a function raises, it raises in the trace
        with contextlib.suppress(Exception):
            given = [self._known[id(arg)][1] if isinstance(arg, torch.Tensor) else arg for arg in args]
            if not any(isinstance(item, _SYMBOLIC) for item in given):
                with apart_from_modes():
                    return func(*self._real(args), **self._real(kwargs))
            numbers = [item.item() if isinstance(item, torch.Tensor) else item for item in given]
            if name in ("__bool__", "item"):
                return bool(numbers[0]) if name == "__bool__" else _read(numbers[0], args[0].dtype)
            plain = name.strip("_")
            reflected = plain.startswith("r") and plain[1:] in _ON_NUMBERS and plain not in _ON_NUMBERS
            compute = _ON_NUMBERS.get(plain[1:] if reflected else plain)
            rounds = plain in ("div", "true_divide") and kwargs
            if compute is not None and not rounds:
                return compute(*(reversed(numbers[:2]) if reflected else numbers))
        return None

    def _with_sizes(self, value: Any, name: str) -> Any:
        """The arguments with numbers in the place of known integers; indices are left as they are, slices excepted."""
        if isinstance(value, Mapping):
            return {key: self._with_sizes(item, name) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)([self._with_sizes(item, name) for item in value])
        if isinstance(value, slice):
            return slice(*(self._with_sizes(item, "slice") for item in (value.start, value.stop, value.step)))
        if not isinstance(value, torch.Tensor) or name == "__getitem__" or id(value) not in self._known:
            return value
        number = self._known[id(value)][1]
        if isinstance(number, torch.Tensor):
            is_whole = number.numel() == 1 and not (number.is_floating_point() or number.is_complex())
            number = int(number) if is_whole and number.dtype is not torch.bool else None
        if self._is_written or not isinstance(number, int | torch.SymInt):
            return value
        self._is_read = True
        return number

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._known[id(value)][1]
        if isinstance(value, Mapping):
            return {key: self._real(item) for key, item in value.items()}
        return type(value)([self._real(item) for item in value]) if type(value) in (list, tuple) else value


def _read(number: Any, dtype: torch.dtype) -> Any:
    return torch.sym_float(number) if dtype.is_floating_point else number


def _integer(number: Any) -> Any:
    return number if isinstance(number, int | torch.SymInt) else torch.sym_int(number)


# The same for numbers, which may be symbolic.
_ON_NUMBERS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "truediv": operator.truediv, "true_divide": operator.truediv, "floordiv": operator.floordiv,
    "floor_divide": operator.floordiv, "mod": operator.mod, "remainder": operator.mod,
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "neg": operator.neg, "ceil": math.ceil, "floor": math.floor, "maximum": torch.sym_max, "minimum": torch.sym_min,
    **dict.fromkeys(("to", "long", "int", "float", "double", "clone", "detach", *_MADE), lambda number, *_: number),
}  # fmt: skip


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors_in(item)] if isinstance(value, list | tuple) else []


def _writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    in_place = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__", "__iter__")
    return in_place or name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs
