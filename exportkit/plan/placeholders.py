"""Relations between values and sizes, which cannot be stated as expressions over sizes.

Token ids hold placeholders for rows of another input, such as the features of an image. The products of grids of
patches, or the sum of lengths, say how many rows another input has. Token types mark where the placeholders are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from exportkit.json_data import Positive, Size

Blocks = list[tuple[int, int]]  # token and length of each run of placeholders, in order


@dataclass(frozen=True)
class Placeholder:
    """A token in the token ids that the model replaces by rows of another input.

    Attributes:
        tokens: Path of the token ids.
        value: The token.
        rows: Path of the input whose first axis holds the rows.
        factor: How many tokens stand for ``per`` rows.
        per: How many rows ``factor`` tokens stand for.
    """

    tokens: str
    value: int
    rows: str
    factor: Positive = 1
    per: Positive = 1


@dataclass(frozen=True)
class Grids:
    """Grids of patches, one for each image; the product of a grid is the image's number of rows in another input.

    Lengths of parts that are in one tensor one after the other, such as ``x.split(lengths.tolist())``, are grids with
    one number each.

    Attributes:
        path: Path of the grids ``(images, axes)``, or of the lengths ``(parts)``.
        rows: Path of the input with a row for each patch.
        examples: Grids to build calls with, taken in turn.
        axis: The axis of that input along which the patches are.
        per: How much of the axis a patch takes, such as its width in pixels.
    """

    path: str
    rows: str
    examples: tuple[tuple[Size, ...], ...]
    axis: Size = 0
    per: Size = 1

    @property
    def are_lengths(self) -> bool:
        """Whether the grids are lengths."""
        return all(len(grid) == 1 for grid in self.examples)

    def taken(self, images: int, rows: int | None = None) -> list[tuple[int, ...]]:
        """Returns the grids of that many images.

        Args:
            images: How many there are.
            rows: How many rows they have, which is followed where it is 0 or 1, and where parts may be empty or one is
                the only part.
        """
        may_be = images == 1 or (images > 1 and (0,) in self.examples)
        if self.are_lengths and rows in (0, 1) and may_be:
            return [(rows if number == 0 else 0,) for number in range(images)]
        return [self.examples[number % len(self.examples)] for number in range(images)]

    def count(self, images: int, rows: int | None = None) -> int:
        """Returns the number of rows of that many images; the arguments are those of `taken`."""
        return sum(math.prod(grid) for grid in self.taken(images, rows))


@dataclass(frozen=True)
class Marker:
    """An input with the shape of the token ids that says where a placeholder is.

    Attributes:
        path: Path of the input.
        tokens: Path of the token ids.
        value: The placeholder.
        inside: Its value where the placeholder is.
        outside: Its value elsewhere.
    """

    path: str
    tokens: str
    value: int
    inside: int
    outside: int


def needed_tokens(
    placeholders: Iterable[Placeholder], shapes: Mapping[str, tuple[int, ...]], grids: Iterable[Grids] = ()
) -> dict[str, Blocks]:
    """Returns the runs of placeholders that the rows of other inputs require, by path of the token ids.

    Args:
        placeholders: The placeholders.
        shapes: Shapes of the inputs by path.
        grids: Grids of images: each image has a run of its own. Without a grid, tokens may be apart from each other.
    """
    by_rows = {grid.rows: grid for grid in grids if grid.axis == 0}
    found: dict[str, dict[int, list[int]]] = defaultdict(dict)
    for p in placeholders:
        grid = by_rows.get(p.rows)
        found[p.tokens][p.value] = [1] * (p.factor * shapes[p.rows][0] // p.per)
        if grid is not None:
            rows = [math.prod(taken) for taken in grid.taken(shapes[grid.path][0], shapes[p.rows][0])]
            found[p.tokens][p.value] = [p.factor * count // p.per for count in rows]
    return {path: [(v, n) for v, lengths in runs.items() for n in lengths] for path, runs in found.items()}


def tokens_fit(
    placeholders: Iterable[Placeholder], shapes: Mapping[str, tuple[int, ...]], grids: Iterable[Grids] = ()
) -> bool:
    """Returns whether the token ids have room for their placeholders, and for one other token."""
    needed = needed_tokens(placeholders, shapes, grids)
    return all(place_blocks(blocks, shapes[path]) is not None for path, blocks in needed.items())


def place_blocks(blocks: Blocks, shape: Sequence[int]) -> list[tuple[int, int, int, int]] | None:
    """Returns token, row, first column and length of runs in token ids of a shape; None if there is no room.

    Single tokens are spread column by column, so that every row gets its share. The first column comes last, because it
    holds the token that begins a sequence. Longer runs are placed row after row, with a gap between them.
    """
    count, length = (math.prod(shape[:-1]), shape[-1]) if shape else (0, 0)
    if all(size == 1 for _, size in blocks):
        free = [(row, column) for column in [*range(1, length), 0][:length] for row in range(count)]
        fits = len(blocks) < max(len(free), 1) or not blocks
        return [(v, *place, 1) for (v, _), place in zip(blocks, free, strict=False)] if fits else None
    equal_share = -(-len(blocks) // max(count, 1))
    evenly = _in_rows(blocks, count, length, equal_share)
    return _in_rows(blocks, count, length, len(blocks)) if evenly is None else evenly


def _in_rows(blocks: Blocks, count: int, length: int, most: int) -> list[tuple[int, int, int, int]] | None:
    """Places runs row after row, at most so many in each."""
    placed: list[tuple[int, int, int, int]] = []
    row, column, here = 0, 1, 0
    for value, size in blocks:
        if here == most or column + size > length:
            row, column, here = row + 1, 1, 0
        if row >= count or column + size > length:
            return None
        placed.append((value, row, column, size))
        column, here = column + size + 1, here + 1
    return placed
