"""A nested value, taken apart: what the later stages see of it.

In come paths and a `Content`, which may make the leaves when they are asked for; out go leaves, by path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import optree
import torch

from exportkit.trees.objects import Growth


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


def flattened_tree(
    paths: tuple[str, ...], leaves: tuple[Any, ...], growing: Mapping[str, Growth], structure: optree.PyTreeSpec
) -> Tree:
    """Returns the tree of a value that optree has flattened."""
    return Tree(paths, _Flattened(paths, leaves, growing, structure))


class _Flattened:
    """The content of a value that optree has flattened: see `Content`."""

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


def join(name: str, path: str) -> str:
    """Returns the path of a leaf of the argument ``name``: ``x``, ``x[0]`` or ``x.inner``."""
    if not path or not name:
        return name or path
    return f"{name}{path}" if path.startswith("[") else f"{name}.{path}"


@functools.lru_cache(maxsize=256)
def joined(name: str, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Returns `join` of each path; worked out once for calls that have the same leaves."""
    return tuple([join(name, path) for path in paths])
