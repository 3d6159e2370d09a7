"""Python arithmetic with sizes: a graph has to compute it, or to refuse the sizes it does not hold for."""

import functools
import math

import torch
from torch.nn import functional as F

from tests.trust.cases import at, case

USUAL = at((2, 6), (4, 9), (3, 12))
SMALL = at((2, 1), (2, 2))


@case(truth=[*USUAL, *SMALL])
def linspace(self, x):
    return x * torch.linspace(0, 1, x.shape[1])


@case(serves=USUAL, truth=SMALL)
def square_root(self, x):
    return x / math.sqrt(x.shape[1])


@case(serves=USUAL, truth=SMALL)
def power_of_a_half(self, x):
    return x * x.shape[1] ** -0.5


@case(may_refuse=True, truth=[*USUAL, *SMALL])
def logarithm(self, x):
    return x * math.log(x.shape[1] + 1)


@case(truth=[*USUAL, *SMALL])
def rounded_half(self, x):
    return x[:, : round(x.shape[1] / 2)]


@case(truth=[*USUAL, *SMALL, *at((2, 100), (2, 14))])
def integer_part_of_a_product(self, x):
    return x[:, int(x.shape[1] * 0.29) :]


@case(truth=[*USUAL, *SMALL])
def ceiling(self, x):
    return x[:, : math.ceil(x.shape[1] / 3)]


@case(may_refuse=True, truth=[*USUAL, *SMALL])
def integer_root(self, x):
    return x * math.isqrt(x.shape[1])


@case(may_refuse=True, truth=[*USUAL, *SMALL])
def quotient_and_remainder(self, x):
    whole, rest = divmod(x.shape[1], 3)
    return x * whole + rest


@case(serves=USUAL, truth=SMALL)
def negative_floor_division(self, x):
    return x * (-x.shape[1] // 2) + (-x.shape[1] // 4)


@case(truth=[*USUAL, *SMALL])
def negative_remainder(self, x):
    return x + (x.shape[1] % -3)


@case(serves=USUAL, truth=SMALL)
def upper_triangle_indices(self, x):
    rows, columns = torch.triu_indices(x.shape[1], x.shape[1])
    return x[:, rows] * x[:, columns]


@case(serves=USUAL, truth=SMALL)
def lower_triangle(self, x):
    size = x.shape[1]
    return x @ torch.tril(torch.ones(size, size), diagonal=-1)


@case(serves=USUAL, truth=SMALL)
def identity_matrix(self, x):
    return torch.diag_embed(x) + torch.eye(x.shape[1])


@case(serves=USUAL, truth=SMALL)
def countdown(self, x):
    return x * torch.arange(x.shape[1], 0, -1)


@case(serves=USUAL, truth=[*SMALL, *at((2, 100), (2, 49), (2, 29))])
def steps_of_a_fraction(self, x):
    return x.sum() * torch.arange(0, 1, 1 / x.shape[1])


@case(truth=[*USUAL, *SMALL])
def one_hot_positions(self, x):
    return x @ F.one_hot(torch.arange(x.shape[1]) % 3, 3).float()


@case(serves=USUAL, truth=SMALL)
def filled_with_the_size(self, x):
    return torch.cat([x, torch.full((x.shape[0], 1), x.shape[1])], 1)


@case(may_refuse=True, truth=[*USUAL, *SMALL])
def rolled_by_half(self, x):
    return x.roll(x.shape[1] // 2, 1)


@case(truth=[*USUAL, *at((2, 1))])
def repeated_by_size(self, x):
    return x.repeat(1, x.shape[0])


@case(may_refuse=True, truth=[*USUAL, *SMALL])
def bits_of_a_size(self, x):
    return x * (x.shape[1] >> 1) + (x.shape[1] & 3)


@case(may_refuse=True, truth=[*USUAL, *SMALL])
def bit_length(self, x):
    return x * x.shape[1].bit_length()


@case(may_refuse=True, truth=[*at((2, 10), (2, 100)), *USUAL])
def digits(self, x):
    return x * len(str(x.shape[1]))


@case(serves=USUAL, truth=SMALL)
def size_as_float(self, x):
    return x + float(x.shape[1]) / 2


@case(serves=USUAL, truth=SMALL)
def middle_column(self, x):
    return x[:, x.shape[1] // 2]


@case(serves=USUAL, truth=SMALL)
def last_three_columns(self, x):
    return x[:, -3:]


@case(serves=USUAL, truth=SMALL)
def every_second_column(self, x):
    return x[:, ::2], x[:, 1::2]


@case(serves=USUAL, truth=SMALL)
def all_but_the_ends(self, x):
    return x[:, 1:-1]


@case(serves=USUAL, truth=[*SMALL, *at((9, 4), (5, 5))])
def distance_of_sizes(self, x):
    return x * abs(x.shape[0] - x.shape[1])


@case(truth=[*USUAL, *SMALL, *at((2, 20))])
def smaller_of_size_and_eight(self, x):
    return x * min(x.shape[1], 8) + max(x.shape[1], 6)


@case(may_refuse=True, truth=[*USUAL, *SMALL, *at((2, 20))])
def quotient_cut_to_an_integer(self, x):
    return x + int(x.shape[1] / 3) + int(-x.shape[1] / 4)


@case(may_refuse=True, truth=[*USUAL, *SMALL])
def sum_over_a_range(self, x):
    return x * sum(range(x.shape[1]))


@case(may_refuse=True, truth=[*USUAL, *SMALL])
def positions_made_in_python(self, x):
    return x * torch.tensor([1 / (1 + position) for position in range(x.shape[1])])


@case(may_refuse=True, truth=[*USUAL, *SMALL])
def split_in_python(self, x):
    return torch.cat([part.mean(1, keepdim=True) for part in x.split(2, 1)], 1)


@case(truth=[*USUAL, *at((2, 3))])
def tensor_split(self, x):
    first, second, third = x.tensor_split(3, 1)
    return first.sum(1), second.sum(1), third.sum(1)


@case(serves=at((2, 9)), truth=[*at((2, 6), (2, 12), (2, 3)), *SMALL])
def split_at_sizes(self, x):
    left, right = x.split([3, x.shape[1] - 3], 1)
    return left.sum(1) * right.amax(1)


@case(truth=[*USUAL, *SMALL])
def squeeze_of_an_axis(self, x):
    return x.squeeze(1).sum(-1)


@case(at((2, 3, 8, 8), (1, 3, 10, 12)), truth=at((2, 3, 9, 7), (1, 3, 5, 5), (2, 3, 11, 3)))
def enlarged_by_a_fraction(self, x):
    return F.interpolate(x, scale_factor=1.5, mode="bilinear", align_corners=True)


@case(at((2, 3, 8, 8), (1, 3, 10, 12)), truth=at((2, 3, 9, 7), (1, 3, 5, 5), (2, 3, 11, 3)))
def shrunk_by_a_fraction(self, x):
    return F.interpolate(x, scale_factor=0.7, mode="nearest")


@case(at((2, 3, 8, 8), (1, 3, 10, 12)), truth=at((2, 3, 9, 7), (1, 3, 5, 5), (2, 3, 4, 4)))
def pooled_with_a_ceiling(self, x):
    return F.max_pool2d(x, 3, stride=2, ceil_mode=True)


@case(at((2, 3, 8, 8), (1, 3, 10, 12)), truth=at((2, 3, 9, 7), (1, 3, 5, 5), (2, 3, 4, 4)))
def averages_with_a_ceiling(self, x):
    return F.avg_pool2d(x, 3, stride=2, padding=1, ceil_mode=True, count_include_pad=False)


@case(at((2, 3, 6, 6), (1, 3, 9, 12)), truth=at((2, 3, 7, 7), (1, 3, 5, 5), (2, 3, 3, 8), (2, 3, 2, 2)))
def pooled_to_three_by_three(self, x):
    return F.adaptive_avg_pool2d(x, 3)


@case(serves=USUAL, truth=SMALL)
def padded_by_a_third(self, x):
    return F.pad(x, (x.shape[1] // 3, 1), value=-1.0)


@case(serves=USUAL, truth=at((2, 4), (2, 3), (2, 2)))
def reflected(self, x):
    return F.pad(x[:, None], (2, 2), mode="reflect")[:, 0]


@case(at((2, 6), (4, 10)), serves=at((3, 8)), truth=at((2, 7), (3, 9), (2, 2)))
def two_equal_heads(self, x):
    return x.view(len(x), 2, -1).transpose(1, 2).reshape(-1, 2).softmax(-1)


@case(serves=USUAL, truth=SMALL)
def product_by_einsum(self, x):
    return torch.einsum("bi,bj,j->bi", x, x, torch.arange(x.shape[1], dtype=x.dtype)) / x.size(0)


@case(may_refuse=True, truth=[*USUAL, *SMALL])
def unbound_columns(self, x):
    first, *_, last = x.unbind(1)
    return first - last


@case(serves=USUAL, truth=SMALL)
def mean_by_hand(self, x):
    return x.sum(1) / x.shape[1], x.sum() / x.numel()


@case(serves=USUAL, truth=[*SMALL, *at((2, 40))])
def distances_by_bucket(self, x):
    positions = torch.arange(x.shape[1])
    apart = (positions[:, None] - positions).abs()
    large = 4 + (torch.log(apart.float() / 4) / math.log(8) * 4).long()
    return x @ torch.where(apart < 4, apart, large.clamp(max=7)).float()


@case(truth=[*USUAL, *SMALL])
def dtype_by_size(self, x):
    return x.double() if x.shape[1] > 10 else x


@case(may_refuse=True, truth=[*at((2, 5), (3, 7), (2, 7)), *USUAL])
def one_of_two_sizes(self, x):
    return x * 2 if x.shape[1] in (5, 7, 9) else x


@case(may_refuse=True, truth=[*at((2, 7), (3, 5)), *USUAL])
def whole_shape(self, x):
    return x * 2 if tuple(x.shape) in {(2, 5), (3, 7)} else x


@case(serves=at((2, 9)), truth=[*USUAL, *SMALL])
def columns_by_index(self, x):
    return x[:, torch.tensor([0, 2, -1])], x[..., 4]


@case(serves=USUAL, truth=at((2, 3), (2, 2)))
def three_largest(self, x):
    return x.topk(3, 1).values


@case(serves=USUAL, truth=SMALL)
def as_many_largest_as_rows(self, x):
    return x.topk(max(1, x.shape[1] // 4), 1).values


@case(serves=USUAL, truth=SMALL)
def powers_with_sizes(self, x):
    return x ** x.shape[0], 2 ** x.shape[1] * x, (-1) ** x.shape[1] * x, x.long() ** x.shape[0]


@functools.lru_cache
def _positions(length):
    return torch.arange(length).float()


@case(serves=USUAL, truth=SMALL)
def remembered_by_a_cache(self, x):
    return x + _positions(x.shape[1])


POWERS = at((2, 1), (2, 3), (2, 4), (1, 7), (2, 8), (1, 15), (2, 16), (2, 31), (2, 63), (2, 64), (1, 99), (1, 100))


@case(serves=POWERS)
def logarithms_as_sizes(self, x):
    """A logarithm in double precision that is a bit too small loses one column at powers of two."""
    size = x.shape[1]
    return x.new_zeros(int(math.log2(size + 1))), x.new_zeros(math.ceil(math.log(size, 2))), size.bit_length() * x


@case(truth=[*POWERS, *at((1, 124), (1, 125), (1, 126), (1, 999), (1, 1000))])
def logarithms_to_other_bases(self, x):
    size = x.shape[1]
    return x.new_zeros(math.ceil(math.log(size, 5))), x.new_zeros(int(math.log10(size) + 1)), x * round(math.log(size))


@case(serves=at((2, 3), (2, 4), (1, 7), (1, 8), (1, 20), (1, 21), (1, 64)))
def logarithms_in_arithmetic(self, x):
    size = x.shape[1]
    strongest = x.topk(min(int(3 * math.log(size)), size), 1).values
    return strongest, x.new_zeros(int(math.log(size) / math.log(2))), x * math.ceil(math.log2(size) * 0.5 - 0.25)


@case(truth=POWERS)
def logarithms_of_quotients(self, x):
    size = x.shape[1]
    return x.new_zeros(int(math.log2(size / 8) + 4)), x.new_zeros(int(math.log2(size * 0.1) + 5))


@case(serves=at((2, 3), (2, 4), (1, 8), (1, 9), (1, 17), (2, 64)))
def padded_to_a_power_of_two(self, x):
    size = x.shape[1]
    padded = F.pad(x, (0, 2 ** math.ceil(math.log2(size)) - size))
    return padded, F.pad(x, (0, (1 << (size - 1).bit_length()) - size))


@case(serves=POWERS)
def integer_square_roots(self, x):
    return x * math.isqrt(x.shape[1]), x.new_zeros(int(math.sqrt(x.shape[1])))


@case(at((2, 16), (3, 24)), serves=at((2, 5), (1, 8), (3, 15), (2, 17), (2, 64)))
def padded_to_a_multiple_recorded_at_multiples(self, x):
    padded = F.pad(x, (0, (8 - x.shape[1] % 8) % 8))
    return padded.view(x.shape[0], -1, 8).cumsum(2).reshape(x.shape[0], -1)[:, : x.shape[1]]


@case(at((2, 16, 20, 3), (1, 24, 16, 3)), truth=at((3, 13, 18, 3), (1, 16, 12, 3)))
def batch_by_division_of_windows(self, x):
    height, width = x.shape[1:3]
    x = F.pad(x, (0, 0, 0, (4 - width % 4) % 4, 0, (4 - height % 4) % 4))
    _, height, width, channels = x.shape
    windows = x.view(-1, height // 4, 4, width // 4, 4, channels).transpose(2, 3).reshape(-1, 4, 4, channels)
    batch = int(windows.shape[0] / (height * width / 4 / 4))
    return windows.view(batch, height // 4, width // 4, 4, 4, -1).transpose(2, 3).reshape(batch, height, width, -1)
