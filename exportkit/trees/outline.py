"""The structure of a nested value, taken in one quick pass; exportkit/trees/outlined.py makes its tree when asked.

In comes a value that somebody else may change the next moment; out comes an `Outline`, which has containers of its own
but none of the tensors: these are listed beside it, so that the caller decides what is kept of each.
"""

from __future__ import annotations

import collections
import functools
import itertools
import operator
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch

from exportkit._torch_compat.transformers import DERIVED_CACHE_TENSORS
from exportkit.trees.flatten import Opened, open_registered
from exportkit.trees.objects import ATOMS, Method, is_cache_class, is_opened_class

# Only plain containers are opened in this namespace, which optree does natively; the rest is opened below.
NAMESPACE = "exportkit.outline"
_insertion_order = optree.dict_insertion_ordered(True, namespace=NAMESPACE)
_insertion_order.__enter__()

SHORT = 8  # up to so many leaves, to look at each of them takes less time than to ask optree
_CONTAINERS = (tuple, list, dict, collections.deque)  # what optree opens by itself; these and classes derived from them
_state = operator.attrgetter("__dict__")
TENSOR = object()  # stands where a tensor goes; they are found in the order in which they are filled in


# What an outline consists of. No named tuples, which optree would open like any other.


@dataclass(slots=True)
class Nested:
    """Plain containers, and what was found in them."""

    structure: optree.PyTreeSpec
    leaves: list[Any]


@dataclass(slots=True)
class Object:
    """A cache or one of its layers."""

    cls: type
    state: dict[str, Any]


@dataclass(slots=True)
class Table:
    """A list of objects of one class with the same attributes: the layers of a cache, attribute by attribute.

    Many layers are looked at together in this way, in a third of the time.
    """

    cls: type
    names: tuple[str, ...]
    columns: list[Any]  # values of one attribute, or TENSOR for a column of tensors
    height: int


@dataclass(slots=True)
class Container:
    """A list, tuple or dict of a class of its own, inside a cache."""

    cls: type
    items: Nested
    default: Any = None  # of a defaultdict: what makes its missing values


@dataclass(slots=True)
class Registered:
    """An object of a class registered with torch's pytree."""

    opened: Opened
    children: Nested


@dataclass(slots=True)
class Closed:
    """An object that nobody told us how to open; kept by reference, and closed even if it is registered later."""

    value: Any


class Outline(NamedTuple):
    """A nested value without its tensors.

    Attributes:
        root: Its containers.
        marks: What tells one structure from another, tensors and constants left out; can be a key of a dict.
    """

    root: Any
    marks: tuple[Any, ...]


_ONE_TENSOR = Outline(TENSOR, (0,))


class Taken(NamedTuple):
    """An outline, and beside it what it was taken of.

    Attributes:
        outline: The structure.
        tensors: The tensors themselves, in the order in which they were found.
        runs: Positions of tensors that are alike as a rule: one attribute of all layers of a cache.
    """

    outline: Outline
    tensors: list[torch.Tensor]
    runs: list[range]


def outline(value: Any, keep_values: bool = True) -> Taken:
    """Returns the outline of a nested value, and the tensors in it.

    Args:
        value: Any nested value; what `flatten` opens is opened.
        keep_values: Keep references to objects that are not opened.
    """
    if isinstance(value, torch.Tensor):  # as many results are
        return Taken(_ONE_TENSOR, [value], [])
    taker = _Taker(keep_values)
    root = taker.nested(value, taker.leaf)
    return Taken(Outline(root, tuple(taker.marks)), taker.tensors, taker.runs)


def outline_of_call(args: tuple[Any, ...], kwargs: dict[str, Any], keep_values: bool = True) -> Taken:
    """Returns the outline of ``(args, kwargs)``, and the tensors in it.

    Args:
        args: What a function is given by position.
        kwargs: What it is given by name.
        keep_values: Keep references to objects that are not opened.
    """
    leaves = [*args, *kwargs.values()]
    if _hold_containers(leaves):
        return outline((args, kwargs), keep_values)
    taker = _Taker(keep_values)
    root = taker.opened(leaves, _call_structure(len(args), tuple(kwargs)), taker.leaf)
    return Taken(Outline(root, tuple(taker.marks)), taker.tensors, taker.runs)


def _flattened(value: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Leaves and structure of plain containers; those of a short one with none inside are known without optree."""
    kind: Any = type(value)
    if kind is dict and len(value) <= SHORT and set(map(type, value)) == {str}:
        leaves = list(value.values())
        if not _hold_containers(leaves):
            return leaves, _dict_structure(tuple(value))
    elif (kind is list or kind is tuple) and len(value) <= SHORT and not _hold_containers(value):
        return list(value), _row_structure(kind, len(value))
    return optree.tree_flatten(value, none_is_leaf=True, namespace=NAMESPACE)


def _hold_containers(leaves: Sequence[Any]) -> bool:
    return any(map(isinstance, leaves, itertools.repeat(_CONTAINERS)))


# A model is given and returns the same structures again and again.


@functools.lru_cache(maxsize=256)
def _call_structure(num_args: int, names: tuple[str, ...]) -> optree.PyTreeSpec:
    return _structure(((None,) * num_args, dict.fromkeys(names)))


@functools.lru_cache(maxsize=256)
def _dict_structure(names: tuple[str, ...]) -> optree.PyTreeSpec:
    return _structure(dict.fromkeys(names))


@functools.lru_cache(maxsize=256)
def _row_structure(kind: Any, length: int) -> optree.PyTreeSpec:
    return _structure(kind([None] * length))


def _structure(value: Any) -> optree.PyTreeSpec:
    return optree.tree_structure(value, none_is_leaf=True, namespace=NAMESPACE)


class _Taker:
    """Takes one value apart, and notes what it comes across. This runs in every recorded call, hence the short cuts."""

    __slots__ = ("keep_values", "marks", "runs", "tensors")

    def __init__(self, keep_values: bool) -> None:
        self.keep_values = keep_values
        self.tensors: list[torch.Tensor] = []
        self.runs: list[range] = []
        self.marks: list[Any] = []

    def nested(self, value: Any, open_leaf: Callable[[Any], Any]) -> Nested:
        """Opens plain containers; what else is found in them is given to ``open_leaf``."""
        leaves, structure = _flattened(value)
        return self.opened(leaves, structure, open_leaf)

    def opened(self, leaves: list[Any], structure: optree.PyTreeSpec, open_leaf: Callable[[Any], Any]) -> Nested:
        """Opens what was found in plain containers of that structure."""
        marks, tensors = self.marks, self.tensors
        marks.append(structure)
        for index, leaf in enumerate(leaves):
            if type(leaf) in ATOMS:
                continue
            marks.append(index)
            if isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
                leaves[index] = TENSOR
            else:
                leaves[index] = open_leaf(leaf)
        return Nested(structure, leaves)

    def leaf(self, value: Any) -> Any:
        if is_cache_class(type(value)):
            return self.object(value)
        opened = open_registered(value)
        if opened is None:
            return Closed(value if self.keep_values else None)
        self.marks.append(opened.names)
        return Registered(opened.with_children([]), self.nested(opened.children, self.leaf))

    def object(self, value: Any) -> Object:
        """Opens a cache or a layer of one."""
        marks, tensors = self.marks, self.tensors
        cls = type(value)
        marks.append(cls)
        state = {name: attribute for name, attribute in vars(value).items() if name not in DERIVED_CACHE_TENSORS}
        for name, attribute in state.items():
            if type(attribute) in ATOMS:
                continue
            marks.append(name)
            if isinstance(attribute, torch.Tensor):
                tensors.append(attribute)
                state[name] = TENSOR
            else:
                state[name] = self._attribute(value, attribute)
        return Object(cls, state)

    def _attribute(self, owner: Any, value: Any) -> Any:
        if isinstance(value, types.MethodType) and value.__self__ is owner:
            return Method(value.__func__)
        return self.inside(value)

    def inside(self, value: Any) -> Any:
        """Opens what is found inside a cache: containers and layers, but no class that is registered with torch."""
        cls = type(value)
        if is_opened_class(cls):
            return self.object(value)
        if cls is list and len(value) > 1:
            table = self._table(value)
            if table is not None:
                return table
        kind = next((kind for kind in (list, tuple, dict) if isinstance(value, kind)), None)
        if kind is None:
            return value if self.keep_values else None
        if cls is kind or optree.is_namedtuple(value):
            return self.nested(value, self.inside)
        return Container(cls, self.nested(kind(value), self.inside), getattr(value, "default_factory", None))

    def _table(self, items: list[Any]) -> Table | None:
        """Opens the layers of a cache together, if they hold tensors and constants only, each in the same way."""
        cls, height = type(items[0]), len(items)
        if not is_opened_class(cls) or list(map(type, items)).count(cls) < height:
            return None
        states = list(map(_state, items))
        names = tuple(states[0])
        if len(names) < 2 or list(map(len, states)).count(len(names)) < height:
            return None
        try:
            columns: list[Any] = list(zip(*map(operator.itemgetter(*names), states), strict=True))
        except KeyError:
            return None
        found = []
        for position, (name, column) in enumerate(zip(names, columns, strict=True)):
            if name in DERIVED_CACHE_TENSORS:
                columns[position] = None
                continue
            kind = type(column[0])
            if list(map(type, column)).count(kind) < height or not (kind is torch.Tensor or kind in ATOMS):
                return None
            if kind is torch.Tensor:
                found.append(position)
        for position in found:
            self.runs.append(range(len(self.tensors), len(self.tensors) + height))
            self.tensors += columns[position]
            columns[position] = TENSOR
        self.marks += (cls, names, height, *found)
        return Table(cls, names, columns, height)
