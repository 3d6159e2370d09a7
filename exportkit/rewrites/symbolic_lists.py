"""Lists of symbolic length: of sizes, of what a range holds, of tensors as long as values say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from exportkit.trees.tree import is_integer

SYMBOLIC_LENGTH = "the length of this tensor is symbolic"  # the error of code that needs it as an int


def any_symbolic(*sizes: Any) -> bool:
    """Returns whether one of several sizes has no number in a trace."""
    return any(isinstance(size, torch.SymInt) for size in sizes)


def has_symbolic_length(value: Any) -> bool:
    """Returns whether a value is a tensor whose first axis has no number in a trace."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and isinstance(value.shape[0], torch.SymInt)


class SymbolicList:
    """A list of symbolic length, whose elements are those of a tensor along its first axis."""

    def whole(self) -> torch.Tensor:
        """Returns all elements along the first axis."""
        raise NotImplementedError

    @property
    def count(self) -> Any:
        """How many elements there are."""
        return self.whole().shape[0]

    @property
    def holds_numbers(self) -> bool:
        """Whether the elements are numbers for Python, not tensors."""
        return True

    @property
    def parts(self) -> list[torch.Tensor]:
        """Tensors whose first axis goes over elements of the list; only elements of one of them have the same shape."""
        return [self.whole()]

    def joined(self, axis: int) -> torch.Tensor:
        """Returns the elements one after the other, along an axis of theirs."""
        axis %= self.parts[0].ndim - 1
        return torch.cat([part.movedim(0, axis).flatten(axis, axis + 1) for part in self.parts], axis)

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(SYMBOLIC_LENGTH)


class TensorList(SymbolicList):
    """A list of symbolic length whose elements are tensors, also nested ones."""

    @property
    def holds_numbers(self) -> bool:
        """Whether the elements are numbers for Python, not tensors."""
        return False


@dataclass(frozen=True, eq=False)
class SizeList(SymbolicList):
    """The numbers of a tensor of symbolic length, as ``tolist`` returns them: for a split, or for a tensor again."""

    tensor: torch.Tensor

    def __len__(self) -> int:
        raise TypeError(SYMBOLIC_LENGTH)

    def __eq__(self, other: object) -> bool:
        raise TypeError(SYMBOLIC_LENGTH)

    __hash__ = None  # type: ignore[assignment]

    def whole(self) -> torch.Tensor:
        """Returns the tensor."""
        return self.tensor


@dataclass(frozen=True)
class Repeated(SymbolicList):
    """A list that is repeated, ``[x] * length``.

    Attributes:
        items: The list.
        times: How often.
    """

    items: list[Any]
    times: Any

    @property
    def holds_numbers(self) -> bool:
        """Whether the elements are numbers for Python, not tensors."""
        return not any(map(torch.is_tensor, self.items))

    def whole(self) -> torch.Tensor:
        """Returns all elements along the first axis."""
        items = torch.stack([torch.as_tensor(item) for item in self.items])
        return items.repeat(self.times, *[1] * (items.ndim - 1))


class Parts(TensorList):
    """A list of tensors that are as long as values say, each along one axis.

    Args:
        padded: The tensors along a first axis, filled up behind their ends.
        lengths: How long they are.
        axis: The axis of an element.
    """

    def __init__(self, padded: torch.Tensor, lengths: torch.Tensor, axis: int) -> None:
        self.padded, self.lengths, self.axis = padded, lengths, axis

    @property
    def count(self) -> Any:
        """How many elements there are."""
        return self.lengths.shape[0]

    def whole(self) -> torch.Tensor:
        """Raises an error: the elements have different shapes."""
        raise TypeError("the elements of this list have lengths that depend on values")

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int):
            raise TypeError(SYMBOLIC_LENGTH)
        return self.padded[index].index_select(self.axis, torch.arange(self.lengths[index].item()))

    def _is_there(self) -> torch.Tensor:
        """Whether a row is part of an element: (elements, rows)."""
        return torch.arange(self.padded.shape[self.axis + 1]) < self.lengths[:, None]

    def joined(self, axis: int) -> torch.Tensor:
        """Returns the elements one after the other, along their own axis."""
        axis %= self.padded.ndim - 1
        if axis != self.axis:
            self.whole()
        return self.padded.movedim(axis + 1, 1)[self._is_there()].movedim(0, axis)

    def filled(self, value: float, batch_first: bool, side: str) -> torch.Tensor:
        """Returns the elements as `torch.nn.utils.rnn.pad_sequence` does, which pads them at their ends only."""
        if self.axis or side != "right":
            self.whole()
        is_there = self._is_there().reshape(*self.padded.shape[:2], *[1] * (self.padded.ndim - 2))
        found = torch.where(is_there, self.padded, value).to(self.padded.dtype)
        return found if batch_first else found.transpose(0, 1)


class RangeNumbers(SymbolicList):
    """What a range holds, or a part of it: numbers at the same distance from each other, after a few first ones.

    Args:
        start: The number after the first ones.
        step: The distance.
        steps: How many numbers there are from ``start`` on.
        first: The first ones.
    """

    def __init__(self, start: Any, step: int, steps: Any, first: tuple[Any, ...] = ()) -> None:
        self._start, self._step, self._steps, self._first = start, step, steps, first

    @classmethod
    def of(cls, start: Any, stop: Any, step: int) -> RangeNumbers:
        """Returns the numbers of a range."""
        return cls(start, step, _length_of_range(stop - start, step))

    @property
    def count(self) -> Any:
        """How many numbers there are."""
        return len(self._first) + self._steps

    def whole(self) -> torch.Tensor:
        """Returns the numbers as a tensor."""
        numbers = torch.arange(self._steps) * self._step + self._start
        return torch.cat([torch.tensor(self._first), numbers]) if self._first else numbers

    def __iter__(self) -> Iterator[Any]:
        return iter([*self._first, *[self._start + self._step * place for place in range(self._steps)]])

    def __len__(self) -> int:
        return int(self.count)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        if 0 <= index < len(self._first):
            return self._first[index]
        place = self._steps + index if index < 0 else index - len(self._first)
        if not 0 <= place < self._steps:
            raise IndexError("list index out of range")
        return self._start + self._step * place

    def _part(self, index: slice) -> RangeNumbers:
        if index == slice(None, None, -1) and not self._first:
            return RangeNumbers(self[-1], -self._step, self._steps)
        begin, end, by, known = index.start or 0, index.stop or 0, index.step or 1, len(self._first)
        if begin < 0 or by < 1 or not -self._steps <= end <= 0 or index.stop == 0:
            raise TypeError(SYMBOLIC_LENGTH)
        skipped = begin - known if begin >= known else (begin - known) % by
        steps = _length_of_range(self._steps - skipped + end, by)
        return RangeNumbers(self._start + self._step * skipped, self._step * by, steps, self._first[begin::by])

    def __radd__(self, other: list[Any]) -> RangeNumbers:
        return RangeNumbers(self._start, self._step, self._steps, (*other, *self._first))


def as_read(numbers: torch.Tensor) -> torch.Tensor:
    """Returns numbers as Python reads them from a tensor: its ints do not wrap."""
    return numbers.to(torch.int64) if is_integer(numbers) else numbers


def range_limits(first: Any, stop: Any = None, step: Any = 1) -> tuple[Any, Any, Any]:
    """Returns where a range starts and stops, and its step, given the arguments of ``range``."""
    return (0, first, step) if stop is None else (first, stop, step)


def _length_of_range(distance: Any, step: int) -> Any:
    """How many numbers a range has."""
    distance, step = (-distance, -step) if step < 0 else (distance, step)
    return torch.sym_max(0, (distance + step - 1) // step)
