"""A loop over a symbolic length as one loop operator: what its body gets in an iteration, and what it leaves."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections import deque
from typing import Any

import torch

from exportkit._torch_compat.loop_operators import scan, while_loop, without_aliases
from exportkit._torch_compat.pytree import tree_flatten, tree_map, tree_unflatten
from exportkit._torch_compat.symbolic_shapes import (
    has_counted_size,
    is_counted_in_loop,
    is_same,
    traced_expression,
)
from exportkit.rewrites.lengths import own_types
from exportkit.rewrites.loop_indices import SliceOfUnknownLength, Slots, rows
from exportkit.rewrites.loop_lists import Iteration, Iterations, Stacked, count_of, lists_of
from exportkit.rewrites.loop_names import names_of_code
from exportkit.rewrites.loop_values import CAUGHT, as_tensor, checked, chosen
from exportkit.rewrites.model_code import may_be_caught
from exportkit.rewrites.symbolic_lists import Parts, Repeated, SymbolicList

DIFFERENT_LENGTHS = "the elements that iterations add to a list have different lengths"


def run(
    steps: Iterations,
    body: types.FunctionType,
    carried: tuple[Any, ...],
    lists: tuple[Any, ...],
    facts: tuple[tuple[bool, ...], tuple[bool, ...], bool],
) -> Any:
    """Returns what a loop leaves in the names that it changes, and in the lists to which it adds elements.

    Args:
        steps: The iterations.
        body: Returns the new values of the names, and the new elements, given the values, what an iteration gets, and
            whether it changes nothing.
        carried: The values before the loop.
        lists: The lists.
        facts: Whether elements are added in front, for each list; whether the body sets items of a value, never the
            name, for each name; whether it decides by the number of the iteration.
    """
    in_front, changed, is_first_apart = facts
    if not all(isinstance(items, list | deque | Stacked) for items in lists):
        raise TypeError("a loop appends to something that is not a list")
    if any(isinstance(items, deque) and items.maxlen is not None for items in lists):
        raise TypeError("a loop appends to a deque that drops elements")
    caught = None
    if not torch.compiler.is_dynamo_compiling():
        body = without_aliases(body)
        if may_be_caught(sys._getframe(1)):
            caught = CAUGHT
            inner = [code for code in body.__code__.co_consts if isinstance(code, types.CodeType)]
            if any(checked.__name__ in names_of_code(code) for code in inner):  # an inner loop, which cannot ask
                raise TypeError(CAUGHT)
    values, begun = [_opened(value) for value in carried], None
    # what is None, or not there, becomes a tensor in the first iteration
    is_first_apart |= not all(isinstance(leaf, torch.Tensor) for leaf in tree_flatten(values)[0])
    if is_first_apart:
        values, begun = _first_iteration(steps, body, values, caught)
    loop_body = _LoopBody(steps, body, values, begun, caught)
    try:
        last, outputs = _operator(steps, loop_body, is_first_apart)
    except Exception as error:
        if DIFFERENT_LENGTHS not in str(error) or is_first_apart:
            raise
        last, outputs = _in_two_passes(steps, loop_body)
    pairs = zip(carried, last, changed, strict=True)
    return tuple([_closed(*each) for each in pairs]), tuple(lists_of(lists, outputs, in_front))


def _first_iteration(
    steps: Iterations, body: types.FunctionType, values: list[Any], caught: str | None
) -> tuple[list[Any], Any]:
    """The values after the first iteration, and the elements that it adds to lists."""
    if steps.count is not None and not steps.count > 0:
        raise TypeError("the first iteration differs from the others, and the loop may run zero times")
    has_ended = None if steps.count is not None or steps.flag is None else values[steps.flag]
    is_idle = torch.as_tensor(has_ended) if has_ended is not None and has_ended is not False else None
    first, added = body(tuple(values), steps.first(), caught or is_idle)
    if is_idle is not None:  # there may be no iteration
        first = chosen(is_idle, tuple(values), first)
    return [as_tensor(value) for value in first], tree_map(_own, added)


def _in_two_passes(steps: Iterations, loop_body: _LoopBody) -> tuple[Any, Any]:
    """The values after a loop that adds tensors of different lengths to lists: how long they are is found first."""
    loop_body.elements = _Lengths(loop_body.around)
    _, lengths = _operator(steps, loop_body, False)
    axes = [found.shape[1] - 1 if found.ndim == 2 else None for found in lengths]
    places = [None if axis is None else _places(found) for axis, found in zip(axes, lengths, strict=True)]
    loop_body.elements = _Padded(axes, places)
    last, outputs = _operator(steps, loop_body, False)
    pairs = zip(outputs, lengths, axes, strict=True)
    return last, tuple([each if axis is None else Parts(each, found[:, 0], axis) for each, found, axis in pairs])


def _places(lengths: torch.Tensor) -> torch.Tensor:
    """The positions in the longest element. A loop body cannot use its length as a number, but as the size of this."""
    return torch.arange(lengths.amax().item())


class _Any:
    """Takes what an iteration of an inner loop adds to lists: torch raises an error if that is not alike."""

    def taken(self, _: int, element: Any) -> Any:
        """Returns what the operator gets for what is added to the list at a place."""
        return tree_map(_own, element)


def _counted(values: Any, elements: Any, body: types.FunctionType) -> list[torch.Tensor]:
    """The tensors that a loop gets, and whose sizes come from values."""
    held: list[Any] = [values, elements]
    for cell in body.__closure__ or ():
        with contextlib.suppress(ValueError):  # the name stands for nothing yet
            held.append(cell.cell_contents)
    return [leaf for leaf in tree_flatten(held)[0] if isinstance(leaf, torch.Tensor) and has_counted_size(leaf)]


class _Alike:
    """Takes what an iteration adds to lists as it is.

    Args:
        around: Tensors from around the loop whose sizes come from values.
    """

    def __init__(self, around: list[torch.Tensor]) -> None:
        self._around = around

    def taken(self, _: int, element: Any) -> Any:
        """Returns what the operator gets for what is added to the list at a place."""
        if isinstance(element, SliceOfUnknownLength):
            raise TypeError(DIFFERENT_LENGTHS)
        for leaf in tree_flatten(element)[0]:
            if isinstance(leaf, torch.Tensor) and self.own_axis(leaf) is not None:
                raise TypeError(DIFFERENT_LENGTHS)
        return tree_map(_own, element)

    def own_axis(self, tensor: torch.Tensor) -> int | None:
        """Returns the first axis whose size comes from values of the iteration; None if there is none."""
        if not has_counted_size(tensor):
            return None
        for axis in range(tensor.ndim):
            size = tensor.shape[axis]
            if is_counted_in_loop(size) and not any(is_same(size, n) for other in self._around for n in other.shape):
                return axis
        return None


class _Lengths(_Alike):
    """Takes how long the elements are, in as many numbers as they have axes up to the one that differs."""

    def taken(self, _: int, element: Any) -> Any:
        """Returns the length of an element; a number without axes if it is a tensor like the others."""
        element = rows(element)
        axis = self.own_axis(element) if isinstance(element, torch.Tensor) else None
        return torch.zeros(()) if axis is None else torch.full((axis + 1,), element.shape[axis], dtype=torch.int64)


class _Padded:
    """Takes the elements, filled up to the longest one.

    Args:
        axes: The axis along which elements have different lengths, for each list; None if they have not.
        places: The places in the longest one.
    """

    def __init__(self, axes: list[int | None], places: list[torch.Tensor | None]) -> None:
        self._axes, self._places = axes, places

    def taken(self, place: int, element: Any) -> Any:
        """Returns an element with zeros at its end."""
        axis, places, element = self._axes[place], self._places[place], rows(element)
        if axis is None or places is None:
            return tree_map(_own, element)
        last = list(element.shape)
        last[axis] = 1
        filled = torch.cat([element, element.new_zeros(last)], axis)
        return _own(filled.index_select(axis, places.clamp(max=element.shape[axis])))


class _LoopBody:
    """The body of a loop as the operator runs it: from tensors to tensors.

    Args:
        steps: The iterations.
        body: The body.
        values: The values before the operator.
        begun: What the first iteration adds to lists, if it is run apart.
        caught: Why the body may not raise; None if it may.
    """

    def __init__(
        self, steps: Iterations, body: types.FunctionType, values: list[Any], begun: Any, caught: str | None
    ) -> None:
        self._given, self._body, self._begun, self._caught = steps.given, body, begun, caught
        is_inner = torch.compiler.is_dynamo_compiling()
        self.around = [] if is_inner else _counted(values, steps.elements, body)
        self.elements: Any = _Any() if is_inner else _Alike(self.around)
        self._leaves, self._form = tree_flatten(tuple(values))
        self._places = [number for number, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor)]

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the first iteration gets. An operator has to have one."""
        return tuple([_own(self._leaves[place]) for place in self._places]) or (torch.zeros(1),)

    def values(self, state: tuple[torch.Tensor, ...]) -> Any:
        """Returns the values of which an iteration gets, or leaves, these tensors."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, state, strict=False):
            leaves[place] = tensor
        return tree_unflatten(leaves, self._form)

    def run(self, state: tuple[torch.Tensor, ...], element: Any, is_idle: torch.Tensor | None) -> Any:
        """Returns the tensors after an iteration, and what it adds to lists.

        Args:
            state: The tensors before it.
            element: The element of the iteration.
            is_idle: Whether it changes nothing; None if every iteration counts.
        """
        iteration = Iteration(self._begun is not None, is_idle)
        # copies, which functions that the body calls may change in place
        values = self.values(tuple([tensor.clone() for tensor in state]))
        new, added = self._body(values, self._given(element, iteration), self._caught or is_idle)
        after, form = tree_flatten(new)
        others = set(range(len(self._leaves))) - {*self._places}
        if form != self._form or any(after[number] is not self._leaves[number] for number in others):
            raise TypeError("a loop changes something other than tensors")
        if self._begun is not None:
            added = tree_map(functools.partial(_unless, is_idle), self._begun, added)
        added = tuple([self.elements.taken(place, each) for place, each in enumerate(added)])
        if not self._places:
            return (state[0].clone(),), added
        found = [_unless(is_idle, old, after[place]) for place, old in zip(self._places, state, strict=True)]
        return tuple([_own(tensor) for tensor in found]), added


def _operator(steps: Iterations, loop_body: _LoopBody, is_first_apart: bool) -> tuple[Any, Any]:
    """The values after the loop, and what its iterations add to lists."""
    if steps.flag is not None:
        return _until_ended(steps, loop_body, steps.flag, is_first_apart), ()
    elements = steps.elements
    # onnxruntime runs no loop without iterations: one that changes nothing is put before them, or is the first one
    has_idle = is_first_apart or _may_be_zero(steps.count)
    if has_idle and not is_first_apart:
        elements = tree_map(_after_zeros, elements)
    elements = tree_map(_own, elements)
    with own_types():
        if not has_idle:
            state, outputs = scan(lambda state, element: loop_body.run(state, element, None), loop_body.state, elements)
            return loop_body.values(state), outputs
        is_idle = torch.arange(count_of(elements)) == 0
        state, outputs = scan(lambda state, given: loop_body.run(state, *given), loop_body.state, (elements, is_idle))
        outputs = outputs if is_first_apart else tree_map(lambda output: output[1:], outputs)
        return loop_body.values(state), outputs


def _until_ended(steps: Iterations, loop_body: _LoopBody, flag: int, is_first_apart: bool) -> Any:
    """The values after a loop that no iteration of which runs once a value is true."""
    elements, count = tree_map(_own, steps.elements), steps.count

    def goes_on(turn: torch.Tensor, *state: torch.Tensor) -> torch.Tensor:
        has_ended = loop_body.values(state)[flag].reshape(())
        goes: torch.Tensor = ~has_ended if count is None else ~has_ended & (turn < count)
        return goes

    def iteration(turn: torch.Tensor, *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        element = tree_map(lambda tensor: tensor.index_select(0, turn.reshape(1))[0], elements)
        after, _ = loop_body.run(state, element, None)
        return turn + 1, *after

    with own_types():
        first = torch.full((), int(is_first_apart), dtype=torch.int64)
        _, *state = while_loop(goes_on, iteration, (first, *loop_body.state))
    return loop_body.values(tuple(state))


def _opened(value: Any) -> Any:
    """A value before the loop; a list of symbolic length as a tensor, or as slots to fill."""
    if isinstance(value, Repeated) and value.items in ([None], [0]):
        return Slots(value.times)
    return value.whole() if isinstance(value, SymbolicList) else value


def _closed(old: Any, new: Any, is_changed: bool) -> Any:
    """A value after the loop. Where the body only changes a tensor, list or dict, it is the same object as before."""
    if isinstance(old, SymbolicList) and isinstance(new, torch.Tensor):
        return Stacked([new])
    if is_changed and type(old) is list and isinstance(new, list):
        old[:] = new
        return old
    if is_changed and isinstance(old, torch.Tensor) and not torch.compiler.is_dynamo_compiling():
        return old.copy_(new)
    if is_changed and type(old) is dict and isinstance(new, dict):
        old.update(new)
        return old
    return new


def _may_be_zero(count: Any) -> bool:
    """Whether a loop has no iterations if all sizes are 1."""
    expression = traced_expression(count)
    if expression is None:
        return not count
    return not bool(expression.subs(dict.fromkeys(expression.free_symbols, 1)) > 0)


def _after_zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.new_zeros(1, *tensor.shape[1:]), tensor])


def _unless(is_idle: torch.Tensor | None, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    if is_idle is None:
        return new
    if old.dtype != new.dtype or old.ndim != new.ndim or any(old.shape[n] != new.shape[n] for n in range(old.ndim)):
        raise TypeError("an iteration changes the shape or dtype of a tensor")
    return torch.where(is_idle, old, new)


def _own(tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        is_slice = isinstance(tensor, SliceOfUnknownLength)
        raise TypeError(
            "the length of a slice depends on values" if is_slice else "an iteration adds no tensor to a list"
        )
    return tensor.contiguous().clone()  # the loop operator takes no views
