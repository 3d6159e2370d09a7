"""Nested values ⇄ leaves with paths.

In comes any nested value (arguments or outputs of a model); out comes a `Tree`: its leaves, each with a stable readable
path such as ``layers[0].keys`` or ``inner.scale``, and what is needed to build the value again. The order of the keys
of a dict does not matter: leaves are known by their path, never by their position.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch

from exportkit._torch_compat.pytree import Registered, key_name, registered_node
from exportkit.errors import UnregisteredClassError
from exportkit.trees.objects import Growth, PathPart, is_cache_class, put_together, take_apart
from exportkit.trees.tree import Tree, flattened_tree, join

# A namespace of our own: nobody else sees what is registered here, and nobody's registrations can be in the way.
_NAMESPACE = "exportkit"
# Dicts flatten in the order of their keys, as in torch; set once and for good, as only this namespace sees it.
_insertion_order = optree.dict_insertion_ordered(True, namespace=_NAMESPACE)
_insertion_order.__enter__()
_lock = threading.RLock()
_opened: set[type] = set()


@dataclass(frozen=True)
class Opened:
    """An object of a class registered with torch's pytree, taken apart: a tree puts an object of that class together.

    Attributes:
        node: The registration.
        context: What the registration keeps besides the children.
        names: Path step of each child.
        children: The children.
    """

    node: Registered
    context: Any
    names: tuple[str | int, ...]
    children: list[Any]

    def with_children(self, children: list[Any]) -> Opened:
        """Returns the same object with other children."""
        return Opened(self.node, self.context, self.names, children)


def open_registered(value: Any) -> Opened | None:
    """Returns an object taken apart the way its class is registered with torch, or None if it is not."""
    node = registered_node(type(value))
    if node is None:
        return None
    children, context = node.flatten(value)
    children = list(children)
    if node.flatten_with_keys is None:
        return Opened(node, context, tuple(range(len(children))), children)
    # For the names alone: its context can be another one (dataclasses), which unflatten does not take.
    names = tuple(key_name(key) for key, _ in node.flatten_with_keys(value)[0])
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
    return flattened_tree(paths, tuple(leaves), growing, structure)


def with_list(tree: Tree, members: Sequence[torch.Tensor], others: list[torch.Tensor]) -> Tree:
    """Returns the tree in which the list that holds exactly ``members`` holds ``others``."""

    def is_wanted(value: Any) -> bool:
        same = type(value) in (list, tuple) and len(value) == len(members)
        return same and all(a is b for a, b in zip(value, members, strict=True))

    changed = optree.tree_map(
        lambda value: type(value)(others) if is_wanted(value) else value,
        tree.build(),
        is_leaf=is_wanted,
        none_is_leaf=True,
        namespace=_NAMESPACE,
    )
    return flatten(changed)


def check_opened(name: str, tree: Tree) -> None:
    """Raises UnregisteredClassError if a leaf is an object that holds tensors nobody told us how to reach."""
    for path, leaf in tree.constants().items():
        if isinstance(leaf, torch.nn.Module | type):
            continue
        held = [key for key, value in _attributes(leaf).items() if _holds_tensor(value)]
        if held:
            raise UnregisteredClassError(
                f"An object of class {type(leaf).__name__} holds tensors that cannot be inputs or outputs of a graph.",
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
    return is_cache_class(cls) or registered_node(cls) is not None


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
