"""The structure of a nested value without its leaves: the order and the paths of the leaves, and building the value.

Structures are made by `exportkit.trees.flatten`, which decides what is opened. A structure alone is enough to list the
paths (`Structure.listed`), and to build the value again around any leaves (`build`).
"""

from __future__ import annotations

import enum
import functools
import itertools
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import optree
import torch

from exportkit._torch_compat.pytree import Registration
from exportkit.trees.caches import COUNTER, DERIVED, GROWING, Growth, growth_of, sizes_noted
from exportkit.trees.object_parts import Path

# In this namespace optree opens only what it opens natively: plain containers. Dicts keep the order of their keys, as
# in torch. Entered and never left: the namespace is ours alone.
_NAMESPACE = "exportkit"
_insertion_order = optree.dict_insertion_ordered(True, namespace=_NAMESPACE)
_insertion_order.__enter__()


class Mark(enum.Enum):
    """Stands in a structure for a value that is kept elsewhere. An enum, as its members stay the same when copied."""

    TENSOR = "tensor"
    LENGTH = "length"
    COUNT = "count"


TENSOR = Mark.TENSOR
# A counter that is symbolic while a graph is traced; when a cache is built, it is read from the length of its keys.
LENGTH = Mark.LENGTH
# A counter of a layer that is a leaf of its cache.
COUNT = Mark.COUNT


# The nodes of a structure: each has ``items`` in the order of their leaves, and puts built items together (``around``).
# Inside a cache, only tensors are leaves. Nodes are not named tuples, which optree would open like any other.


@dataclass(slots=True, unsafe_hash=True)
class Nested:
    """Plain containers, and what was found in them: constants, `TENSOR`, and further nodes."""

    inside: ClassVar = False
    spec: optree.PyTreeSpec
    items: tuple[Any, ...] = ()

    def around(self, items: Sequence[Any]) -> Any:
        """Returns the containers around the given items."""
        return self.spec.unflatten(items)


@dataclass(slots=True, unsafe_hash=True)
class RegisteredObject:
    """An object of a class registered with torch's pytree, and the path step of each of its children."""

    inside: ClassVar = False
    cls: type
    node: Registration
    context: Any
    names: tuple[str | int, ...]
    children: Nested

    @property
    def items(self) -> tuple[Any, ...]:
        """What was found in its children."""
        return self.children.items

    def around(self, items: Sequence[Any]) -> Any:
        """Returns the object around the given items."""
        return unflattened(self.cls, self.node, self.children.spec.unflatten(items), self.context)


def unflattened(cls: type, node: Registration, children: Any, context: Any) -> Any:
    """Returns the object of a registered class; torch (2.13) itself makes a tuple of what was a torch.Size."""
    if cls is torch.Size and not any(isinstance(child, torch.Tensor) for child in children):
        return torch.Size(children)
    return node.unflatten(children, context)


@dataclass(slots=True, unsafe_hash=True)
class Object:
    """A cache or one of its layers, and its attributes."""

    inside: ClassVar = True
    cls: type
    names: tuple[str, ...]
    items: tuple[Any, ...] = ()

    def around(self, items: Sequence[Any]) -> Any:
        """Returns the object around the given items. No ``update`` runs, and it behaves as the flattened one did."""
        built: Any = object.__new__(self.cls)
        state = dict(zip(self.names, items, strict=True))
        if "layers" in state and COUNTER in state:
            count = state.pop(COUNTER)
            for layer in state["layers"]:
                if vars(layer).get(COUNTER) is COUNT:
                    setattr(layer, COUNTER, count)
        for name, value in state.items():
            if type(value) is Method:
                state[name] = types.MethodType(value.function, built)
            elif value is LENGTH:
                keys = state.get("keys")
                state[name] = 0 if keys is None else keys.shape[-2]
        state |= sizes_noted(state)
        for name, source in DERIVED.items():
            if source in state:
                state[name] = torch.tensor(state[source], dtype=torch.long)
        built.__dict__.update(state)
        return built


@dataclass(slots=True, unsafe_hash=True)
class Table:
    """A list of objects of one class with the same attributes: the layers of a cache, attribute by attribute.

    Opening many layers together takes a third of the time.
    """

    inside: ClassVar = True
    cls: type
    names: tuple[str, ...]
    columns: tuple[Any, ...]  # the values of one attribute, or TENSOR for a column of tensors
    height: int

    @property
    def items(self) -> list[Object]:
        """The objects."""
        columns = [itertools.repeat(TENSOR, self.height) if c is TENSOR else c for c in self.columns]
        return [Object(self.cls, self.names, row) for row in zip(*columns, strict=True)]

    def around(self, items: list[Any]) -> Any:
        """Returns the list of the given items."""
        return items


@dataclass(slots=True, unsafe_hash=True)
class Container:
    """A container inside a cache, where it can be of a derived class. optree knows nothing about it.

    `build` is traced by Dynamo where torch takes a cache as an input, and Dynamo does not know optree's structures.
    """

    inside: ClassVar = True
    cls: type
    keys: tuple[Any, ...] | None  # of a dict
    items: tuple[Any, ...]
    extra: Any = None  # what makes the missing values of a defaultdict, or the greatest length of a deque

    @classmethod
    def of(cls, value: Any, items: Iterable[Any] = ()) -> Container:
        """Returns the node of a list, tuple, dict or deque that holds these items."""
        keys = tuple(value) if isinstance(value, dict) else None
        extra = getattr(value, "default_factory" if isinstance(value, dict) else "maxlen", None)
        return cls(type(value), keys, tuple(items), extra)

    def around(self, items: Sequence[Any]) -> Any:
        """Returns the container around the given items."""
        if self.keys is not None:
            pairs = dict(zip(self.keys, items, strict=True))
            return self.cls(pairs) if self.extra is None else self.cls(self.extra, pairs)
        if hasattr(self.cls, "_fields"):
            return self.cls(*items)
        return self.cls(items) if self.extra is None else self.cls(items, self.extra)


_NODES = frozenset({Nested, RegisteredObject, Object, Table, Container})


@dataclass(slots=True, unsafe_hash=True)
class Closed:
    """An object that cannot be opened; kept by reference, and closed even if its class is registered later."""

    value: Any
    noted: Any = field(default=None, compare=False)  # its fingerprint when it was recorded
    opened: Any = field(default=None, compare=False)  # what was in it then, if it can be opened once it holds tensors


@dataclass(slots=True, unsafe_hash=True)
class Method:
    """A method bound to the very object that is opened; it is bound to the object that is built from the structure."""

    function: Any


@dataclass(slots=True)
class Argument:
    """One argument in the structure of a call, the number of its first tensor, and its leaves."""

    node: Any
    first: int
    leaves: Leaves


class Structure(NamedTuple):
    """A nested value without its tensors.

    Attributes:
        root: Its outermost node.
        marks: What tells one structure from another, tensors and constants left out; can be a key of a dict.
    """

    root: Any
    marks: tuple[Any, ...]

    def listed(self) -> Leaves:
        """Returns the leaves with their paths."""
        return Leaves().add(self.root)

    def arguments(self) -> tuple[tuple[Argument, ...], dict[str, Argument]]:
        """Returns the parts of a structure of ``(args, kwargs)``."""
        args, kwargs = self.root.spec.children()
        parts: list[Argument] = []
        start = first = 0
        for spec in (*args.children(), *kwargs.children()):
            stop = start + spec.num_leaves
            node = Nested(spec, self.root.items[start:stop])
            parts.append(Argument(node, first, Leaves(next=first).add(node)))
            start, first = stop, parts[-1].leaves.next
        return tuple(parts[: args.num_children]), dict(zip(kwargs.entries(), parts[args.num_children :], strict=True))

    def growing_tensors(self) -> frozenset[int]:
        """Returns the numbers of tensors that a cache replaces when it grows, and so does not write to."""
        leaves = self.listed()
        growing = set().union(*leaves.growing)
        return frozenset([number for path, number in leaves.tensors() if path in growing])


@dataclass(slots=True)
class Leaves:
    """The leaves of a structure, in the order in which `build` takes them.

    Attributes:
        paths: Path of each leaf, such as ``layers[0].keys`` or ``inner.scale``.
        numbers: Number of each tensor; None for a leaf that is not a tensor.
        constants: Leaves that are not tensors, by path.
        growing: How the lengths of dynamic caches grow, by path, in several dicts.
        next: Number of the next tensor.
    """

    paths: list[str] = field(default_factory=list)
    numbers: list[int | None] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    growing: list[dict[str, Growth]] = field(default_factory=list)
    next: int = 0

    def tensors(self) -> list[tuple[str, int]]:
        """Returns path and number of each tensor."""
        pairs = zip(self.paths, self.numbers, strict=True)
        return [(path, number) for path, number in pairs if number is not None]

    def add(self, root: Any, start: str = "") -> Leaves:
        """Adds the leaves of a node at the path ``start``, depth first; inside a cache, only tensors are leaves."""
        levels: list[Iterator[tuple[Any, str, bool, Growth | None]]] = [iter([(root, start, False, None)])]
        while levels:
            for node, path, inside, growth in levels[-1]:
                if node is TENSOR:
                    self.paths.append(path)
                    self.numbers.append(self.next)
                    self.next += 1
                    if growth is not None:
                        self.growing.append({path: growth})
                elif type(node) is Table:
                    self._add_table(node, path)
                elif type(node) in _NODES:
                    levels.append(_steps(node, path, growth))
                    break  # what is in it comes first
                elif not inside:
                    self.paths.append(path)
                    self.numbers.append(None)
                    self.constants[path] = node.value if type(node) is Closed else node
            else:
                levels.pop()
        return self

    def _add_table(self, node: Table, path: str) -> None:
        columns = dict(zip(node.names, node.columns, strict=True))
        tensors = tuple([name for name, column in columns.items() if column is TENSOR])
        windows, records = (columns.get(name, (None,) * node.height) for name in ("sliding_window", "record_past"))
        windows = tuple([None if record else window for window, record in zip(windows, records, strict=True)])
        paths, numbers, growing = _table_leaves(path, self.next, node.cls, node.names, tensors, windows)
        self.paths += paths
        self.numbers += numbers
        self.growing.append(growing)
        self.next += len(numbers)


def _steps(node: Any, path: str, growth: Growth | None) -> Iterator[tuple[Any, str, bool, Growth | None]]:
    """The items of a node with their paths, whether they are inside a cache, and how they grow."""
    growths = [growth] * len(node.items)
    if type(node) is Nested:
        paths = [path_of(steps, path) for steps in node.spec.paths()]
    elif type(node) is RegisteredObject:
        paths = [path_of((node.names[steps[0]], *steps[1:]), path) for steps in node.children.spec.paths()]
    elif type(node) is Container:
        paths = [f"{path}[{key!r}]" for key in node.keys or range(len(node.items))]
    else:
        state = dict(zip(node.names, node.items, strict=True))
        paths = [f"{path}.{name}" if path else name for name in state]
        growths = [growth_of(name, node.cls, state) if name in GROWING else None for name in state]
    return zip(node.items, paths, [node.inside] * len(paths), growths, strict=True)


@functools.lru_cache(maxsize=256)
def _table_leaves(
    path: str, first: int, cls: Any, names: tuple[str, ...], tensors: tuple[str, ...], windows: tuple[Any, ...]
) -> tuple[list[str], list[int], dict[str, Growth]]:
    """Paths and numbers of the tensors of a table, and how they grow; the calls of a model have the same ones.

    Tensors are numbered attribute by attribute, and listed layer by layer.
    """
    paths, numbers, growing, state = [], [], {}, dict.fromkeys(names)
    for row, window in enumerate(windows):
        if "sliding_window" in state:
            state["sliding_window"] = window
        for column, name in enumerate(tensors):
            inner = f"{path}[{row}].{name}"
            paths.append(inner)
            numbers.append(first + column * len(windows) + row)
            growth = growth_of(name, cls, state)
            if growth is not None:
                growing[inner] = growth
    return paths, numbers, growing


def joined_parts(value: Any) -> Argument:
    """Returns one part for a tuple or dict of parts, such as ``*args``."""
    if type(value) is Argument:
        return value
    leaves = Leaves()
    parts, spec = containers(value)
    for steps, part in zip(spec.paths(), parts, strict=True):
        leaves.next = part.first
        leaves.add(part.node, path_of(steps))
    return Argument(Nested(spec, tuple([part.node for part in parts])), 0, leaves)


def build(root: Any, leaves: Iterator[Any]) -> Any:
    """Returns the value of a structure, around the leaves themselves; containers, caches and objects are new.

    Args:
        root: The root of the structure.
        leaves: Its leaves in the order of their paths, constants outside of caches included.
    """
    # Items that are being built, the positions to come, and the node of the items with its own place among items.
    levels: list[tuple[list[Any], Iterator[int], Any]] = [([root], iter(range(1)), None)]
    while True:
        items, positions, node = levels[-1]
        for index in positions:
            item = items[index]
            if item is TENSOR:
                items[index] = next(leaves)
            elif type(item) in _NODES:
                found = list(item.items)
                levels.append((found, iter(range(len(found))), (item, items, index)))
                break
            elif node is None or not node[0].inside:
                items[index] = next(leaves)
        else:
            levels.pop()
            if node is None:
                return items[0]
            built, parent, place = node
            parent[place] = built.around(items)


def containers(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], optree.PyTreeSpec]:
    """Returns what plain containers hold, and the containers.

    Args:
        value: Any nested value.
        is_leaf: Says which containers are not opened.
    """
    return optree.tree_flatten(value, is_leaf, none_is_leaf=True, namespace=_NAMESPACE)


def first_name(path: str) -> str:
    """Returns the name that a path begins with."""
    return re.split(r"[.\[]", path, maxsplit=1)[0]


# The path of an element of a list, such as ``layers[0]``.
LIST_MEMBER = re.compile(r"(?P<list>.+)\[(?P<index>\d+)\]$")


def without_indices(path: str) -> str:
    """Returns a path without the numbers in brackets: ``layers[].keys`` for ``layers[0].keys``."""
    return re.sub(r"\[\d+\]", "[]", path)


def join(name: str, path: str) -> str:
    """Returns the path of a leaf of the argument ``name``: ``x``, ``x[0]`` or ``x.inner``."""
    if not path or not name:
        return name or path
    return f"{name}{path}" if path.startswith("[") else f"{name}.{path}"


@functools.lru_cache(maxsize=256)
def joined(name: str, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Returns `join` of each path; computed once for calls that have the same leaves."""
    return tuple([join(name, path) for path in paths])


def path_of(steps: Sequence[Any], start: str = "") -> str:
    """Returns the path that leads from ``start`` along the keys, names and positions of ``steps``."""
    path = start
    for step in steps:
        if type(step) is Path:
            path = join(path, step.removeprefix("."))
        elif isinstance(step, str) and step.isidentifier():
            path = f"{path}.{step}" if path else step
        else:
            path += f"[{step!r}]"
    return path
