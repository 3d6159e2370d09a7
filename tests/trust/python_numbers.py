"""Python numbers as arguments, with other values than the recorded ones: negative, large, infinite, out of range."""

import torch
from torch.nn import functional as F

from tests.trust.cases import call, case, ints, x

DOUBLE = torch.float64
CLOSE_TO_ONE = 1 + 1e-12  # 1 in single precision


def doubles(*numbers):
    """Returns a call for each number, with a tensor in double precision."""
    return [call(x(3, 6, dtype=DOUBLE), number) for number in numbers]


@case(
    recorded=[call(x(2, 5), 1), call(x(3, 7), 2)],
    truth=[call(x(3, 6), place) for place in (-1, 0, 5, 6, -7)],
)
def column(self, x, place):
    return x[:, place]


@case(
    recorded=[call(x(2, 5), 1, 3), call(x(3, 7), 2, 6)],
    truth=[call(x(3, 6), *ends) for ends in ((-2, 5), (0, 20), (5, 2), (0, -1), (2, 2))],
)
def columns(self, x, first, end):
    return x[:, first:end]


@case(recorded=[call(x(2, 5), 1), call(x(3, 7), 2)], truth=[call(x(3, 6), shift) for shift in (-2, 0, 9)])
def rolled(self, x, shift):
    return x.roll(shift, 1)


@case(recorded=[call(x(2, 5), 1), call(x(3, 7), 2)], truth=[call(x(3, 6), count) for count in (3, 0, 7)])
def largest(self, x, count):
    return x.topk(count, 1).values


@case(
    recorded=[call(x(2, 5, dtype=DOUBLE), 0.1), call(x(3, 7, dtype=DOUBLE), 0.7)],
    serves=doubles(1 / 3, 1e300),
    truth=doubles(float("inf"), -0.0),
)
def arithmetic_in_double_precision(self, x, number):
    return x * number, x + number, number - x, x / number, number / x, (x - 1) * (number * 2 - 1)


@case(
    recorded=[call(torch.ones(2, 5, dtype=DOUBLE), 0.1), call(torch.ones(3, 7, dtype=DOUBLE), 0.7)],
    truth=[call(torch.ones(3, 6, dtype=DOUBLE), number) for number in (CLOSE_TO_ONE, 1.0, 1e-300)],
)
def compared_in_double_precision(self, x, number):
    return x == number, x < number, (x - number) * 1e12


@case(
    recorded=[call(x(2, 5, dtype=DOUBLE), 0.1), call(x(3, 7, dtype=DOUBLE), 0.7)],
    truth=doubles(CLOSE_TO_ONE, 1e300),
)
def filled_in_double_precision(self, x, number):
    return (
        (torch.full_like(x, number) - 1) * 1e12,
        (torch.full(x.shape, number, dtype=x.dtype) - 1) * 1e12,
        (torch.where(x > 0, x, number) - 1) * 1e12,
        (x.masked_fill(x > 0, number) - 1) * 1e12,
        (x * 0 + 2).clamp(max=number) - 1,
    )


@case(
    recorded=[call(x(2, 5, dtype=DOUBLE), 0.1), call(x(3, 7, dtype=DOUBLE), 0.7)],
    truth=doubles(CLOSE_TO_ONE, 2.0),
)
def factors_in_double_precision(self, x, number):
    one = torch.ones_like(x)
    found = (
        torch.add(one * 0, one, alpha=number),
        torch.addcmul(one * 0, one, one, value=number),
        one.lerp(one * 2, number),
    )
    return *((value - 1) * 1e12 for value in found), x.abs() ** number


@case(
    recorded=[call(x(2, 5), 0.1), call(x(3, 7), 0.7)],
    truth=[call(x(3, 6), number) for number in (1e300, float("nan"), -0.0, 3)],
)
def divisor(self, x, number):
    return 1 / (x.abs() * 0 + number)


@case(
    recorded=[call(ints(2, 5), 3), call(ints(3, 7), 4)],
    truth=[call(ints(3, 6), number) for number in (2**40, -3, 0, True, 2.5)],
)
def factor_of_integers(self, x, number):
    return x * number


@case(
    recorded=[call(ints(2, 5) + 1, 3), call(ints(3, 7) + 1, 4)],
    truth=[call(ints(3, 6) - 4, number) for number in (-3, 3, 0)],
)
def divisor_of_integers(self, x, number):
    return x // number, x % number, torch.div(x, number, rounding_mode="trunc")


@case(
    recorded=[call(x(2, 5), 0.0, 1.0), call(x(3, 7), -1.0, 2.0)],
    truth=[call(x(3, 6), *limits) for limits in ((1.0, -1.0), (float("nan"), 1.0), (0.0, float("nan")))],
)
def limits(self, x, low, high):
    return x.clamp(low, high), F.hardtanh(x, low, high) if low < high else x


@case(
    recorded=[call(x(2, 5), True), call(x(3, 7), False)],
    truth=[call(x(3, 6), flag) for flag in (1, 0, None, 2, torch.tensor(True))],
)
def flag(self, x, flag):
    return x * 2 if flag is True else x if flag is False else x * 5
