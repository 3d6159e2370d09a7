"""Scales, dtypes, ties, masks and special values: a small mistake is seen, and rounding is no mistake."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.trust.cases import at, call, case, control, ints, x

OTHERS = at((4, 9), (2, 6), (5, 12))


def scaled(factor, *shapes):
    """Returns a call for each shape, with numbers of this size."""
    return [call(x(*shape) * factor) for shape in shapes]


def in_dtype(dtype, *shapes):
    """Returns a call for each shape, in a dtype."""
    return [call(x(*shape, dtype=dtype)) for shape in shapes]


@case(serves=at((4, 9)), truth=at((1, 5), (1, 9)))
def small_results(self, x):
    return (x * 3 if len(x) == 1 else x - 1) * 1e-5


@case(serves=at((4, 9)), truth=at((2, 1), (3, 1)))
def tiny_results(self, x):
    return (x * 3 if x.shape[1] == 1 else x - 1) * 1e-20


@case(serves=at((4, 9)), truth=at((1, 5), (1, 9)))
def small_part_of_a_large_result(self, x):
    small = x * 3 if len(x) == 1 else x - 1
    return torch.cat([x * 1e6, small * 1e-3], 1)


@case(serves=at((4, 9)), truth=at((1, 5), (1, 8)))
def small_output_beside_a_large_one(self, x):
    return x * 1e6, (x * 3 if len(x) == 1 else x - 1) * 1e-6


@case(serves=at((4, 9)), truth=at((1, 40), (1, 5)))
def last_column_only(self, x):
    y = x * 2
    if len(x) == 1:
        y = torch.cat([y[:, :-1], y[:, -1:] + 1e-2], 1)
    return y


@control(scaled(1e3, (2, 5), (3, 7)), serves=scaled(1e3, (4, 9), (1, 5)))
class LargeNumbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))

    def forward(self, x):
        return (x[..., None] * self.weight).sum(-1) * 1e3


@control(scaled(1e-12, (2, 5), (3, 7)), serves=scaled(1e-12, (4, 9), (1, 5)))
def very_small_numbers(self, x):
    return x.sum(1) * 0.1, x @ x.T


@control(serves=OTHERS)
def sums_that_cancel(self, x):
    return (x * 1000 + 1).sum(1) - (x * 1000).sum(1)


@control(serves=OTHERS, slack=10.0)
def many_layers(self, x):
    for _ in range(20):
        x = (x * 1.3).tanh() - x.mean(1, keepdim=True) * 0.1
    return x


@control(in_dtype(torch.float16, (2, 8), (3, 8)), serves=in_dtype(torch.float16, (4, 8), (1, 8)))
def half():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4), nn.Softmax(-1)).half()


@case(in_dtype(torch.bfloat16, (2, 8), (3, 8)), truth=in_dtype(torch.bfloat16, (4, 8), (1, 8)), may_refuse=True)
def brain_float():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).bfloat16()


@control(in_dtype(torch.float64, (2, 8), (3, 8)), serves=in_dtype(torch.float64, (4, 8), (1, 8)))
def double():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


@case(in_dtype(torch.float64, (2, 5), (3, 7)), truth=in_dtype(torch.float64, (4, 9), (1, 5)))
def double_through_half(self, x):
    return x.sin() + 1e-9 * x.cumsum(1) if len(x) > 1 else x.half().sin().double()


@case(in_dtype(torch.float16, (2, 8), (3, 9)), truth=in_dtype(torch.float16, (1, 8), (4, 40)))
def half_with_a_branch(self, x):
    return x * (1.05 if len(x) == 1 else 1.0)


@case(truth=[*in_dtype(torch.float64, (2, 5)), *in_dtype(torch.float16, (2, 5)), call(ints(2, 5))])
def decision_by_dtype(self, x):
    return x * 2 if x.dtype is torch.float32 else x * 3


@case(
    [call(torch.complex(x(2, 5), x(2, 5))), call(torch.complex(x(3, 7), x(3, 7)))],
    truth=[call(torch.complex(x(4, 9), x(4, 9))), call(x(4, 9))],
    may_refuse=True,
)
def complex_numbers(self, z):
    return z * z.conj() + 2j, z.abs(), z.angle()


BYTES = [call(ints(2, 5, below=256).to(torch.uint8)), call(ints(3, 7, below=256).to(torch.uint8))]


@case(BYTES, truth=[call(ints(4, 9, below=256).to(torch.uint8)), call(torch.full((2, 2), 255, dtype=torch.uint8))])
def bytes_that_overflow(self, x):
    return x + 1, x * 3, 255 - x, x.sum(1)


@case(BYTES, truth=[call(ints(4, 9, below=256).to(torch.uint8)), call(torch.full((2, 2), 255, dtype=torch.uint8))])
def images_to_floats(self, x):
    return x / 255, (x.float() / 255 - 0.5).to(torch.float16), x > 127


@case(
    [call(ints(2, 5).to(torch.int8) - 4), call(ints(3, 7).to(torch.int8) - 4)],
    truth=[call(torch.tensor([[-128, 127, 0, -1, 1]], dtype=torch.int8))],
)
def small_integers(self, x):
    return -x, x.abs(), x // 2, x % 3, x * x


LARGE = torch.tensor([[2**53 + 1, 2**62, -(2**53) - 1, 20000001]])


@case([call(ints(2, 5)), call(ints(3, 7))], serves=[call(LARGE)], truth=[call(-LARGE), call(LARGE * 2)])
def large_integers(self, x):
    return x + 1, x * 3, x // 7, x % 1000


@case([call(ints(2, 5)), call(ints(3, 7))], truth=[call(LARGE), call(-LARGE), call(LARGE * 2)])
def large_integers_as_floats(self, x):
    return x / 3, x.float().sum(1), x.double().mean(1)


@case([call(x(2, 5) > 0), call(x(3, 7) > 0)], serves=[call(x(4, 9) > 0)], truth=[call(x(4, 9)), call(ints(4, 9))])
def booleans(self, x):
    return x | x.flip(1), x.sum(1), x.logical_xor(x.roll(1, 1)), x.any(1), x.float().mean(1), ~x & x.all()


NAN = torch.tensor([[1.0, float("nan"), 3.0, -2.0, 0.0], [float("inf"), -float("inf"), 1e38, -0.0, 5.0]])


@case(serves=[call(NAN)], truth=[call(-NAN)])
def special_values_go_through(self, x):
    return x + 1, x * 2, x / 2, torch.where(x > 0, x, -x), x.isnan(), x.isinf(), x == x.abs()


@case(truth=[call(NAN), call(-NAN), call(NAN.flip(1))], finding="sort: NaN")
def special_values_in_orders(self, x):
    return x.amax(1), x.amin(1), x.argmax(1), x.sort(1).values, x.clamp(-2, 2), x.maximum(x.flip(1))


@case(truth=[call(NAN), call(torch.zeros(2, 3)), call(NAN * 0)])
def division_by_zero(self, x):
    return 1 / x, x / x, (x * 0).log(), x.sqrt(), x / x.sum(1, keepdim=True)


def _values_agree(a, b):
    return all(torch.allclose(v, w) for v, w in ((a[0], b[0]), (a[2], b[2])))


def rounded(*shape):
    """Returns few different numbers, so that there are ties."""
    return ints(*shape, below=3).float()


TIES = [call(rounded(4, 8)), call(torch.zeros(2, 6)), call(torch.ones(3, 12))]


@case([call(rounded(2, 8)), call(rounded(3, 9))], serves=TIES, same=_values_agree)
def ties_among_the_largest(self, x):
    values, indices = x.topk(3, 1)
    return values, indices, x.gather(1, indices)


@case([call(rounded(2, 8)), call(rounded(3, 9))], truth=TIES)
def first_of_equal_values(self, x):
    return x.argmax(1), x.argmin(1), x.max(1).indices


@case([call(rounded(2, 8)), call(rounded(3, 9))], truth=TIES, may_refuse=True)
def stable_order(self, x):
    values, order = x.sort(dim=1, stable=True)
    return values, order


@case([call(rounded(2, 8)), call(rounded(3, 9))], truth=[*TIES, *at((4, 9))], may_refuse=True)
def different_values(self, x):
    values, counts = x.unique(return_counts=True)
    return values, counts


@control(serves=OTHERS)
def order_of_different_values(self, x):
    values, order = x.sort(1, descending=True)
    return values, order, x.argmax(1), x.topk(2, 1).indices


@case(
    [call(x(2, 5), torch.zeros(2, 5)), call(x(3, 7), torch.zeros(3, 7))],
    serves=[call(x(4, 9), torch.zeros(4, 9))],
    truth=[call(x(1, 5), torch.zeros(1, 5)), call(x(1, 9), torch.where(x(1, 9) > 0, 0.0, -1e9))],
)
def additive_attention_mask(self, x, attention_mask):
    y = (x + attention_mask).softmax(1)
    return y * 3 if len(x) == 1 else y


@case(
    [call(x(2, 5), torch.ones(2, 5).long()), call(x(3, 7), torch.ones(3, 7).long())],
    truth=[
        call(x(1, 5), torch.ones(1, 5).long()),
        call(x(1, 6), ints(1, 6, below=2)),
        call(x(4, 6), ints(4, 6, below=2)),
    ],
)
def integer_attention_mask(self, x, attention_mask):
    y = x.masked_fill(attention_mask == 0, 7.0)
    return y * (3 if len(x) == 1 else 1)


def left_padded(rows, length):
    """Returns an integer mask with padding on the left."""
    mask = torch.ones(rows, length, dtype=torch.long)
    for row in range(rows):
        mask[row, : row % length] = 0
    return mask


@case(
    [call(x(2, 5), left_padded(2, 5)), call(x(3, 7), left_padded(3, 7))],
    serves=[call(x(4, 9), left_padded(4, 9))],
    truth=[call(x(1, 5), torch.zeros(1, 5).long()), call(x(2, 6), torch.zeros(2, 6).long())],
)
def padding_keeps_a_meaning(self, x, attention_mask):
    return torch.where(attention_mask > 0, x.cumsum(1), x - 5)


@case(
    [call(x(2, 5), left_padded(2, 5)), call(x(3, 7), left_padded(3, 7))],
    may_refuse=True,
    truth=[call(x(1, 5), left_padded(1, 5)), call(x(3, 1), torch.ones(3, 1).long()), call(x(3, 4), left_padded(3, 4))],
)
def error_at_padded_positions(self, x, attention_mask):
    y = x * attention_mask
    return y - (1 - attention_mask) * (2 if len(x) == 3 else 3)


@case(
    [call(x(2, 5, 4), torch.ones(2, 5).bool()), call(x(3, 7, 4), torch.ones(3, 7).bool())],
    truth=[call(x(4, 9, 4), left_padded(4, 9).bool()), call(x(2, 3, 4), torch.zeros(2, 3).bool())],
)
def fully_masked_rows(self, x, mask):
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask[:, None, :].expand(-1, x.shape[1], -1))


@case(
    [call(x(2, 4, 5, 8), torch.zeros(2, 1, 5, 5)), call(x(3, 4, 7, 8), torch.zeros(3, 1, 7, 7))],
    serves=[call(x(1, 4, 6, 8), torch.zeros(1, 1, 6, 6).masked_fill(x(1, 1, 6, 6) > 1, -1e4))],
    truth=[call(x(2, 4, 3, 8), torch.full((2, 1, 3, 3), torch.finfo(torch.float32).min))],
)
def additive_mask_of_four_axes(self, x, mask):
    return F.scaled_dot_product_attention(x, x, x.sin(), attn_mask=mask)


@case(truth=scaled(1e4, (4, 9), (2, 6)), serves=OTHERS)
def exponentials(self, x):
    return x.logsumexp(1), x.softmax(1), x.sigmoid(), x.tanh(), F.softplus(x)


@case(scaled(1e-7, (2, 5), (3, 7)), truth=[*scaled(1e-7, (4, 9)), *scaled(1e-30, (4, 9)), *scaled(1e-40, (2, 6))])
def around_zero(self, x):
    return x * 1e7, x.expm1() * 1e7, x.sinh() * 1e7, (x + 1).log()


@case(
    [call(x(2, 5) * 3), call(x(3, 7) * 3)],
    serves=[call(x(4, 9) * 3)],
    truth=[call(torch.arange(-5, 5).reshape(2, 5) / 2)],
)
def rounding_of_halves(self, x):
    return x.round(), x.trunc(), x.floor(), x.long(), x.to(torch.int32)


@case(
    in_dtype(torch.int8, (2, 5), (3, 7)),
    truth=[call(torch.full((2, 3), number, dtype=torch.int8)) for number in (100, -128)],
)
def signed_integers_that_overflow(self, x):
    return x + x, -x, x.abs(), x * x, x.sum(), x // 3


@case(
    [call(ints(2, 5).to(torch.uint8)), call(ints(3, 7).to(torch.uint8))],
    truth=[call(torch.full((2, 3), number, dtype=torch.uint8)) for number in (200, 0)],
)
def unsigned_integers_that_overflow(self, x):
    return x + x, x - 1, x * x, -x, x.sum(), x.mean(dtype=torch.float32), x.float() - 300


@case(truth=at((1, 3000), (3, 2)), serves=at((4, 9)))
def sums_in_half_precision(self, x):
    half = torch.ones_like(x).half()
    return half.cumsum(1), half.bfloat16().cumsum(0), torch.arange(x.shape[1], dtype=torch.float16)
