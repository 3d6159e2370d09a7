"""Where outputs that differ begin to: also where no step alone makes more error than it may."""

from dataclasses import replace

import pytest

from exportkit.module_traces.attribution import CHOSE, GREW, attribute_error, first_step, is_known
from exportkit.module_traces.error_steps import ComparedCall
from tests.module_traces.test_attribution import leaf


def chain(*errors):
    """Calls of one class of layer in a row; the errors are those of the input and of what each layer returns."""
    leaves = [leaf(error) for error in errors]
    calls = [ComparedCall(0, "", "Model", 0, None, (leaves[0],), (leaves[-1],))]
    return calls + [
        ComparedCall(i, f"layers.{i - 1}", f"Layer{i}", 0, 0, (leaves[i - 1],), (leaves[i],))
        for i in range(1, len(leaves))
    ]


def first(calls, wrong=()):
    return first_step(attribute_error(calls, {call.index for call in calls}), calls, wrong)


def test_a_step_that_is_wrong_is_the_first():
    assert first(chain(0.0, 1e-7, 2e-2, 3e-2)).owner == 2


def test_rounding_has_no_first_step():
    assert first(chain(0.0, 1e-7, 2e-7, 3e-7)) is None


def test_error_that_grows_from_step_to_step_begins_where_it_comes_near_that_of_the_outputs():
    found = first(chain(0.0, 1e-7, 7e-7, 4e-6, 2e-5, 1e-4, 7e-4, 4e-3))

    assert (found.owner, found.verdict, found.reason) == (6, "differs", GREW)


def test_less_than_half_of_the_digits_is_wrong_only_where_it_is_known_to_be():
    calls = chain(0.0, 1e-7, 7e-7, 4e-6, 2e-5)

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
