"""Groups axes that always had the same size, and finds groups whose size follows from other groups.

Equal sizes need two distinct observations to count as one group. A relation such as ``total = past + new``,
``min(past, window - 1)`` or ``4*images`` needs two if a cache length is part of it, and three otherwise, because
columns of small numbers fit each other by accident.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from exportkit.plan.expression import Expression
from exportkit.plan.leaves import AxisKey, CallTable, Leaf, Sizes, known

DISTINCT_OBSERVATIONS = 3
_LARGEST_FACTOR = 8
_LARGEST_DIVISOR = 4096
# The divisors that fit may differ by this part of the one that is taken: the narrower for any, the wider for products
# of 2 and 5 without a shift. For four lengths up to 16000 and random lengths of a text up to 5, a quotient then fits in
# 2 of 100 cases by accident; of right ones for four lengths up to 6000 and strides of 160 to 400, 99 of 100 are taken.
_NARROW, _WIDE = 1 / 32, 1 / 8
_PREFIX = "group_"


@dataclass(frozen=True)
class Group:
    """Axes that had the same size in every call.

    Attributes:
        axes: The axes, in order of appearance; none for a length that only follows from others.
        seen: Their common sizes in all calls; None where all of their leaves are absent.
        grows: Whether it is the length of a cache.
        limit: The largest length that this cache stores (sliding window), or None.
    """

    axes: tuple[AxisKey, ...]
    seen: Sizes
    grows: bool = False
    limit: int | None = None


def draft_name(position: int) -> str:
    """Returns the name of a group's variable before it has its final one."""
    return f"{_PREFIX}{position}"


def group_axes(table: CallTable) -> list[Group]:
    """Returns the varying axes of a table in groups of equal sizes.

    An axis of a leaf that is absent in some calls joins a group if it agrees with it in at least two distinct sizes.
    Axes that were seen in all calls go first, so that the others find the group they belong to.
    """
    complete: list[tuple[Leaf, int, Sizes]] = []
    partial: list[tuple[Leaf, int, Sizes]] = []
    for leaf, axis, sizes in table.axes():
        if len(known(sizes)) > 1:
            (partial if None in sizes else complete).append((leaf, axis, sizes))
    groups: list[Group] = []
    for leaf, axis, sizes in [*complete, *partial]:
        grows = axis == leaf.growing
        for place, old in enumerate(groups):
            if _agree(old, leaf, axis, sizes):
                merged = tuple([b if a is None else a for a, b in zip(old.seen, sizes, strict=True)])
                axes = (*old.axes, (leaf.path, axis))
                groups[place] = replace(old, axes=axes, seen=merged, grows=old.grows or grows)
                break
        else:
            groups.append(Group(((leaf.path, axis),), sizes, grows, leaf.limit if grows else None))
    return groups


def _agree(group: Group, leaf: Leaf, axis: int, sizes: Sizes) -> bool:
    grows = axis == leaf.growing
    if (group.limit is not None or (grows and leaf.limit is not None)) and not (grows and group.limit == leaf.limit):
        return False  # a window that is not full yet looks like any other length
    common = set()
    for a, b in zip(group.seen, sizes, strict=True):
        if a is not None and b is not None:
            if a != b:
                return False
            common.add(a)
    return len(common) > 1 or (group.grows and grows and bool(common))


def with_past(groups: Sequence[Group], table: CallTable) -> list[Group]:
    """Returns the groups, and the number of cached tokens if no cache shows it because each has a window.

    The number of cached tokens then follows from a mask over all tokens and the new tokens: ``past = total - new``. If
    there was always the same number of new tokens, the counters of the caches have to agree with it. Windows that were
    full in all calls are groups then, too.
    """
    full = []
    for leaf, axis, sizes in table.axes():
        if axis == leaf.growing and leaf.limit is not None and known(sizes) == {leaf.limit}:
            full.append(Group(((leaf.path, axis),), sizes, grows=True, limit=leaf.limit))
    windows = [*full, *(group for group in groups if group.limit is not None)]
    if not windows or any(group.grows and group.limit is None for group in groups):
        return list(groups)
    is_empty = [not any(lengths) for lengths in zip(*(window.seen for window in windows), strict=True)]
    counted = table.counted or (None,) * len(is_empty)
    others = [group for group in groups if not group.grows]
    for total, new in itertools.permutations(others, 2):
        # A call may have no mask.
        rows = zip(total.seen, new.seen, is_empty, counted, strict=True)
        past = [(0 if empty else count) if a is None or b is None else a - b for a, b, empty, count in rows]
        lengths = {length for length in past if length is not None}
        is_told = None not in new.seen and len(lengths) > 1 and min(lengths) >= 0
        is_told &= all(count in (None, length) for count, length in zip(counted, past, strict=True))
        if is_told and all(_is_window_of(window, past) for window in windows):
            return [*groups, *full, Group((), tuple(past), grows=True)]
    for total in others if None not in counted and len(set(counted)) > 1 else ():
        offsets = {a - b for a, b in zip(total.seen, counted, strict=True) if a is not None and b is not None}
        if len(offsets) == 1 and min(offsets) > 0 and all(_is_window_of(window, counted) for window in windows):
            return [*groups, *full, Group((), counted, grows=True)]
    return list(groups)


def find_relations(groups: Sequence[Group], distinct: int = DISTINCT_OBSERVATIONS) -> dict[int, Expression]:
    """Returns expressions by position of the group whose size they are. No expression needs another one.

    For each group the shortest expression is taken that fits every call.

    Args:
        groups: All groups.
        distinct: How many distinct observations a relation needs that has no cache length in it.
    """
    ranked = []
    for whole, size in _candidates(groups, distinct):
        operands, grows = set(), False
        for name in size.variables():
            operand = int(name.removeprefix(_PREFIX))
            operands.add(operand)
            grows |= groups[operand].grows
        # windows and sums with a cache length first, then the shorter expressions
        length = (size.shift > 0) + bool(size.constant) + sum([factor > 1 for _, factor in size.terms])
        rank = (size.cap is None, not grows, size.divisor, length, -len(size.terms), abs(size.constant))
        ranked.append((rank, whole, size, operands))
    found: dict[int, Expression] = {}
    used: set[int] = set()
    for _, whole, size, operands in sorted(ranked, key=operator.itemgetter(0)):
        if whole not in found and whole not in used and not operands & found.keys():
            found[whole] = size
            used |= operands
    return found


def _candidates(groups: Sequence[Group], distinct: int) -> Iterator[tuple[int, Expression]]:
    """Yields the position of a group, and an expression over other groups (see `draft_name`) that fits its sizes."""
    for whole, group in enumerate(groups):
        others = [i for i in range(len(groups)) if i != whole and groups[i].limit is None]
        if group.limit is not None:
            for past in others:
                if groups[past].grows and _is_window_of(group, groups[past].seen):
                    yield whole, Expression(((draft_name(past), 1),), cap=group.limit)
            continue
        if not group.axes:
            continue  # it is there for the others to be expressed with
        for pair in itertools.combinations(others, 2):
            needed = 2 if groups[pair[0]].grows or groups[pair[1]].grows else distinct
            if _is_sum(group, groups[pair[0]], groups[pair[1]], needed):
                first, second = reversed(pair) if groups[pair[1]].grows else pair
                yield whole, Expression(((draft_name(first), 1), (draft_name(second), 1)))
        for other in others:
            for size in _of_one(groups, whole, other, distinct):
                yield whole, size


def _is_window_of(window: Group, past: Sequence[int | None]) -> bool:
    pairs = [(a, b) for a, b in zip(window.seen, past, strict=True) if a is not None and b is not None]
    return window.limit is not None and all(a == min(b, window.limit) for a, b in pairs)


def _is_sum(whole: Group, first: Group, second: Group, needed: int) -> bool:
    rows = set()
    for total, a, b in zip(whole.seen, first.seen, second.seen, strict=True):
        if total is not None and (a is not None or b is not None):
            if total != (a or 0) + (b or 0):  # an absent part counts as empty
                return False
            rows.add((a or 0, b or 0))
    return len(rows) >= needed


def _of_one(groups: Sequence[Group], whole: int, first: int, distinct: int) -> Iterator[Expression]:
    """Yields expressions over one other group: an offset, a multiple, a multiple and an offset, a quotient."""
    grows = groups[first].grows
    both = zip(groups[first].seen, groups[whole].seen, strict=True)
    pairs = sorted({(a, b) for a, b in both if a is not None and b is not None})
    if len(pairs) < (2 if grows else distinct) or len(dict(pairs)) < len(pairs):
        return
    (low, start), (high, end) = pairs[0], pairs[-1]
    name = draft_name(first)
    factor, rest = divmod(end - start, high - low)
    offset = start - factor * low
    if not rest and 1 <= factor <= _LARGEST_FACTOR and all(b == factor * a + offset for a, b in pairs):
        needed = 2 if grows and factor == 1 else distinct
        if (offset > 0 or factor > 1) and len(pairs) >= needed:
            yield Expression(((name, factor),), offset)
    elif len({b for _, b in pairs}) >= distinct and 0 < end - start < high - low:
        quotient = _quotient(pairs)
        if quotient is not None:
            yield Expression(((name, 1),), *quotient)


def _quotient(pairs: Sequence[tuple[int, int]]) -> tuple[int, int, int] | None:
    """Constant, divisor and shift with ``b = (a + shift)//divisor + constant``; None if the sizes do not tell.

    Several divisors fit a few observations; the simplest one is taken: no shift, then no constant, then the roundest
    divisor, then the smallest. If the divisors that fit are far apart, the sizes fit by accident.
    """
    (low, start), (high, end) = pairs[0], pairs[-1]
    # between the ends, b grows by (high - low)/divisor, give or take the rounding of both
    least = max((high - low) // (end - start + 1) + 1, 2)
    most = min((high - low) // max(end - start - 1, 1) + 1, _LARGEST_DIVISOR)
    plain, shifted = list[tuple[int, ...]](), list[tuple[int, ...]]()
    for divisor in range(least, most + 1):
        # (a + total)//divisor is b if b*divisor <= a + total < (b + 1)*divisor; total is shift + constant*divisor
        rests = [b * divisor - a for a, b in pairs]
        first, last = max(rests), min(rests) + divisor - 1
        if first > last:
            continue
        constant, shift = divmod(first, divisor)
        if shift and (constant + 1) * divisor <= last:
            constant, shift = constant + 1, 0
        rank = abs(constant), -_roundness(divisor)[0], divisor, constant, shift
        (shifted if shift else plain).append(rank)
    for fits in (plain, shifted if len(pairs) > DISTINCT_OBSERVATIONS else []):
        if fits:
            *_, divisor, constant, shift = min(fits)
            alike = [rank[2] for rank in fits if rank[3] == constant]
            is_round = constant in (0, 1) and not shift and _roundness(divisor)[1] == 1
            known = max(alike) - min(alike) <= divisor * (_WIDE if is_round else _NARROW)
            return (constant, divisor, shift) if known else None
    return None


def _roundness(divisor: int) -> tuple[int, int]:
    """How many times 2 and 5 divide it, and what is left: strides are products of small numbers."""
    count = 0
    for prime in (2, 5):
        while divisor % prime == 0:
            divisor, count = divisor // prime, count + 1
    return count, divisor
