"""Indices in the body of a loop operator, and slices whose lengths depend on values."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from exportkit._torch_compat.pytree import tree_map
from exportkit._torch_compat.symbolic_shapes import is_counted_in_loop, is_same
from exportkit._torch_compat.traced_values import asserted
from exportkit.rewrites.loop_positions import Position, Span, is_int, is_number


class SliceOfUnknownLength:
    """A slice ``x[i, :n]`` whose length depends on values.

    Functions of all of its elements leave out the others; any other function gets a tensor of as many rows as there
    are.

    Args:
        whole: The tensor before the slice is taken.
        is_inside: For each index along the axis whether it is in the slice.
        axis: The axis.
    """

    def __init__(self, whole: torch.Tensor, is_inside: torch.Tensor, axis: int) -> None:
        self._whole, self._axis = whole, axis
        self._count = is_inside.sum()
        self._first = is_inside.to(torch.int64).argmax()
        self._is_inside = _along(axis, is_inside, whole.ndim)

    def rows(self) -> torch.Tensor:
        """Returns the slice as a tensor."""
        return self._whole.index_select(self._axis, torch.arange(self._count.item()) + self._first)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(rows, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rows(), name)

    def sum(self, *args: Any, **options: Any) -> Any:
        """Returns the sum."""
        filled = self._filled(0, args, options)
        return (self.rows() if filled is None else filled).sum(*args, **options)

    def mean(self, *args: Any, **options: Any) -> Any:
        """Returns the mean."""
        filled = self._filled(0, args, options)
        if filled is None:
            return self.rows().mean(*args, **options)
        dtype = options.get("dtype") or filled.dtype
        precise = torch.promote_types(dtype, torch.float32)  # a sum in half precision may overflow
        return (filled.sum(*args, **{**options, "dtype": precise}) / self._count).to(dtype)

    def amax(self, *args: Any, **options: Any) -> Any:
        """Returns the largest elements."""
        return self._of_some(-math.inf, args, options).amax(*args, **options)

    def amin(self, *args: Any, **options: Any) -> Any:
        """Returns the smallest elements."""
        return self._of_some(math.inf, args, options).amin(*args, **options)

    def _of_some(self, number: float, args: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
        asserted(self._count > 0, "a slice that is empty has no largest element")
        filled = self._filled(number, args, options)
        return self.rows() if filled is None else filled

    def _filled(self, number: float, args: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor | None:
        """The whole tensor with a number outside of the slice, for a reduction along its axis; None for others."""
        dim: Any = args[0] if args else options.get("dim")
        is_along = is_int(dim) and dim % self._whole.ndim == self._axis
        if not is_along or (number and not self._whole.is_floating_point()):
            return None
        return torch.where(self._is_inside, self._whole, number)


def rows(value: Any) -> Any:
    """Returns a slice of unknown length as a tensor, and anything else as it is."""
    return value.rows() if isinstance(value, SliceOfUnknownLength) else value


def _of_rows(name: str) -> Any:
    def method(self: SliceOfUnknownLength, *args: Any) -> Any:
        return getattr(self.rows(), name)(*map(rows, args))

    return method


for _name in ("add", "sub", "mul", "truediv", "pow", "matmul", "floordiv", "mod"):
    for _side in ("", "r"):
        setattr(SliceOfUnknownLength, f"__{_side}{_name}__", _of_rows(f"__{_side}{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "invert", "getitem"):
    setattr(SliceOfUnknownLength, f"__{_name}__", _of_rows(f"__{_name}__"))


class Slots:
    """A list of symbolic length, ``[None] * n``, before a loop has put a tensor into it.

    Args:
        count: Its length.
    """

    def __init__(self, count: Any) -> None:
        self.count = count


def item(value: Any, index: Any) -> Any:
    """Returns ``value[index]``."""
    value = rows(value)
    if not isinstance(value, torch.Tensor):
        return value[index]
    parts = index if isinstance(index, tuple) else (index,)
    spans = [
        part
        for axis, part in _with_axes(value, parts)
        if isinstance(part, Span) and part.rows(value.shape[axis]) is None
    ]
    limits, index = _limits(value, index, spans)
    axes, index = _axes(value, index)
    for axis, places in axes:
        value = value.index_select(axis, places)
    value, index = _last_rows(value, index)
    if not spans:
        return value[index]
    if len(limits) > 1 or any(isinstance(part, torch.Tensor) and part.ndim for part in parts):
        raise TypeError("several slices have lengths that depend on values")
    ((axis, is_inside),) = limits
    left = parts[: next(place for place, part in enumerate(parts) if part is spans[0])]
    if any(part is None or part is Ellipsis for part in left):
        raise TypeError("a slice has a length that depends on values")
    return SliceOfUnknownLength(value[index], is_inside, sum(isinstance(part, slice | Span) for part in left))


def _last_rows(value: torch.Tensor, index: Any) -> tuple[torch.Tensor, Any]:
    """Selects the last row for ``-1:``, because a trace cannot tell that the axis is not empty."""
    parts = list(index) if isinstance(index, tuple) else [index]
    for place, (axis, part) in enumerate(_with_axes(value, parts)):
        is_last = isinstance(part, slice) and type(part.start) is int and part.start == -1 and part.stop is None
        if is_last and part.step is None and is_counted_in_loop(value.shape[axis]):
            value = value.index_select(axis, torch.scalar_tensor(value.shape[axis] - 1, dtype=torch.int64).reshape(1))
            parts[place] = slice(None)
    return value, tuple(parts)


def with_item(value: Any, index: Any, part: Any) -> Any:
    """Returns a copy of a tensor, list or dict in which ``value[index] = part``."""
    if type(value) in (list, dict) and type(index) in (int, str):
        again = value.copy()
        again[index] = part
        return again
    if isinstance(value, Slots) and isinstance(part, torch.Tensor):
        value = part.new_zeros((value.count, *part.shape))
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            "a loop sets an item of something that is not a tensor, or whose index depends on the iteration"
        )
    limits, rest = _limits(value, index, index if isinstance(index, tuple) else (index,))
    part = rows(part)
    if limits and isinstance(part, torch.Tensor):
        part = _spread(part, value, index if isinstance(index, tuple) else (index,), limits)
    axes, index = _axes(value, rest)
    before = value
    for axis, places in axes:
        before = before.index_select(axis, places)
    taken = before.clone()
    taken[index] = part
    for axis, is_inside in limits:
        taken = torch.where(_along(axis, is_inside, value.ndim), taken, before)
    if not axes:
        return taken
    if any(isinstance(index[axis] if isinstance(index, tuple) else index, slice) for axis, _ in axes):
        raise TypeError("a loop sets a slice")
    is_there = [_along(axis, torch.arange(value.shape[axis]) == places, value.ndim) for axis, places in axes]
    return torch.where(functools.reduce(torch.logical_and, is_there), taken, value)


def _spread(
    part: torch.Tensor, value: torch.Tensor, index: tuple[Any, ...], limits: Sequence[tuple[int, torch.Tensor]]
) -> torch.Tensor:
    """What slices whose lengths depend on values are set to, at the places that it gets along the whole axes."""
    if any(each is None or each is Ellipsis or (isinstance(each, torch.Tensor) and each.ndim) for each in index):
        raise TypeError("a loop sets a slice, whose length depends on values, beside other indices")
    numbers = [axis for axis, each in enumerate(index) if not isinstance(each, slice | Span)]
    for axis, is_inside in limits:
        from_end = value.ndim - axis - sum(number > axis for number in numbers)
        if part.ndim < from_end or is_same(part.shape[-from_end], 1):
            continue  # every place gets the same
        count, sizes, own = part.shape[-from_end], list(part.shape), part.ndim - from_end
        length = torch.scalar_tensor(count, dtype=torch.int64)
        is_right = (length == 1) | (is_inside.sum() == length)
        for is_idle in [each.is_idle for each in index if isinstance(each, Span) and each.is_idle is not None]:
            is_right = is_right | is_idle
        asserted(is_right, "a slice is set to a tensor of another length")
        sizes[own] = 1  # a last row, which stands for those of an empty part
        places = (torch.arange(value.shape[axis]) - is_inside.to(torch.int64).argmax()).clamp(min=0)
        places = torch.where(length == 1, 0, torch.minimum(places, length))
        part = torch.cat([part, part.new_zeros(sizes)], own).index_select(own, places)
    return part


def _along(axis: int, values: torch.Tensor, ndim: int) -> torch.Tensor:
    """One value for each index of an axis, with as many axes as a tensor has."""
    return values.reshape(-1, *[1] * (ndim - axis - 1))


def _limits(value: torch.Tensor, index: Any, chosen: Sequence[Any]) -> tuple[list[tuple[int, torch.Tensor]], Any]:
    """The axes along which an index has some slices of unknown length, with what they hold, and the other index."""
    parts = list(index) if isinstance(index, tuple) else [index]
    spans = [
        (axis, part.holds(value.shape[axis]))
        for axis, part in _with_axes(value, parts)
        if isinstance(part, Span) and any(part is each for each in chosen)
    ]
    rest = [slice(None) if isinstance(part, Span) and any(part is each for each in chosen) else part for part in parts]
    return spans, tuple(rest) if spans else index


def _with_axes(value: torch.Tensor, parts: Sequence[Any]) -> list[tuple[int, Any]]:
    """The parts of an index, each with the axis at which it begins."""
    used, axis = sum(1 for part in parts if part is not None and part is not Ellipsis), 0
    found = []
    for part in parts:
        found.append((axis, part))
        axis += 0 if part is None else value.ndim - used if part is Ellipsis else 1
    return found


def _axes(value: torch.Tensor, index: Any) -> tuple[list[tuple[int, torch.Tensor]], Any]:
    """The axes along which an index has numbers of iterations, with the rows there, and the index of what is left."""
    parts = list(index) if isinstance(index, tuple) else [index]
    parts = [Position(part, 0) if is_number(part) else part for part in parts]
    if not any(isinstance(part, Position | Span) for part in parts):
        return [], index
    found: list[tuple[int, torch.Tensor]] = []
    rest: list[Any] = []
    for axis, part in _with_axes(value, parts):
        if isinstance(part, torch.Tensor) and part.dtype is torch.bool:
            raise TypeError("a mask beside the number of an iteration")
        if isinstance(part, Position):
            found.append((axis, part.rows(value.shape[axis])))
            rest.append(0)
        elif isinstance(part, Span):
            places = part.rows(value.shape[axis])
            if places is None:
                raise TypeError("a slice has another length in each iteration")
            found.append((axis, places))
            rest.append(slice(None))
        else:
            rest.append(part)
    return found, tuple(rest)
