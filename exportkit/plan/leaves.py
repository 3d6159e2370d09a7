"""Input tensors and the sizes of their axes: as the calls showed them, and as a plan describes them.

A plan is inferred from these values alone.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, Literal

from exportkit.errors import PlanError
from exportkit.json_data import Size
from exportkit.plan.expression import Expression

AxisKey = tuple[str, int]  # (path of a leaf, one of its axes)
Sizes = tuple[Size | None, ...]  # the sizes of one axis in all calls; None where the leaf is absent
Role = Literal["batch", "sequence", "past", "other"]


def known(sizes: Sizes) -> set[int]:
    """Returns the distinct sizes of an axis."""
    return {size for size in sizes if size is not None}


def listed(sizes: Sizes) -> str:
    """Returns the sizes of an axis in all calls as text."""
    return ", ".join(["absent" if size is None else str(size) for size in sizes])


def unique_name(name: str, taken: Container[str]) -> str:
    """Returns a name that is not taken: the name itself, or with a number."""
    return next(unique for unique in chain([name], (f"{name}_{number}" for number in count(2))) if unique not in taken)


def identifier(path: str) -> str:
    """Returns a path as part of a name: ``layers_0_keys`` for ``layers[0].keys``."""
    return re.sub(r"\W+", "_", path).strip("_")


def is_below(path: str, root: str) -> bool:
    """Returns whether a path leads to the value at another path, or to something inside it."""
    return path == root or path.startswith((f"{root}.", f"{root}["))


class _RecordedShapes:
    """What recorded and planned inputs have in common."""

    dtype: str
    shapes: tuple[tuple[int, ...] | None, ...]
    growing: int | None

    @property
    def is_integer(self) -> bool:
        """Whether the elements are integers or booleans."""
        return self.dtype == "bool" or "int" in self.dtype

    def seen(self, axis: int) -> Sizes:
        """Returns the sizes of an axis in all calls; 0 where the leaf is absent because a cache is empty."""
        absent = 0 if axis == self.growing else None
        return tuple([absent if shape is None else shape[axis] for shape in self.shapes])


@dataclass(frozen=True)
class Leaf(_RecordedShapes):
    """One input tensor in all calls.

    Attributes:
        path: Path of the leaf, such as ``past_key_values.layers[0].keys``.
        argument: The method's parameter that it belongs to.
        dtype: Its dtype, such as ``int64``.
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
        return len(self.first_shape)

    @property
    def leading_sizes(self) -> set[int]:
        """The distinct sizes of the first axis; none if it has no axes."""
        return known(self.seen(0)) if self.rank else set()

    @property
    def first_shape(self) -> tuple[int, ...]:
        """The shape in the first call that has the leaf."""
        return next(shape for shape in self.shapes if shape is not None)


@dataclass(frozen=True)
class CallTable:
    """All input leaves in signature order, with the shapes of the outputs of each call.

    Attributes:
        leaves: The leaves.
        output_shapes: Shapes of the outputs of each call.
        counted: Number of tokens that the caches had counted before each call; None if unknown, or if there were none.
    """

    leaves: tuple[Leaf, ...]
    output_shapes: tuple[tuple[tuple[int, ...], ...], ...] = ()
    counted: Sizes = ()

    def __post_init__(self) -> None:
        for leaf in self.leaves:
            if len({len(shape) for shape in leaf.shapes if shape is not None}) > 1:
                raise PlanError(
                    "An input has different ranks in different calls; one graph has one rank for each input.",
                    where=leaf.path,
                    expected="the same number of axes in every call",
                    got=", ".join(f"call {i}: {shape}" for i, shape in enumerate(leaf.shapes) if shape is not None),
                    hint="observe each kind of call with an observer of its own.",
                )

    def axes(self) -> Iterator[tuple[Leaf, int, Sizes]]:
        """Yields each axis of each leaf with its sizes in all calls."""
        for leaf in self.leaves:
            for axis in range(leaf.rank):
                yield leaf, axis, leaf.seen(axis)

    def sizes_of(self, key: AxisKey) -> Sizes:
        """Returns the sizes of one axis in all calls."""
        return next(leaf.seen(key[1]) for leaf in self.leaves if leaf.path == key[0])


@dataclass(frozen=True)
class PlannedLeaf(_RecordedShapes):
    """One input tensor and the sizes of its axes.

    Attributes:
        path: Path of the leaf.
        argument: The method's parameter that it belongs to.
        dtype: Its dtype, such as ``int64``.
        sizes: One expression for each axis.
        shapes: Its shape in each recorded call; None where it is absent.
        growing: Length axis of a dynamic cache, or None.
        restored: Whether no call had it: an attention mask of ones that was added afterwards.
        ones_if_missing: Whether all stored calls had it, and the model returns the same without it as with ones: an
            attention mask.
        of_frames: Whether it is a mask over frames, which may end anywhere within the last of the states that an
            encoder made of them: its length is a multiple of theirs, and up to one step more or less.
    """

    path: str
    argument: str
    dtype: str
    sizes: tuple[Expression, ...]
    shapes: tuple[tuple[Size, ...] | None, ...]
    growing: Size | None = None
    restored: bool = False
    ones_if_missing: bool = False
    of_frames: bool = False

    @property
    def is_optional(self) -> bool:
        """Whether it may be left out: some recorded calls lack it, or ones stand for it."""
        return self.restored or self.ones_if_missing or None in self.shapes

    def variables(self) -> frozenset[str]:
        """Returns the names of the variables that its sizes depend on."""
        return frozenset().union(*map(Expression.variables, self.sizes))


@dataclass(frozen=True)
class Variable:
    """A size that callers choose.

    Attributes:
        name: Its name, also in ONNX.
        role: What it means: the batch, new tokens, cached tokens, or something else.
        seen: Its size in each recorded call; None where all of its leaves are absent.
        evidence: One sentence: why these axes vary, and vary together.
        minimum: Smallest size that callers may choose.
        maximum: Largest size that callers may choose, or None.
        follows: Another variable whose size this one has unless it is 0: a cache of what the encoder returned.
        required: Whether a user asked for its range, so that an export may not serve less.
    """

    name: str
    role: Role
    seen: Sizes
    evidence: str
    minimum: Size = 0
    maximum: Size | None = None
    follows: str | None = None
    required: bool = False

    def filled_length(self, sizes: Mapping[str, int]) -> int | None:
        """Returns the one size that it can have apart from 0; None if it can have many.

        Args:
            sizes: Sizes of the other variables.
        """
        if self.follows is not None:
            return sizes[self.follows]
        return self.maximum if known(self.seen) == {0, self.maximum} else None


@dataclass(frozen=True)
class Constant:
    """A Python value among the inputs: it becomes part of the graph and cannot change later.

    Attributes:
        path: Its path.
        argument: The parameter that it belongs to.
        value: The value; its repr, if the plan was read from JSON and that cannot hold the value.
        fingerprint: Data by which it is compared with other values, so that ``True`` is not ``1``.
    """

    path: str
    argument: str
    value: Any
    fingerprint: tuple[Any, ...] = ()

    @property
    def is_generator(self) -> bool:
        """Whether it is a generator of random numbers, all of which have the same fingerprint."""
        return self.fingerprint[:1] == ("torch",) and str(self.fingerprint[1]).startswith("Generator(")


@dataclass(frozen=True)
class Finding:
    """Something a person should know about the plan, such as a constant that is baked into the graph."""

    kind: str
    where: str
    text: str
