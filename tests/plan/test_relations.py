"""Axes that always had the same size, and sizes that follow from others."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from exportkit.plan.leaves import CallTable, Leaf
from exportkit.plan.relations import Group, find_relations, group_axes, with_past


def leaf(path, *shapes, growing=None, limit=None):
    return Leaf(path, path.split(".", maxsplit=1)[0], "float32", shapes, growing, limit)


def columns(**sequences):
    """One axis for each name, with these sizes in the calls."""
    return CallTable(
        tuple(leaf(name, *(None if size is None else (size,) for size in s)) for name, s in sequences.items())
    )


def relations_of(table, **options):
    groups = with_past(group_axes(table), table)
    names = {f"group_{i}": group.axes[0][0] if group.axes else "past" for i, group in enumerate(groups)}
    found = find_relations(groups, **options)
    return {names[f"group_{whole}"]: str(size.renamed(names)) for whole, size in found.items()}


def test_total_is_past_plus_new_tokens():
    table = CallTable(
        (
            leaf("ids", (1, 7), (1, 1), (1, 1)),
            leaf("mask", (1, 7), (1, 8), (1, 9)),
            leaf("past.keys", None, (1, 2, 7, 8), (1, 2, 8, 8), growing=2),
        )
    )
    assert relations_of(table) == {"mask": "past.keys + ids"}


def test_two_observations_are_enough_for_a_sum_with_a_cache_and_too_few_for_any_other():
    cache = CallTable(
        (leaf("ids", (7,), (1,)), leaf("mask", (7,), (8,)), leaf("past.keys", None, (1, 2, 7), growing=2))
    )
    assert relations_of(cache) == {"mask": "past.keys + ids"}
    plain = columns(a=(2, 3), b=(6, 9), c=(8, 12))
    assert relations_of(plain) == {}
    assert relations_of(plain, distinct=2)


def test_only_one_token_per_call_gives_a_constant_offset():
    past = leaf("past.keys", (1, 2, 7, 8), (1, 2, 9, 8), growing=2)
    assert relations_of(CallTable((leaf("mask", (1, 8), (1, 10)), past))) == {"mask": "past.keys + 1"}


@pytest.mark.parametrize(
    ("sequences", "expected"),
    [
        ({"images": (1, 2, 5), "patches": (4, 8, 20)}, "4*images"),
        ({"images": (1, 2, 5), "patches": (5, 9, 21)}, "4*images + 1"),
        ({"images": (3, 4, 6), "patches": (5, 6, 8)}, "images + 2"),
        ({"length": (3200, 6400, 16000), "patches": (10, 20, 50)}, "length//320"),
        ({"length": (3300, 6500, 16100, 9999), "patches": (11, 21, 51, 32)}, "length//320 + 1"),
    ],
)
def test_multiples_offsets_and_quotients(sequences, expected):
    assert relations_of(columns(**sequences)) == {"patches": expected}


@pytest.mark.parametrize("texts", [(1, 2, 3, 3), (1, 3, 2, 3)])
def test_lengths_of_a_text_are_no_quotient_of_lengths_of_its_audio(texts):
    assert relations_of(columns(audio=(2000, 5003, 7001, 10007), text=texts)) == {}


@given(
    st.lists(st.integers(1000, 20000), min_size=4, max_size=7, unique=True),
    st.sampled_from([160, 320]),
    st.integers(1, 159),
)
def test_quotients_with_a_shift_fit_every_call(values, divisor, shift):
    frames = [(value + shift) // divisor for value in values]
    assume(len(set(frames)) > 1)
    table = columns(a=values, whole=frames)
    check(table, "whole", 0, {})


def test_a_window_stores_the_past_up_to_its_limit():
    table = CallTable(
        (
            leaf("full.keys", None, (1, 2, 7, 8), (1, 2, 8, 8), growing=2),
            leaf("window.keys", None, (1, 2, 5, 8), (1, 2, 5, 8), growing=2, limit=5),
        )
    )
    assert relations_of(table) == {"window.keys": "min(full.keys, 5)"}


@pytest.mark.parametrize("limit", [5, 63])
def test_with_windows_only_the_past_is_what_the_mask_has_beyond_the_new_tokens(limit):
    stored = [min(past, limit) for past in (7, 8)]
    table = CallTable(
        (
            leaf("ids", (1, 7), (1, 1), (1, 1)),
            leaf("mask", (1, 7), (1, 8), (1, 9)),
            leaf("window.keys", None, *((1, 2, n, 8) for n in stored), growing=2, limit=limit),
        )
    )
    assert relations_of(table) == {"mask": "past + ids", "window.keys": f"min(past, {limit})"}


sizes = st.integers(2, 400)
rows = st.lists(st.tuples(sizes, sizes), min_size=4, max_size=7, unique=True)


def check(table, whole, true_size, unseen):
    """What was found for ``whole`` fits every call; and if it is the true relation, unseen ones too."""
    groups = group_axes(table)
    position = {path: i for i, group in enumerate(groups) for path, _ in group.axes}
    found = find_relations(groups)
    for place, size in found.items():
        for call, value in enumerate(groups[place].seen):
            assert size.evaluate({f"group_{i}": group.seen[call] for i, group in enumerate(groups)}) == value
    size = found.get(position[whole])
    if size is not None and size.variables() == {f"group_{position[name]}" for name in unseen}:
        values = {f"group_{position[name]}": value for name, value in unseen.items()}
        return size.evaluate(values) == true_size
    return None


@given(rows, sizes, sizes)
def test_true_sums_fit_every_call_and_predict_unseen_ones(pairs, a, b):
    table = columns(a=[x for x, _ in pairs], b=[y for _, y in pairs], whole=[x + y for x, y in pairs])
    assume(len(group_axes(table)) == 3)
    assert check(table, "whole", a + b, {"a": a, "b": b}) in (True, None)


@given(st.lists(sizes, min_size=3, max_size=7, unique=True), st.integers(1, 8), st.integers(0, 9), sizes)
def test_true_multiples_are_found_and_predict_unseen_sizes(values, factor, offset, new):
    assume(factor > 1 or offset > 0)
    table = columns(a=values, whole=[factor * value + offset for value in values])
    assert check(table, "whole", factor * new + offset, {"a": new}) is True


@given(
    st.lists(st.integers(100, 20000), min_size=4, max_size=7, unique=True),
    st.sampled_from([16, 160, 320]),
    st.integers(0, 2),
)
def test_quotients_that_are_found_fit_every_call(values, divisor, constant):
    frames = [value // divisor + constant for value in values]
    assume(len(set(frames)) > 1 and frames != values)
    table = columns(a=values, whole=frames)
    check(table, "whole", 0, {})


@given(rows, st.integers(1, 4))
def test_no_relation_needs_another_one(pairs, offset):
    table = columns(
        a=[x for x, _ in pairs], b=[y for _, y in pairs], c=[x + y for x, y in pairs], d=[x + offset for x, _ in pairs]
    )
    found = find_relations(group_axes(table), distinct=2)
    assert all(not {int(n.removeprefix("group_")) for n in size.variables()} & found.keys() for size in found.values())


def test_a_group_without_axes_is_never_expressed():
    groups = [Group((("a", 0),), (2, 3, 5)), Group((), (4, 6, 10), grows=True)]
    assert 1 not in find_relations(groups)


# Groups


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


def test_windows_show_the_tokens_before_although_a_call_without_past_has_no_mask():
    table = CallTable(
        (
            leaf("ids", (2, 7), (2, 9), (2, 1), (2, 1)),
            leaf("mask", (2, 7), None, (2, 8), (2, 9)),
            leaf("past.keys", None, None, (2, 2, 5, 8), (2, 2, 5, 8), growing=2, limit=5),
        )
    )
    assert relations_of(table) == {"mask": "past + ids", "past.keys": "min(past, 5)"}
