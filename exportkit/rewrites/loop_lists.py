"""The iterations of a loop of symbolic length, and the lists that it makes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from exportkit._torch_compat.pytree import tree_flatten, tree_map
from exportkit._torch_compat.traced_values import asserted, at_least, number_asserted
from exportkit.rewrites.loop_indices import SliceOfUnknownLength, item
from exportkit.rewrites.symbolic_lists import Parts, SymbolicList, TensorList


class Iteration(NamedTuple):
    """How an iteration is run.

    Attributes:
        is_later: Whether the first iteration is run apart.
        is_idle: Whether this iteration changes nothing; None if every iteration counts.
    """

    is_later: bool = False
    is_idle: torch.Tensor | None = None


def count_of(elements: Any) -> Any:
    """Returns how many elements the first axis of nested tensors goes over."""
    return tree_flatten(elements)[0][0].shape[0]


class Iterations:
    """The iterations of a loop of symbolic length.

    Args:
        elements: Nested tensors whose first axis is the loop; an empty tuple for a loop without a limit.
        given: Makes what the body gets from an element, and from how the iteration is run.
        first: Returns what it gets in the first iteration.

    Attributes:
        flag: The place, among the values that iterations leave, of what ends the loop once it is true; None if all
            iterations run.
    """

    def __init__(self, elements: Any, given: Callable[[Any, Iteration], Any], first: Callable[[], Any]) -> None:
        self.elements, self.given, self.first = elements, given, first
        self.flag: int | None = None

    @property
    def count(self) -> Any:
        """How many iterations there are; None if that depends on values alone."""
        return None if isinstance(self.elements, tuple) and not self.elements else count_of(self.elements)

    def ending(self, flag: int) -> Iterations:
        """Returns the iterations, of which none runs once a value is true."""
        found = Iterations(self.elements, self.given, self.first)
        found.flag = flag
        return found

    def until(self, count: Any) -> Iterations:
        """Returns the first iterations."""
        return Iterations(tree_map(lambda tensor: tensor[:count], self.elements), self.given, self.first)


def turns() -> Iterations:
    """Returns the iterations of a loop that has no limit."""
    return Iterations((), lambda element, _: element, lambda: ())


class Stacked(TensorList):
    """A list to which every iteration of a loop adds a tensor.

    Args:
        parts: Tensors whose first axis goes over elements of the list.
    """

    def __init__(self, parts: list[torch.Tensor]) -> None:
        self._parts = parts

    def whole(self) -> torch.Tensor:
        """Returns all elements along the first axis."""
        return torch.cat(self._parts) if len(self._parts) > 1 else self._parts[0]

    @property
    def parts(self) -> list[torch.Tensor]:
        """Tensors whose first axis goes over elements of the list."""
        return self._parts

    def append(self, element: torch.Tensor) -> None:
        """Adds an element at the end, as a list does."""
        self._parts.append(element.unsqueeze(0))

    def appendleft(self, element: torch.Tensor) -> None:
        """Adds an element in front, as a deque does."""
        self._parts.insert(0, element.unsqueeze(0))

    def insert(self, index: int, element: torch.Tensor) -> None:
        """Adds an element in front."""
        if index != 0:
            raise TypeError("an element is put into the middle of a list of symbolic length")
        self.appendleft(element)

    def reverse(self) -> None:
        """Reverses the order of the elements."""
        self._parts = [part.flip(0) for part in reversed(self._parts)]

    def __getitem__(self, index: Any) -> Any:
        if index == slice(None, None, -1):
            return Stacked([part.flip(0) for part in reversed(self._parts)])
        return Stacked([self.whole()[index]]) if isinstance(index, slice) else item(self.whole(), index)


class StackedLists(TensorList):
    """A list to which every iteration of a loop adds a list or tuple of tensors.

    Args:
        elements: Nested tensors whose first axis goes over elements of the list.
    """

    def __init__(self, elements: Any) -> None:
        self.elements = elements

    def whole(self) -> torch.Tensor:
        """Raises an error: the elements are not tensors."""
        raise TypeError("the elements of this list of symbolic length are lists")

    @property
    def count(self) -> Any:
        """How many elements there are."""
        return count_of(self.elements)

    def __getitem__(self, index: Any) -> Any:
        change = (lambda tensor: tensor[index]) if isinstance(index, slice) else (lambda tensor: item(tensor, index))
        found = tree_map(change, self.elements)
        return StackedLists(found) if isinstance(index, slice) else found


def steps_of_parts(parts: Parts) -> Iterations:
    """Returns the iterations over a list of tensors that are as long as values say."""

    def given(element: Any, iteration: Iteration) -> SliceOfUnknownLength:
        padded, length = element
        is_there = torch.arange(padded.shape[parts.axis]) < length
        is_there = is_there if iteration.is_idle is None else is_there | iteration.is_idle
        return SliceOfUnknownLength(padded, is_there, parts.axis)

    elements = parts.padded, parts.lengths
    return Iterations(elements, given, lambda: given(tree_map(lambda tensor: tensor[0], elements), Iteration()))


class Chunks(Parts):
    """What ``tensor.split(size, axis)`` returns: the last part may be shorter.

    A loop goes over any number of parts; other code gets as many as in the trace.

    Args:
        tensor: The tensor.
        size: How long the parts are.
        axis: The axis, counted from the first one.
    """

    def __init__(self, tensor: torch.Tensor, size: int, axis: int) -> None:
        self._split = tensor, size, axis
        length = tensor.shape[axis]
        count = torch.sym_max((length + size - 1) // size, 1)
        filler = tensor.new_zeros([count * size - length if own == axis else n for own, n in enumerate(tensor.shape)])
        padded = torch.cat([tensor, filler], axis).unflatten(axis, (count, size)).movedim(axis, 0)
        super().__init__(padded, (length - torch.arange(count) * size).clamp(max=size), axis)

    def _as_traced(self) -> tuple[torch.Tensor, ...]:
        tensor, size, axis = self._split
        parts: tuple[torch.Tensor, ...] = tensor.split(size, axis)
        return parts

    def whole(self) -> torch.Tensor:
        """Returns the parts along a first axis."""
        return torch.stack(self._as_traced())

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._as_traced())

    def __getitem__(self, index: Any) -> Any:
        return self._as_traced()[index]


def segments(tensor: torch.Tensor, lengths: torch.Tensor, axis: int) -> Parts:
    """Returns what ``tensor.split(lengths, axis)`` returns, for any number of lengths.

    Args:
        tensor: The tensor.
        lengths: How long the parts are: (parts,), int64.
        axis: The axis, counted from the first one.
    """
    asserted((lengths >= 0).all() & (lengths.sum() == tensor.shape[axis]), "a split into parts of these lengths")
    places = torch.arange(at_least(lengths.max().item(), 0))
    is_there = places < lengths[:, None]
    ends = lengths.cumsum(0)
    # one more row is in place of what is behind the end of a part
    filler = tensor.new_zeros([1 if own == axis else size for own, size in enumerate(tensor.shape)])
    rows = torch.where(is_there, (ends - lengths)[:, None] + places, tensor.shape[axis])
    padded = torch.cat([tensor, filler], axis).index_select(axis, rows.flatten())
    return Parts(padded.unflatten(axis, rows.shape).movedim(axis, 0), lengths, axis)


def parts_of(items: Any) -> list[torch.Tensor]:
    """Returns tensors whose first axis goes over elements of a list."""
    return items.parts if isinstance(items, Stacked) else [torch.as_tensor(item)[None] for item in items]


def lists_of(lists: Sequence[Any], added: Sequence[Any], in_front: Sequence[bool]) -> Iterator[Any]:
    """Yields lists with elements added one by one, which are in the order in which they are added.

    Nothing, an empty tuple, leaves a list as it is.
    """
    for items, new, is_in_front in zip(lists, added, in_front, strict=True):
        parts = parts_of(items)
        if isinstance(new, tuple) and not new:
            yield items
        elif isinstance(new, Parts):
            if parts or is_in_front:
                raise TypeError("tensors of different lengths are added to a list that is not empty")
            yield new
        elif isinstance(new, torch.Tensor):
            yield Stacked([new.flip(0), *parts] if is_in_front else [*parts, new])
        elif parts:
            raise TypeError("an iteration adds a list to a list that is not empty")
        else:
            yield StackedLists(tree_map(lambda tensor: tensor.flip(0), new) if is_in_front else new)


def starred(items: Any, before: int, after: int) -> tuple[Any, ...]:
    """Returns the elements that ``first, *rest, last = items`` unpacks, with the rest as a list in its place.

    Args:
        items: What is unpacked, which may be a list of symbolic length.
        before: How many names are in front of the rest.
        after: How many names are behind it.
    """
    items = items if isinstance(items, SymbolicList) else [*items]
    count = items.count if isinstance(items, SymbolicList) else len(items)
    if count < before + after:
        raise ValueError(f"not enough values to unpack (expected at least {before + after}, got {count})")
    last = [items[-place] for place in range(after, 0, -1)]
    return (*[items[place] for place in range(before)], items[before : -after or None], *last)


def until(items: Any, iterations: torch.Tensor, steps: Iterations) -> Any:
    """Returns a list without the elements that were added after a loop had ended early.

    Args:
        items: The list.
        iterations: How many iterations there were before the end.
        steps: All iterations.
    """
    count: Any = iterations.item()
    before = items.count - steps.count
    number_asserted(count >= 0)
    number_asserted(count <= steps.count)
    number_asserted(count + before > 0)  # code that makes a tensor of an empty list raises
    return items[: before + count]


def product_of(all_steps: Sequence[Iterations]) -> Iterations:
    """Returns the iterations of ``itertools.product`` over several loops."""

    def elements(place: int) -> Any:
        before = math.prod(steps.count for steps in all_steps[:place])
        after = math.prod(steps.count for steps in all_steps[place + 1 :])

        def repeated(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[None, :, None].expand(before, -1, after, *tensor.shape[1:]).flatten(0, 2)

        return tree_map(repeated, all_steps[place].elements)

    def given(iteration_elements: Any, iteration: Iteration) -> Any:
        pairs = zip(all_steps, iteration_elements, strict=True)  # later iterations may have a first element again
        return tuple([steps.given(each, Iteration(is_idle=iteration.is_idle)) for steps, each in pairs])

    return Iterations(
        tuple(map(elements, range(len(all_steps)))), given, lambda: tuple([each.first() for each in all_steps])
    )
