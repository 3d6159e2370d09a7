"""A nested value with its leaves, known by path: what the later stages see of arguments and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from exportkit.trees.caches import Growth
from exportkit.trees.structure import Leaves, Nested, Object, Part, Registered, build, joined_parts


class Tensors(Protocol):
    """The tensors of a value, or copies of them, in the order in which the flattener found them."""

    def tensors(self) -> Sequence[torch.Tensor]:
        """Returns the tensors."""

    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Returns their shapes, without making the tensors."""


class Tree:
    """A nested value by its leaves.

    Args:
        structure: How the leaves are put together: the root of a structure.
        listed: What is known about the leaves.
        source: Gives the tensors when they are needed.

    Attributes:
        paths: Path of each leaf inside the value; the path of a value that is itself a leaf is "".
        structure: How the leaves are put together.
    """

    def __init__(self, structure: Any, listed: Leaves, source: Tensors) -> None:
        self.paths: tuple[str, ...] = tuple(listed.paths)
        self.structure, self._listed, self._source = structure, listed, source
        # Made when asked for, and not by functools.cached_property: Dynamo does not trace its lock (Python 3.11).
        self._leaves: tuple[Any, ...] | None = None
        self._tensor_paths: tuple[str, ...] | None = None
        self._growing: dict[str, Growth] | None = None

    def __repr__(self) -> str:
        return f"Tree(paths={self.paths!r})"

    @property
    def cls(self) -> type:
        """The class of the value; ``object`` if it is a leaf."""
        found = self.structure
        if type(found) is Nested:
            if found.spec.type is not None:
                return found.spec.type
            found = found.items[0]
        return found.cls if type(found) in (Object, Registered) else object

    @property
    def leaves(self) -> tuple[Any, ...]:
        """The leaves: tensors, and constants (numbers, strings, None, ...)."""
        if self._leaves is None:
            tensors, constants = self._source.tensors(), self._listed.constants
            pairs = zip(self.paths, self._listed.numbers, strict=True)
            self._leaves = tuple([constants[path] if number is None else tensors[number] for path, number in pairs])
        return self._leaves

    @property
    def growing(self) -> Mapping[str, Growth]:
        """By path, the axis that grows by one with each token, in dynamic caches, and its limit."""
        if self._growing is None:
            self._growing = {path: growth for found in self._listed.growing for path, growth in found.items()}
        return self._growing

    @property
    def tensor_paths(self) -> tuple[str, ...]:
        """Paths of the leaves that are tensors."""
        if self._tensor_paths is None:
            self._tensor_paths = tuple([path for path in self.paths if path not in self._listed.constants])
        return self._tensor_paths

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the leaves that are tensors, by path."""
        constants = self._listed.constants
        return {path: leaf for path, leaf in zip(self.paths, self.leaves, strict=True) if path not in constants}

    def shapes(self) -> list[tuple[int, ...]]:
        """Returns the shapes of the tensors, in the order of `tensor_paths`, without making the tensors."""
        shapes = self._source.shapes()
        return [shapes[number] for number in self._listed.numbers if number is not None]

    def constants(self) -> dict[str, Any]:
        """Returns the leaves that are not tensors, by path."""
        return dict(self._listed.constants)

    def map(self, change: Callable[[Any], Any]) -> Tree:
        """Returns the same tree with ``change(leaf)`` for each leaf."""
        return self._holding(map(change, self.leaves))

    def with_leaves(self, leaves: Mapping[str, Any]) -> Tree:
        """Returns the same tree with the leaves of the given paths replaced."""
        return self._holding(map(leaves.get, self.paths, self.leaves))

    def _holding(self, leaves: Iterable[Any]) -> Tree:
        tensors: list[torch.Tensor] = []
        listed = Leaves(self._listed.paths, growing=self._listed.growing)
        for path, leaf in zip(self.paths, leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                listed.numbers.append(len(tensors))
                tensors.append(leaf)
            else:
                listed.numbers.append(None)
                listed.constants[path] = leaf
        return Tree(self.structure, listed, HeldTensors(tensors))

    def build(self) -> Any:
        """Returns the nested value, holding the leaves themselves; containers and caches are new objects."""
        return build(self.structure, iter(self.leaves))


class HeldTensors:
    """Tensors at hand: see `Tensors`."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors

    def tensors(self) -> list[torch.Tensor]:
        """Returns the tensors."""
        return self._tensors

    def shapes(self) -> list[tuple[int, ...]]:
        """Returns their shapes."""
        return list(map(shape_of, self._tensors))


def lazy_tree(parts: Any, source: Tensors) -> Tree:
    """Returns the tree of a part of a recorded call; its tensors are asked for when its leaves are.

    Args:
        parts: A `Part`, or a tuple or dict of parts.
        source: Copies of the tensors of the whole call.
    """
    part: Part = joined_parts(parts)
    return Tree(part.node, part.leaves, source)


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape of a tensor; that of a nested tensor, which has none, is ()."""
    return () if tensor.is_nested else tuple(tensor.shape)
