"""The structure of a nested value, taken in one quick pass; its tree, with paths, is made when it is asked for.

In comes a value that somebody else may change the next moment; out comes an `Outline`, which has containers of its own
but none of the tensors: these are listed beside it, so that the caller decides what is kept of each.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch

from exportkit import _torch_compat
from exportkit.trees.flatten import Opened, Tree, flatten, open_registered
from exportkit.trees.objects import DERIVED, GROWING, Method, is_cache_class, is_opened_class

# Only plain containers are opened in this namespace, which optree does natively; the rest is opened below.
_NAMESPACE = "exportkit.outline"
_insertion_order = optree.dict_insertion_ordered(True, namespace=_NAMESPACE)
_insertion_order.__enter__()

# Values of these types cannot change, and most attributes of a cache are of one: they are passed over quickly.
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_TENSOR = object()  # stands where a tensor goes; they are filled in in the order in which they were found


class _Nested(NamedTuple):
    structure: optree.PyTreeSpec
    leaves: list[Any]


class _Object(NamedTuple):
    """A cache or one of its layers."""

    cls: type
    state: dict[str, Any]


class _Container(NamedTuple):
    """A list, tuple or dict of a class of its own, inside a cache."""

    cls: type
    items: Any


class _Registered(NamedTuple):
    """An object of a class registered with torch's pytree."""

    opened: Opened
    children: _Nested


class _Closed(NamedTuple):
    """An object that nobody told us how to open; kept by reference, and closed even if it is registered later."""

    value: Any


@dataclass(frozen=True)
class Outline:
    """A nested value without its tensors.

    Attributes:
        marks: What tells one structure from another, tensors and constants left out; can be a key of a dict.
    """

    root: _Nested
    marks: tuple[Any, ...]

    def fill(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Returns the nested value with these tensors, as `outlined_tree` takes it; each time with new containers."""
        return _filled(self.root, iter(tensors))


class Taken(NamedTuple):
    """An outline, and beside it what it was taken of.

    Attributes:
        outline: The structure.
        tensors: The tensors themselves, in the order in which `Outline.fill` wants theirs.
        growing: Positions of those that a cache replaces when it grows, and so never writes to.
    """

    outline: Outline
    tensors: list[torch.Tensor]
    growing: frozenset[int]


def outline(value: Any, keep_values: bool = True) -> Taken:
    """Returns the outline of a nested value and the tensors in it.

    Args:
        value: Any nested value; what `flatten` opens is opened.
        keep_values: Keep references to objects that are not opened.
    """
    taker = _Taker(keep_values)
    root = taker.nested(value, taker.leaf)
    return Taken(Outline(root, tuple(taker.marks)), taker.tensors, frozenset(taker.growing))


def outlined_tree(filled: Any) -> Tree:
    """Returns the tree of a value, or of a part of a value, that `Outline.fill` made."""
    return flatten(filled).map(lambda leaf: leaf.value if type(leaf) is _Closed else leaf)


class _Taker:
    """Takes one value apart, and notes what it comes across."""

    def __init__(self, keep_values: bool) -> None:
        self._keep_values = keep_values
        self.tensors: list[torch.Tensor] = []
        self.growing: list[int] = []
        self.marks: list[Any] = []

    def nested(self, value: Any, open_leaf: Callable[[Any], Any]) -> _Nested:
        """Opens plain containers; what else is found in them is given to ``open_leaf``."""
        leaves, structure = optree.tree_flatten(value, none_is_leaf=True, namespace=_NAMESPACE)
        marks, tensors = self.marks, self.tensors
        marks.append(structure)
        for index, leaf in enumerate(leaves):
            if type(leaf) in _ATOMS:
                continue
            marks.append(index)
            if isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
                leaves[index] = _TENSOR
            else:
                leaves[index] = open_leaf(leaf)
        return _Nested(structure, leaves)

    def leaf(self, value: Any) -> Any:
        if is_cache_class(type(value)):
            return self._object(value)
        opened = open_registered(value)
        if opened is None:
            return _Closed(value if self._keep_values else None)
        self.marks.append(opened.names)
        return _Registered(opened.with_children([]), self.nested(opened.children, self.leaf))

    def _object(self, value: Any) -> _Object:
        marks, tensors = self.marks, self.tensors
        marks.append(type(value))
        growing = () if hasattr(value, "max_cache_len") else GROWING
        state = dict(vars(value))
        for name, attribute in state.items():
            if type(attribute) in _ATOMS:
                continue
            marks.append(name)
            if name in DERIVED:
                state[name] = None
            elif isinstance(attribute, torch.Tensor):
                if name in growing:
                    self.growing.append(len(tensors))
                tensors.append(attribute)
                state[name] = _TENSOR
            elif isinstance(attribute, types.MethodType) and attribute.__self__ is value:
                state[name] = Method(attribute.__func__)
            else:
                state[name] = self._inside(attribute)
        return _Object(type(value), state)

    def _inside(self, value: Any) -> Any:
        """Opens what is found inside a cache: containers and layers, but no class that is registered with torch."""
        if is_opened_class(type(value)):
            return self._object(value)
        for kind in (list, tuple, dict):
            if type(value) is kind or hasattr(value, "_fields"):
                return self.nested(value, self._inside)
            if isinstance(value, kind):
                return _Container(type(value), self.nested(kind(value), self._inside))
        return value if self._keep_values else None


def _filled(item: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if item is _TENSOR:
        return next(tensors)
    kind = type(item)
    if kind is _Nested:
        return item.structure.unflatten([_filled(leaf, tensors) for leaf in item.leaves])
    if kind is _Object:
        return _filled_object(item, tensors)
    if kind is _Container:
        return item.cls(_filled(item.items, tensors))
    if kind is _Registered:
        return item.opened.with_children(_filled(item.children, tensors))
    return item


def _filled_object(item: _Object, tensors: Iterator[torch.Tensor]) -> Any:
    value: Any = object.__new__(item.cls)
    state = {name: _filled(attribute, tensors) for name, attribute in item.state.items()}
    for name, attribute in state.items():
        if isinstance(attribute, Method):
            state[name] = types.MethodType(attribute.function, value)
    value.__dict__.update(state)
    return value
