"""Sizes as expressions."""

import json

import pytest

from exportkit.plan.expression import Expression


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (Expression.of(3), "3"),
        (Expression.of("batch"), "batch"),
        (Expression.of("past") + Expression.of("seq"), "past + seq"),
        (Expression((("images", 4),), 1), "4*images + 1"),
        (Expression((("frames", 1),), -2), "frames - 2"),
        (Expression(), "0"),
        (Expression((("length", 1),), 1, divisor=320), "length//320 + 1"),
        (Expression((("length", 1),), divisor=4, shift=3), "(length + 3)//4"),
        (Expression((("past", 1), ("seq", 1)), cap=5), "min(past + seq, 5)"),
    ],
)
def test_prints_as_one_would_write_it(expression, text):
    assert str(expression) == text


def test_evaluates_with_the_sizes_of_its_variables():
    total = Expression.of("past") + Expression((("seq", 2),), 1)
    assert total.evaluate({"past": 5, "seq": 4}) == 14
    assert total.variables() == {"past", "seq"}


def test_is_one_variable_only_without_factor_and_constant():
    assert Expression.of("batch").variable == "batch"
    assert Expression((("batch", 2),)).variable is None
    assert Expression((("batch", 1),), 1).variable is None
    assert Expression.of(4).variable is None


def test_terms_that_cancel_disappear():
    assert (Expression.of("a") + Expression((("a", -1),), 3)) == Expression.of(3)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (Expression((("n", 1),), 1, divisor=3), 4),
        (Expression((("n", 1),), divisor=4, shift=3), 3),
        (Expression((("n", 2),), cap=5), 5),
        (Expression((("n", 1),), cap=50), 11),
    ],
)
def test_evaluates_divisions_and_caps(expression, value):
    assert expression.evaluate({"n": 11}) == value


@pytest.mark.parametrize("expression", [Expression(), Expression.of(3), Expression((("n", 2), ("m", 1)), 1, 3, 2, 9)])
def test_survives_json(expression):
    assert Expression.from_json(json.loads(json.dumps(expression.to_json()))) == expression


def test_variables_that_get_one_name_are_added_up():
    assert str(Expression((("past", 1), ("new", 2))).renamed({"new": "past"})) == "3*past"
