"""Placeholders: token ids that stand for rows of another input, such as the features of an image.

They tie the number of rows to values and not to sizes, so no expression over sizes can say it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Placeholder:
    """A token that stands in the token ids wherever the model puts rows of another input.

    Attributes:
        tokens: Path of the token ids.
        value: The token.
        rows: Path of the input whose first axis holds the rows.
        factor: How many tokens stand for one row.
    """

    tokens: str
    value: int
    rows: str
    factor: int = 1


def needed_tokens(
    placeholders: Iterable[Placeholder], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, dict[int, int]]:
    """Returns how often each placeholder must occur, by path of the token ids and by token.

    Args:
        placeholders: The placeholders.
        shapes: Shapes of the inputs by path.
    """
    found: dict[str, dict[int, int]] = defaultdict(dict)
    for placeholder in placeholders:
        found[placeholder.tokens][placeholder.value] = placeholder.factor * shapes[placeholder.rows][0]
    return dict(found)


def tokens_fit(placeholders: Iterable[Placeholder], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Returns whether the token ids have room for their placeholders, and for one other token."""
    needed = needed_tokens(placeholders, shapes)
    return all(sum(counts.values()) < max(math.prod(shapes[path]), 1) or not any(counts.values())
               for path, counts in needed.items())  # fmt: skip
