"""Numbers of iterations in the body of a loop operator, and slices that begin or end at them."""

from __future__ import annotations

import functools
from typing import Any

import torch

from exportkit._torch_compat.pytree import tree_map
from exportkit._torch_compat.symbolic_shapes import is_counted_in_loop


class Position:
    """The number of an iteration in the body of a loop, ``base * factor + offset``.

    Args:
        base: The number as a tensor without axes.
        least: Its smallest value.
        most: A value that it does not exceed; None if that is not known.
        factor: A factor.
        offset: A summand, which may be symbolic.
        is_idle: Whether the iteration is one that changes nothing, whose number may not be an index.
    """

    def __init__(
        self,
        base: torch.Tensor,
        least: Any,
        most: Any = None,
        *,
        factor: int = 1,
        offset: Any = 0,
        is_idle: torch.Tensor | None = None,
    ) -> None:
        self.base, self.least, self.most, self.is_idle = base, least, most, is_idle
        self.factor, self.offset = factor, offset

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(plain, (args, kwargs or {}))
        return function(*args, **kwargs)

    @property
    def value(self) -> torch.Tensor:
        """The number."""
        found: torch.Tensor = self.base * self.factor + self.offset
        return found

    def rows(self, axis_size: Any) -> torch.Tensor:
        """Returns the number as an index of one element, from the end if it is negative."""
        value = self.value.reshape(1)
        return self._or_zero(torch.where(value < 0, value + axis_size, value))

    def until(self, stop: Any, axis_size: Any) -> torch.Tensor | None:
        """Returns the indices of a slice that begins here; None if its length may depend on the iteration."""
        if not isinstance(stop, Position) or stop.base is not self.base or stop.factor != self.factor:
            return None
        if not (self.factor > 0 and self.least * self.factor + self.offset >= 0):
            return None
        if self.most is not None and self.most * self.factor + stop.offset > axis_size:
            return None
        return self._or_zero(self.value + torch.arange(stop.offset - self.offset))

    def _or_zero(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.is_idle is None else torch.where(self.is_idle, 0, rows)

    def _is_above(self, other: Any) -> bool:
        """Whether the number is known to be above another one in every iteration."""
        is_known = type(other) is int and type(self.least) is int and type(self.offset) is int and self.factor > 0
        return is_known and self.least * self.factor + self.offset > other

    def _affine(self, factor: int, offset: Any) -> Position:
        return Position(
            self.base,
            self.least,
            self.most,
            factor=self.factor * factor,
            offset=self.offset * factor + offset,
            is_idle=self.is_idle,
        )

    def __add__(self, other: Any) -> Any:
        return self._affine(1, other) if is_int(other) else self.value + plain(other)

    def __sub__(self, other: Any) -> Any:
        return self._affine(1, -other) if is_int(other) else self.value - plain(other)

    def __rsub__(self, other: Any) -> Any:
        return self._affine(-1, other) if is_int(other) else other - self.value

    def __mul__(self, other: Any) -> Any:
        return self._affine(other, 0) if type(other) is int else self.value * plain(other)

    def __neg__(self) -> Position:
        return self._affine(-1, 0)

    __radd__, __rmul__ = __add__, __mul__

    def __lt__(self, other: Any) -> Any:
        return False if self._is_above(other) else self.value < plain(other)

    def __le__(self, other: Any) -> Any:
        return False if self._is_above(other) else self.value <= plain(other)

    def __gt__(self, other: Any) -> Any:
        return True if self._is_above(other) else self.value > plain(other)

    def __ge__(self, other: Any) -> Any:
        return True if self._is_above(other) else self.value >= plain(other)

    def __eq__(self, other: object) -> Any:
        return False if self._is_above(other) else self.value == plain(other)

    def __ne__(self, other: object) -> Any:
        return True if self._is_above(other) else self.value != plain(other)

    __hash__ = None  # type: ignore[assignment]


class Span:
    """A slice from or to something that is not known before the loop runs.

    Args:
        start: Where it begins: a number, the number of an iteration, a tensor without axes, or None.
        stop: Where it ends.
        is_idle: Whether the iteration changes nothing, so that the slice may be any; None or a text if it counts.
    """

    def __init__(self, start: Any, stop: Any, is_idle: torch.Tensor | str | None) -> None:
        self.start, self.stop, self._is_idle = start, stop, is_idle

    @property
    def is_idle(self) -> torch.Tensor | None:
        """Whether the slice may be any, as nothing comes of it; None if something does."""
        found = [self._is_idle, *(limit.is_idle for limit in (self.start, self.stop) if isinstance(limit, Position))]
        tensors = [each for each in found if isinstance(each, torch.Tensor)]
        return functools.reduce(torch.logical_or, tensors) if tensors else None

    def rows(self, axis_size: Any) -> torch.Tensor | None:
        """Returns the indices in a slice whose length is the same in every iteration; None for any other."""
        return self.start.until(self.stop, axis_size) if isinstance(self.start, Position) else None

    def holds(self, size: Any) -> torch.Tensor:
        """Returns for each index along an axis whether it is in the slice, as Python counts.

        Negative limits count from the end, and limits may be beyond it. Where an iteration changes nothing, it has all
        elements: others may be none.
        """
        places, found = torch.arange(size), torch.ones(size, dtype=torch.bool)
        if self.start is not None:
            found = found & (places >= _from_start(self.start, size))
        if self.stop is not None:
            found = found & (places < _from_start(self.stop, size))
        return found if self.is_idle is None else found | self.is_idle


def _from_start(limit: Any, size: Any) -> Any:
    limit = plain(limit)
    if isinstance(limit, torch.Tensor):
        return torch.where(limit < 0, limit + size, limit)
    return limit + size if limit < 0 else limit


def part_between(start: Any, stop: Any, step: Any, is_idle: torch.Tensor | str | None) -> Span | slice:
    """Returns ``slice(start, stop, step)``; ``is_idle`` as for `Span`."""
    start, stop = _limit(start), _limit(stop)
    if not _is_value(start) and not _is_value(stop):
        return slice(start, stop, step)
    if step is not None:
        raise TypeError("a slice that depends on values has a step")
    return Span(start, stop, is_idle)


def _limit(limit: Any) -> Any:
    """A limit of a slice, as a tensor if it is a number that comes from values, such as the length of a selection."""
    is_counted = is_int(limit) and is_counted_in_loop(limit)
    return torch.scalar_tensor(limit, dtype=torch.int64) if is_counted else limit


def is_int(value: Any) -> bool:
    """Returns whether something is an int, which may be symbolic."""
    return type(value) is int or isinstance(value, torch.SymInt)


def plain(value: Any) -> Any:
    """Returns the number of an iteration as a tensor, and anything else as it is."""
    return value.value if isinstance(value, Position) else value


def _as_tensor(number: Any) -> torch.Tensor:
    """A number as a tensor in the precision that it has in Python."""
    if is_int(number):
        return torch.scalar_tensor(number, dtype=torch.int64)
    return torch.as_tensor(plain(number), dtype=torch.float64 if type(number) is float else None)


def beyond(name: str, first: Any, second: Any) -> torch.Tensor:
    """Returns what Python's ``max`` or ``min`` does: the first number, unless the second one is beyond it."""
    first, second = [_as_tensor(number) for number in (first, second)]
    return torch.where(second > first if name == "max" else second < first, second, first)


def small_exponent(base: Any, exponent: Any) -> Any:
    """Returns the exponent of a power, unless the power may be an int that is too large for a tensor."""
    if type(base) is int and isinstance(exponent, torch.Tensor) and not exponent.is_floating_point():
        raise TypeError("a power of an int may not fit into 64 bits")
    return exponent


def exact(value: Any) -> Any:
    """Returns a number to divide without a remainder, unless Python may have computed it in double precision."""
    value = plain(value)
    if isinstance(value, torch.Tensor) and not value.ndim and value.is_floating_point():
        raise TypeError("a number that is not an int is rounded to a multiple of another one")
    return value


def is_number(part: Any) -> bool:
    """Returns whether this is a tensor of one integer, without axes."""
    return isinstance(part, torch.Tensor) and part.ndim == 0 and part.dtype in (torch.int64, torch.int32)


def _is_value(limit: Any) -> bool:
    return isinstance(limit, Position) or is_number(limit)
