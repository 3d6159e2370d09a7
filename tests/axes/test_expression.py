"""Sizes as expressions."""

import pytest

from exportkit.axes import Expression


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (Expression.of(3), "3"),
        (Expression.of("batch"), "batch"),
        (Expression.of("past") + Expression.of("seq"), "past + seq"),
        (Expression((("images", 4),), 1), "4*images + 1"),
        (Expression((("frames", 1),), -2), "frames - 2"),
        (Expression(), "0"),
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
