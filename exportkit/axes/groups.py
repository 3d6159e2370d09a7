"""Groups axes by their value sequences, and finds groups that are sums of others.

In comes the table of seen sizes; out come groups (axes that always had the same size) and relations between them. An
equality or a sum needs at least two distinct observations, else it says nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from exportkit.axes.table import AxisKey, CallTable, Leaf, Sizes, known

# A sum of two axes that are no cache lengths is believed after this many distinct observations: with fewer, three
# columns of small numbers fit by accident too often.
DISTINCT_FOR_A_SUM = 3
_LARGEST_FACTOR = 8


@dataclass(frozen=True)
class Group:
    """Axes with one value sequence.

    Attributes:
        axes: The axes, in order of appearance.
        seen: Their common sizes in all calls; None where all of their leaves are absent.
        grows: Whether one of them is the length of a cache.
    """

    axes: tuple[AxisKey, ...]
    seen: Sizes
    grows: bool


@dataclass(frozen=True)
class Sum:
    """``whole = factor * first + second + constant``, where there may be no second; positions in the groups."""

    whole: int
    first: int
    second: int | None = None
    factor: int = 1
    constant: int = 0


def group_axes(table: CallTable) -> list[Group]:
    """Returns the varying axes of a table in groups of equal value sequences.

    Sequences of leaves that are absent in some calls join a group when they agree with it in at least two distinct
    sizes. Sequences seen in all calls go first, so that the others find the group they belong to.
    """
    varying = [(leaf, axis, sizes) for leaf, axis, sizes in table.axes() if len(known(sizes)) > 1]
    varying.sort(key=lambda item: None in item[2])  # stable: signature order within both halves
    groups: list[Group] = []
    for leaf, axis, sizes in varying:
        place = next((i for i, group in enumerate(groups) if _agree(group, leaf, axis, sizes)), None)
        grows = axis == leaf.growing
        if place is None:
            groups.append(Group(((leaf.path, axis),), sizes, grows))
            continue
        old = groups[place]
        merged = tuple(b if a is None else a for a, b in zip(old.seen, sizes, strict=True))
        groups[place] = Group((*old.axes, (leaf.path, axis)), merged, old.grows or grows)
    return groups


def _agree(group: Group, leaf: Leaf, axis: int, sizes: Sizes) -> bool:
    common = [(a, b) for a, b in zip(group.seen, sizes, strict=True) if a is not None and b is not None]
    same_cache = group.grows and axis == leaf.growing
    return all(a == b for a, b in common) and (len(set(common)) > 1 or (same_cache and bool(common)))


def find_sums(groups: Sequence[Group], distinct: int = DISTINCT_FOR_A_SUM) -> list[Sum]:
    """Returns the groups that are the sum of two others, or of one and a constant, each group at most once.

    Sums with a cache length come first (``total = past + new tokens``) and need two distinct observations; others need
    ``distinct`` many. No group is a sum of sums.
    """
    found: dict[int, Sum] = {}
    used: set[int] = set()
    for candidate in sorted(_candidates(groups, distinct), key=lambda sum_: _rank(groups, sum_)):
        operands = {i for i in (candidate.first, candidate.second) if i is not None}
        if candidate.whole in found or candidate.whole in used or operands & found.keys():
            continue
        found[candidate.whole] = candidate
        used |= operands
    return list(found.values())


def _candidates(groups: Sequence[Group], distinct: int) -> Iterator[Sum]:
    for whole, group in enumerate(groups):
        others = [i for i in range(len(groups)) if i != whole]
        for first, second in itertools.combinations(others, 2):
            needed = 2 if groups[first].grows or groups[second].grows else distinct
            if _fits(group, (groups[first], groups[second]), needed):
                yield _ordered(groups, Sum(whole, first, second))
        for first in others:
            yield from _multiples(groups, whole, first, distinct)


def _fits(whole: Group, operands: tuple[Group, Group], needed: int) -> bool:
    rows = [
        (total, first or 0, second or 0)  # an absent part counts as empty
        for total, first, second in zip(whole.seen, operands[0].seen, operands[1].seen, strict=True)
        if total is not None and (first is not None or second is not None)
    ]
    return len(set(rows)) >= needed and all(total == first + second for total, first, second in rows)


def _multiples(groups: Sequence[Group], whole: int, first: int, distinct: int) -> Iterator[Sum]:
    both = zip(groups[first].seen, groups[whole].seen, strict=True)
    pairs = {(a, b) for a, b in both if a is not None and b is not None}
    if len(pairs) < (2 if groups[first].grows else distinct):
        return
    offsets = {b - a for a, b in pairs}
    if len(offsets) == 1 and min(offsets) > 0:
        yield Sum(whole, first, constant=min(offsets))
    factors = {b // a if a and b % a == 0 else 0 for a, b in pairs}
    if len(factors) == 1 and 1 < min(factors) <= _LARGEST_FACTOR:
        yield Sum(whole, first, factor=min(factors))


def _ordered(groups: Sequence[Group], sum_: Sum) -> Sum:
    if sum_.second is not None and groups[sum_.second].grows and not groups[sum_.first].grows:
        return Sum(sum_.whole, sum_.second, sum_.first)
    return sum_


def _rank(groups: Sequence[Group], sum_: Sum) -> tuple[bool, bool, int]:
    grows = groups[sum_.first].grows
    return (not grows, sum_.second is None, sum_.constant + sum_.factor)
