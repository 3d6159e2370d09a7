"""The one flattener: decides which values are opened, and lists their leaves in order.

`flattened` makes one quick pass over a value that its owner may change the next moment, and returns a structure and the
tensors beside it, so that a recorder decides what it keeps of each. `flatten` returns a `Tree` around the value's own
leaves. The order of the keys of a dict does not matter: leaves are known by their path, never by their position.
"""

from __future__ import annotations

import collections
import functools
import itertools
import operator
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import optree
import torch

from exportkit._torch_compat.pytree import Registration, key_name, registered_node
from exportkit.errors import UnregisteredClassError
from exportkit.trees.caches import ATOMS, COUNTER, DERIVED, is_cache_class, shared_count
from exportkit.trees.objects import OBJECT, Opened, changing_classes, flatten_tensors, open_object
from exportkit.trees.structure import (
    COUNT,
    LENGTH,
    TENSOR,
    Closed,
    Container,
    Method,
    Nested,
    Object,
    RegisteredObject,
    Structure,
    Table,
    containers,
)
from exportkit.trees.tree import HeldTensors, Tree

_CONTAINERS = (tuple, list, dict, collections.deque)  # what optree opens natively, and classes derived from them
_SHORT = 8  # up to this many leaves, looking at each of them takes less time than calling optree
_ONE_TENSOR = Structure(TENSOR, (0,))
_DERIVED = frozenset(DERIVED)
_state = operator.attrgetter("__dict__")

# Classes that were opened because they are registered with torch's pytree: taking that back later is an error.
_registered: set[type] = set()


class Flattened(NamedTuple):
    """A structure, and the tensors that were found.

    Attributes:
        structure: The structure.
        tensors: The tensors themselves, in the order in which they were found.
        runs: Positions of tensors that are usually alike: one attribute of all layers of a cache.
    """

    structure: Structure
    tensors: list[torch.Tensor]
    runs: list[range]


def flatten(value: Any) -> Tree:
    """Returns the `Tree` of a nested value; `flattened` says what is opened.

    Raises:
        UnregisteredClassError: if an object was opened before, and its class is not registered any more.
    """
    found = flattened(value)
    leaves = found.structure.listed()
    for constant in leaves.constants.values():
        if type(constant) in _registered:
            raise UnregisteredClassError(
                f"Class {type(constant).__name__} was registered with torch's pytree and no longer is.",
                hint="keep the registration active while the model is observed and exported.",
            )
    return Tree(found.structure.root, leaves, HeldTensors(found.tensors))


def flattened(value: Any, keep_values: bool = True) -> Flattened:
    """Returns the structure of a nested value, and the tensors in it.

    Lists, tuples, dicts, named tuples, caches, every class registered with torch's pytree, and objects that hold
    tensors and can be built again are opened; any other object is a leaf.

    Args:
        value: Any nested value.
        keep_values: Keep references to objects that are not opened.
    """
    if isinstance(value, torch.Tensor):  # as many results are
        return Flattened(_ONE_TENSOR, [value], [])
    flattener = _Flattener(keep_values)
    root = flattener.opened(flattener.nested(value))
    return Flattened(Structure(root, tuple(flattener.marks)), flattener.tensors, flattener.runs)


def flattened_call(args: tuple[Any, ...], kwargs: dict[str, Any], keep_values: bool = True) -> Flattened:
    """Returns the structure of ``(args, kwargs)``, and the tensors in it.

    Args:
        args: Positional arguments of a call.
        kwargs: Its keyword arguments.
        keep_values: Keep references to objects that are not opened.
    """
    leaves = [*args, *kwargs.values()]
    if _hold_containers(leaves):
        return flattened((args, kwargs), keep_values)
    flattener = _Flattener(keep_values)
    spec = _spec_of(None, (len(args), tuple(kwargs)))
    root = flattener.opened(flattener.begin(Nested(spec), leaves, spec))
    return Flattened(Structure(root, tuple(flattener.marks)), flattener.tensors, flattener.runs)


def flattened_cache(cache: Any) -> tuple[list[torch.Tensor], Object]:
    """Returns the tensors of a cache in the order of their paths, layer by layer, and its structure."""
    flattener = _Flattener(keep_values=True, by_layer=True)
    structure: Object = flattener.opened(flattener.object(cache))
    return flattener.tensors, structure


def node_of_object(cls: type, opened: Opened) -> RegisteredObject:
    """Returns the node of an object that is opened by its attributes.

    Args:
        cls: Its class, whose objects are opened from then on even if they hold no tensors.
        opened: What is in it.
    """
    changing_classes.add(cls)
    flattener = _Flattener(keep_values=True)
    children = flattener.opened(flattener.nested(opened.leaves))
    return RegisteredObject(cls, OBJECT, opened.skeleton, opened.paths, children)


def open_registered(value: Any) -> tuple[Registration, Any, tuple[str | int, ...], list[Any]] | None:
    """Returns how an object is built from its children, its context, and names and values of the children.

    An object that holds tensors is opened by its attributes, if it can be built again. None for any other value.
    """
    node = registered_node(type(value))
    if node is None or node.flatten is flatten_tensors:
        opened = None if type(value) in _registered else open_object(value)
        return None if opened is None else (OBJECT, opened.skeleton, opened.paths, opened.leaves)
    _registered.add(type(value))
    children, context = node.flatten(value)
    children = list(children)
    if node.flatten_with_keys is None:
        return node, context, tuple(range(len(children))), children
    # For the names alone: its context can differ (dataclasses), and unflatten does not take that one.
    names = tuple([key_name(key) for key, _ in node.flatten_with_keys(value)[0]])
    return node, context, names, children


def _hold_containers(leaves: Sequence[Any]) -> bool:
    return any(map(isinstance, leaves, itertools.repeat(_CONTAINERS)))


@functools.lru_cache(maxsize=256)  # a model takes and returns the same structures in every call
def _spec_of(kind: Any, contents: Any) -> optree.PyTreeSpec:
    """The containers of a list or tuple of some length, of a dict with some names, or of a call with both."""
    if kind is None:
        return containers(((None,) * contents[0], dict.fromkeys(contents[1])))[1]
    return containers(dict.fromkeys(contents) if kind is dict else kind((None,) * contents))[1]


class _Leaf(NamedTuple):
    """A value inside a cache that is a leaf, as if it stood outside."""

    value: Any


class _Flattener:
    """Opens one value, and notes what it finds. This runs in every recorded call, hence the short cuts.

    Values are opened depth first, with the levels that are not finished on a stack, so that deep nesting does not
    recurse.
    """

    __slots__ = ("by_layer", "counted", "keep_values", "levels", "marks", "runs", "tensors")

    def __init__(self, keep_values: bool, by_layer: bool = False) -> None:
        self.keep_values, self.by_layer, self.counted = keep_values, by_layer, False
        self.tensors: list[torch.Tensor] = []
        self.runs: list[range] = []
        self.marks: list[Any] = []
        # The node that gets the items, its values, their owner if they are inside a cache, and the positions to come.
        self.levels: list[tuple[Any, list[Any], Any, Iterator[int]]] = []

    def begin(self, node: Any, values: list[Any], mark: Any, owner: Any = None) -> Any:
        """Returns a node whose items `opened` makes of these values."""
        self.marks.append(mark)
        self.levels.append((node, values, owner, iter(range(len(values)))))
        return node

    def opened(self, root: Any) -> Any:
        """Returns the node, after it got its items, and all nodes in it got theirs."""
        marks, tensors, levels = self.marks, self.tensors, self.levels
        while levels:
            node, values, owner, positions = levels[-1]
            for index in positions:
                value = values[index]
                if type(value) in ATOMS:
                    continue
                marks.append(index)
                if isinstance(value, torch.Tensor):
                    tensors.append(value)
                    values[index] = TENSOR
                    continue
                values[index] = self.leaf(value) if owner is None else self.inside(value, owner)
                if levels[-1][1] is not values:  # it has values of its own, which come first
                    break
            else:
                node.items = tuple(values)
                levels.pop()
        return root

    def nested(self, value: Any) -> Nested:
        """Begins plain containers."""
        kind: Any = type(value)
        if kind is dict and len(value) <= _SHORT and set(map(type, value)) == {str}:
            leaves = list(value.values())
            if not _hold_containers(leaves):
                spec = _spec_of(dict, tuple(value))
                return self.begin(Nested(spec), leaves, spec)  # type: ignore[no-any-return]
        elif (kind is list or kind is tuple) and len(value) <= _SHORT and not _hold_containers(value):
            spec = _spec_of(kind, len(value))
            return self.begin(Nested(spec), list(value), spec)  # type: ignore[no-any-return]
        leaves, spec = containers(value)
        return self.begin(Nested(spec), leaves, spec)  # type: ignore[no-any-return]

    def leaf(self, value: Any) -> Any:
        """Begins what is found in plain containers: caches, and classes registered with torch's pytree."""
        if is_cache_class(type(value)):
            return self.object(value)
        opened = open_registered(value)
        if opened is None:
            return Closed(value if self.keep_values else None)
        node, context, names, children = opened
        self.marks += (type(value), names)
        return RegisteredObject(type(value), node, context, names, self.nested(children))

    def object(self, value: Any) -> Any:
        """Begins a cache or a layer of one."""
        cls, state = type(value), vars(value)
        if not _DERIVED.isdisjoint(state):
            state = {name: attribute for name, attribute in state.items() if name not in _DERIVED}
        if COUNTER in state and self.counted:
            state = state | {COUNTER: COUNT}
        elif isinstance(layers := state.get("layers"), list):
            count = shared_count(layers)
            self.counted = isinstance(count, torch.Tensor if self.by_layer else object) and count is not None
            if self.counted:
                state = state | {COUNTER: _Leaf(count)}
        names = tuple(state)
        self.marks.append(cls)
        return self.begin(Object(cls, names), list(state.values()), names, value)

    def inside(self, value: Any, owner: Any) -> Any:
        """Begins what is found inside a cache: containers and layers, but no class that is registered with torch."""
        cls: Any = type(value)
        if cls is _Leaf:
            return self.nested(value.value)
        if is_cache_class(cls):
            return self.object(value)
        if cls is list and len(value) > 1 and not self.by_layer:
            table = self._table(value)
            if table is not None:
                return table
        if isinstance(value, _CONTAINERS):
            values = list(value.values() if isinstance(value, dict) else value)
            self.marks.append(cls)
            mark = tuple(value) if isinstance(value, dict) else len(values)
            return self.begin(Container.of(value), values, mark, value)
        if isinstance(value, torch.SymInt):
            return LENGTH
        if value is COUNT:
            return COUNT
        if isinstance(value, types.MethodType) and value.__self__ is owner:
            return Method(value.__func__)
        return value if self.keep_values else None

    def _table(self, items: list[Any]) -> Table | None:
        """Opens the layers of a cache together, if they hold tensors and constants only, each in the same way."""
        cls, height = type(items[0]), len(items)
        if not is_cache_class(cls) or list(map(type, items)).count(cls) < height:
            return None
        states = list(map(_state, items))
        names = tuple(states[0])
        if len(names) < 2 or list(map(len, states)).count(len(names)) < height:
            return None
        try:
            columns: list[Any] = list(zip(*map(operator.itemgetter(*names), states), strict=True))
        except KeyError:
            return None
        if not _DERIVED.isdisjoint(names):
            columns = [column for name, column in zip(names, columns, strict=True) if name not in _DERIVED]
            names = tuple([name for name in names if name not in _DERIVED])
        found = []
        for position, column in enumerate(columns):
            kind = type(column[0])
            if names[position] == COUNTER and self.counted:
                columns[position] = (COUNT,) * height
                continue
            if list(map(type, column)).count(kind) < height or not (kind is torch.Tensor or kind in ATOMS):
                return None
            if kind is torch.Tensor:
                found.append(position)
        for position in found:
            self.runs.append(range(len(self.tensors), len(self.tensors) + height))
            self.tensors += columns[position]
            columns[position] = TENSOR
        self.marks += (cls, names, height, *found)
        return Table(cls, names, tuple(columns), height)


def with_list(tree: Tree, members: Sequence[torch.Tensor], others: list[torch.Tensor]) -> Tree:
    """Returns the tree in which the list that holds exactly ``members`` holds ``others``."""

    def is_wanted(value: Any) -> bool:
        same = type(value) in (list, tuple) and len(value) == len(members)
        return same and all(a is b for a, b in zip(value, members, strict=True))

    def changed(value: Any) -> Any:
        leaves, spec = containers(value, is_wanted)
        for index, leaf in enumerate(leaves):
            if is_wanted(leaf):
                leaves[index] = type(leaf)(others)
            elif not isinstance(leaf, torch.Tensor) and not is_cache_class(type(leaf)):
                opened = open_registered(leaf)
                if opened is not None:
                    node, context, _, children = opened
                    leaves[index] = node.unflatten([changed(child) for child in children], context)
        return spec.unflatten(leaves)

    return flatten(changed(tree.build()))


def holds_tensor(value: Any) -> bool:
    """Returns whether a value is a tensor, or lists, tuples and dicts that hold one."""
    if isinstance(value, list | tuple):
        return any(map(holds_tensor, value))
    if isinstance(value, dict):
        return any(map(holds_tensor, value.values()))
    return isinstance(value, torch.Tensor)
