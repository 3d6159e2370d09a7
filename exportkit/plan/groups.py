"""Groups axes by their value sequences: axes that always had the same size are one group.

In comes the table of seen sizes; out come groups. An equality needs two distinct observations, else it says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from exportkit.plan.table import AxisKey, CallTable, Leaf, Sizes, known


@dataclass(frozen=True)
class Group:
    """Axes with one value sequence.

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
            groups.append(Group(((leaf.path, axis),), sizes, grows, leaf.limit if grows else None))
            continue
        old = groups[place]
        merged = tuple(b if a is None else a for a, b in zip(old.seen, sizes, strict=True))
        groups[place] = replace(old, axes=(*old.axes, (leaf.path, axis)), seen=merged, grows=old.grows or grows)
    return groups


def _agree(group: Group, leaf: Leaf, axis: int, sizes: Sizes) -> bool:
    common = [(a, b) for a, b in zip(group.seen, sizes, strict=True) if a is not None and b is not None]
    grows = axis == leaf.growing
    if (group.limit is not None or (grows and leaf.limit is not None)) and not (grows and group.limit == leaf.limit):
        return False  # a window that is not full yet looks like any other length
    same_cache = group.grows and grows
    return all(a == b for a, b in common) and (len(set(common)) > 1 or (same_cache and bool(common)))
