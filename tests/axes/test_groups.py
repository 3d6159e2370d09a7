"""Axes with equal value sequences, and groups that are sums of others."""

from hypothesis import given
from hypothesis import strategies as st

from exportkit.axes.groups import find_sums, group_axes
from exportkit.axes.table import CallTable, Leaf


def leaf(path, *shapes, dtype="float32", growing=None):
    return Leaf(path, path.split(".", maxsplit=1)[0], dtype, shapes, growing)


def sums_of(*leaves, **options):
    groups = group_axes(CallTable(leaves))
    names = [group.axes[0] for group in groups]
    found = find_sums(groups, **options)
    return {names[s.whole]: (names[s.first], None if s.second is None else names[s.second]) for s in found}


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


def test_total_is_past_plus_new_tokens():
    assert sums_of(
        leaf("ids", (1, 7), (1, 1), (1, 1)),
        leaf("mask", (1, 7), (1, 8), (1, 9)),
        leaf("past.keys", None, (1, 2, 7, 8), (1, 2, 8, 8), growing=2),
    ) == {("mask", 1): (("past.keys", 2), ("ids", 1))}


def test_two_observations_are_enough_for_a_sum_with_a_cache_and_too_few_for_any_other():
    ids, mask = leaf("ids", (1, 7), (1, 1)), leaf("mask", (1, 7), (1, 8))
    assert sums_of(ids, mask, leaf("past.keys", None, (1, 2, 7, 8), growing=2))
    plain = leaf("a", (2,), (3,)), leaf("b", (6,), (9,)), leaf("c", (8,), (12,))
    assert not sums_of(*plain)
    assert sums_of(*plain, distinct=2) == {("c", 0): (("a", 0), ("b", 0))}


def test_only_one_token_per_call_gives_a_constant_offset():
    past = leaf("past.keys", (1, 2, 7, 8), (1, 2, 9, 8), growing=2)
    (found,) = find_sums(group_axes(CallTable((leaf("mask", (1, 8), (1, 10)), past))))
    assert (found.second, found.constant) == (None, 1)


sizes = st.integers(2, 60)


@given(st.lists(st.tuples(sizes, sizes), min_size=4, max_size=6, unique=True))
def test_a_true_sum_is_found_and_reproduces_every_observation(rows):
    table = CallTable(
        (
            leaf("a", *((first,) for first, _ in rows)),
            leaf("b", *((second,) for _, second in rows)),
            leaf("whole", *((first + second,) for first, second in rows)),
        )
    )
    groups = group_axes(table)
    for found in find_sums(groups):
        for whole, first, second in zip(
            groups[found.whole].seen,
            groups[found.first].seen,
            (0,) * len(rows) if found.second is None else groups[found.second].seen,
            strict=True,
        ):
            assert whole == found.factor * first + second + found.constant


@given(st.lists(st.tuples(sizes, sizes), min_size=3, max_size=6, unique=True), st.integers(1, 4))
def test_no_group_is_a_sum_of_itself_or_of_sums(rows, offset):
    leaves = [
        leaf("a", *((a,) for a, _ in rows)),
        leaf("b", *((b,) for _, b in rows)),
        leaf("c", *((a + b,) for a, b in rows)),
        leaf("d", *((a + offset,) for a, _ in rows)),
    ]
    found = find_sums(group_axes(CallTable(tuple(leaves))), distinct=2)
    wholes = {s.whole for s in found}
    assert all(s.first not in wholes and s.second not in wholes for s in found)
