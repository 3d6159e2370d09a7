import pytest

from exportkit.plan.condition_bounds import bounds_of, leaves_out_sizes
from exportkit.plan.conditions import SizeCondition


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
