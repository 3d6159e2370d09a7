"""Where error is introduced, from numbers alone; and the first step, also where no step adds more than it may."""

import math
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from exportkit.module_traces.attribution import CHOSE, GREW, JUMP, ROUNDING, attribute_error, first_step, is_known
from exportkit.module_traces.error_steps import ComparedCall, TensorPair
from exportkit.running.compare import Distance

UNIT = 2.0**-24


def leaf(error, dtypes=("float32", "float32"), unit=UNIT, **changes):
    far = Distance(error, 4 * error, error, spread=error, exact=error == 0, **changes)
    return TensorPair("outputs", far, unit, dtypes)


def calls_in_a_row(*errors, dtypes=None):
    """Calls of layers in a row; the errors are those of the input and of what each layer returns."""
    leaves = [leaf(error, *([dtypes[i]] if dtypes else [])) for i, error in enumerate(errors)]
    calls = [ComparedCall(0, "", "Model", 0, None, (leaves[0],), (leaves[-1],))]
    return calls + [
        ComparedCall(i, f"layers.{i - 1}", f"Layer{i}", 0, 0, (leaves[i - 1],), (leaves[i],))
        for i in range(1, len(leaves))
    ]


def chain(*errors, dtypes=None):
    return attribute_error(calls_in_a_row(*errors, dtypes=dtypes))


def wrong(steps):
    return [step.owner for step in steps if step.verdict == "differs"]


def test_the_first_module_with_a_jump_is_wrong_and_later_ones_carry_it_on():
    steps = chain(0.0, 1e-7, 2e-2, 3e-2, 2.5e-2)

    assert wrong(steps) == [2]
    assert [step.verdict for step in steps if step.side == "outputs"] == [
        "close",
        "differs",
        "carried",
        "carried",
        "carried",
    ]


def test_what_a_module_computes_between_those_inside_is_its_own_fault():
    good, bad = leaf(0.0), leaf(0.1)
    calls = [
        ComparedCall(0, "", "Model", 0, None, (good,), (bad,)),
        ComparedCall(1, "first", "Layer", 0, 0, (good,), (good,)),
        ComparedCall(2, "second", "Layer", 0, 0, (bad,), (bad,)),
    ]

    steps = attribute_error(calls)

    assert wrong(steps) == [0]
    assert [step.side for step in steps if step.verdict == "differs"] == ["inputs"]


def test_what_a_cache_carries_out_of_a_module_is_no_second_fault():
    good, close, bad = leaf(0.0), leaf(1e-6), leaf(0.5)
    calls = [
        ComparedCall(0, "", "Model", 0, None, (good,), (close,)),
        ComparedCall(1, "attention", "Attention", 0, 0, (good,), (close,)),
        ComparedCall(2, "attention.keys", "Linear", 0, 1, (good,), (bad,)),
        ComparedCall(3, "next", "Layer", 0, 0, (bad,), (close,)),
    ]

    assert wrong(attribute_error(calls)) == [2]


def test_inputs_that_differ_are_nobodys_fault():
    assert wrong(chain(0.5, 0.5, 0.5)) == [None]


@given(st.lists(st.floats(0, ROUNDING / 2), min_size=2, max_size=12), st.floats(1, JUMP / 2))
def test_rounding_that_grows_slowly_is_no_fault(own, amplified):
    errors = [0.0]
    for error in own:
        errors.append(min(amplified * errors[-1], 1.0) + error * UNIT)

    assert wrong(chain(*errors)) == []


@given(st.integers(1, 9), st.floats(1e-3, 10))
def test_a_fault_of_any_size_is_found_where_it_is(place, size):
    errors = [1e-7 if i < place else size for i in range(11)]

    assert wrong(chain(0.0, *errors)) == [place + 1]


def test_nan_in_one_run_only_is_a_fault():
    assert wrong(chain(0.0, 1e-7, math.inf, math.inf)) == [2]


def test_another_shape_is_a_fault_once():
    shape = {"problem": "shape (3,) instead of (2,)"}
    calls = [
        ComparedCall(0, "a", "A", 0, None, (leaf(0.0),), (leaf(math.inf, **shape),)),
        ComparedCall(1, "b", "B", 0, None, (leaf(math.inf, **shape),), (leaf(math.inf, **shape),)),
    ]

    assert wrong(attribute_error(calls)) == [0]


def test_integers_must_be_equal_where_what_they_come_from_is():
    ids = leaf(0.1, ("int64", "int64"), 0.0)
    exact = [ComparedCall(0, "a", "A", 0, None, (leaf(0.0),), (ids,))]
    close = [ComparedCall(0, "a", "A", 0, None, (leaf(0.1),), (ids,))]

    assert wrong(attribute_error(exact)) == [0]
    assert 0 not in wrong(attribute_error(close))


def test_one_module_with_another_element_type_is_wrong():
    same, other = ("float32", "float32"), ("float32", "float16")
    steps = chain(0.0, 0.0, 1e-4, 1e-4, 1e-4, dtypes=[same, same, other, same, same])

    assert wrong(steps) == [2]
    assert next(step for step in steps if step.verdict == "differs").reason == "dtype float16 instead of float32"


def test_a_run_in_another_element_type_is_as_precise_as_that():
    other = ("float32", "bfloat16")
    calls = [ComparedCall(i, str(i), "Layer", 0, None, (), (leaf(3e-3 * (i + 1), other, 2.0**-9),)) for i in range(6)]

    assert wrong(attribute_error(calls)) == []


@pytest.mark.parametrize("reproduced", [True, False])
def test_a_class_that_computed_the_same_elsewhere_may_not_differ_much(reproduced):
    error = 20 * UNIT
    calls = [
        ComparedCall(0, "a", "Layer", 0, None, (leaf(0.0),), (leaf(0.0 if reproduced else UNIT),)),
        ComparedCall(1, "b", "Layer", 0, None, (leaf(0.0),), (leaf(error),)),
    ]

    assert wrong(attribute_error(calls)) == ([1] if reproduced else [])


def test_values_that_were_not_stored_leave_it_open():
    unknown = TensorPair("outputs", Distance(exact=False, values=False), UNIT, ("float32", "float32"))

    steps = attribute_error([ComparedCall(0, "a", "A", 0, None, (leaf(0.0),), (unknown,))])

    assert [step.verdict for step in steps if step.side == "outputs"] == ["unknown"]


def first(calls, wrong=()):
    return first_step(attribute_error(calls, {call.index for call in calls}), calls, wrong)


def test_a_step_that_is_wrong_is_the_first():
    assert first(calls_in_a_row(0.0, 1e-7, 2e-2, 3e-2)).owner == 2


def test_rounding_has_no_first_step():
    assert first(calls_in_a_row(0.0, 1e-7, 2e-7, 3e-7)) is None


def test_error_that_grows_from_step_to_step_begins_where_it_comes_near_that_of_the_outputs():
    found = first(calls_in_a_row(0.0, 1e-7, 7e-7, 4e-6, 2e-5, 1e-4, 7e-4, 4e-3))

    assert (found.owner, found.verdict, found.reason) == (6, "differs", GREW)


def test_less_than_half_of_the_digits_is_wrong_only_where_it_is_known_to_be():
    calls = calls_in_a_row(0.0, 1e-7, 7e-7, 4e-6, 2e-5)

    assert first(calls) is None
    assert first(calls, ["outputs"]).owner == 3
    assert first(calls, ["outputs.logits"]) is None


def test_a_choice_that_small_differences_turn_is_the_first_step():
    close, wrong = leaf(1e-7), leaf(0.2)
    chosen = replace(leaf(0.001), unit=0.0, dtypes=("int64", "int64"))
    calls = [
        ComparedCall(0, "", "Model", 0, None, (leaf(0.0),), (wrong,)),
        ComparedCall(1, "norm", "Norm", 0, 0, (leaf(0.0),), (close,)),
        ComparedCall(2, "router", "Router", 0, 0, (close,), (replace(close, path="outputs[0]"), chosen)),
        ComparedCall(3, "experts", "Experts", 0, 0, (close, chosen), (wrong,)),
    ]

    found = first(calls)

    assert (found.owner, found.pair, found.reason) == (2, chosen, CHOSE)


def with_another_order_inside(after):
    """Experts that take their tokens in another order, and return the same; then a layer."""
    good, reordered = leaf(1e-7), leaf(1.4, reordered=True)
    return [
        ComparedCall(0, "", "Model", 0, None, (leaf(0.0),), (after,)),
        ComparedCall(1, "experts", "Experts", 0, 0, (leaf(0.0),), (good,)),
        ComparedCall(2, "experts.act", "Act", 0, 1, (reordered,), (reordered,)),
        ComparedCall(3, "head", "Head", 0, 0, (good,), (after,)),
    ]


def test_another_order_inside_of_a_module_that_returns_the_same_is_no_difference():
    assert first(with_another_order_inside(leaf(1e-7))) is None


def test_another_value_inside_of_a_module_that_returns_the_same_is_one():
    calls = with_another_order_inside(leaf(1e-7))
    calls[2] = ComparedCall(2, "experts.act", "Act", 0, 1, (leaf(1.4),), (leaf(1.4),))

    assert first(calls).owner == 1


def test_another_order_inside_of_a_module_hides_nothing_that_comes_after():
    assert first(with_another_order_inside(leaf(0.1))).owner == 3


def test_what_is_inside_counts_where_the_module_returns_more_than_is_compared():
    calls = with_another_order_inside(leaf(1e-7))

    assert first_step(attribute_error(calls, {0, 2, 3}), calls, ()).owner == 1


@pytest.mark.parametrize(("path", "known"), [("outputs.a", True), ("outputs.a[0].b", True), ("outputs.ab", False)])
def test_an_output_in_one_that_is_known_is_known(path, known):
    assert is_known(path, ["outputs.a"]) is known
