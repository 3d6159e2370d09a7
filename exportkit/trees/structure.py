"""The structure of a nested value without its leaves: the order and the paths of the leaves, and building the value.

Structures are made by `exportkit.trees.flatten`, which decides what is opened. A structure alone is enough to list the
paths (`Structure.listed`), and to build the value again around any leaves (`build`).
"""

from __future__ import annotations

import enum
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import optree
import torch

from exportkit._torch_compat.pytree import Registered as Registration
from exportkit.trees.caches import DERIVED, GROWING, Growth, growth_of

# In this namespace optree opens only what it opens natively: plain containers. Dicts keep the order of their keys, as
# in torch. Entered once and for good, as nobody else uses the namespace.
_NAMESPACE = "exportkit"
_insertion_order = optree.dict_insertion_ordered(True, namespace=_NAMESPACE)
_insertion_order.__enter__()


class Mark(enum.Enum):
    """Stands in a structure for a value that is kept elsewhere. An enum, as its members stay the same when copied."""

    TENSOR = "tensor"
    LENGTH = "length"


TENSOR = Mark.TENSOR
# A counter that is symbolic while a graph is traced; when a cache is built, it is read from the length of its keys.
LENGTH = Mark.LENGTH


# The nodes of a structure. They are no named tuples, which optree would open like any other.


@dataclass(slots=True, unsafe_hash=True)
class Nested:
    """Plain containers, and what was found in them: constants, `TENSOR`, and further nodes."""

    spec: optree.PyTreeSpec
    leaves: tuple[Any, ...]


@dataclass(slots=True, unsafe_hash=True)
class Object:
    """A cache or one of its layers. Of the leaves inside, only tensors count; everything else belongs to the object."""

    cls: type
    names: tuple[str, ...]
    values: tuple[Any, ...]


@dataclass(slots=True, unsafe_hash=True)
class Table:
    """A list of objects of one class with the same attributes: the layers of a cache, attribute by attribute.

    Opening many layers together takes a third of the time.
    """

    cls: type
    names: tuple[str, ...]
    columns: tuple[Any, ...]  # the values of one attribute, or TENSOR for a column of tensors
    height: int

    def rows(self) -> list[Object]:
        """Returns the objects."""
        columns = [itertools.repeat(TENSOR, self.height) if c is TENSOR else c for c in self.columns]
        return [Object(self.cls, self.names, values) for values in zip(*columns, strict=True)]


@dataclass(slots=True, unsafe_hash=True)
class Container:
    """A container inside a cache, where it can be of a derived class. optree knows nothing about it.

    `build` is traced by Dynamo where torch takes a cache as an input, and Dynamo does not know optree's structures.
    """

    cls: type
    keys: tuple[Any, ...] | None  # of a dict
    values: tuple[Any, ...]
    extra: Any = None  # what makes the missing values of a defaultdict, or the greatest length of a deque

    @classmethod
    def of(cls, value: Any, nodes: Iterable[Any]) -> Container:
        """Returns the node of a list, tuple, dict or deque which holds these nodes."""
        keys = tuple(value) if isinstance(value, dict) else None
        extra = getattr(value, "default_factory" if isinstance(value, dict) else "maxlen", None)
        return cls(type(value), keys, tuple(nodes), extra)

    def around(self, values: Sequence[Any]) -> Any:
        """Returns the container around the given values."""
        if self.keys is not None:
            items = dict(zip(self.keys, values, strict=True))
            return self.cls(items) if self.extra is None else self.cls(self.extra, items)
        if hasattr(self.cls, "_fields"):
            return self.cls(*values)
        return self.cls(values) if self.extra is None else self.cls(values, self.extra)


@dataclass(slots=True, unsafe_hash=True)
class Registered:
    """An object of a class registered with torch's pytree, and the path step of each of its children."""

    cls: type
    node: Registration
    context: Any
    names: tuple[str | int, ...]
    children: Nested


@dataclass(slots=True, unsafe_hash=True)
class Closed:
    """An object that cannot be opened; kept by reference, and closed even if its class is registered later."""

    value: Any


@dataclass(slots=True, unsafe_hash=True)
class Method:
    """A method bound to the very object that is opened; it is bound to the object that is built from the structure."""

    function: Any


@dataclass(slots=True)
class Part:
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

    def arguments(self) -> tuple[tuple[Part, ...], dict[str, Part]]:
        """Returns the parts of a structure of ``(args, kwargs)``."""
        args, kwargs = self.root.spec.children()
        parts: list[Part] = []
        start = first = 0
        for spec in (*args.children(), *kwargs.children()):
            stop = start + spec.num_leaves
            node = Nested(spec, self.root.leaves[start:stop])
            parts.append(Part(node, first, Leaves(next=first).add(node)))
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

    def add(self, node: Any, path: str = "", inside: bool = False, growth: Growth | None = None) -> Leaves:
        """Adds the leaves of a node; ``inside`` a cache, only tensors are leaves.

        Args:
            node: The node.
            path: Its path.
            inside: Whether it is inside a cache.
            growth: How it grows.
        """
        kind = type(node)
        if node is TENSOR:
            self.paths.append(path)
            self.numbers.append(self.next)
            self.next += 1
            if growth is not None:
                self.growing.append({path: growth})
        elif kind is Nested:
            for steps, leaf in zip(node.spec.paths(), node.leaves, strict=True):
                self.add(leaf, path_of(steps, path))
        elif kind is Object:
            state = dict(zip(node.names, node.values, strict=True))
            for name, value in state.items():
                growth = growth_of(name, node.cls, state) if name in GROWING else None
                self.add(value, f"{path}.{name}" if path else name, True, growth)
        elif kind is Table:
            columns = dict(zip(node.names, node.columns, strict=True))
            tensors = tuple([name for name, column in columns.items() if column is TENSOR])
            windows = columns.get("sliding_window", (None,) * node.height)
            paths, numbers, growing = _table_leaves(path, self.next, node.cls, node.names, tensors, windows)
            self.paths += paths
            self.numbers += numbers
            self.growing.append(growing)
            self.next += len(numbers)
        elif kind is Container:
            for key, value in zip(node.keys or range(len(node.values)), node.values, strict=True):
                self.add(value, f"{path}[{key!r}]", True, growth)
        elif kind is Registered:
            for steps, leaf in zip(node.children.spec.paths(), node.children.leaves, strict=True):
                self.add(leaf, path_of((node.names[steps[0]], *steps[1:]), path))
        elif not inside:
            self.paths.append(path)
            self.numbers.append(None)
            self.constants[path] = node.value if kind is Closed else node
        return self


@functools.lru_cache(maxsize=256)
def _table_leaves(
    path: str, first: int, cls: Any, names: tuple[str, ...], tensors: tuple[str, ...], windows: tuple[Any, ...]
) -> tuple[list[str], list[int], dict[str, Growth]]:
    """Paths and numbers of the tensors of a table, and how they grow; the calls of a model have the same ones.

    Tensors are numbered attribute by attribute, and listed layer by layer.
    """
    paths, growing, state, height = [], {}, dict.fromkeys(names), len(windows)
    for row, window in enumerate(windows):
        if "sliding_window" in state:
            state["sliding_window"] = window
        for name in tensors:
            inner = f"{path}[{row}].{name}"
            paths.append(inner)
            growth = growth_of(name, cls, state)
            if growth is not None:
                growing[inner] = growth
    numbers = [first + column * height + row for row in range(height) for column in range(len(tensors))]
    return paths, numbers, growing


def joined_parts(value: Any) -> Part:
    """Returns one part for a tuple or dict of parts, such as ``*args``."""
    if type(value) is Part:
        return value
    leaves = Leaves()
    parts, spec = containers(value)
    for steps, part in zip(spec.paths(), parts, strict=True):
        leaves.next = part.first
        leaves.add(part.node, path_of(steps))
    return Part(Nested(spec, tuple([part.node for part in parts])), 0, leaves)


def build(node: Any, leaves: Iterator[Any], inside: bool = False) -> Any:
    """Returns the value of a structure, around the leaves themselves; containers, caches and objects are new.

    No tensor is copied and no ``update`` runs; a new cache behaves as the old one did.

    Args:
        node: The root of the structure.
        leaves: Its leaves in the order of their paths, constants outside of caches included.
        inside: Whether the node is inside a cache, where only tensors are leaves.
    """
    kind = type(node)
    if node is TENSOR:
        return next(leaves)
    if kind is Nested:
        return node.spec.unflatten([build(leaf, leaves) for leaf in node.leaves])
    if kind is Object:
        return _object(node, [build(value, leaves, True) for value in node.values])
    if kind is Table:
        return [build(row, leaves, True) for row in node.rows()]
    if kind is Container:
        return node.around([build(value, leaves, True) for value in node.values])
    if kind is Registered:
        return node.node.unflatten(build(node.children, leaves), node.context)
    return node if inside else next(leaves)


def _object(node: Object, values: list[Any]) -> Any:
    built: Any = object.__new__(node.cls)
    state = dict(zip(node.names, values, strict=True))
    for name, value in state.items():
        if type(value) is Method:
            state[name] = types.MethodType(value.function, built)
        elif value is LENGTH:
            keys = state.get("keys")
            state[name] = 0 if keys is None else keys.shape[-2]
    for name, source in DERIVED.items():
        if source in state:
            state[name] = torch.tensor(state[source], dtype=torch.long)
    built.__dict__.update(state)
    return built


def containers(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], optree.PyTreeSpec]:
    """Returns what plain containers hold, and the containers.

    Args:
        value: Any nested value.
        is_leaf: Says which containers are not opened.
    """
    return optree.tree_flatten(value, is_leaf, none_is_leaf=True, namespace=_NAMESPACE)


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
        if isinstance(step, str) and step.isidentifier():
            path = f"{path}.{step}" if path else step
        else:
            path += f"[{step!r}]"
    return path
