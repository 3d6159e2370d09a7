"""Lengths of tensors as Python takes them: ``len(tensor)``, ``int(length)``, ``range(length)``, and lists of numbers.

`len(tensor)`, `int(length)`, `range(length)` and transformers' `torch_int` make ints of a symbolic length, which fixes
it; `int(tensor)` and `float(tensor)` make numbers of a value. Here these names are shadowed in the Python modules that
define the model's classes and methods, and the functions that these call; lists of symbolic length can be made tensors.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from exportkit._torch_compat.size_arithmetic import slices_of_any_length
from exportkit._torch_compat.symbolic_shapes import SYMBOLIC
from exportkit._torch_compat.traced_values import depends_on_values
from exportkit.overrides import Attribute, attribute_slots, classes_of, replaced, replaced_attributes, with_imports
from exportkit.rewrites.loop_positions import Position, beyond
from exportkit.rewrites.symbolic_lists import Parts, RangeNumbers, Repeated, SymbolicList, range_limits

_OTHERS = {"torch", "exportkit", *sys.stdlib_module_names}
Cached = type(functools.cache(len))
_CONSTRUCTORS = {
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
}


def symbolic_lengths(
    model: torch.nn.Module, called: Sequence[ModuleType] = ()
) -> contextlib.AbstractContextManager[None]:
    """Shadows what makes ints of lengths, and caches by length, where the code of the model is defined.

    Args:
        model: The model.
        called: Python modules with functions that the model calls.
    """
    own = own_modules(model, called)
    replacements: list[tuple[Any, Any]] = [
        (Attribute(module, name), shadow)
        for module in own
        for name, shadow in _SHADOWS.items()
        if name != "torch_int" or hasattr(module, name)
    ]
    for owner in (*own, *classes_of(model)):
        for name, value in vars(owner).items():
            if isinstance(value, Cached):  # a cache cannot look a symbolic length up
                replacements.append((Attribute(owner, name), value.__wrapped__))
    replacements += [(Attribute(torch, name), _taking_lists(getattr(torch, name))) for name in ("tensor", "as_tensor")]
    replacements += [(Attribute(torch, name), _constructor(name, dtype)) for name, dtype in _CONSTRUCTORS.items()]
    replacements += [(Attribute(torch.Tensor, name), _like(name)) for name in ("new", "new_tensor")]
    replacements += [(Attribute(torch, name), _joining(getattr(torch, name))) for name in ("stack", "cat")]
    rnn = torch.nn.utils.rnn
    replacements.append((Attribute(rnn, "pad_sequence"), _padding(rnn.pad_sequence)))
    replacements += [(Attribute(torch.SymInt, name), _repeating(name)) for name in ("__mul__", "__rmul__")]
    replacements += attribute_slots([slices_of_any_length()])
    return replaced(with_imports(replacements))


def own_modules(model: torch.nn.Module, called: Sequence[ModuleType]) -> list[ModuleType]:
    """Returns the Python modules with the code of a model: of its classes, its methods and the functions they call.

    Args:
        model: The model.
        called: Python modules with functions that the model calls.
    """
    classes = classes_of(model)
    members = [value for owner in (*classes, *model.modules()) for value in vars(owner).values()]
    methods = [value for value in members if inspect.isfunction(value) or inspect.ismethod(value)]
    names = {value.__module__ for value in (*classes, *methods)}  # a method may have been put there from elsewhere
    names |= {module.__name__ for module in called}
    return [sys.modules[name] for name in sorted(names & sys.modules.keys()) if name.partition(".")[0] not in _OTHERS]


def own_types() -> contextlib.AbstractContextManager[None]:
    """Puts the types back that are shadowed: torch compiles the bodies of loop operators, and cannot compile shadows.

    Compiled code leaves ``int(length)`` symbolic by itself.
    """
    names = (*_SHADOWS, *_CONSTRUCTORS)
    modules = [module for module in sys.modules.values() if isinstance(module, ModuleType)]
    found = [(module, name, vars(module).get(name)) for module in modules for name in names]
    return replaced([(Attribute(m, name), value.types[0]) for m, name, value in found if isinstance(value, _StandIn)])


class _StandIn(type):
    """Makes a class stand for a type, which values are also checked against."""

    types: tuple[type, ...]
    made: Callable[..., Any]

    def __call__(cls, *args: Any, **options: Any) -> Any:
        return cls.made(*args, **options)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.types)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.types)


def length(value: Any) -> Any:
    """Returns the length of a value, which may be symbolic."""
    if isinstance(value, SymbolicList):
        return value.count
    return value.shape[0] if isinstance(value, torch.Tensor) and value.ndim else builtins.len(value)


def _int(*args: Any, **options: Any) -> Any:
    if len(args) == 1 and isinstance(args[0], torch.Tensor) and args[0].dtype is not torch.bool:
        args = (args[0].item(),)
    if len(args) == 1 and isinstance(args[0], torch.SymInt | torch.SymFloat):
        return torch.sym_int(args[0])
    return builtins.int(*args, **options)


def _float(*args: Any) -> Any:
    if len(args) == 1 and isinstance(args[0], torch.Tensor) and args[0].dtype is not torch.bool:
        args = (args[0].item(),)
    if len(args) == 1 and isinstance(args[0], torch.SymBool):
        args = (builtins.bool(args[0]),)
    is_symbolic = len(args) == 1 and isinstance(args[0], torch.SymInt | torch.SymFloat)
    return torch.sym_float(args[0]) if is_symbolic else builtins.float(*args)


def _range(*limits: Any) -> Any:
    start, stop, step = range_limits(*limits)
    if type(step) is builtins.int and step and any(isinstance(limit, torch.SymInt) for limit in (start, stop)):
        return RangeNumbers.of(start, stop, step)
    return builtins.range(*limits)


def _over_list(name: str) -> Callable[..., Any]:
    """``max``, ``min`` or ``sum``, which also takes a list of symbolic length, or two numbers read from tensors."""
    original = getattr(builtins, name)
    of_two: Callable[..., Any] | None = {"max": torch.sym_max, "min": torch.sym_min}.get(name)

    def reduced(*args: Any, **options: Any) -> Any:
        are_numbers = len(args) == 2 and not options and not any(map(torch.is_tensor, args))
        if of_two is not None and are_numbers and any(map(depends_on_values, args)):
            return of_two(*args)
        if of_two is not None and len(args) == 2 and not options and any(map(_is_of_iteration, args)):
            return beyond(name, *args)
        if of_two is not None and len(args) == 2 and not options and any(map(_is_traced_number, args)):
            return _one_of_two(name, *map(torch.as_tensor, args))
        if not args or not isinstance(args[0], SymbolicList):
            return original(*args, **options)
        return _reduced(name, *args, **options)

    return reduced


def _is_of_iteration(value: Any) -> bool:
    """Whether this is a number in the body of a loop operator that depends on the iteration."""
    is_tensor = isinstance(value, torch.Tensor) and value.ndim == 0
    return isinstance(value, Position) or (is_tensor and torch.compiler.is_dynamo_compiling())


def _is_traced_number(value: Any) -> bool:
    """Whether this is a tensor of one element that has no value in a trace."""
    return isinstance(value, torch.Tensor) and type(value) is not torch.Tensor and value.ndim == 0


def _one_of_two(name: str, first: torch.Tensor, second: torch.Tensor) -> Any:
    """What Python's ``max`` or ``min`` returns. An integer is read from its tensor: it may become a size."""
    found = beyond(name, first, second)
    return found if found.is_floating_point() else found.item()


def _reduced(name: str, items: SymbolicList, start: Any = 0) -> Any:
    """The sum, or the largest or smallest element, of a list of symbolic length."""
    whole = items.whole()
    if name != "sum" and whole.ndim > 1:
        raise TypeError("the elements are compared, and have several numbers each")
    found: Any = getattr(whole, name)() if whole.ndim == 1 else whole.sum(0)
    if name == "sum" and whole.dtype is not torch.bool and not items.holds_numbers:
        found = found.to(whole.dtype)
    found = found.item() if items.holds_numbers else found
    return found if isinstance(start, int) and start == 0 else start + found


def _list(*args: Any) -> Any:
    return args[0] if args and isinstance(args[0], SymbolicList) else builtins.list(*args)


class Int(builtins.int, metaclass=_StandIn):
    """Stands for ``int``, and leaves a symbolic number as it is."""

    types, made = (builtins.int, torch.SymInt), _int


class _Float(builtins.float, metaclass=_StandIn):
    """Stands for ``float``, and leaves a symbolic number as it is."""

    types, made = (builtins.float, torch.SymFloat), _float


class _List(builtins.list[Any], metaclass=_StandIn):
    """Stands for ``list``, and leaves a list of symbolic length as it is."""

    types, made = (builtins.list, SymbolicList), _list


class _Range(metaclass=_StandIn):
    """Stands for ``range``, and takes symbolic limits."""

    types, made = (builtins.range,), _range


_SHADOWS = {"len": length, "int": Int, "float": _Float, "torch_int": Int, "range": _Range, "list": _List}
_SHADOWS |= {name: _over_list(name) for name in ("max", "min", "sum")}


def _taking_lists(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a tensor, also of nested lists of symbolic length."""

    def made(data: Any, **options: Any) -> Any:
        if not _holds_symbolic(data):
            if torch.compiler.is_dynamo_compiling():  # in the body of a loop operator
                return make(data, **options)
            with replaced_attributes(torch, {make.__name__: make}):  # torch.export compares the function with it
                return make(data, **options)
        return _stacked(data).to(device=options.get("device"), dtype=options.get("dtype"))

    return made


def _constructor(name: str, dtype: torch.dtype) -> _StandIn:
    """Stands for one of the classes of tensors of a dtype, such as ``torch.LongTensor``."""
    cls = getattr(torch, name)

    def made(*args: Any, **options: Any) -> Any:
        if args and _holds_symbolic(args[0]):
            return _stacked(args[0]).to(dtype)
        # a number alone is the shape of a tensor without values
        are_values = args and isinstance(args[0], list | tuple) and holds_sizes(args[0])
        return torch.tensor(args[0], dtype=dtype) if are_values else cls(*args, **options)

    return _StandIn(name, (), {"types": (cls,), "made": made})


def _like(name: str) -> Callable[..., Any]:
    """``tensor.new`` or ``tensor.new_tensor``, which also take a list of symbolic length."""
    original = getattr(torch.Tensor, name)

    def made(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], SymbolicList):
            return args[0].whole().to(self).to(**options)
        return original(self, *args, **options)

    return made


def _joining(original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.stack`` or ``torch.cat``, which also takes a list of symbolic length."""

    def join(tensors: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(tensors, SymbolicList):
            return original(tensors, *args, **options)
        dim = args[0] if args else options.get("dim", options.get("axis", 0))
        return tensors.whole().movedim(0, dim) if original.__name__ == "stack" else tensors.joined(dim)

    return join


def _padding(original: Callable[..., Any]) -> Callable[..., Any]:
    """``pad_sequence``, which also takes a list of symbolic length."""

    def pad(
        sequences: Any, batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
    ) -> torch.Tensor:
        if isinstance(sequences, Parts):
            return sequences.filled(padding_value, batch_first, padding_side)
        found: torch.Tensor = original(sequences, batch_first, padding_value, padding_side)
        return found

    return pad


def _repeating(name: str) -> Callable[..., Any]:
    """A product of a symbolic number, which also repeats a list."""
    original = getattr(torch.SymInt, name)

    def product(times: torch.SymInt, other: Any) -> Any:
        return Repeated(other, times) if type(other) is builtins.list and other else original(times, other)

    return product


def _holds_symbolic(data: Any) -> bool:
    return isinstance(data, SymbolicList) or (isinstance(data, list | tuple) and any(map(_holds_symbolic, data)))


def holds_sizes(data: Any) -> bool:
    """Returns whether this is a symbolic number, or a nested list with one."""
    if isinstance(data, list | tuple):
        return any(map(holds_sizes, data))
    return isinstance(data, SYMBOLIC)


def _stacked(data: Any) -> torch.Tensor:
    if isinstance(data, list | tuple):
        return torch.stack([_stacked(part) for part in data])
    return data.whole() if isinstance(data, SymbolicList) else torch.as_tensor(data)
