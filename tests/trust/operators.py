"""Operators whose ONNX form may mean something else, at the values where it does.

Where onnxruntime itself cannot, a finding that names the operator is enough.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.trust.cases import at, call, case, ints, x

NAN, INF = float("nan"), float("inf")
OTHERS = at((4, 9), (2, 6), (1, 5))
SPECIAL = [call(torch.tensor([[1.0, NAN, -2.0, 0.0], [INF, 3.0, -INF, -0.0]])), call(torch.full((2, 3), NAN))]
EXTREME = [call(torch.tensor([[-200.0, -100.0, -88.5, 0.0], [1e-7, -1e-7, 100.0, 1e8]]))]


@case(serves=OTHERS, truth=[*EXTREME, *SPECIAL], finding="logsigmoid|log_sigmoid")
def log_of_a_sigmoid(self, x):
    return F.logsigmoid(x)


@case(serves=OTHERS, truth=EXTREME, finding="binary_cross_entropy")
def cross_entropy_with_logits(self, x):
    return F.binary_cross_entropy_with_logits(x, (x > 0).float(), reduction="none")


@case(serves=OTHERS, truth=EXTREME, finding="logaddexp")
def log_of_added_exponentials(self, x):
    return torch.logaddexp(x, x.flip(1)), torch.logaddexp2(x, x * 0.5)


@case([call(x(2, 5).abs()), call(x(3, 7).abs())], truth=[call(x(4, 9).abs() * 1e-7)], finding="log1p|expm1")
def close_to_one(self, x):
    return torch.log1p(x) * 1e7, torch.expm1(x) * 1e7


@case(serves=OTHERS, truth=[*EXTREME, *SPECIAL], finding="remainder|fmod|%")
def remainders(self, x):
    return x % 0.7, torch.fmod(x, 0.7), x % -3


@case(serves=OTHERS, truth=SPECIAL, finding="amax|max|NaN")
def largest_with_nan(self, x):
    return x.amax(1), x.max(1).values, F.max_pool1d(x[:, None], 2)


@case(serves=OTHERS, truth=SPECIAL, finding="cummax|median|sign|NaN", may_refuse=True)
def median_and_running_maximum(self, x):
    return x.median(1).values, x.cummax(1).values, x.sign()


@case(serves=OTHERS, truth=[*SPECIAL, *at((2, 0))], finding="norm|NaN")
def norms(self, x):
    return x.norm(dim=1), x.norm(p=1, dim=1), x.norm(p=float("inf"), dim=1), F.normalize(x, dim=1)


@case([call(ints(2, 5)), call(ints(3, 7))], truth=[call(torch.tensor([[20000001, -20000001, 2**53 + 1, -7]]))])
def rounded_division_of_integers(self, x):
    return torch.div(x, 3, rounding_mode="floor"), torch.div(x, 3, rounding_mode="trunc"), x // -4


@case([call(ints(2, 5)), call(ints(3, 7))], truth=[call(torch.tensor([[3, 7, -5, 94906267], [2, 0, 1, -1]]))])
def integer_powers(self, x):
    return x**2, x**3, 2 ** x.clamp(0, 20)


@case(
    [call(x(2, 5) > 0, x(2, 5) > 0), call(x(3, 7) > 0, x(3, 7) > 0)],
    serves=[call(x(4, 9) > 0, x(4, 9) > 0)],
    may_refuse=True,
)
def filled_boolean_mask(self, a, b):
    return a.masked_fill(b, True), torch.where(b, a, ~a)


@case([call(x(2, 4, 5)), call(x(3, 4, 7))], truth=at((1, 4, 6), (2, 4, 3), (2, 4, 1)), finding="nearest")
def nearest_exact(self, x):
    return F.interpolate(x, scale_factor=1.7, mode="nearest-exact"), F.interpolate(x, size=5, mode="nearest")


@case(
    [call(x(2, 6), ints(2, 6, below=4)), call(x(3, 8), ints(3, 8, below=4))],
    truth=[call(x(4, 9), ints(4, 9, below=4)), call(x(1, 5), torch.zeros(1, 5).long())],
    finding="scatter",
)
def scattered_means(self, x, index):
    return torch.zeros(len(x), 4).scatter_reduce(1, index, x, "mean", include_self=False)


@case(
    [call(x(2, 6), ints(2, 6, below=4)), call(x(3, 8), ints(3, 8, below=4))],
    serves=[call(x(4, 9), ints(4, 9, below=4)), call(x(2, 4), torch.zeros(2, 4).long())],
)
def scattered_sums(self, x, index):
    return torch.zeros(len(x), 4).scatter_add(1, index, x), x.gather(1, index)


@case(
    [call(x(2, 6), ints(2, below=6)), call(x(4, 6), ints(4, below=6))],
    truth=[call(x(5, 6), ints(5, below=6)), call(x(5, 6), torch.tensor([0, -100, 3, -100, 5]))],
    finding="cross_entropy",
)
def cross_entropy_with_smoothing(self, x, target):
    return F.cross_entropy(x, target, label_smoothing=0.1), F.cross_entropy(x, target)


@case([call(ints(2, 5)), call(ints(3, 7))], serves=[call(ints(4, 9)), call(ints(1, 5))], truth=[call(-ints(2, 4))])
class Embedding(nn.Module):
    """Also with a padding index; the model raises for negative indices."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4, padding_idx=0)

    def forward(self, ids):
        return self.embedding(ids)


@case(
    [call(ints(6), torch.tensor([0, 2])), call(ints(9), torch.tensor([0, 4, 5]))],
    truth=[call(ints(7), torch.tensor([0, 3, 3, 5])), call(ints(4), torch.tensor([0]))],
    may_refuse=True,
)
class BagOfEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(8, 4, mode="mean")

    def forward(self, ids, offsets):
        return self.bag(ids, offsets)


@case(
    [call(x(2, 5, 3), None), call(x(3, 7, 3), (x(2, 3, 4), x(2, 3, 4)))],
    truth=[call(x(4, 9, 3), None), call(x(1, 4, 3), (x(2, 1, 4), x(2, 1, 4))), call(x(2, 1, 3)), call(x(5, 3))],
    may_refuse=True,
)
class LongShortTermMemory(nn.Module):
    """The hidden state is sometimes left out."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True, bidirectional=True)

    def forward(self, x, hidden=None):
        return self.lstm(x, hidden)


def _padding(rows, length):
    mask = torch.zeros(rows, length, dtype=torch.bool)
    for row in range(rows):
        mask[row, length - row % length :] = True
    return mask


@case(
    [call(x(2, 5, 8), _padding(2, 5)), call(x(3, 7, 8), _padding(3, 7))],
    truth=[call(x(4, 9, 8), _padding(4, 9)), call(x(1, 3, 8), _padding(1, 3)), call(x(2, 4, 8), ~_padding(2, 4))],
)
class EncoderWithPadding(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x, padding):
        return self.encoder(x, src_key_padding_mask=padding)


@case(
    [call(x(2, 5, 8), _padding(2, 5)), call(x(3, 7, 8), _padding(3, 7))],
    serves=[call(x(4, 9, 8), _padding(4, 9))],
    truth=[call(x(1, 3, 8), _padding(1, 3)), call(x(2, 4, 8), torch.ones(2, 4).bool())],
)
class AttentionWithPadding(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, padding):
        return self.attention(x, x, x, key_padding_mask=padding, need_weights=True)


@case(
    [call(x(2, 2, 4, 8), x(2, 2, 6, 8)), call(x(3, 2, 5, 8), x(3, 2, 7, 8))],
    truth=[call(x(1, 2, 1, 8), x(1, 2, 6, 8)), call(x(1, 2, 6, 8), x(1, 2, 3, 8)), call(x(2, 2, 5, 8), x(2, 2, 5, 8))],
)
def causal_with_fewer_queries(self, query, keys):
    return F.scaled_dot_product_attention(query, keys, keys * 2, is_causal=True)


@case([call(x(2, 4, 6, 6)), call(x(3, 4, 8, 9))], serves=at((1, 4, 5, 7), (4, 4, 2, 2)))
def normalised_by_group(self, x):
    return F.group_norm(x, 2), F.instance_norm(x), F.layer_norm(x, x.shape[-1:])


@case([call(x(2, 4, 6, 6)), call(x(3, 4, 8, 10))], serves=at((1, 4, 4, 6)), truth=at((1, 4, 5, 7), (1, 4, 1, 2)))
def shuffled_pixels(self, x):
    y = F.pixel_shuffle(x, 2)
    return y, F.pixel_unshuffle(y, 2), F.unfold(x, 3, padding=1)


@case(
    [call(x(2, 3, 6, 6), x(2, 4, 5, 2)), call(x(3, 3, 8, 7), x(3, 6, 4, 2))],
    truth=[call(x(1, 3, 5, 9), x(1, 2, 2, 2) * 3), call(x(1, 3, 2, 2), x(1, 2, 7, 2))],
    finding="grid_sample",
)
def sampled_on_a_grid(self, x, grid):
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


@case([call(x(2, 3, 6, 6)), call(x(3, 3, 8, 9))], serves=at((1, 3, 5, 7), (4, 3, 3, 3)))
class TransposedConvolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1, output_padding=1)

    def forward(self, x):
        return self.up(x), F.avg_pool2d(x, 2, ceil_mode=False), F.pad(x, (1, 1, 0, 2), mode="replicate")


@case(
    [call(x(4, 3), x(6, 3)), call(x(5, 3), x(7, 3))], serves=[call(x(8, 3), x(4, 3))], truth=[call(x(40, 3), x(30, 3))]
)
def distances_of_pairs(self, a, b):
    return torch.cdist(a, b)


@case(serves=OTHERS, truth=[*SPECIAL, call(torch.tensor([[-1.0, 0.0, 1.0]]))])
def buckets(self, x):
    limits = torch.tensor([-1.0, 0.0, 1.0])
    return torch.bucketize(x, limits), torch.searchsorted(limits, x.contiguous(), right=True)


@case(serves=OTHERS, truth=EXTREME)
def smooth_activations(self, x):
    return F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), F.mish(x), F.softplus(x, threshold=5), F.elu(x), x.erf()


@case(
    [call(x(4, 3), ints(2, below=4)), call(x(6, 3), ints(3, below=4))],
    serves=[call(x(5, 3), ints(7, below=5))],
    truth=[
        call(x(5, 3), torch.tensor([-1, 0])),
        call(x(5, 3), torch.tensor([2, 2, 2])),
        call(x(5, 3), torch.tensor([5])),
    ],
)
def rows_by_index(self, x, index):
    return x[index], x.index_add(0, index, torch.ones(len(index), 3)), x.index_fill(0, index, 0.5)


@case(may_refuse=True, truth=[*OTHERS, call(torch.zeros(2, 4))])
def selected_values(self, x):
    return x[x > 0], (x > 0).nonzero()


@case(serves=at((4, 9)), truth=[*OTHERS, *SPECIAL])
def replaced_special_values(self, x):
    return torch.nan_to_num(x, nan=0.5), torch.nan_to_num(x, posinf=9.0), x.nansum(1)


@case(serves=OTHERS, truth=SPECIAL)
def moments(self, x):
    y = torch.cat([x, x + 1], 1)
    return torch.var_mean(y, 1), y.std(1, unbiased=False), y.var(correction=0)


@case(serves=OTHERS, truth=at((4, 4), (2, 2)))
def diagonals(self, x):
    return x.diagonal(), x.tril(1), x.triu(-1), x.trace() if x.dim() > 2 else x.T.diagonal(1)


@case(
    may_refuse=True, truth=[*OTHERS, call(torch.tensor([[0.0, -0.0, 2.0, -2.0]])), *SPECIAL], finding="sign|atan2|NaN"
)
def signs(self, x):
    return torch.atan2(x, x.flip(1)), torch.copysign(x.abs(), -x), x.sign() * 2


@case(may_refuse=True, serves=at((4, 3, 3)), recorded=at((2, 3, 3), (3, 3, 3)), truth=[call(torch.zeros(2, 3, 3))])
def linear_algebra(self, x):
    return torch.linalg.det(x), torch.linalg.inv(x + 3 * torch.eye(3))


@case(may_refuse=True, serves=OTHERS)
def fourier_transform(self, x):
    return torch.fft.rfft(x).abs(), torch.fft.irfft(torch.fft.rfft(x), n=x.shape[1])


@case(serves=OTHERS, truth=at((3, 1)))
def kept_by_rank(self, x):
    rank = x.argsort(1).argsort(1)
    return torch.where(rank < x.shape[1] // 2, 0.0, x), x.kthvalue(1, 1).values


@case(
    [call(x(2, 5, 3)), call(x(3, 7, 3))],
    serves=[call(x(4, 9, 3)), call(x(1, 4, 3))],
    truth=[call(x(2, 1, 3)), call(x(2, 5, 3), x(1, 2, 4)), call(x(2, 0, 3)), call(x(0, 5, 3))],
)
class GatedRecurrentUnit(nn.Module):
    """The hidden state is left out. onnxruntime ends the process for empty inputs."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 4, batch_first=True, bidirectional=False)

    def forward(self, x, hidden=None):
        return self.gru(x, hidden)


@case(
    [call(ints(2, 5), ints(2, 5)), call(ints(3, 7), ints(3, 7))],
    serves=[call(ints(4, 9), ints(4, 9))],
    truth=[call(ints(2, 4), torch.full((2, 4), 64)), call(ints(2, 4) - 4, ints(2, 4))],
)
def shifted_bits(self, x, count):
    return x << count, x >> count


@case([call(x(2, 6, 5)), call(x(3, 6, 7))], serves=[call(x(4, 6, 9)), call(x(1, 6, 4))], truth=[call(x(2, 6, 1))])
def taken_along_an_axis(self, x):
    best = x.argmax(1, keepdim=True)
    last = x.take_along_dim(best - x.shape[1], 1)
    return x.take_along_dim(best, 1), last, x.take_along_dim(x[:1].argsort(2), 2), x.take_along_dim(best)


@case(serves=at((4, 9)), truth=at((1, 6), (4, 1)))
def covariances(self, x):
    return x.T.cov(), x.cov(correction=0), torch.corrcoef(x), x[0].cov()


@case(
    [call(ints(2, 5)), call(ints(3, 7))],
    serves=[call(ints(4, 9)), call(ints(1, 1))],
    truth=[call(ints(2, 5) - 8), call(ints(2, 5) + 8)],
)
def one_of_eight_classes(self, x):
    return F.one_hot(x, 8).float()


@case(
    [call(x(2, 5), ints(2, below=5)), call(x(3, 5), ints(3, below=5))],
    serves=[call(x(4, 5), ints(4, below=5)), call(x(2, 5), torch.tensor([-100, 2]))],
    truth=[call(x(2, 5), torch.tensor(target)) for target in ([-100, -100], [7, 2], [-1, 2])],
)
def losses_of_classes(self, x, target):
    return F.cross_entropy(x, target), F.nll_loss(x, target, reduction="none")


@case(
    [call(x(2, 5, 3), torch.tensor([5, 3])), call(x(3, 7, 3), torch.tensor([7, 4, 2]))],
    serves=[call(x(4, 6, 3), torch.tensor([6, 1, 2, 6])), call(x(2, 6, 3), torch.tensor([4, 3]))],
    truth=[call(x(2, 6, 3), torch.tensor(lengths)) for lengths in ([0, 3], [-1, 3], [7, 3])],
)
class PackedGru(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 4, batch_first=True, bidirectional=True)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        rows, last = self.gru(packed)
        return nn.utils.rnn.pad_packed_sequence(rows, batch_first=True)[0], last


@case(
    [call(x(2, 5), torch.tensor([1, 2])), call(x(3, 7), torch.tensor([1, 3, 2]))],
    serves=[call(x(3, 6), torch.tensor([1, 0, 4]))],
    truth=[call(x(2, 6), torch.tensor([0, 0])), call(x(2, 6), torch.tensor([-1, 2]))],
)
def repeated_rows(self, x, repeats):
    return x.repeat_interleave(repeats, 0) * 2


@case(
    [call(ints(6), torch.tensor([0, 2, 4])), call(ints(9), torch.tensor([0, 3, 3, 7]))],
    serves=[call(ints(5), torch.tensor([0, 1])), call(ints(5), torch.tensor([0, 5]))],
    truth=[call(ints(5), torch.tensor(offsets)) for offsets in ([0], [1, 3], [0, 4, 2], [0, 6])],
)
class LargestOfBags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(8, 4, mode="max")

    def forward(self, ids, offsets):
        return self.bag(ids, offsets)


@case(
    [call(x(2, 5), torch.tensor(3)), call(x(3, 7), torch.tensor(4))],
    serves=[call(x(2, 6), torch.tensor(0)), call(x(2, 6), torch.tensor(4))],
    truth=[call(x(2, 5), torch.tensor(start)) for start in (4, -1, -2, -9)],
)
def two_columns_from_a_place(self, x, start):
    return x.narrow(1, start.item(), 2)


@case(
    [call(x(2, 3, 3)), call(x(4, 3, 3))],
    serves=[call(x(3, 3, 3))],
    truth=[call(torch.ones(2, 3, 3)), call(torch.zeros(1, 3, 3)), call(torch.full((1, 3, 3), NAN))],
)
def solved(self, x):
    return torch.linalg.inv(x), torch.linalg.solve(x, x + 1)


@case(
    [call(x(2, 5).sigmoid(), x(2, 5).sigmoid()), call(x(3, 7).sigmoid(), x(3, 7).sigmoid())],
    serves=[call(torch.tensor([[0.0, 1.0, 1.0]]), torch.tensor([[0.0, 1.0, 0.0]]))],
    truth=[call(x(2, 5).sigmoid() - 2, x(2, 5).sigmoid()), call(x(2, 5).sigmoid(), x(2, 5).sigmoid() + 2)],
)
def losses_of_probabilities(self, x, target):
    return F.binary_cross_entropy(x, target)


@case(
    [call(x(2, 5), torch.tensor([1, 2])), call(x(3, 7), torch.tensor([3, 1, 2]))],
    serves=[call(x(2, 9), torch.tensor([4, 2]))],
    truth=[call(x(2, 5), torch.tensor([0, 6])), call(x(2, 5), torch.tensor([3, 3]))],
)
def a_check_of_lengths(self, x, lengths):
    if (lengths < 1).any():
        raise ValueError("a sequence without tokens")
    assert (lengths < 6).all()
    return x * lengths[:, None]


@case(
    [call(x(2, 5, 8)), call(x(3, 7, 8)), call(x(3, 7, 8), _padding(3, 7).flip(1))],
    serves=[call(x(4, 6, 8)), call(x(2, 6, 8), _padding(2, 6).flip(1))],
    truth=[call(x(2, 6, 8), torch.ones(2, 6).bool())],
)
class EncoderWithPaddingInFront(nn.Module):
    """Padding alone is an error in eager mode without gradients."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x, padding=None):
        return self.encoder(x, src_key_padding_mask=padding)


@case(
    [call(x(2, 6).sigmoid()), call(x(3, 9).sigmoid())],
    serves=[call(torch.zeros(2, 5)), call((torch.arange(51) / 50)[None]), call(torch.tensor([[0.8, 0.7]]))],
)
def histograms_and_bins(self, x):
    limits = torch.linspace(0, 1, 16)
    bins = [((x > limits[i].item()) & (x <= limits[i + 1].item())).float().mean() for i in range(10, 15)]
    return (
        torch.histc(x, 10),
        torch.histc(x, 15, -0.1, 1.1),
        torch.stack(bins),
        x[..., None] <= torch.linspace(-1, 1, 11),
    )


@case(
    [call(x(2, 6).sigmoid(), x(2, 6).sigmoid()), call(x(3, 9).sigmoid(), x(3, 9).sigmoid())],
    serves=[call(torch.tensor([[0.0, math.nan, 1.0, 0.5]]), torch.tensor([[math.nan, 1.0, 0.0, math.inf]]))],
)
def logits_and_products_of_logarithms(self, x, y):
    return torch.logit(x, 1e-3), torch.logit(x), torch.xlogy(x, y)


@case(
    [call(x(2, 6), torch.tensor([[0, 3, 5], [2, 1, 0]])), call(x(3, 9), torch.tensor([[0, 1, 2, 3, 4]] * 3))],
    serves=[call(x(1, 7), torch.tensor([[5, 2]]))],
)
def scattered_parts(self, x, index):
    rows = torch.zeros(x.shape[0], 6)
    return rows.scatter(1, index, x), rows.scatter_add(1, index, x), rows.clone().scatter_reduce_(1, index, x, "mean")


@case([call(x(2, 3, 9, 8)), call(x(3, 3, 14, 11))], serves=[call(x(1, 3, 10, 12)), call(x(2, 3, 7, 7))])
class Enlarged(nn.Module):
    """Each transposed convolution gives the size that the convolution before it had."""

    def __init__(self):
        super().__init__()
        self.smaller, self.larger = nn.Conv2d(3, 4, 3, 2, 1), nn.ConvTranspose2d(4, 3, 3, 2, 1)

    def forward(self, x):
        return self.larger(self.smaller(x), output_size=x.shape[-2:])


@case([call(x(2, 3, 5, 4)), call(x(3, 3, 7, 4))], serves=[call(x(1, 3, 9, 4)), call(x(2, 3, 1, 4))])
def causal_for_several_tokens(self, x):
    return F.scaled_dot_product_attention(x, x, x, is_causal=x.shape[2] > 1)


@case([call(x(2, 5)), call(x(3, 7))], serves=[call(x(4, 6))])
def numbers_of_tensors(self, x):
    return x * float(x.mean()) + int(x.sum() * 10), torch.full_like(x, float(x.max()))


@case(
    [call(x(2, 5), torch.tensor([1, 4])), call(x(3, 7), torch.tensor([6, 0, 7]))],
    serves=[call(x(2, 9), torch.tensor([9, 3]))],
)
def losses_that_ignore_places_beyond_the_end(self, scores, target):
    return F.cross_entropy(scores, target.clamp(0, scores.shape[1]), ignore_index=scores.shape[1])


def _integers(dtype, *shape):
    low, high = max(-99, torch.iinfo(dtype).min), min(200, torch.iinfo(dtype).max)
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@case(
    [call(*(_integers(dtype, rows, 5) for dtype in (torch.uint8, torch.int16, torch.int64))) for rows in (2, 3)],
    serves=[call(*(_integers(dtype, 6, 5) for dtype in (torch.uint8, torch.int16, torch.int64)))],
)
def shifted_integers(self, a, b, c):
    bits = (a[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits, a << 1, (b >> 1) + (b << 2), (c[..., None] << torch.arange(8)).sum(-1), c >> 2


@case([call(x(2, 5)), call(x(3, 7))], serves=[call(x(7, 3)), call(x(4, 4))])
def written_diagonals(self, x):
    products, above, below, pairs = x.T @ x, x.clone(), x.clone(), torch.stack([x, x + 1], 1)
    products.diagonal().fill_(0)
    above.diagonal(1).mul_(3)
    below.diagonal(-1).copy_(below.diagonal(-1) + 1)
    pairs.diagonal(0, 0, 2).add_(5)
    return products, above, below, pairs
