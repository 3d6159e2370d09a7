"""Nested values ⇄ leaves with paths.

In comes any nested value (arguments or outputs of a model); out comes a `Tree`: its leaves, each with a stable readable
path such as ``layers[0].keys`` or ``inner.scale``, and what is needed to build the value again. The order of the keys
of a dict does not matter: leaves are known by their path, never by their position.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import optree
import torch

from exportkit import _torch_compat
from exportkit.errors import UnregisteredClassError
from exportkit.trees.objects import Growth, PathPart, is_cache_class, put_together, take_apart

# A namespace of our own: nobody else sees what is registered here, and nobody's registrations can be in the way.
_NAMESPACE = "exportkit"
# Dicts flatten in the order of their keys, as in torch; set once and for good, as only this namespace sees it.
_insertion_order = optree.dict_insertion_ordered(True, namespace=_NAMESPACE)
_insertion_order.__enter__()
_lock = threading.RLock()
_opened: set[type] = set()


class Content(Protocol):
    """What a tree holds; most of it is made when it is asked for."""

    def cls(self) -> type:
        """Returns the class of the value."""

    def leaves(self) -> tuple[Any, ...]:
        """Returns the leaves."""

    def structure(self) -> optree.PyTreeSpec:
        """Returns what puts the leaves together."""

    def constants(self) -> Mapping[str, Any]:
        """Returns the leaves that are no tensors, by path."""

    def shapes(self) -> list[tuple[int, ...]]:
        """Returns the shapes of those that are tensors, in order."""

    def growing(self) -> Mapping[str, Growth]:
        """Returns how the lengths of caches grow, by path."""


@dataclass(frozen=True, eq=False)
class Tree:
    """A nested value, taken apart.

    Attributes:
        paths: Path of each leaf inside the value; the path of a value that is itself a leaf is "".
        content: The leaves, and how they are put together.
    """

    paths: tuple[str, ...]
    content: Content = field(repr=False)

    @property
    def cls(self) -> type:
        """The class of the value; of one that is a leaf, another one."""
        return self.content.cls()

    @functools.cached_property
    def leaves(self) -> tuple[Any, ...]:
        """The leaves: tensors, and constants (numbers, strings, None, ...)."""
        return self.content.leaves()

    @functools.cached_property
    def growing(self) -> Mapping[str, Growth]:
        """By path, the axis that grows by one with each token, in dynamic caches, and its limit."""
        return self.content.growing()

    @functools.cached_property
    def structure(self) -> optree.PyTreeSpec:
        """How optree puts the leaves together."""
        return self.content.structure()

    @functools.cached_property
    def tensor_paths(self) -> tuple[str, ...]:
        """Paths of the leaves that are tensors."""
        constants = self.content.constants()
        return tuple([path for path in self.paths if path not in constants]) if constants else self.paths

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the leaves that are tensors, by path."""
        return dict(self._tensors)

    @functools.cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return {p: leaf for p, leaf in zip(self.paths, self.leaves, strict=True) if isinstance(leaf, torch.Tensor)}

    def shapes(self) -> list[tuple[int, ...]]:
        """Returns the shapes of the tensors, in the order of `tensor_paths`, without making those of a recording."""
        return self.content.shapes()

    def constants(self) -> dict[str, Any]:
        """Returns the leaves that are no tensors, by path."""
        return dict(self.content.constants())

    def map(self, change: Callable[[Any], Any]) -> Tree:
        """Returns the same tree with ``change(leaf)`` for each leaf."""
        return self._holding([change(leaf) for leaf in self.leaves])

    def with_leaves(self, leaves: Mapping[str, Any]) -> Tree:
        """Returns the same tree with the leaves of the given paths replaced."""
        return self._holding([leaves.get(p, leaf) for p, leaf in zip(self.paths, self.leaves, strict=True)])

    def _holding(self, leaves: list[Any]) -> Tree:
        return Tree(self.paths, _Flattened(self.paths, tuple(leaves), self.growing, self.structure))

    def build(self) -> Any:
        """Returns the nested value, holding the leaves themselves; containers and caches are new objects."""
        return self.structure.unflatten(self.leaves)


class _Flattened:
    """The content of a value that optree has flattened."""

    def __init__(
        self,
        paths: tuple[str, ...],
        leaves: tuple[Any, ...],
        growing: Mapping[str, Growth],
        structure: optree.PyTreeSpec,
    ) -> None:
        self._paths, self._leaves, self._growing, self._structure = paths, leaves, growing, structure

    def cls(self) -> type:
        return self._structure.type or object

    def leaves(self) -> tuple[Any, ...]:
        return self._leaves

    def structure(self) -> optree.PyTreeSpec:
        return self._structure

    def constants(self) -> dict[str, Any]:
        pairs = zip(self._paths, self._leaves, strict=True)
        return {path: leaf for path, leaf in pairs if not isinstance(leaf, torch.Tensor)}

    def shapes(self) -> list[tuple[int, ...]]:
        return [shape_of(leaf) for leaf in self._leaves if isinstance(leaf, torch.Tensor)]

    def growing(self) -> Mapping[str, Growth]:
        return self._growing


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape of a tensor; that of a nested tensor, which has none, is ()."""
    return () if tensor.is_nested else tuple(tensor.shape)


@dataclass(frozen=True)
class Opened:
    """An object of a class registered with torch's pytree, taken apart: a tree puts an object of that class together.

    Attributes:
        node: The registration.
        context: What the registration keeps besides the children.
        names: Path step of each child.
        children: The children.
    """

    node: _torch_compat.Registered
    context: Any
    names: tuple[str | int, ...]
    children: list[Any]

    def with_children(self, children: list[Any]) -> Opened:
        """Returns the same object with other children."""
        return Opened(self.node, self.context, self.names, children)


def open_registered(value: Any) -> Opened | None:
    """Returns an object taken apart the way its class is registered with torch, or None if it is not."""
    node = _torch_compat.registered_node(type(value))
    if node is None:
        return None
    children, context = node.flatten(value)
    children = list(children)
    if node.flatten_with_keys is None:
        return Opened(node, context, tuple(range(len(children))), children)
    # For the names alone: its context can be another one (dataclasses), which unflatten does not take.
    names = tuple(_torch_compat.key_name(key) for key, _ in node.flatten_with_keys(value)[0])
    return Opened(node, context, names, children)


def flatten(value: Any) -> Tree:
    """Returns the `Tree` of a nested value.

    Lists, tuples, dicts, named tuples, caches, and every class registered with torch's pytree are opened; any other
    object is a leaf.
    """
    parts, leaves, structure = _flatten(value)
    unopened = {type(leaf) for leaf in leaves if _can_open(type(leaf))}
    if unopened:
        for cls in unopened:
            _open(cls)
        return flatten(value)
    paths = tuple(path_of(steps) for steps in parts)
    growing = {path: growth for path, steps in zip(paths, parts, strict=True) if (growth := _growth(steps)) is not None}
    return Tree(paths, _Flattened(paths, tuple(leaves), growing, structure))


def join(name: str, path: str) -> str:
    """Returns the path of a leaf of the argument ``name``: ``x``, ``x[0]`` or ``x.inner``."""
    if not path or not name:
        return name or path
    return f"{name}{path}" if path.startswith("[") else f"{name}.{path}"


@functools.lru_cache(maxsize=256)
def joined(name: str, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Returns `join` of each path; worked out once for calls that have the same leaves."""
    return tuple([join(name, path) for path in paths])


def check_opened(name: str, tree: Tree) -> None:
    """Raises UnregisteredClassError if a leaf is an object that holds tensors nobody told us how to reach."""
    for path, leaf in tree.constants().items():
        if isinstance(leaf, torch.nn.Module | type):
            continue
        held = [key for key, value in _attributes(leaf).items() if _holds_tensor(value)]
        if held:
            raise UnregisteredClassError(
                f"An object of class {type(leaf).__name__} holds tensors that cannot become inputs of a graph.",
                where=join(name, path),
                expected="a class registered with torch's pytree",
                got=f"{type(leaf).__module__}.{type(leaf).__qualname__} with tensors in {', '.join(sorted(held))}",
                hint="torch.utils._pytree.register_pytree_node(cls, flatten, unflatten), before the model runs; "
                "for a dataclass torch.export.register_dataclass(cls).",
            )


def _attributes(leaf: Any) -> dict[str, Any]:
    """Attributes of an object, those in slots included."""
    state = object.__getstate__(leaf)
    plain, slots = state if isinstance(state, tuple) else (state, None)
    return {**(plain or {}), **(slots or {})}


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_holds_tensor(item) for item in value)
    if isinstance(value, dict):
        return any(_holds_tensor(item) for item in value.values())
    return isinstance(value, torch.Tensor)


def _flatten(value: Any) -> tuple[list[tuple[Any, ...]], list[Any], optree.PyTreeSpec]:
    return optree.tree_flatten_with_path(value, none_is_leaf=True, namespace=_NAMESPACE)


def _can_open(cls: type) -> bool:
    if cls in _opened or issubclass(cls, torch.Tensor):
        return False
    return is_cache_class(cls) or _torch_compat.registered_node(cls) is not None


def _open(cls: type) -> None:
    """Teaches our namespace how to take ``cls`` apart: as a cache, or the way it is registered with torch."""
    with _lock:
        if cls in _opened:
            return
        if is_cache_class(cls):
            _register(cls, _flatten_cache, _build_cache, namespace=_NAMESPACE)
        else:
            _register(cls, _flatten_registered, _build_registered, namespace=_NAMESPACE)
        _opened.add(cls)


def _flatten_cache(cache: Any) -> tuple[list[Any], Any, tuple[PathPart, ...]]:
    tensors, paths, part = take_apart(cache)
    return list(tensors), part, tuple(paths)


def _build_cache(part: Any, tensors: Sequence[Any]) -> Any:
    return put_together(tensors, part)


def _flatten_registered(value: Any) -> tuple[list[Any], Any, tuple[str | int, ...]]:
    opened = open_registered(value)
    if opened is None:  # registered once, and taken back since: then it has no parts for torch either
        raise UnregisteredClassError(
            f"Class {type(value).__name__} was registered with torch's pytree and no longer is.",
            hint="keep the registration active while the model is observed and exported.",
        )
    return _flatten_opened(opened)


def _flatten_opened(opened: Opened) -> tuple[list[Any], Any, tuple[str | int, ...]]:
    return opened.children, (opened.node, opened.context), opened.names


def _build_registered(kept: Any, children: Sequence[Any]) -> Any:
    node, context = kept
    return node.unflatten(list(children), context)


_register: Any = optree.register_pytree_node  # its types ask more of a class than it does
_register(Opened, _flatten_opened, _build_registered, namespace=_NAMESPACE)


def path_of(steps: Sequence[Any], start: str = "") -> str:
    """Returns the path that leads from ``start`` along the steps that optree gives."""
    path = start
    for step in steps:
        if isinstance(step, PathPart) or (isinstance(step, str) and step.isidentifier()):
            path = join(path, step)
        else:
            path += f"[{step!r}]"
    return path


def _growth(steps: Sequence[Any]) -> Growth | None:
    return next((step.growth for step in reversed(steps) if isinstance(step, PathPart)), None)
