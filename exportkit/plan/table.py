"""The sizes that were seen: for each leaf its shape in each call. This is all that the reasoning knows of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from exportkit.errors import PlanError

AxisKey = tuple[str, int]  # (path of a leaf, axis of it)
Sizes = tuple[int | None, ...]  # sizes of one axis in all calls; None where the leaf is absent


@dataclass(frozen=True)
class Leaf:
    """One input tensor through all calls.

    Attributes:
        path: Path of the leaf, such as ``past_key_values.layers[0].keys``.
        argument: Parameter of the method that it belongs to.
        dtype: Element type, such as ``int64``.
        shapes: Its shape in each call; None where it is absent.
        growing: Axis that is 0 while the leaf is absent and grows by one with each token (dynamic caches), or None.
        limit: The largest size of that axis, where the cache has a sliding window, or None.
    """

    path: str
    argument: str
    dtype: str
    shapes: tuple[tuple[int, ...] | None, ...]
    growing: int | None = None
    limit: int | None = None

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(next(shape for shape in self.shapes if shape is not None))

    @property
    def is_integer(self) -> bool:
        """Whether the elements are integers or booleans."""
        return self.dtype == "bool" or "int" in self.dtype

    def sizes(self, axis: int) -> Sizes:
        """Returns the sizes of an axis in all calls, its value sequence."""
        absent = 0 if axis == self.growing else None
        return tuple(absent if shape is None else shape[axis] for shape in self.shapes)


@dataclass(frozen=True)
class CallTable:
    """All input leaves in signature order, and the shapes of the outputs of each call."""

    leaves: tuple[Leaf, ...]
    output_shapes: tuple[tuple[tuple[int, ...], ...], ...] = ()

    def __post_init__(self) -> None:
        for leaf in self.leaves:
            ranks = {len(shape) for shape in leaf.shapes if shape is not None}
            if len(ranks) > 1:
                raise PlanError(
                    "An input has different ranks in different calls; one graph has one rank for each input.",
                    where=leaf.path,
                    expected="the same number of axes in every call",
                    got=", ".join(f"call {i}: {shape}" for i, shape in enumerate(leaf.shapes) if shape is not None),
                    hint="observe the two kinds of call with an observer each.",
                )

    def axes(self) -> Iterator[tuple[Leaf, int, Sizes]]:
        """Yields each axis of each leaf with its value sequence."""
        for leaf in self.leaves:
            for axis in range(leaf.rank):
                yield leaf, axis, leaf.sizes(axis)

    def sizes_of(self, key: AxisKey) -> Sizes:
        """Returns the value sequence of one axis."""
        return next(leaf.sizes(key[1]) for leaf in self.leaves if leaf.path == key[0])


def known(sizes: Sizes) -> set[int]:
    """Returns the distinct sizes of an axis."""
    return {size for size in sizes if size is not None}
