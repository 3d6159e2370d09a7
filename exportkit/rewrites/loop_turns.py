"""The turns of a loop of symbolic length as one loop operator: what the source of such a loop refers to."""

from __future__ import annotations

import functools
import itertools
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from exportkit._torch_compat.loop_operators import scan, without_aliases
from exportkit._torch_compat.pytree import tree_flatten, tree_map, tree_unflatten
from exportkit._torch_compat.symbolic_shapes import traced_expression
from exportkit.rewrites.lengths import Repeated, SymbolicList, own_types
from exportkit.rewrites.loop_bunches import bunch, extended
from exportkit.rewrites.loop_choices import (
    boolean,
    both,
    chosen,
    either,
    is_one_of,
    kept,
    one_of_two,
    only_if,
    opposite,
    truth,
)
from exportkit.rewrites.loop_indices import (
    Position,
    SliceOfUnknownLength,
    Slots,
    exact,
    is_int,
    item,
    part_between,
    plain,
    small,
    with_item,
)
from exportkit.rewrites.loop_lists import Stacked, StackedLists, Steps, Turn, lists_of, product_of, starred, until

# Turns of a loop over a number of turns that may end early: fewer ones are traced one by one, more would take long.
_FEWEST_TURNS, _MOST_TURNS = 4, 128


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, torch.SymInt)


class Helpers:
    """What the source of a loop refers to."""

    @staticmethod
    def steps(iterated: Any, ends_early: bool = False) -> Any:
        """Returns the turns of a loop over something; the thing itself if its length is a number.

        Args:
            iterated: The thing.
            ends_early: Whether the loop may end before the last turn, by the value of a tensor.
        """
        if ends_early and isinstance(iterated, range) and _FEWEST_TURNS <= len(iterated) <= _MOST_TURNS:
            start, stop, step = iterated.start, iterated.stop, iterated.step
            return Helpers._of_range(start, stop, step)
        if isinstance(iterated, StackedLists):
            elements = iterated.elements
            return Steps(elements, lambda element, _: element, lambda: tree_map(lambda tensor: tensor[0], elements))
        if isinstance(iterated, SymbolicList):
            iterated = iterated.whole()
        if isinstance(iterated, torch.Tensor) and iterated.ndim and _is_symbolic(iterated.shape[0]):
            return Steps(iterated, lambda element, _: element, lambda: iterated[0])
        return iterated

    nested, starred, until = staticmethod(itertools.product), staticmethod(starred), staticmethod(until)

    @staticmethod
    def are_symbolic(*iterated: Any) -> bool:
        """Returns whether nested loops all have a symbolic length."""
        return all(isinstance(each, Steps) for each in iterated)

    @staticmethod
    def is_symbolic(iterated: Any) -> bool:
        """Returns whether a loop has a symbolic length."""
        return isinstance(iterated, Steps)

    @staticmethod
    def range(*limits: Any) -> Any:
        """Returns the turns of ``range``."""
        start, stop, step = {1: (0, *limits, 1), 2: (*limits, 1)}.get(len(limits), limits)
        if not any(isinstance(limit, torch.SymInt) for limit in limits):
            return range(*limits)
        if not all(map(is_int, limits)) or (isinstance(step, torch.SymInt) and not start + step < stop):
            return _one_by_one(start, stop, step)
        if isinstance(step, torch.SymInt):
            raise TypeError("the step of a loop is symbolic")
        return Helpers._of_range(start, stop, step)

    @staticmethod
    def _of_range(start: Any, stop: Any, step: int) -> Steps:
        least, most = (start, stop - 1) if step > 0 else (stop - start % -step, start)  # not below the last one

        def given(element: torch.Tensor, turn: Turn) -> Position:
            first = least + step if turn.is_later and step > 0 else least
            return Position(element, first, most, is_idle=turn.is_idle)

        return Steps(torch.arange(start, stop, step), given, lambda: start)

    @staticmethod
    def enumerate(iterated: Any, start: int = 0) -> Any:
        """Returns the turns of ``enumerate``."""
        steps = Helpers.steps(iterated)
        if not isinstance(steps, Steps):
            return enumerate(steps, start)
        return Helpers.zip(Helpers.range(start, steps.count + start), steps)

    @staticmethod
    def zip(*iterated: Any, **options: Any) -> Any:
        """Returns the turns of ``zip``."""
        all_steps = [Helpers.steps(each) for each in iterated]
        if not any(isinstance(steps, Steps) for steps in all_steps):
            return zip(*all_steps, **options)  # noqa: B905 (the options of the caller)
        if not all(isinstance(steps, Steps) for steps in all_steps):
            raise TypeError("a loop runs over things of different lengths")
        if not all(steps.count == all_steps[0].count for steps in all_steps):
            if options.get("strict"):
                raise TypeError("a loop runs over things of different lengths")
            count = functools.reduce(torch.sym_min, [steps.count for steps in all_steps])
            all_steps = [steps.until(count) for steps in all_steps]
        givens, firsts = [steps.given for steps in all_steps], [steps.first for steps in all_steps]
        return Steps(
            tuple(steps.elements for steps in all_steps),
            lambda elements, turn: tuple([given(each, turn) for given, each in zip(givens, elements, strict=True)]),
            lambda: tuple([first() for first in firsts]),
        )

    @staticmethod
    def product(function: Callable[..., Any], *iterated: Any, **options: Any) -> Any:
        """Returns the turns of ``itertools.product``, if this is the function."""
        all_steps = [Helpers.steps(each) for each in iterated] * options.get("repeat", 1)
        if not any(isinstance(steps, Steps) for steps in all_steps):
            return function(*iterated, **options)
        if function is not itertools.product or not all(isinstance(steps, Steps) for steps in all_steps):
            raise TypeError("a loop runs over a length and over something else")
        return product_of(all_steps)

    bunch, extended = staticmethod(bunch), staticmethod(extended)
    truth, is_tensor, boolean = staticmethod(truth), staticmethod(torch.is_tensor), staticmethod(boolean)
    opposite, both, either = staticmethod(opposite), staticmethod(both), staticmethod(either)
    is_one_of, chosen, one_of_two = staticmethod(is_one_of), staticmethod(chosen), staticmethod(one_of_two)
    only_if = staticmethod(only_if)
    kept = staticmethod(kept)

    @staticmethod
    def tensor(make: type, data: Any) -> Any:
        """Returns ``torch.Tensor(data)``, also of a list of symbolic length."""
        return data.whole().to(torch.get_default_dtype()) if isinstance(data, SymbolicList) else make(data)

    @staticmethod
    def reversed(iterated: Any) -> Any:
        """Returns the turns of ``reversed``."""
        steps = Helpers.steps(iterated)
        if not isinstance(steps, Steps):
            return reversed(steps)
        flipped = tree_map(lambda tensor: tensor.flip(0), steps.elements)

        def given(element: Any, turn: Turn) -> Any:
            return steps.given(element, Turn(is_idle=turn.is_idle))

        return Steps(flipped, given, lambda: steps.given(tree_map(lambda tensor: tensor[0], flipped), Turn()))

    @staticmethod
    def unbind(tensor: Any, *args: Any, **options: Any) -> Any:
        """Returns the slices of a tensor."""
        dim = options.get("dim", args[0] if args else 0)
        return Helpers._slices(tensor, dim, keeps_axis=False) or tensor.unbind(*args, **options)

    @staticmethod
    def chunk(tensor: Any, *args: Any, **options: Any) -> Any:
        """Returns the chunks of a tensor, which may be its slices."""
        count, dim = options.get("chunks", args[0] if args else 1), options.get("dim", args[1] if args[1:] else 0)
        is_each = isinstance(tensor, torch.Tensor) and _is_symbolic(count) and tensor.shape[dim] == count
        found = Helpers._slices(tensor, dim, keeps_axis=True) if is_each else None
        return found or tensor.chunk(*args, **options)

    @staticmethod
    def split(tensor: Any, *args: Any, **options: Any) -> Any:
        """Returns the parts of a tensor, or of a string."""
        size, dim = args[0] if args else None, options.get("dim", args[1] if args[1:] else 0)
        is_each = isinstance(size, int) and size == 1
        found = Helpers._slices(tensor, dim, keeps_axis=True) if is_each else None
        return found or tensor.split(*args, **options)

    @staticmethod
    def _slices(tensor: Any, dim: Any, keeps_axis: bool) -> Stacked | None:
        if not isinstance(tensor, torch.Tensor) or not _is_symbolic(tensor.shape[dim]):
            return None
        slices = tensor.movedim(dim, 0)
        return Stacked([slices.unsqueeze(dim % tensor.ndim + 1) if keeps_axis else slices])

    @staticmethod
    def plain(value: Any) -> Any:
        """Returns the number of a turn as a tensor, and anything else as it is."""
        return plain(value)

    @staticmethod
    def tolist(value: Any) -> Any:
        """Returns what a loop runs over in place of ``value.tolist()``: a tensor, if its length is symbolic."""
        is_symbolic = isinstance(value, torch.Tensor) and value.ndim and _is_symbolic(value.shape[0])
        return value if is_symbolic else value.tolist()

    @staticmethod
    def number(value: Any) -> Any:
        """Returns a tensor without axes in place of ``value.item()``."""
        return value.reshape(()) if isinstance(value, torch.Tensor) else value.item()

    @staticmethod
    def data(value: Any) -> Any:
        """Returns the tensor itself in place of ``tensor.data``, which torch makes a constant of in a loop operator."""
        return value.detach() if isinstance(value, torch.Tensor) else value.data

    @staticmethod
    def int(value: Any, is_read: bool) -> Any:
        """Returns a tensor without axes in place of ``int(tensor)``, and ``int(value)`` for anything else.

        Args:
            value: The number.
            is_read: Whether it is an element of a tensor. Python computes others in double precision, and may round
                them to another integer.
        """
        if not isinstance(value, torch.Tensor):
            return int(value)
        if value.is_floating_point() and not is_read:
            raise TypeError("a number that is computed from others becomes an int")
        return value.reshape(()).to(torch.int64)

    @staticmethod
    def quotient(left: Any, right: Any) -> Any:
        """Returns a tensor without axes in place of ``int(left / right)`` if one of them is a tensor."""
        left, right = plain(left), plain(right)
        is_whole = isinstance(left, torch.Tensor) and not left.is_floating_point() and is_int(right)
        if is_whole and not left.is_complex() and right > 0:
            return torch.div(left, right, rounding_mode="trunc").reshape(()).to(torch.int64)
        return Helpers.int(left / right, False)

    @staticmethod
    def power(base: Any, exponent: Any) -> Any:
        """Returns ``base ** exponent``."""
        return plain(base) ** small(base, plain(exponent))

    @staticmethod
    def shifted(number: Any, places: Any) -> Any:
        """Returns ``number << places``."""
        return plain(number) << small(number, plain(places))

    @staticmethod
    def floored(left: Any, right: Any) -> Any:
        """Returns ``left // right``."""
        return exact(left) // exact(right)

    @staticmethod
    def remainder(left: Any, right: Any) -> Any:
        """Returns ``left % right``."""
        return exact(left) % exact(right)

    @staticmethod
    def part(start: Any, stop: Any, step: Any) -> Any:
        """Returns ``slice(start, stop, step)``."""
        return part_between(start, stop, step)

    @staticmethod
    def item(value: Any, index: Any) -> Any:
        """Returns ``value[index]`` in the body of a loop."""
        return item(value.whole() if isinstance(value, Stacked) else value, index)

    @staticmethod
    def put(value: Any, index: Any, part: Any) -> Any:
        """Returns a copy of a tensor in which ``value[index] = part``."""
        return with_item(value, index, part)

    @staticmethod
    def attribute(owner: Any, name: str, root: Any, read: tuple[str, ...]) -> Any:
        """Returns an attribute for which a loop has a local name; None if it is not set.

        Args:
            owner: What has the attribute.
            name: The attribute.
            root: The object that the body knows by name, such as ``self``.
            read: The attributes of this object that the body reads.
        """
        if owner is root:
            users = [function for each in read for function in _functions(type(root), each)]
        else:
            users = [function for each in dir(type(owner)) for function in _functions(type(owner), each)]
        for user in users:
            if _mentions(user, type(owner), name, set()):
                raise TypeError(f"the loop sets the attribute {name}, which {user.__name__}() also uses")
        return getattr(owner, name, None)

    @staticmethod
    def joined(tensor: Any, elements: Stacked, dim: Any, in_front: bool) -> torch.Tensor:
        """Returns what a tensor becomes to which every turn adds a slice; None for a tensor that the loop begins."""
        parts = elements.parts
        axis = dim % (parts[0].ndim - 1)
        new = [part.movedim(0, axis).flatten(axis, axis + 1) for part in parts]
        if tensor is None:
            return torch.cat(new, axis)
        return torch.cat([*new, tensor] if in_front else [tensor, *new], axis)

    @staticmethod
    def counted(start: Any, stop: Any) -> Any:
        """Returns what the counter of a loop is after it."""
        return torch.sym_max(start, stop)

    @staticmethod
    def run(
        steps: Steps,
        body: types.FunctionType,
        carried: tuple[Any, ...],
        lists: tuple[Any, ...],
        facts: tuple[tuple[bool, ...], tuple[bool, ...], bool],
    ) -> Any:
        """Returns what a loop leaves in the names that it changes, and in the lists to which it adds elements.

        Args:
            steps: The turns.
            body: Returns the new values of the names, and the new elements, given the values and what a turn gets.
            carried: The values before the loop.
            lists: The lists.
            facts: Whether elements are added in front, for each list; whether the body sets items of a value, never the
                name, for each name; whether it decides by the number of the turn.
        """
        in_front, changed, is_first_apart = facts
        if not all(isinstance(items, list | deque | Stacked) for items in lists):
            raise TypeError("a loop appends to something that is not a list")
        if not torch.compiler.is_dynamo_compiling():
            body = without_aliases(body)
        before = [items.parts if isinstance(items, Stacked) else [item[None] for item in items] for items in lists]
        values = [_opened(value) for value in carried]
        elements = steps.elements
        # what is None, or not there, becomes a tensor in the first turn
        begun: tuple[Any, ...] | None = None
        is_first_apart |= not all(isinstance(leaf, torch.Tensor) for leaf in tree_flatten(values)[0])
        if is_first_apart:
            if not steps.count > 0:
                raise TypeError("the first turn of a loop is another one, and there may be none")
            first, added = body(tuple(values), steps.first())
            values = [torch.as_tensor(value) if isinstance(value, int) else value for value in first]
            begun = tree_map(_own, added)
        # onnxruntime runs no loop without turns: one that changes nothing is put before them, or is the first one
        has_idle = is_first_apart or _may_be_zero(steps.count)
        if has_idle and not is_first_apart:
            elements = tree_map(_after_zeros, elements)
        leaves, form = tree_flatten(tuple(values))
        places = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def step(state: tuple[torch.Tensor, ...], given: Any) -> Any:
            element, is_idle = given if has_idle else (given, None)
            old = list(leaves)
            for place, tensor in zip(places, state, strict=True):
                old[place] = tensor
            new, added = body(tree_unflatten(old, form), steps.given(element, Turn(is_first_apart, is_idle)))
            after, form_after = tree_flatten(new)
            if form_after != form or any(after[n] is not leaves[n] for n in range(len(leaves)) if n not in places):
                raise TypeError("a loop changes something other than tensors")
            found = [_unless(is_idle, old[place], after[place]) for place in places]
            if begun is not None:
                added = tree_map(functools.partial(_unless, is_idle), begun, added)
            return tuple([_own(tensor) for tensor in found]), tree_map(_own, added)

        state = tuple([_own(leaves[place]) for place in places]) or (torch.zeros(1),)
        if not places:
            step = functools.partial(_without_state, step)
        elements = tree_map(_own, elements)
        with own_types():
            if has_idle:
                is_idle = torch.arange(tree_flatten(elements)[0][0].shape[0]) == 0
                last, outputs = scan(step, state, (elements, is_idle))
                outputs = outputs if is_first_apart else tree_map(lambda output: output[1:], outputs)
            else:
                last, outputs = scan(step, state, elements)
        for place, tensor in zip(places, last, strict=False):
            leaves[place] = tensor
        results = [
            _closed(old, new, is_changed)
            for old, new, is_changed in zip(carried, tree_unflatten(leaves, form), changed, strict=True)
        ]
        return tuple(results), tuple(lists_of(before, outputs, in_front))


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


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, int | float) and one == other)


def _may_be_zero(count: Any) -> bool:
    """Whether a loop has no turns if all sizes are 1."""
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
        raise TypeError("a turn changes the shape or dtype of a tensor")
    return torch.where(is_idle, old, new)


def _functions(cls: type, name: str) -> list[types.FunctionType]:
    """The method of this name, or what a property calls."""
    found = getattr(cls, name, None)
    found = found.fget if isinstance(found, property) else found
    return [found] if isinstance(found, types.FunctionType) else []


def _mentions(function: types.FunctionType, cls: type, name: str, seen: set[str]) -> bool:
    """Whether a method, or one that it calls, uses an attribute."""
    names = {*function.__code__.co_names} - seen
    seen |= names
    return name in names or any(
        _mentions(each, cls, name, seen) for called in names for each in _functions(cls, called)
    )


def _without_state(step: Callable[..., Any], state: Any, element: Any) -> Any:
    return (state[0].clone(),), step((), element)[1]


def _own(tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        is_slice = isinstance(tensor, SliceOfUnknownLength)
        raise TypeError("the length of a slice depends on values" if is_slice else "a turn adds no tensor to a list")
    return tensor.contiguous().clone()  # the loop operator takes no views


def _one_by_one(start: Any, stop: Any, step: Any) -> Iterator[Any]:
    """``range`` that keeps its numbers symbolic, for few turns."""
    while start < stop:
        yield start
        start = start + step
