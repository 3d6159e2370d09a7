"""Loops over a length, such as ``for step in x.unbind(1):``, as one loop operator.

A trace unrolls a Python loop, which fixes how often it runs. Under this rewrite, the functions of a model with such
loops are compiled once more from their source: where the loop runs over a symbolic length, its body becomes a function
from what it changes, and one element, to what it has changed. A loop that does something else, such as to set an
attribute or to end early, stays as it is.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from exportkit._torch_compat.loop_operators import scan
from exportkit._torch_compat.pytree import tree_flatten, tree_map, tree_unflatten
from exportkit.overrides import Attribute, namespaces, replaced
from exportkit.rewrites.lengths import SymbolicList, own_types
from exportkit.rewrites.loop_indices import Position, is_int, item, part_between, plain, with_item
from exportkit.rewrites.loop_source import HELPERS, with_loops_as_functions


def loops_as_operators(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Replaces the functions with loops where the classes of the model are defined."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    owners = (*classes, *namespaces(model), *model.modules())  # a module may hold a function as its attribute
    own = [owner for owner in owners if _package(owner) not in ("torch", "builtins", "exportkit")]
    replacements: list[tuple[Any, Any]] = []
    for owner in own:
        for name, value in list(vars(owner).items()):
            if isinstance(value, types.FunctionType) and (again := _compiled(value)) is not None:
                replacements.append((Attribute(owner, name), again))
    return replaced(replacements)


def _package(owner: Any) -> str:
    return str(getattr(owner, "__module__", None) or owner.__name__).partition(".")[0]


@functools.lru_cache(maxsize=1024)
def _compiled(function: types.FunctionType) -> types.FunctionType | None:
    """The function, compiled with loop bodies as functions; None if it has no such loop, or no plain source."""
    inner = getattr(function, "__wrapped__", None)
    if isinstance(inner, types.FunctionType):  # decorated, for instance with torch.no_grad()
        return _around(function, inner)
    try:
        lines, first = inspect.getsourcelines(function.__code__)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return None
    definition.decorator_list = []  # this is the function that they were given
    names = function.__code__.co_freevars
    factory = with_loops_as_functions(definition, names)
    if factory is None:
        return None
    ast.increment_lineno(factory, first - 1)
    module = compile(ast.Module([factory], []), function.__code__.co_filename, "exec")
    (made,) = (code for code in module.co_consts if isinstance(code, types.CodeType))
    (code,) = (code for code in made.co_consts if isinstance(code, types.CodeType) and code.co_name == definition.name)
    cells = dict(zip(names, function.__closure__ or (), strict=True)) | {HELPERS: types.CellType(Helpers)}
    closure = tuple(cells[name] for name in code.co_freevars)
    again = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    again.__kwdefaults__, again.__module__ = function.__kwdefaults__, function.__module__
    return again


def _around(function: types.FunctionType, inner: types.FunctionType) -> types.FunctionType | None:
    """What a decorator made of a function, with the function compiled; None if that is not where it is looked up."""
    again, cells = _compiled(inner), list(function.__closure__ or ())
    places = [number for number, cell in enumerate(cells) if _content(cell) is inner]
    if again is None or not places:
        return None
    for place in places:
        cells[place] = types.CellType(again)
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    made.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(made, again)
    return made


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, torch.SymInt)


class Steps:
    """The turns of a loop of symbolic length.

    Args:
        elements: Nested tensors whose first axis is the loop.
        given: Makes what the body gets from an element.
        first: Returns what it gets in the first turn.
    """

    def __init__(self, elements: Any, given: Callable[[Any], Any], first: Callable[[], Any]) -> None:
        self.elements, self.given, self.first = elements, given, first


class Stacked(SymbolicList):
    """A list to which every turn of a loop adds a tensor.

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


class Helpers:
    """What the source of a loop refers to."""

    @staticmethod
    def steps(iterated: Any) -> Any:
        """Returns the turns of a loop over something; the thing itself if its length is a number."""
        if isinstance(iterated, SymbolicList):
            iterated = iterated.whole()
        if isinstance(iterated, torch.Tensor) and iterated.ndim and _is_symbolic(iterated.shape[0]):
            return Steps(iterated, lambda element: element, lambda: iterated[0])
        return iterated

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
        least = start if step > 0 else stop - start % -step  # not below the last one
        elements = torch.arange(start, stop, step)
        return Steps(elements, lambda element: Position(element, least), lambda: start)

    @staticmethod
    def enumerate(iterated: Any, start: int = 0) -> Any:
        """Returns the turns of ``enumerate``."""
        steps = Helpers.steps(iterated)
        if not isinstance(steps, Steps):
            return enumerate(steps, start)
        return Helpers.zip(Helpers.range(start, _length(steps) + start), steps)

    @staticmethod
    def zip(*iterated: Any, **options: Any) -> Any:
        """Returns the turns of ``zip`` over things of the same length."""
        all_steps = [Helpers.steps(each) for each in iterated]
        if not any(isinstance(steps, Steps) for steps in all_steps):
            return zip(*all_steps, **options)  # noqa: B905 (the options of the caller)
        if not all(isinstance(steps, Steps) and _length(steps) == _length(all_steps[0]) for steps in all_steps):
            raise TypeError("a loop runs over things of different lengths")
        givens, firsts = [steps.given for steps in all_steps], [steps.first for steps in all_steps]
        return Steps(
            tuple(steps.elements for steps in all_steps),
            lambda elements: tuple([given(element) for given, element in zip(givens, elements, strict=True)]),
            lambda: tuple([first() for first in firsts]),
        )

    @staticmethod
    def reversed(iterated: Any) -> Any:
        """Returns the turns of ``reversed``."""
        steps = Helpers.steps(iterated)
        if not isinstance(steps, Steps):
            return reversed(steps)
        flipped = tree_map(lambda tensor: tensor.flip(0), steps.elements)
        return Steps(flipped, steps.given, lambda: steps.given(tree_map(lambda tensor: tensor[0], flipped)))

    @staticmethod
    def unbind(tensor: Any, dim: int = 0) -> Any:
        """Returns the turns of a loop over the slices of a tensor."""
        if isinstance(tensor, torch.Tensor) and isinstance(tensor.shape[dim], torch.SymInt):
            return Helpers.steps(tensor.movedim(dim, 0))
        return tensor.unbind(dim)

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
    def int(value: Any) -> Any:
        """Returns a tensor without axes in place of ``int(tensor)``, and ``int(value)`` for anything else."""
        return value.reshape(()).to(torch.int64) if isinstance(value, torch.Tensor) else int(value)

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
    def run(
        steps: Steps,
        body: Callable[[Any, Any], Any],
        carried: tuple[Any, ...],
        lists: tuple[Any, ...],
        in_front: tuple[bool, ...],
    ) -> Any:
        """Returns what a loop leaves in the names that it changes, and in the lists to which it adds elements.

        Args:
            steps: The turns.
            body: Returns the new values of the names, and the new elements, given the values and what a turn gets.
            carried: The values before the loop.
            lists: The lists.
            in_front: Whether elements are added in front, for each list.
        """
        if not all(isinstance(items, list | deque | Stacked) for items in lists):
            raise TypeError("a loop appends to something that is not a list")
        before = [items.parts if isinstance(items, Stacked) else [item[None] for item in items] for items in lists]
        elements = steps.elements
        if not all(isinstance(leaf, torch.Tensor) for leaf in tree_flatten(carried)[0]):
            carried, added = body(carried, steps.first())  # what is None, or not there, becomes a tensor
            before = _extended(before, [part[None] for part in added], in_front)
            elements = tree_map(lambda tensor: tensor[1:], elements)
        leaves, form = tree_flatten(carried)
        places = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def step(state: tuple[torch.Tensor, ...], element: Any) -> Any:
            given = list(leaves)
            for place, tensor in zip(places, state, strict=True):
                given[place] = tensor
            changed, added = body(tree_unflatten(given, form), steps.given(element))
            after, form_after = tree_flatten(changed)
            if form_after != form or any(after[n] is not leaves[n] for n in range(len(leaves)) if n not in places):
                raise TypeError("a loop changes something other than tensors")
            return tuple([_own(after[place]) for place in places]), tuple([_own(part) for part in added])

        state = tuple([_own(leaves[place]) for place in places]) or (torch.zeros(1),)
        if not places:
            step = functools.partial(_without_state, step)
        with own_types():
            last, outputs = scan(step, state, tree_map(_own, elements))
        for place, tensor in zip(places, last, strict=False):
            leaves[place] = tensor
        return tree_unflatten(leaves, form), tuple(map(Stacked, _extended(before, outputs, in_front)))


def _extended(
    lists: Sequence[list[torch.Tensor]], added: Sequence[torch.Tensor], in_front: Sequence[bool]
) -> list[list[torch.Tensor]]:
    """The parts of lists, with elements added one by one, which are in the order in which they are added."""
    found = zip(lists, added, in_front, strict=True)
    return [[new.flip(0), *parts] if is_in_front else [*parts, new] for parts, new, is_in_front in found]


def _without_state(step: Callable[..., Any], state: Any, element: Any) -> Any:
    return (state[0].clone(),), step((), element)[1]


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().clone()  # the loop operator takes no views


def _length(steps: Steps) -> Any:
    return tree_flatten(steps.elements)[0][0].shape[0]


def _one_by_one(start: Any, stop: Any, step: Any) -> Iterator[Any]:
    """``range`` that keeps its numbers symbolic, for few turns."""
    while start < stop:
        yield start
        start = start + step
