"""Sizes 0 and 1, which a trace does not see: torch.export assumes 2 and more."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.trust.cases import at, call, case, x


@case(serves=at((4, 9)), truth=at((2, 1), (3, 1), (1, 1), (1, 5)))
def single_column(self, x):
    return x * 5 if x.shape[1] == 1 else x - 1


@case(serves=at((4, 9)), truth=at((1, 5), (1, 9), (1, 1)))
def single_row(self, x):
    return x.max(1).values if len(x) == 1 else x.min(1).values


@case(serves=at((4, 9)), truth=at((0, 5), (0, 0), (1, 5)))
def no_row(self, x):
    return x.new_ones(1, 3) if x.shape[0] == 0 else x[:, :3]


@case(
    [call(x(2, 5), x(2, 0)), call(x(3, 6), x(3, 2)), call(x(4, 5), x(4, 3))],
    truth=[call(x(4, 9), x(4, 0)), call(x(4, 9), x(4, 1)), call(x(1, 5), x(1, 0))],
    may_refuse=True,
)
def nothing_cached(self, x, cache):
    return torch.cat([cache, x * 2 if cache.shape[1] == 0 else x], 1)


@case(serves=at((4, 9)), truth=at((2, 0), (0, 0), (0, 7), (1, 1)))
def no_element(self, x):
    return x.new_full((1,), -1.0) if not x.numel() else x.sum(1)


@case(serves=at((4, 9)), truth=at((2, 1), (1, 1), (2, 0)))
def deviation_of_one(self, x):
    return x.std(1)


@case(serves=at((4, 9)), truth=at((2, 1), (1, 1), (1, 7), (2, 2)))
def variance_over_rows(self, x):
    return x.var(0)


@case(serves=at((4, 9)), truth=at((2, 0), (2, 1), (0, 5)))
def mean_of_none(self, x):
    return x.mean(1)


@case(serves=at((4, 9)), truth=at((2, 0), (0, 5), (0, 0)))
def mean_of_all(self, x):
    return x.mean()


@case(serves=at((4, 9)), truth=at((2, 0), (2, 1)))
def largest_of_none(self, x):
    return x.amax(1)


@case(serves=at((4, 9)), truth=at((2, 0), (2, 1), (0, 3)))
def product_of_none(self, x):
    return x.prod(1), x.all(1), x.any(1)


@case(serves=at((4, 9)), truth=at((1, 5), (2, 1), (1, 1)))
def squeeze_of_every_axis(self, x):
    return x.squeeze() * 2


@case(serves=at((4, 9)), truth=at((1, 5), (1, 1)))
def squeeze_of_the_batch(self, x):
    return x.squeeze(0)


@case([call(x(2, 5), x(2, 5)), call(x(3, 7), x(3, 7))], truth=[call(x(2, 5), x(2, 1)), call(x(2, 5), x(1, 5))])
def broadcast_when_one(self, x, y):
    return x * y


@case([call(x(2, 5), x(2, 5)), call(x(3, 7), x(3, 7))], truth=[call(x(1, 5), x(4, 5)), call(x(2, 1), x(2, 7))])
def other_input_broadcasts(self, x, y):
    return (x + y).sum(0)


@case([call(x(2, 5), x(5, 3)), call(x(3, 7), x(7, 3))], serves=[call(x(1, 5), x(5, 3)), call(x(2, 1), x(1, 3))])
def product_of_matrices(self, x, y):
    return x @ y


@case(serves=at((4, 9)), truth=at((2, 1), (2, 0), (1, 5)))
def cumulative(self, x):
    return x.cumsum(1), x.flip(1), x.roll(1, 1)


@case(at((2, 5, 4), (3, 7, 4)), serves=at((1, 5, 4), (2, 1, 4)), truth=at((2, 0, 4), (0, 3, 4)))
class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(x).softmax(1)


@case(at((2, 3, 5), (4, 3, 7)), training=True, may_refuse=True, truth=at((1, 3, 1), (1, 3, 5), (2, 3, 1)))
class BatchNormInTraining(nn.BatchNorm1d):
    def __init__(self):
        super().__init__(3)


@case(serves=at((4, 9)), truth=at((1, 1), (1, 4), (4, 1)))
def number_if_single(self, x):
    return x.sum() + 100 if x.numel() == 1 else x.sum()


@case(at((2, 3, 8, 8), (1, 3, 10, 12)), serves=at((2, 3, 9, 7)), truth=at((2, 3, 1, 1), (1, 3, 1, 8), (2, 3, 2, 2)))
def enlarged(self, x):
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


@case(at((2, 3, 8), (1, 3, 10)), serves=at((2, 3, 9)), truth=at((2, 3, 3), (2, 3, 2), (2, 3, 1)))
class Kernel(nn.Module):
    """Three columns at a time; the model raises for fewer."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(3, 4, 3)

    def forward(self, x):
        return self.convolution(x).relu()


@case(
    [call(x(2, 4, 3), x(2, 5, 3)), call(x(3, 1, 3), x(3, 6, 3))],
    truth=[call(x(2, 4, 3), x(2, 0, 3)), call(x(2, 1, 3), x(2, 0, 3)), call(x(2, 1, 3), x(2, 1, 3))],
)
def empty_past(self, new, past):
    return new * 2 if past.shape[1] == 0 else torch.cat([past, new], 1).cumsum(1)


@case(at((1, 5), (1, 7)), truth=at((3, 5), (2, 9)))
def first_row_only(self, x):
    return x[0] * 2


@case(at((1, 5), (1, 7)), truth=at((3, 5), (2, 9)))
def batch_one_is_removed(self, x):
    return x.squeeze(0).unsqueeze(-1) @ x.squeeze(0).unsqueeze(0) if len(x) == 1 else x


@case(at((1, 5), (1, 7)), truth=at((3, 5), (2, 9)))
def batch_one_is_flattened(self, x):
    return x.flatten().cumsum(0)


@case(at((2, 1), (3, 1)), truth=at((2, 4), (2, 2)))
def only_one_column_was_seen(self, x):
    return x.expand(-1, 4)


@case(serves=at((4, 9)), truth=at((2, 1), (1, 9), (2, 2)))
def difference_to_the_next(self, x):
    return x.diff(dim=1) if x.shape[1] > 1 else x


@case(serves=at((4, 9)), truth=at((2, 2), (2, 1), (2, 3)))
def at_most_two(self, x):
    return x.exp() if x.shape[1] <= 2 else x.neg()


@case(serves=at((4, 9)), truth=at((1, 5), (1, 1)))
def distance_to_the_mean_of_others(self, x):
    return (x - (x.sum(0) - x) / (x.shape[0] - 1)).abs()


@case(
    [call(x(2, 5)), call(x(3, 7))],
    truth=[call(x(1, 1200)), call(x(1, 1001)), call(x(1, 1000)), call(x(1, 1)), call(x(3, 1200))],
    serves=[call(x(4, 9)), call(x(4, 1200))],
)
def one_long_row(self, x):
    return x * 2 if x.shape[0] == 1 and x.shape[1] > 1000 else x + 1


@case(
    [call(x(1, 5)), call(x(1, 7)), call(x(3, 7))],
    truth=[call(x(1, 120)), call(x(1, 101)), call(x(1, 100)), call(x(3, 120))],
    serves=[call(x(1, 9)), call(x(4, 9)), call(x(4, 1200))],
)
def one_long_row_beside_recorded_ones(self, x):
    if x.shape[0] == 1:
        return x * 2 if x.shape[1] > 100 else x + 1
    return x + 1


@case(
    [call(x(2, 5)), call(x(3, 7))],
    truth=[call(x(90, 1)), call(x(41, 1)), call(x(40, 1)), call(x(90, 2))],
    serves=[call(x(4, 9)), call(x(90, 9))],
)
def one_column_of_many_rows(self, x):
    rows, columns = x.shape
    return -x if columns == 1 and rows * columns > 40 else x


@case(
    [call(x(2, 5)), call(x(3, 7))],
    truth=[call(x(4, 1200)), call(x(3, 1200)), call(x(1, 1200)), call(x(4, 300)), call(x(5, 299))],
    serves=[call(x(4, 9)), call(x(3, 9))],
)
def odd_rows_that_are_long(self, x):
    if x.shape[0] % 2 == 0:
        return x + 1
    return 1 + x if x.shape[1] < 300 else x - 1


@case(
    [call(x(2, 5)), call(x(3, 7))],
    truth=[call(x(1, 250)), call(x(1, 128)), call(x(1, 127)), call(x(2, 250))],
    serves=[call(x(4, 9)), call(x(4, 250))],
)
def one_row_of_many_blocks(self, x):
    return x.cumsum(1) if x.shape[0] == 1 and x.shape[1] // 32 > 3 else x


# How the length of a single row decides, other than by a comparison of the length itself.
UNUSUAL = {
    "half": lambda n: n / 2 > 500,
    "root": lambda n: math.sqrt(n) > 31.6,
    "power": lambda n: n**2 > 1e6,
    "bits": lambda n: n.bit_length() > 9,
    "shift": lambda n: n >> 8 > 2,
    "digits": lambda n: len(f"{n}") > 3,
    "steps": lambda n: len(range(0, n, 2)) > 500,
    "set": lambda n: n in {1024, 1100},
    "table": lambda n: {1024: True, 1100: True}.get(n, False),
    "rounded": lambda n: round(n / 100) >= 10,
}


class UnusualRow(nn.Module):
    def __init__(self, how, other):
        super().__init__()
        self.how, self.other = how, other

    def forward(self, x, y=None):
        rows, length = x.shape
        is_other = rows == 1 if self.other == "one row" else y is None
        if is_other and UNUSUAL[self.how](length):
            return x * 2
        return x + (1 if y is None else y)


def add_unusual(how, other):
    def made():
        return UnusualRow(how, other)

    made.__name__ = f"{other} decides by {how}"
    rows = 1 if other == "one row" else 4
    case(
        [call(x(2, 5)), call(x(3, 7))] if rows == 1 else [call(x(2, 5), x(2, 5)), call(x(3, 7))],
        truth=[call(x(rows, size)) for size in (1100, 1024, 1001, 1000, 999, 120)],
        serves=[call(x(4, 9)), call(x(4, 1200))] if rows == 1 else [],
        may_refuse=rows == 4,  # without the input there is a program of its own, and some of these cannot be traced
    )(made)


for how in UNUSUAL:
    add_unusual(how, "one row")
    add_unusual(how, "an absent input")
