"""Conditions on sizes: what their texts may contain, what they mean, and what they say."""

import pytest

from exportkit.errors import PlanError
from exportkit.plan.conditions import SizeCondition, bounds_of, evaluate, first_broken, leaves_out_sizes


@pytest.mark.parametrize(
    ("text", "sizes", "holds"),
    [
        ("batch <= 8", {"batch": 8}, True),
        ("(height - 1) // 32 <= 3", {"height": 129}, False),
        ("batch % 64 != 0", {"batch": 128}, False),
        ("min(past, 5) + max(new, 2) == 7 and not new > 3", {"past": 9, "new": 1}, True),
        ("floor(rows / 2.0) ** 2 == 9 or rows == 1", {"rows": 7}, True),
        ("(2 if rows > 3 else 5) == 5", {"rows": 3}, True),
        ("8 % rows == 0", {"rows": 0}, False),
        ("sqrt(rows - 5) > 0", {"rows": 1}, False),
        ("max(max, 3) == 4", {"max": 4}, True),
    ],
)
def test_conditions_are_evaluated(text, sizes, holds):
    assert SizeCondition(text).holds(sizes) is holds


@pytest.mark.parametrize(
    "text",
    [
        "", "batch <=", "__import__('os')", "batch.real", "batch[0]", "[batch]", "(lambda: 1)()", "'a' < 'b'", "x := 1",
        "batch ** rows", "2 ** 64", "(batch ** 9) ** 9", "9" * 40, "1e999", "min(3)", "abs(1, 2)", "print(1)", "__x__",
        "(" * 300, "-" * 3000 + "1", "1+" * 9000 + "1", "batch" * 9000, "batch\x00", None, 5,
    ],
)  # fmt: skip
def test_any_other_text_is_an_error(text):
    with pytest.raises(PlanError, match="Not a condition on sizes"):
        SizeCondition(text).holds({"batch": 1, "rows": 1})


def test_unknown_variables_are_an_error():
    with pytest.raises(PlanError, match="a variable that the plan does not have"):
        first_broken([SizeCondition("depth > 3")], ["batch"])


def test_the_first_broken_condition_is_found_also_where_another_has_no_value():
    check = first_broken([SizeCondition("a > 1"), SizeCondition("8 % b == 0"), SizeCondition("b > 0")], ["a", "b"])
    assert [check(sizes) for sizes in ((2, 4), (1, 4), (2, 3), (2, 0), (1, 0))] == [-1, 0, 1, 1, 0]


@pytest.mark.parametrize(
    ("text", "sizes", "got"),
    [
        ("rows * columns <= 4096", {"rows": 64, "columns": 80}, "64 * 80 = 5120"),
        ("rows <= 9", {"rows": 10}, "10"),
        ("past + new == 2 * rows", {"past": 1, "new": 2, "rows": 2}, "1 + 2 = 3 and 2 * 2 = 4"),
        ("rows == 3 or columns == 4", {"rows": 2, "columns": 2}, "rows = 2, columns = 2"),
        ("8 % rows == 0", {"rows": 0}, "8 % 0, which has no value: integer modulo by zero"),
    ],
)
def test_messages_put_numbers_in(text, sizes, got):
    assert SizeCondition(text).got(sizes) == got


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("batch <= 8", ("batch", None, 8)),
        ("batch < 8", ("batch", None, 7)),
        ("3 < batch", ("batch", 4, None)),
        ("batch >= 3", ("batch", 3, None)),
        ("batch != 3", None),
        ("2 * batch <= 8", None),
        ("batch <= 8 or batch == 9", None),
    ],
)
def test_bounds_of_one_variable_are_recognised(text, bounds):
    assert SizeCondition(text).bounds() == bounds


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("batch", 3), ("max(max, batch)", 4), ("batch * (length // 2) - 1", 8), ("-1 * length % 4", 1),
        ("max(batch, 5)", 5), ("trunc(0.29 * float(length))", 2), ("2 if batch == 3 and not length < 0 else 1", 2),
        ("length ** 2", 49), ("length > 4", True), ("batch / 2", 1.5),
    ],
)  # fmt: skip
def test_numbers_have_the_value_that_python_gives_them(text, value):
    found = evaluate(text, {"batch": 3, "length": 7, "max": 4})
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "batch +",
        "__import__('os')",
        "batch.real",
        "[batch]",
        "'text'.upper()",
        "lambda: 1",
        "9 ** 9 ** 9",
        "b" * 3000,
    ],
)
def test_no_other_text_is_a_number(text):
    with pytest.raises(PlanError):
        evaluate(text, {"batch": 3, "length": 7})


def test_a_number_without_a_value_is_an_error():
    with pytest.raises(PlanError, match="cannot be evaluated for these sizes"):
        evaluate("1 // batch", {"batch": 0})


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("(4095 + 8 * n) // 4096 == 1", (2, 512)),
        ("n // 3 >= 1_000_000", (3_000_000, None)),
        ("5 < n // 2 and n < 4000", (12, 3999)),
        ("n % 2 == 0", None),
        ("8 * -(-n // 8) == n", None),
        ("n + 1 != 0", None),
        ("n < 1", None),
        ("n * m < 9", None),
    ],
)
def test_a_condition_is_a_range_if_it_leaves_out_nothing_between(text, bounds):
    assert bounds_of(SizeCondition(text), (2, None)) == bounds


def test_bounds_stay_within_what_is_allowed():
    assert bounds_of(SizeCondition("n // 4 <= 100"), (2, 300)) is None
    assert bounds_of(SizeCondition("n // 4 <= 100"), (2, 403)) is None
    assert bounds_of(SizeCondition("n // 4 <= 100"), (2, 404)) == (2, 403)


@pytest.mark.parametrize(("most", "found"), [(None, True), (4, False), (9, True)])
def test_conditions_that_leave_out_sizes_are_found(most, found):
    assert leaves_out_sizes(SizeCondition("n * m != 9 * 17 and m < 99_999"), {"n": (2, most), "m": (2, 99)}) is found
