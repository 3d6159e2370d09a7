"""Arrays of numpy that a model computes from sizes or from tensors: they hold tensors in a trace.

In a trace, sizes have no numbers and tensors no values, so numpy cannot compute with them. torch has functions of the
same names. Here they stand for those of numpy in the Python modules that define the model's classes, and the functions
that these call, if an argument is a symbolic size, a tensor or what they returned. With other arguments numpy computes
as always: arrays of constants have their values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from exportkit._torch_compat.arrays import array_dtype, array_functions, array_type, numbers_of_numpy_taken
from exportkit._torch_compat.symbolic_shapes import SYMBOLIC
from exportkit.overrides import Attribute, Item, Slot, replaced
from exportkit.rewrites.lengths import length, own_modules

_UNCHANGED = ("random", "testing")  # numbers that numpy draws are constants of a trace


@contextlib.contextmanager
def arrays_as_tensors(model: torch.nn.Module, called: Sequence[ModuleType] = ()) -> Iterator[None]:
    """Lets the code of a model compute with numpy from sizes and tensors.

    Args:
        model: The model.
        called: Python modules with functions that the model calls.
    """
    module_of_torch = array_functions()
    functions = {id(value): _function(value, module_of_torch) for value in vars(np).values() if _is_function(value)}
    replacements: list[tuple[Slot, Any]] = []
    for module in own_modules(model, called):
        replacements.append((Attribute(module, "len"), _length))
        for name, value in vars(module).items():
            if value is np:
                replacements.append((Attribute(module, name), _Numpy(np, module_of_torch)))
            elif id(value) in functions:
                replacements.append((Attribute(module, name), functions[id(value)]))
    normalizers, items = numbers_of_numpy_taken()
    replacements += [(Item(normalizers, name), value) for name, value in items.items()]
    array = array_type()
    replacements.append((Attribute(array, "__array_ufunc__"), None))  # arrays of numpy leave operators to these
    replacements.append((Attribute(array, "__len__"), _count))
    replacements.append((Attribute(torch, "from_numpy"), _from_numpy))
    replacements.append((Attribute(torch.Tensor, "numpy"), _numpy))
    with replaced(replacements), _ArraysTaken():
        yield


class _ArraysTaken(TorchFunctionMode):
    """Functions of torch take arrays that hold tensors for tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_as_tensors(args), **_as_tensors(kwargs or {}))


class _Numpy(ModuleType):
    """Stands for numpy, or for a Python module in it.

    Args:
        original: The module.
        functions: torch's module of that name; None if it has none.
    """

    def __init__(self, original: ModuleType, functions: Any) -> None:
        super().__init__(original.__name__)
        self._original, self._functions = original, functions

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._original, name)
        if value is np.ndarray:
            return _Array
        if isinstance(value, ModuleType):
            return value if name in _UNCHANGED else _Numpy(value, getattr(self._functions, name, None))
        return _function(value, self._functions) if _is_function(value) else value


class _AnyArray(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, (np.ndarray, array_type()))


class _Array(metaclass=_AnyArray):
    """Stands for the class of arrays."""


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type) and not isinstance(value, ModuleType)


def _function(original: Callable[..., Any], functions: Any) -> Callable[..., Any]:
    """A function of numpy, computed by torch if it is given symbolic sizes or tensors."""

    def computed(*args: Any, **options: Any) -> Any:
        if not _is_traced([*args, *options.values()]):
            return original(*args, **options)
        own = _OWN.get(original) or getattr(functions, original.__name__)
        return own(*map(_as_arrays, args), **{key: _as_arrays(value) for key, value in options.items()})

    return computed


def _is_traced(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_is_traced, value))
    return isinstance(value, (*SYMBOLIC, torch.Tensor, array_type(), array_dtype())) or (
        isinstance(value, np.ndarray) and value.dtype == object
    )


def _as_arrays(value: Any) -> Any:
    """An argument with arrays that hold tensors, also for arrays of numpy that hold symbolic sizes."""
    if isinstance(value, np.ndarray) and value.dtype == object:
        numbers = torch.stack([torch.as_tensor(_as_tensors(number)) for number in value.flat])
        return array_type()(numbers.reshape(value.shape))
    if isinstance(value, list | tuple):
        return type(value)(map(_as_arrays, value)) if type(value) in (list, tuple) else value
    return value


def _as_tensors(value: Any) -> Any:
    if isinstance(value, array_type()):
        return value.tensor
    if isinstance(value, np.ndarray) and value.dtype == object:
        return _as_arrays(value).tensor
    if type(value) in (list, tuple):
        return type(value)(map(_as_tensors, value))
    if type(value) is dict:
        return {key: _as_tensors(item) for key, item in value.items()}
    return value


def _length(value: Any) -> Any:
    return value.shape[0] if isinstance(value, array_type()) else length(value)


def _count(self: Any) -> int:
    """The length of an array; an index of a tensor asks for it, and does without it."""
    count = self.shape[0]
    if isinstance(count, torch.SymInt):
        raise TypeError("the length is symbolic")
    return int(count)


def _from_numpy(array: Any) -> torch.Tensor:
    found = _as_tensors(array)
    return found if isinstance(found, torch.Tensor) else _original_from_numpy(array)


def _numpy(self: torch.Tensor, **options: Any) -> Any:
    """The array of a tensor; of one without values, an array that holds it."""
    return _original_numpy(self, **options) if type(self) is torch.Tensor else array_type()(self)


def _interp(x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None) -> Any:
    """Linear interpolation between points: https://numpy.org/doc/stable/reference/generated/numpy.interp.html."""
    make = array_functions().asarray
    at, places, values = (make(given).tensor.to(torch.float64) for given in (x, xp, fp))
    after = torch.searchsorted(places, at, right=True).clamp(1, places.shape[0] - 1)
    part = (at - places[after - 1]) / (places[after] - places[after - 1])
    found = values[after - 1] + (values[after] - values[after - 1]) * part
    found = torch.where(at < places[0], values[0] if left is None else left, found)
    found = torch.where(at == places[-1], values[-1], found)
    return array_type()(torch.where(at > places[-1], values[-1] if right is None else right, found))


_OWN: dict[Any, Callable[..., Any]] = {np.interp: _interp}
_original_from_numpy, _original_numpy = torch.from_numpy, torch.Tensor.numpy
