"""Sizes to export with, and sizes nobody has run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exportkit.errors import ArgumentError
from exportkit.plan.infer import infer_plan
from exportkit.plan.leaves import CallTable, Leaf
from exportkit.plan.sizes import choose_sizes, unseen_sizes


def leaf(path, *shapes, dtype="float32", growing=None):
    return Leaf(path, path.split(".", maxsplit=1)[0], dtype, shapes, growing)


def decoder_plan(batch=1, prompt=7, heads=2, dim=8):
    lengths = (prompt, prompt + 1)
    return infer_plan(
        CallTable(
            (
                leaf("input_ids", (batch, prompt), (batch, 1), (batch, 1), dtype="int64"),
                leaf("attention_mask", *((batch, n) for n in (prompt, *(n + 1 for n in lengths))), dtype="int64"),
                leaf("past.layers[0].keys", None, *((batch, heads, n, dim) for n in lengths), growing=2),
            ),
            (((batch, 1, 99),),) * 3,
        )
    )


@given(st.integers(1, 6), st.integers(2, 40), st.integers(1, 16), st.integers(1, 64))
def test_export_sizes_are_distinct_greater_than_one_and_unlike_static_ones(batch, prompt, heads, dim):
    plan = decoder_plan(batch, prompt, heads, dim)
    sizes = choose_sizes(plan)
    total = sizes["past_sequence"] + sizes["sequence"]
    values = [*sizes.values(), total]
    assert len(set(values)) == len(values)
    assert min(values) > 1
    assert not plan.static_sizes() & set(values)


def test_recorded_sizes_are_preferred():
    assert choose_sizes(decoder_plan())["sequence"] == 7


def test_new_tokens_beyond_a_chunk_stay_within_their_range():
    plan = decoder_plan()
    assert choose_sizes(plan, chunk=64)["sequence"] == 66
    assert choose_sizes(plan.range("sequence", 1, 100), chunk=64)["sequence"] == 66
    assert choose_sizes(plan.range("sequence", 1, 8), chunk=64)["sequence"] <= 8


def test_a_plan_without_variables_needs_no_sizes():
    plan = infer_plan(CallTable((leaf("x", (4, 6)),)))
    assert choose_sizes(plan) == {}
    assert unseen_sizes(plan, {}) == []


def test_image_sizes_keep_their_common_factor():
    plan = infer_plan(CallTable((leaf("pixel_values", (2, 3, 32, 48), (3, 3, 64, 96)),)))
    sizes = choose_sizes(plan)
    unseen = unseen_sizes(plan, sizes)
    assert all(item.sizes["height"] % 32 == 0 and item.sizes["width"] % 48 == 0 for item in unseen)


def test_unseen_sizes_cover_one_token_an_empty_past_batch_one_and_more():
    plan = decoder_plan()
    sizes = choose_sizes(plan)
    unseen = [item.sizes for item in unseen_sizes(plan, sizes)]
    assert any(s["sequence"] == 1 and s["past_sequence"] > 1 for s in unseen)
    assert any(s["past_sequence"] == 0 and s["sequence"] > 7 for s in unseen)
    assert any(s["past_sequence"] > 1 and s["sequence"] > 1 for s in unseen)
    assert {1} < {s["batch"] for s in unseen}
    assert sizes not in unseen


def test_sizes_that_cannot_be_distinct_are_an_error_with_a_hint():
    crowded = [leaf(f"static_{size}", (size,), (size,)) for size in range(2, 200)]
    plan = infer_plan(CallTable((leaf("x", (2, 6), (3, 6)), *crowded)))
    sizes = choose_sizes(plan)
    assert sizes["batch"] >= 200 or sizes["batch"] == 1 or sizes["batch"] not in plan.static_sizes()


def test_failing_to_find_sizes_says_what_was_asked(monkeypatch):
    monkeypatch.setattr("exportkit.plan.sizes._SEARCH_LIMIT", 0)
    with pytest.raises(ArgumentError, match="No distinct sizes were found") as caught:
        choose_sizes(decoder_plan())
    assert "greater than 1" in str(caught.value)
    assert "make one of the axes static" in str(caught.value)
