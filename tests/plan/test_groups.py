"""Axes with equal value sequences."""

from exportkit.plan.leaves import CallTable, Leaf
from exportkit.plan.relations import group_axes


def leaf(path, *shapes, dtype="float32", growing=None, limit=None):
    return Leaf(path, path.split(".", maxsplit=1)[0], dtype, shapes, growing, limit)


def test_axes_that_always_had_one_size_are_one_group():
    groups = group_axes(CallTable((leaf("x", (2, 6), (3, 7)), leaf("y", (2, 4), (3, 4)))))
    assert [group.axes for group in groups] == [(("x", 0), ("y", 0)), (("x", 1),)]


def test_sizes_that_never_change_are_in_no_group():
    assert group_axes(CallTable((leaf("x", (2, 6), (2, 6)),))) == []


def test_a_leaf_absent_in_one_call_joins_only_what_it_matches_in_two_sizes():
    table = CallTable(
        (leaf("x", (5, 2), (7, 3), (6, 3)), leaf("often", (5,), None, (6,)), leaf("once", (5,), None, (5,)))
    )
    assert [group.axes for group in group_axes(table)] == [(("x", 0), ("often", 0)), (("x", 1),)]


def test_a_cache_that_is_absent_is_a_cache_of_length_zero():
    (group,) = group_axes(CallTable((leaf("past.keys", None, (1, 2, 7, 8), growing=2),)))
    assert group.seen == (0, 7)
    assert group.grows


def test_a_window_that_is_not_full_yet_stays_apart_from_a_full_cache():
    shapes = None, (1, 2, 3, 8), (1, 2, 4, 8)
    full, window = leaf("a.keys", *shapes, growing=2), leaf("b.keys", *shapes, growing=2, limit=5)
    assert [(group.axes, group.limit) for group in group_axes(CallTable((full, window)))] == [
        ((("a.keys", 2),), None),
        ((("b.keys", 2),), 5),
    ]
