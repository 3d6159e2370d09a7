"""Trees of outlines: the paths are listed without building the value, which is built when it is asked for.

In comes an `Outline`, and whoever has copies of its tensors; out go a `Tree`, or what an outline tells by itself.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import optree
import torch

from exportkit.trees.flatten import flatten, path_of
from exportkit.trees.objects import GROWING, Growth, Method, growth_of
from exportkit.trees.outline import NAMESPACE, TENSOR, Closed, Container, Nested, Object, Outline, Registered, Table
from exportkit.trees.tree import Tree


class Copies(Protocol):
    """Copies of the tensors of an outline, in the order in which these were found."""

    def tensors(self) -> Sequence[torch.Tensor]:
        """Returns the copies."""

    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Returns their shapes."""


@dataclass(frozen=True, slots=True)
class Located:
    """Something that was found in plain containers, and the number of its first tensor."""

    item: Any
    first: int


def located(outline: Outline) -> Any:
    """Returns the plain containers of an outline, with a `Located` in the place of each thing in them."""
    root = outline.root
    if type(root) is not Nested:
        return Located(root, 0)
    firsts = itertools.accumulate(map(_count, root.leaves), initial=0)
    return root.structure.unflatten(map(Located, root.leaves, firsts))


def outlined_tree(value: Any, copies: Copies) -> Tree:
    """Returns the tree of what `located` returned, or of a part of it, around copies of the tensors."""
    leaves = _listed(value)
    return Tree(tuple(leaves.paths), _Outlined(value, leaves, copies))


def tensor_paths(value: Any) -> list[tuple[str, int]]:
    """Returns path and number of each tensor in what `located` returned, or in a part of it."""
    leaves = _listed(value)
    return [(path, number) for path, number in zip(leaves.paths, leaves.numbers, strict=True) if number is not None]


def constant_paths(value: Any) -> list[str]:
    """Returns the path of each leaf that is no tensor in what `located` returned, or in a part of it."""
    return list(_listed(value).constants)


def growing_tensors(outline: Outline) -> frozenset[int]:
    """Returns the numbers of tensors that a cache replaces when it grows, and so does not write to."""
    leaves = _listed(Located(outline.root, 0))
    growing, pairs = leaves.growing(), zip(leaves.paths, leaves.numbers, strict=True)
    return frozenset(number for path, number in pairs if number is not None and path in growing)


class _Outlined:
    """The leaves of a tree that is outlined only: see `exportkit.trees.tree.Content`."""

    def __init__(self, value: Any, listed: _Leaves, copies: Copies) -> None:
        self._value, self._listed, self._copies = value, listed, copies

    def leaves(self) -> tuple[Any, ...]:
        tensors, constants = self._copies.tensors(), self._listed.constants
        pairs = zip(self._listed.paths, self._listed.numbers, strict=True)
        return tuple([constants[path] if number is None else tensors[number] for path, number in pairs])

    def structure(self) -> optree.PyTreeSpec:
        filled: Any = optree.tree_map(self._fill, self._value, none_is_leaf=True, namespace=NAMESPACE)
        return flatten(filled).structure

    def cls(self) -> type:
        found = self._value.item if type(self._value) is Located else self._value
        return found.cls if type(found) is Object else type(found)

    def _fill(self, found: Located) -> Any:
        return _filled(found.item, itertools.islice(self._copies.tensors(), found.first, None))

    def constants(self) -> dict[str, Any]:
        return self._listed.constants

    def growing(self) -> dict[str, Growth]:
        return self._listed.growing()

    def shapes(self) -> list[tuple[int, ...]]:
        shapes = self._copies.shapes()
        return [shapes[number] for number in self._listed.numbers if number is not None]


def _listed(value: Any) -> _Leaves:
    """The leaves of what `located` returned."""
    leaves = _Leaves()
    if type(value) is Located:
        leaves.add(value.item, "", value.first)
        return leaves
    parts, found, _ = optree.tree_flatten_with_path(value, none_is_leaf=True, namespace=NAMESPACE)
    for steps, leaf in zip(parts, found, strict=True):
        leaves.add(leaf.item, path_of(steps), leaf.first)
    return leaves


class _Leaves:
    """Lists leaves as `flatten` finds them in the filled value.

    Attributes:
        paths: Path of each leaf.
        numbers: Number of each tensor; None for a leaf that is no tensor.
        constants: Those leaves, by path.
    """

    __slots__ = ("_growing", "_next", "_tables", "constants", "numbers", "paths")

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.numbers: list[int | None] = []
        self.constants: dict[str, Any] = {}
        self._growing: dict[str, Growth] = {}
        self._tables: list[tuple[Table, str]] = []
        self._next = 0

    def growing(self) -> dict[str, Growth]:
        """Returns by path the axes that grow."""
        found = dict(self._growing)
        for table, path in self._tables:
            names = _names(table)
            growths = zip(*[_growths(table, name) for name in names], strict=True)
            paths, _ = _layers(path, tuple(names), table.height, 0)
            pairs = zip(paths, itertools.chain.from_iterable(growths), strict=True)
            found |= {path: growth for path, growth in pairs if growth is not None}
        return found

    def add(self, item: Any, path: str, first: int) -> None:
        """Adds the leaves of something whose first tensor has that number."""
        self._next = first
        self._outside(item, path)

    def _outside(self, item: Any, path: str) -> None:
        """Adds what is found outside of caches, where constants are leaves."""
        kind = type(item)
        if item is TENSOR:
            self._tensor(path, None)
        elif kind is Object:
            self._object(item, path)
        elif kind is Nested:
            for steps, leaf in zip(item.structure.paths(), item.leaves, strict=True):
                self._outside(leaf, path_of(steps, path))
        elif kind is Registered:
            names = item.opened.names
            for steps, leaf in zip(item.children.structure.paths(), item.children.leaves, strict=True):
                self._outside(leaf, path_of((names[steps[0]], *steps[1:]), path))
        else:
            self.paths.append(path)
            self.numbers.append(None)
            self.constants[path] = item.value if kind is Closed else item

    def _tensor(self, path: str, growth: Growth | None) -> None:
        self.paths.append(path)
        self.numbers.append(self._next)
        self._next += 1
        if growth is not None:
            self._growing[path] = growth

    def _object(self, item: Object, path: str) -> None:
        for name, attribute in item.state.items():
            inner = f"{path}.{name}" if path else name
            growth = growth_of(name, item.cls, item.state) if name in GROWING else None
            self._inside(attribute, inner, growth)

    def _inside(self, item: Any, path: str, growth: Growth | None) -> None:
        """Adds what is found inside of a cache, where only tensors are leaves."""
        kind = type(item)
        if item is TENSOR:
            self._tensor(path, growth)
        elif kind is Object:
            self._object(item, path)
        elif kind is Table:
            self._table(item, path)
        elif kind is Nested or kind is Container:
            nested = item.items if kind is Container else item
            for steps, leaf in zip(nested.structure.paths(), nested.leaves, strict=True):
                self._inside(leaf, path + "".join([f"[{step!r}]" for step in steps]), growth)

    def _table(self, table: Table, path: str) -> None:
        """Adds the tensors of layers: they are numbered attribute by attribute, and listed layer by layer."""
        names = _names(table)
        paths, numbers = _layers(path, tuple(names), table.height, self._next)
        self.paths += paths
        self.numbers += numbers
        self._next += table.height * len(names)
        self._tables.append((table, path))


def _names(table: Table) -> list[str]:
    """The attributes that are tensors."""
    return [name for name, column in zip(table.names, table.columns, strict=True) if column is TENSOR]


@functools.lru_cache(maxsize=256)
def _layers(path: str, names: tuple[str, ...], height: int, first: int) -> tuple[list[str], list[int]]:
    """Paths and numbers of the tensors of a table; calls have the same ones as a rule."""
    rows, columns = range(height), range(len(names))
    paths = [f"{path}[{row}].{name}" for row in rows for name in names]
    return paths, [first + column * height + row for row in rows for column in columns]


def _growths(table: Table, name: str) -> list[Growth | None]:
    """How one attribute grows in each layer."""
    state = dict.fromkeys(table.names)
    if "sliding_window" not in state:
        return [growth_of(name, table.cls, state)] * table.height
    windows = table.columns[table.names.index("sliding_window")]
    return [growth_of(name, table.cls, {**state, "sliding_window": window}) for window in windows]


def _count(item: Any) -> int:
    """The number of tensors in something."""
    kind = type(item)
    if item is TENSOR:
        return 1
    if kind is Nested:
        return sum(map(_count, item.leaves))
    if kind is Object:
        return sum(map(_count, item.state.values()))
    if kind is Table:
        height: int = item.height
        return height * int(item.columns.count(TENSOR))
    if kind is Container:
        return _count(item.items)
    return _count(item.children) if kind is Registered else 0


def _filled(item: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if item is TENSOR:
        return next(tensors)
    kind = type(item)
    if kind is Nested:
        return item.structure.unflatten([_filled(leaf, tensors) for leaf in item.leaves])
    if kind is Object:
        return _filled_object(item, tensors)
    if kind is Table:
        return _filled_table(item, tensors)
    if kind is Container:
        items = _filled(item.items, tensors)
        return item.cls(items) if item.default is None else item.cls(item.default, items)
    if kind is Registered:
        return item.opened.with_children(_filled(item.children, tensors))
    return item


def _filled_object(item: Object, tensors: Iterator[torch.Tensor]) -> Any:
    value: Any = object.__new__(item.cls)
    state = {name: _filled(attribute, tensors) for name, attribute in item.state.items()}
    for name, attribute in state.items():
        if isinstance(attribute, Method):
            state[name] = types.MethodType(attribute.function, value)
    value.__dict__.update(state)
    return value


def _filled_table(table: Table, tensors: Iterator[torch.Tensor]) -> list[Any]:
    values: list[Any] = [object.__new__(table.cls) for _ in range(table.height)]
    for name, column in zip(table.names, table.columns, strict=True):
        if column is not None:
            filled = itertools.islice(tensors, table.height) if column is TENSOR else column
            for value, attribute in zip(values, filled, strict=True):
                value.__dict__[name] = attribute
    return values
