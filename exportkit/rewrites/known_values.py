"""Tensors that a model reads as numbers: a flag in an ``if``, a length with ``item()``.

In a trace tensors have no values, but a graph has the buffers as they are, the tensors that the model holds in other
objects, and those that it makes of numbers. What follows from small ones alone is computed beside the trace. So is what
follows from them and from sizes, as long as no rounding is involved: it is a symbolic number then, or an array of them.
A product with 0.29 is left out, for float32 rounds 100 times 0.29 to 29, and exact arithmetic does not.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from exportkit._torch_compat.memory import version_of
from exportkit._torch_compat.size_arithmetic import quotient_parts
from exportkit._torch_compat.symbolic_shapes import SYMBOLIC
from exportkit._torch_compat.tracing import apart_from_modes
from exportkit.rewrites.symbolic_lists import SYMBOLIC_LENGTH
from exportkit.trees.tree import is_inexact

_LARGEST = 1024
_READS = {"__bool__", "__float__", "__index__", "__int__", "__len__", "item", "tolist"}
_MADE = ("tensor", "as_tensor", "scalar_tensor")
_OF_PLAIN_NUMBERS = (*_MADE, "arange", "linspace", "logspace", "eye", "tril_indices", "triu_indices")
# Functions with arguments that are sizes, or places along an axis.
_CREATES = {"arange", "zeros", "ones", "full", "empty", "rand", "randn"}
_TAKES_SIZES = _CREATES | {
    "pad", "view", "reshape", "expand", "repeat", "narrow", "split", "new_zeros", "new_ones", "new_full", "new_empty",
    "unflatten", "roll", "interpolate", "__getitem__",
}  # fmt: skip


class KnownValues(TorchFunctionMode):
    """Answers with the value of a buffer, or of what was computed from buffers and sizes, where it is read as a number.

    Args:
        buffers: Pairs of a buffer as the trace has it, and the buffer with its values.
    """

    def __init__(self, buffers: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        # by identity of a traced tensor, which is kept with its value so that no other takes its place; and its version
        self._known: dict[int, tuple[torch.Tensor, Any, int | None]] = {}
        self._held = set[int]()  # by the model: where their values are
        for traced, real in buffers:
            self._hold(traced, real)
        self._is_read = self._is_written = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():  # the body of a loop operator, which may not change buffers
            return func(*args, **(kwargs or {}))
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        tensors = [item for value in (*args, *kwargs.values()) for item in _tensors_in(value)]
        for tensor in tensors:
            is_new = type(tensor) is torch.Tensor and id(tensor) not in self._known
            if is_new and tensor.device.type != "meta":  # no tensor of the trace: the model holds it itself
                self._hold(tensor, tensor)
        known = [tensor for tensor in tensors if self._is_known(tensor)]
        if name in _TAKES_SIZES:
            first = 0 if name in _CREATES else 1  # the tensor itself stays one
            args = (*args[:first], *self._with_sizes(args[first:], name))
            kwargs = self._with_sizes(kwargs, name)
        if name in _OF_PLAIN_NUMBERS and not tensors and not _holds_symbolic_or_array([*args, *kwargs.values()]):
            result = func(*args, **kwargs)
            if result.numel() <= _LARGEST:
                with apart_from_modes():
                    self._note(result, func(*args, **kwargs))
            return result
        if not known and not (name in _MADE and args and _is_of_numbers(args[0])):
            return func(*args, **kwargs)
        written = self._memory_of(None if "out" in kwargs else args[0]) if _writes(name, kwargs) else None
        self._is_written |= _writes(name, kwargs) and (written is None or written in self._held)
        is_number = name in _READS and len(known) == len(tensors)
        self._is_read |= is_number
        if self._is_written and self._is_read:
            raise TypeError("a buffer is read as a number, and buffers are changed: a graph cannot follow both")
        value = None
        if len(known) == len(tensors) and not self._is_written:
            value = self._computed(func, name, args, kwargs)
        if is_number and value is not None:
            if name in ("__int__", "__index__") and isinstance(value, torch.SymInt):
                raise TypeError(SYMBOLIC_LENGTH)
            return value
        result = func(*args, **kwargs)
        if name == "__iter__":
            result = list(result)
        if written is not None:
            self._follow_write(written, is_known=len(known) == len(tensors))
        for traced, found in zip(_items_in(result), _items_in(value), strict=False):
            if isinstance(traced, torch.Tensor):
                with contextlib.suppress(Exception):  # sizes by values cannot be compared
                    self._note(traced, found)
        return iter(result) if name == "__iter__" else result

    def _hold(self, traced: torch.Tensor, real: torch.Tensor) -> None:
        """Takes a tensor that the model holds, if it is small."""
        if real.numel() <= _LARGEST:
            self._known[id(traced)] = traced, real, version_of(traced)
            self._held.add(real.untyped_storage().data_ptr())

    def _is_known(self, tensor: torch.Tensor) -> bool:
        """Whether the value of a traced tensor is known: neither it nor a view of it was written since."""
        traced, _, version = self._known.get(id(tensor), (None, None, None))
        return traced is not None and version_of(traced) == version

    def _follow_write(self, memory: int, *, is_known: bool) -> None:
        """Takes account of a write to a tensor, its views and its ``data``: their values were written, or are lost."""
        for key, (traced, real, _) in list(self._known.items()):
            if self._memory_of(traced) != memory:
                continue
            if is_known:
                self._known[key] = traced, real, version_of(traced)
            else:
                del self._known[key]

    def _memory_of(self, tensor: Any) -> int | None:
        """The address of the value of a traced tensor; None if it has none of torch."""
        _, value, _ = self._known.get(id(tensor), (None, None, None))
        return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else None

    def _note(self, traced: torch.Tensor, value: Any) -> None:
        is_exact = True
        if isinstance(value, np.ndarray):
            is_exact = traced.dtype is torch.int64 and value.shape == tuple(traced.shape) and value.size <= _LARGEST
        elif isinstance(value, torch.Tensor):
            is_exact = value.numel() <= _LARGEST
        else:
            value = _exact(value, traced.dtype) if traced.ndim == 0 else None
        if is_exact and value is not None:
            self._known[id(traced)] = traced, value, version_of(traced)

    def _computed(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """What a function returns for the values: a tensor, or a symbolic number; None if that is not known."""
        # a symbolic size has no value, and whatever a function raises, it raises in the trace
        with contextlib.suppress(Exception):
            given = [self._known[id(arg)][1] if isinstance(arg, torch.Tensor) else arg for arg in args]
            if not _holds_symbolic_or_array(given) and not _holds_symbolic_or_array(list(kwargs.values())):
                with apart_from_modes():
                    return func(*self._real(args), **self._real(kwargs))
            if any(isinstance(item, np.ndarray | list | tuple) for item in given):
                return _of_arrays(name.strip("_"), *given, **kwargs)
            numbers = [item.item() if isinstance(item, torch.Tensor) else item for item in given]
            for place, arg in enumerate(args):
                numbers[place] = _rounded_once(arg) if isinstance(arg, torch.SymFloat) else numbers[place]
            if name in ("__bool__", "item"):
                return bool(numbers[0]) if name == "__bool__" else _read(numbers[0], args[0].dtype)
            plain = name.strip("_")
            if plain in _CONVERSIONS:
                return numbers[0]
            reflected = plain.startswith("r") and plain[1:] in _ON_NUMBERS and plain not in _ON_NUMBERS
            plain = plain[1:] if reflected else plain
            if plain in _ON_NUMBERS and not kwargs and _is_exact(plain, numbers):
                return _ON_NUMBERS[plain](*(reversed(numbers) if reflected else numbers))
        return None

    def _with_sizes(self, value: Any, name: str) -> Any:
        """The arguments with numbers in the place of known integers; indices are left as they are, slices excepted."""
        if isinstance(value, Mapping):
            return {key: self._with_sizes(item, name) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)([self._with_sizes(item, name) for item in value])
        if isinstance(value, slice):
            return slice(*(self._with_sizes(item, "slice") for item in (value.start, value.stop, value.step)))
        if not isinstance(value, torch.Tensor) or name == "__getitem__" or not self._is_known(value):
            return value
        number = self._known[id(value)][1]
        if isinstance(number, torch.Tensor):
            is_whole = number.numel() == 1 and not is_inexact(number)
            number = int(number) if is_whole and number.dtype is not torch.bool else None
        if self._is_written or value.is_floating_point() or not isinstance(number, int | torch.SymInt):
            return value
        self._is_read = True
        return number

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._known[id(value)][1]
        if isinstance(value, Mapping):
            return {key: self._real(item) for key, item in value.items()}
        return type(value)([self._real(item) for item in value]) if type(value) in (list, tuple) else value


# Below these, a quotient of integers in float32 lies on the same side of every integer as the exact one, also after a
# small integer was added: two such numbers are at least 1 / _BELOW apart, and the sum stays below 2**24.
_ABOVE, _BELOW = 2**23, 2**11
_LARGEST_NUMBER = {torch.float32: 2**24, torch.float64: 2**24, torch.int32: 2**31, torch.int64: 2**63}


def _quotient(above: Any, below: Any) -> Any:
    if not (_is_within(above, _ABOVE) and _is_within(below, _BELOW)):
        raise ValueError("float32 rounds")
    return above / below


def _rounded_once(number: torch.SymFloat) -> Any:
    """The number that Python computed, where float32 rounds it to the same side of every integer."""
    parts = quotient_parts(number)
    if parts is None or abs(parts[2]) >= _BELOW:
        raise ValueError("float32 rounds")
    return _quotient(*parts[:2]) + parts[2]


_CONVERSIONS = ("to", "long", "int", "float", "double", "clone", "detach", *_MADE)
_ON_QUOTIENTS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "neg": operator.neg, "ceil": math.ceil, "floor": math.floor,
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
# What functions of tensors do, for numbers that may be symbolic.
_ON_NUMBERS: dict[str, Callable[..., Any]] = {
    **_ON_QUOTIENTS,
    "mul": operator.mul, "div": _quotient, "truediv": _quotient, "true_divide": _quotient,
    "floordiv": operator.floordiv, "floor_divide": operator.floordiv, "mod": operator.mod, "remainder": operator.mod,
    "maximum": torch.sym_max, "minimum": torch.sym_min,
}  # fmt: skip


def _is_within(number: Any, limit: int) -> bool:
    """Whether a number is between the limits; for a symbolic one, this becomes a condition on sizes."""
    return bool(-limit < number) and bool(number < limit)


def _is_exact(name: str, numbers: list[Any]) -> bool:
    """Whether a function of integers, or of a quotient of them, gives what it gives without rounding."""
    whole = [number for number in numbers if isinstance(number, int | torch.SymInt)]
    if len(whole) == len(numbers):
        return True
    quotients = [number for number in numbers if isinstance(number, torch.SymFloat)]
    small = all(type(number) is int and abs(number) < _BELOW for number in whole)
    return name in _ON_QUOTIENTS and len(quotients) == 1 and len(quotients) + len(whole) == len(numbers) and small


def _exact(number: Any, dtype: torch.dtype) -> Any:
    """The number that a tensor of a dtype holds; None if the dtype may round it."""
    if dtype is torch.bool:
        return number if isinstance(number, bool | torch.SymBool) else None
    if isinstance(number, torch.SymFloat):
        if dtype.is_floating_point:
            return number if dtype in _LARGEST_NUMBER else None
        number = torch.sym_int(number)
    is_known = dtype in _LARGEST_NUMBER and isinstance(number, int | torch.SymInt)
    if not is_known or (dtype is not torch.int64 and not _is_within(number, _LARGEST_NUMBER[dtype])):
        return None
    return number


def _read(number: Any, dtype: torch.dtype) -> Any:
    if isinstance(number, torch.SymFloat):
        raise TypeError("rounded")
    return torch.sym_float(number) if dtype.is_floating_point else number


def _is_of_numbers(value: Any) -> bool:
    """Whether a value is an integer or a symbolic number, or a list of integers that may be symbolic."""
    return _is_of_integers(value) if isinstance(value, list | tuple) else isinstance(value, SYMBOLIC)


def _is_of_integers(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return 0 < len(value) <= _LARGEST and all(map(_is_of_integers, value))
    return type(value) in (int, torch.SymInt)


def _holds_symbolic_or_array(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_symbolic_or_array, value))
    if isinstance(value, slice):
        return _holds_symbolic_or_array((value.start, value.stop, value.step))
    return isinstance(value, (*SYMBOLIC, np.ndarray))


def _of_arrays(name: str, value: Any, *rest: Any, **options: Any) -> Any:
    """What a function of tensors gives for arrays of integers, some of which are symbolic; None if that is not known.

    An element is a number, and the rows of an array are a list of arrays, or of numbers.
    """
    options.pop("device", None)
    options.pop("dtype", None)  # only results in int64 are noted
    value, rest = _array(value), tuple(_array(item) if isinstance(item, torch.Tensor) else item for item in rest)
    if name in _MADE and not options:
        return value
    if name == "getitem" and _is_of_places(rest[0]):
        return value[rest[0]]
    if name == "tolist":
        return value.tolist()
    if name in ("unbind", "iter"):
        return list(np.moveaxis(value, rest[0] if rest else options.get("dim", 0), 0))
    if name in ("prod", "sum", "cumsum", "cumprod"):
        return getattr(np, name)(value, rest[0] if rest else options.get("dim"))
    if name in ("add", "sub", "mul", "floordiv", "floor_divide") and not options:
        return _ON_NUMBERS[name](value, *rest)
    return value if name in ("long", "clone", "detach", "to") else None


def _array(value: Any) -> np.ndarray[Any, Any]:
    return np.array(value.tolist() if isinstance(value, torch.Tensor) else value, dtype=object)


def _is_of_places(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return not _holds_symbolic_or_array(parts) and all(
        isinstance(part, int | slice | type(None) | type(...)) for part in parts
    )


def _items_in(value: Any) -> list[Any]:
    """The tensors of a result, or the values of these."""
    return [item for part in value for item in _items_in(part)] if isinstance(value, list | tuple) else [value]


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors_in(item)] if isinstance(value, list | tuple) else []


def _writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    in_place = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__", "__iter__")
    return (
        in_place
        or name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__"))
        or "out" in kwargs
        or kwargs.get("inplace") is True
    )
