"""Models that any exporter serves: each has to be proven, and right at all sizes, one row among them."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.trust.cases import at, call, control, ints, x

SIZES = at((4, 9), (1, 5), (7, 2), (2, 40))
FIVE, ROWS = at((2, 5), (3, 5)), at((1, 5), (4, 5), (30, 5))
STEPS, MORE_STEPS = at((2, 5, 4), (3, 7, 4)), at((1, 5, 4), (4, 9, 4), (2, 2, 4))
IMAGES, MORE_IMAGES = at((2, 3, 8, 8), (1, 3, 12, 10)), at((4, 3, 9, 8), (1, 3, 16, 16), (3, 3, 7, 11))


@control(FIVE, serves=ROWS)
def layers_of_a_perceptron():
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3), nn.Softmax(-1))


@control(STEPS, serves=MORE_STEPS)
def linear_over_three_axes():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


@control(IMAGES, serves=MORE_IMAGES)
def convolutions():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3, stride=2))


@control(IMAGES, serves=MORE_IMAGES)
def image_classifier():
    body = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*body, nn.Linear(4, 10))


@control(IMAGES, serves=MORE_IMAGES)
def pooling():
    return nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(3, 4, 1), nn.AvgPool2d(2, 1))


@control(IMAGES, serves=MORE_IMAGES)
def depthwise_convolution():
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, groups=3), nn.Hardswish(), nn.Conv2d(6, 3, 1))


@control(IMAGES, serves=at((4, 3, 8, 12), (1, 3, 16, 16)))
class DownAndUp(nn.Module):
    """A small U-Net, for sizes that are even."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(4, 3, 2, stride=2)

    def forward(self, x):
        return torch.cat([self.up(self.down(x).relu()), x], 1)


@control(FIVE, serves=ROWS)
class WeightsThatCancel(nn.Module):
    """Scales by sums of weights that are small next to the weights, so that their last digits are arbitrary."""

    def __init__(self):
        super().__init__()
        weights = torch.randn(64, 5)
        self.weights = nn.Parameter(weights - weights.mean(0) + 1e-3)

    def forward(self, x):
        return x * self.weights.sum(0)


@control(IMAGES, serves=MORE_IMAGES)
def warped_image(self, x):
    turned = torch.tensor([[[0.6, 0.3, 0.0], [-0.3, 0.6, 0.0]]]).expand(len(x), 2, 3)
    grid = F.affine_grid(turned, x.shape, align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


@control(IMAGES, serves=MORE_IMAGES)
def doubled_image(self, x):
    return F.interpolate(x, scale_factor=2, mode="nearest")


@control(IMAGES, serves=MORE_IMAGES)
def resized_to_the_input(self, x):
    small = F.avg_pool2d(x, 2)
    return x - F.interpolate(small, size=x.shape[-2:], mode="bilinear", align_corners=False)


@control(at((2, 3, 20), (1, 3, 26)), serves=at((4, 3, 21), (1, 3, 40)))
def dilated_convolution():
    return nn.Sequential(nn.Conv1d(3, 4, 3, dilation=2), nn.ELU(), nn.Conv1d(4, 2, 5, padding=2))


@control(STEPS, serves=MORE_STEPS)
class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


@control(STEPS, serves=MORE_STEPS)
class CausalAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


@control(STEPS, serves=MORE_STEPS)
class AttentionByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        scores = self.query(x) @ self.key(x).mT / 2
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ x


@control(STEPS, serves=MORE_STEPS)
class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=True)

    def forward(self, x):
        return self.layer(x)


@control([call(ints(2, 5)), call(ints(3, 7))], serves=[call(ints(1, 5)), call(ints(4, 9)), call(ints(2, 2))])
class BagOfWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 3)

    def forward(self, ids):
        return self.head(self.embedding(ids).mean(1))


@control(
    [call(ints(2, 5), torch.ones(2, 5).long()), call(ints(3, 7), ints(3, 7, below=2))],
    serves=[call(ints(1, 5), ints(1, 5, below=2)), call(ints(4, 9), torch.ones(4, 9).long())],
)
class MaskedMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)

    def forward(self, input_ids, attention_mask):
        weights = attention_mask[..., None].float()
        return (self.embedding(input_ids) * weights).sum(1) / weights.sum(1).clamp(min=1e-6)


@control(STEPS, serves=MORE_STEPS)
def rotary_positions(self, x):
    angles = torch.arange(x.shape[1])[:, None] / torch.tensor([1.0, 10.0])
    left, right = x.chunk(2, -1)
    return torch.cat([left * angles.cos() - right * angles.sin(), left * angles.sin() + right * angles.cos()], -1)


@control(STEPS, serves=MORE_STEPS)
class SinusoidalPositions(nn.Module):
    def __init__(self):
        super().__init__()
        positions = torch.arange(64)[:, None] / torch.tensor([1.0, 5.0, 25.0, 125.0])
        self.register_buffer("table", positions.sin())

    def forward(self, x):
        return x + self.table[: x.shape[1]]


@control(STEPS, serves=MORE_STEPS)
class RootMeanSquareNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 4))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


@control(STEPS, serves=MORE_STEPS)
class GatedLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


@control(STEPS, serves=at((1, 5, 4), (4, 9, 4)))
def last_step(self, x):
    return x[:, -1], x[:, :1], x[:, 1:].sum(1)


@control(SIZES[:2], serves=SIZES[2:])
def elementwise(self, x):
    return x.sin() * x.exp() - x.abs().sqrt(), (x > 0).float(), x.clamp(-1, 1)


@control(serves=SIZES)
def reductions(self, x):
    return x.sum(1), x.mean(0), x.amax(1), x.amin(0), x.prod(1), x.argmax(1)


@control(serves=SIZES)
def reshapes(self, x):
    return x.reshape(-1), x.T, x.unsqueeze(1), x[None].expand(3, -1, -1), x.flatten()[:, None]


@control(serves=SIZES)
def joined_and_stacked(self, x):
    return torch.cat([x, x * 2], 1), torch.stack([x, -x]), torch.cat([x, torch.zeros(len(x), 1)], 1)


@control(serves=SIZES)
def outer_product(self, x):
    return torch.einsum("bi,bj->bij", x, x), x[:, :, None] * x[:, None]


@control(
    [call(x(2, 5), x(5, 3)), call(x(3, 7), x(7, 4))],
    serves=[call(x(4, 9), x(9, 2)), call(x(1, 5), x(5, 5))],
)
def two_matrices(self, a, b):
    return (a @ b).softmax(-1)


@control([call(x(2, 5), x(2, 5)), call(x(3, 7), x(3, 7))], serves=[call(x(4, 9), x(4, 9)), call(y=x(1, 5), x=x(1, 5))])
def two_inputs_of_one_size(self, x, y):
    return x * y + x, (x - y).pow(2).mean(1)


@control(
    [call(x(2, 5), x(5)), call(x(3, 7), x(7))],
    serves=[call(x(4, 9), x(9)), call(x(1, 5), x(5))],
)
def vector_for_all_rows(self, x, y):
    return x * y


@control(
    [call({"a": x(2, 5), "b": [x(2, 5)]}), call({"a": x(3, 7), "b": [x(3, 7)]})],
    serves=[call({"a": x(4, 9), "b": [x(4, 9)]}), call({"b": [x(1, 5)], "a": x(1, 5)})],
)
def nested_inputs(self, batch):
    return {"total": batch["a"] + batch["b"][0], "parts": (batch["a"] * 2, [batch["b"][0]])}


@control(
    [call(x(2, 5)), call(x(3, 7), x(3, 7))],
    serves=[call(x(4, 9)), call(x(4, 9), x(4, 9)), call(x(1, 5), y=x(1, 5)), call(x(4, 9), None)],
)
def added_if_given(self, x, y=None):
    return x if y is None else x + y


@control([call(x(2, 5), 2.0, flag=True), call(x(3, 7), 2.0, flag=True)], serves=[call(x(4, 9), 2.0, flag=True)])
def constants_that_stay(self, x, factor, flag=False):
    return x * factor if flag else x


@control([call(ints(2, 5)), call(ints(3, 7))], serves=[call(ints(4, 9)), call(ints(1, 5))])
def integers(self, ids):
    return ids + 1, ids * 2 - 3, ids // 2, ids % 3, (ids == 2).sum(1), ids.float().mean(1)


@control([call(ints(2, 5)), call(ints(3, 7))], serves=[call(ints(4, 9)), call(ints(1, 5))])
def shifted_labels(self, ids):
    return torch.cat([ids.new_full((len(ids), 1), 7), ids[:, :-1]], 1), ids.ne(0).cumsum(1)


@control(STEPS, serves=[*at((1, 5, 4), (4, 9, 4))])
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x):
        steps, (hidden, _) = self.lstm(x)
        return self.head(steps), hidden[-1]


@control(
    [call(x(2, 1, 4), x(2, 5, 4)), call(x(3, 2, 4), x(3, 8, 4))],
    serves=[call(x(1, 1, 4), x(1, 9, 4)), call(x(4, 3, 4), x(4, 6, 4))],
)
class AppendsToAPast(nn.Module):
    def __init__(self):
        super().__init__()
        self.key = nn.Linear(4, 4)

    def forward(self, x, past):
        whole = torch.cat([past, self.key(x)], 1)
        return (x @ whole.mT).softmax(-1) @ whole, whole


@control(STEPS, serves=MORE_STEPS)
class Experts(nn.Module):
    """Every expert computes, and the two best are added."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        scores = torch.zeros_like(self.router(x)).scatter(-1, chosen, weights)
        return torch.einsum("bsi,eij,bse->bsj", x, self.experts, scores)


@control(IMAGES, serves=at((4, 3, 8, 12), (1, 3, 16, 16)))
class PatchTokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 4, 2, stride=2)
        self.first = nn.Parameter(torch.randn(1, 1, 4))

    def forward(self, x):
        tokens = self.patches(x).flatten(2).mT
        return torch.cat([self.first.expand(len(x), -1, -1), tokens], 1)


@control(STEPS, serves=MORE_STEPS)
class TiedWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(4, 6, bias=False)

    def forward(self, x):
        return F.log_softmax(self.embedding(x) @ self.embedding.weight, -1)


@control(at((1, 5, 4), (1, 7, 4)), serves=at((1, 9, 4), (3, 5, 4)))
class BatchThatNeverVaried(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).softmax(1)


@control([call(x(2, 8, 4)), call(x(3, 12, 4))], serves=[call(x(1, 16, 4)), call(x(4, 4, 4))])
def blocks_of_four(self, x):
    blocks = x.unflatten(1, (-1, 4))
    return blocks.mean(2), blocks.flatten(1, 2)


@control([call(x(2, 6), x(6, 6)), call(x(3, 6), x(6, 6))], serves=[call(x(1, 6), x(6, 6)), call(x(9, 6), x(6, 6))])
def matrix_of_fixed_size(self, x, matrix):
    return x @ matrix @ matrix.T


@control([call(x(5), x(5)), call(x(7), x(7))], serves=[call(x(9), x(9)), call(x(2), x(2))])
def vectors(self, a, b):
    return a.dot(b), a * b, torch.outer(a, b)


@control(
    [call(x(2, 5), torch.tensor(2.0)), call(x(3, 7), torch.tensor(0.5))],
    serves=[call(x(4, 9), torch.tensor(-1.0)), call(x(1, 5), torch.tensor(0.0))],
)
def number_in_a_tensor(self, x, factor):
    return torch.where(factor > 0, x * factor, x - 1)
