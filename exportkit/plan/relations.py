"""Finds groups whose size follows from others: ``total = past + new``, ``min(past, window - 1)``, ``4*images``, ...

In come groups of axes; out comes an expression for each group that needs no variable of its own: the shortest one that
fits every call. A relation needs at least two distinct observations if a cache length is part of it, and three
otherwise, as columns of small numbers fit each other by accident.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from exportkit.plan.expression import Expression
from exportkit.plan.groups import Group

DISTINCT_OBSERVATIONS = 3
_LARGEST_FACTOR = 8
_LARGEST_DIVISOR = 4096


@dataclass(frozen=True)
class Relation:
    """The size of group ``whole`` as an expression over other groups, each called as `draft_name` calls it."""

    whole: int
    size: Expression

    def operands(self) -> set[int]:
        """Returns the positions of the groups in the expression."""
        return {int(name.removeprefix(_PREFIX)) for name in self.size.variables()}


_PREFIX = "group_"


def draft_name(position: int) -> str:
    """Returns the name of a group's variable before it has a real one."""
    return f"{_PREFIX}{position}"


def with_past(groups: Sequence[Group]) -> list[Group]:
    """Returns the groups, and the number of stored tokens where no cache shows it because each has a window.

    What is stored then follows from a mask over all tokens and the new tokens: ``past = total - new``.
    """
    windows = [group for group in groups if group.limit is not None]
    if not windows or any(group.grows and group.limit is None for group in groups):
        return list(groups)
    for total, new in itertools.permutations([g for g in groups if not g.grows and None not in g.seen], 2):
        past = tuple((a or 0) - (b or 0) for a, b in zip(total.seen, new.seen, strict=True))
        if min(past) >= 0 and len(set(past)) > 1 and all(_is_window_of(window, past) for window in windows):
            return [*groups, Group((), past, grows=True)]
    return list(groups)


def find_relations(groups: Sequence[Group], distinct: int = DISTINCT_OBSERVATIONS) -> dict[int, Expression]:
    """Returns expressions by position of the group that they give the size of. No expression needs another one.

    Args:
        groups: All groups.
        distinct: How many distinct observations a relation needs that has no cache length in it.
    """
    found: dict[int, Expression] = {}
    used: set[int] = set()
    ranked = sorted(_candidates(groups, distinct), key=lambda relation: _rank(groups, relation))
    for relation in ranked:
        if relation.whole not in found and relation.whole not in used and not relation.operands() & found.keys():
            found[relation.whole] = relation.size
            used |= relation.operands()
    return found


def _candidates(groups: Sequence[Group], distinct: int) -> Iterator[Relation]:
    for whole, group in enumerate(groups):
        others = [i for i in range(len(groups)) if i != whole and groups[i].limit is None]
        if group.limit is not None:
            yield from _windows(groups, whole, others)
            continue
        if not group.axes:
            continue  # it is there for the others to be expressed with
        for first, second in itertools.combinations(others, 2):
            needed = 2 if groups[first].grows or groups[second].grows else distinct
            if _is_sum(group, groups[first], groups[second], needed):
                first, second = (second, first) if groups[second].grows else (first, second)  # noqa: PLW2901
                yield Relation(whole, Expression(((draft_name(first), 1), (draft_name(second), 1))))
        for first in others:
            yield from _of_one(groups, whole, first, distinct)


def _windows(groups: Sequence[Group], whole: int, others: Sequence[int]) -> Iterator[Relation]:
    for past in others:
        if groups[past].grows and _is_window_of(groups[whole], groups[past].seen):
            yield Relation(whole, Expression(((draft_name(past), 1),), cap=groups[whole].limit))


def _is_window_of(window: Group, past: Sequence[int | None]) -> bool:
    pairs = [(a, b) for a, b in zip(window.seen, past, strict=True) if a is not None and b is not None]
    return window.limit is not None and all(a == min(b, window.limit) for a, b in pairs)


def _is_sum(whole: Group, first: Group, second: Group, needed: int) -> bool:
    rows = [
        (total, a or 0, b or 0)  # an absent part counts as empty
        for total, a, b in zip(whole.seen, first.seen, second.seen, strict=True)
        if total is not None and (a is not None or b is not None)
    ]
    return len(set(rows)) >= needed and all(total == a + b for total, a, b in rows)


def _of_one(groups: Sequence[Group], whole: int, first: int, distinct: int) -> Iterator[Relation]:
    """Relations to one other group: an offset, a multiple, a multiple and an offset, a quotient."""
    both = zip(groups[first].seen, groups[whole].seen, strict=True)
    pairs = sorted({(a, b) for a, b in both if a is not None and b is not None})
    if len(pairs) < (2 if groups[first].grows else distinct) or len({a for a, _ in pairs}) < len(pairs):
        return
    (low, start), (high, end) = pairs[0], pairs[-1]
    name = draft_name(first)
    factor, rest = divmod(end - start, high - low)
    offset = start - factor * low
    if not rest and 1 <= factor <= _LARGEST_FACTOR and all(b == factor * a + offset for a, b in pairs):
        needed = 2 if groups[first].grows and factor == 1 else distinct
        if (offset > 0 or factor > 1) and len(pairs) >= needed:
            yield Relation(whole, Expression(((name, factor),), offset))
    elif len({b for _, b in pairs}) >= distinct and 0 < end - start < high - low:
        yield from (Relation(whole, Expression(((name, 1),), *found)) for found in _quotients(pairs))


def _quotients(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yields constant, divisor and shift with ``b = (a + shift)//divisor + constant``, the simplest of those that fit.

    Several divisors fit a few observations; the roundest one is taken: no shift, then no constant, then the smallest.
    """
    (low, start), (high, end) = pairs[0], pairs[-1]
    # between the ends, b grows by (high - low)/divisor, give or take the rounding of both
    least = (high - low) // (end - start + 1) + 1
    most = min((high - low) // max(end - start - 1, 1) + 1 if end - start > 1 else _LARGEST_DIVISOR, _LARGEST_DIVISOR)
    for shifted in (False, True) if len(pairs) > DISTINCT_OBSERVATIONS else (False,):
        fits = []
        for divisor in range(max(least, 2), most + 1):
            for shift in range(1, divisor) if shifted else (0,):
                constant = start - (low + shift) // divisor
                if all(b == (a + shift) // divisor + constant for a, b in pairs):
                    fits.append((abs(constant), -_roundness(divisor), divisor, constant, shift))
                    break
        if fits:
            *_, divisor, constant, shift = min(fits)
            yield constant, divisor, shift
            return


def _roundness(divisor: int) -> int:
    """How many times 2 and 5 divide it: strides are products of small numbers."""
    count = 0
    for prime in (2, 5):
        while divisor % prime == 0:
            divisor, count = divisor // prime, count + 1
    return count


def _rank(groups: Sequence[Group], relation: Relation) -> tuple[int, ...]:
    """Windows and sums with a cache length first, then the shorter expressions."""
    size = relation.size
    grows = any(groups[operand].grows for operand in relation.operands())
    length = (size.shift > 0) + bool(size.constant) + sum(factor > 1 for _, factor in size.terms)
    return (size.cap is None, not grows, size.divisor, length, -len(size.terms), abs(size.constant))
