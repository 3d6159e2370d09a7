"""Tabular data, recommendation, time series, reinforcement learning."""

import torch
from cases import case, ints, randn
from torch import nn
from torch.nn import functional as F

ROWS, MORE_ROWS = [(2,), (5,)], [(1,), (17,)]


@case(ROWS, MORE_ROWS)
def categories_and_numbers():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.columns = nn.ModuleList(nn.Embedding(size, 4) for size in (10, 20, 30))
            self.norm, self.head = nn.BatchNorm1d(5), nn.Sequential(nn.Linear(17, 16), nn.ReLU(), nn.Linear(16, 1))

        def forward(self, categories, numbers):
            found = [column(categories[:, index]) for index, column in enumerate(self.columns)]
            return self.head(torch.cat([*found, self.norm(numbers)], -1)).squeeze(-1)

    model = Table()
    return model, lambda rows: model(ints(rows, 3, below=10), randn(rows, 5))


@case(ROWS, MORE_ROWS)
def factorisation_machine():
    class Machine(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.factors = nn.Embedding(100, 1), nn.Embedding(100, 8)
            self.register_buffer("offsets", torch.tensor([0, 30, 60]))

        def forward(self, fields):
            found = self.factors(fields + self.offsets)
            pairs = 0.5 * (found.sum(1).square() - found.square().sum(1)).sum(-1)
            return torch.sigmoid(self.linear(fields + self.offsets).sum((1, 2)) + pairs)

    model = Machine()
    return model, lambda rows: model(ints(rows, 3, below=30))


@case([(3, 10), (5, 14)], [(1, 6), (8, 30)])
def bags_of_words():
    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(50, 8, mode="mean"), nn.Linear(8, 4)

        def forward(self, words, offsets):
            return self.head(self.bag(words, offsets))

    model = Bags()

    def use(rows, words):
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), torch.randperm(words - 1)[: rows - 1].sort().values + 1])
        model(ints(words), offsets)

    return model, use


@case([(3, 4), (5, 6)], [(1, 5), (8, 9)])
def bags_of_equal_length():
    model = nn.EmbeddingBag(50, 8, mode="sum")
    return model, lambda rows, words: model(ints(rows, words))


@case(ROWS, MORE_ROWS)
def deep_recommendation():
    class Recommendation(nn.Module):
        def __init__(self):
            super().__init__()
            self.bottom, self.bags = nn.Linear(6, 8), nn.ModuleList(nn.Embedding(20, 8) for _ in range(3))
            self.top = nn.Sequential(nn.Linear(8 + 6, 8), nn.ReLU(), nn.Linear(8, 1))
            self.register_buffer("pairs", torch.tril_indices(4, 4, -1))

        def forward(self, dense, sparse):
            first = self.bottom(dense).relu()
            stacked = torch.stack([first, *(bag(column) for bag, column in zip(self.bags, sparse, strict=True))], 1)
            crossed = torch.bmm(stacked, stacked.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
            return self.top(torch.cat([first, crossed], -1)).sigmoid()

    model = Recommendation()
    return model, lambda rows: model(randn(rows, 6), [ints(rows, below=20) for _ in range(3)])


@case(ROWS, MORE_ROWS)
def attentive_table():
    class Attentive(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 2)

        def forward(self, x):
            x = self.norm(x)
            prior, total = torch.ones_like(x), torch.zeros(x.shape[0], 2)
            for step in self.steps:
                ordered = (step(x) * prior).sort(-1, descending=True).values
                sums, count = ordered.cumsum(-1) - 1, torch.arange(1, 9)
                support = (ordered * count > sums).sum(-1, keepdim=True)
                mask = (step(x) * prior - sums.gather(-1, support - 1) / support).clamp(min=0)
                prior, total = prior * (1.3 - mask), total + self.head(mask * x).relu()
            return total

    model = Attentive()
    return model, lambda rows: model(randn(rows, 8))


@case(ROWS, MORE_ROWS)
def soft_decision_tree():
    class Tree(nn.Module):
        def __init__(self):
            super().__init__()
            self.split, self.leaves = nn.Linear(6, 7), nn.Parameter(randn(8, 3))

        def forward(self, x):
            right = self.split(x).sigmoid()
            path = x.new_ones(x.shape[0], 1)
            for level in range(3):
                here = right[:, 2**level - 1 : 2 ** (level + 1) - 1]
                path = torch.stack([path * (1 - here), path * here], -1).flatten(1)
            return path @ self.leaves

    model = Tree()
    return model, lambda rows: model(randn(rows, 6))


@case([(2, 24), (3, 48)], [(1, 36), (4, 96)])
def series_in_patches():
    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layer = nn.Linear(8, 16), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.head = nn.Linear(16, 4)

        def forward(self, series):
            mean, deviation = series.mean(1, keepdim=True), series.std(1, keepdim=True) + 1e-5
            patches = ((series - mean) / deviation).unfold(1, 8, 4)
            return self.head(self.layer(self.embed(patches)).mean(1)) * deviation + mean

    model = Patches()
    return model, lambda batch, steps: model(randn(batch, steps))


@case([(2, 24), (3, 48)], [(1, 36), (4, 96)])
def series_with_trend_and_season():
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.trend, self.season = nn.Conv1d(3, 3, 5, padding=2), nn.Conv1d(3, 3, 3, padding=1)

        def forward(self, series):
            front, back = series[:, :1].repeat(1, 2, 1), series[:, -1:].repeat(1, 2, 1)
            padded = torch.cat([front, series, back], 1).transpose(1, 2)
            trend = F.avg_pool1d(padded, 5, 1)
            return (self.trend(trend) + self.season(series.transpose(1, 2) - trend)).transpose(1, 2)

    model = Linear()
    return model, lambda batch, steps: model(randn(batch, steps, 3))


@case([(2, 24), (3, 48)], [(1, 36), (4, 96)])
def series_with_correlation():
    class Correlation(nn.Module):
        def forward(self, q, k, v):
            scores = torch.fft.irfft(
                torch.fft.rfft(q, dim=1) * torch.conj(torch.fft.rfft(k, dim=1)), dim=1, n=q.shape[1]
            )
            weights, delays = scores.mean(-1).topk(3, dim=-1)
            positions = torch.arange(v.shape[1]).view(1, -1, 1)
            index = (positions + delays.unsqueeze(1)) % v.shape[1]
            shifted = v.gather(1, index[..., :1].expand(-1, -1, v.shape[-1]))
            return shifted * weights.softmax(-1)[:, :1].unsqueeze(-1)

    model = Correlation()
    return model, lambda batch, steps: model(*(randn(batch, steps, 4) for _ in range(3)))


@case(ROWS, MORE_ROWS)
def gaussian_policy():
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.log_std = (
                nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)),
                nn.Parameter(torch.zeros(2)),
            )

        def forward(self, state, action):
            policy = torch.distributions.Normal(self.body(state), self.log_std.exp())
            return policy.mean, policy.log_prob(action).sum(-1), policy.entropy().sum(-1)

    model = Policy()
    return model, lambda rows: model(randn(rows, 6), randn(rows, 2))


@case(ROWS, MORE_ROWS)
def categorical_policy_with_legal_moves():
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.value = nn.Linear(6, 5), nn.Linear(6, 1)

        def forward(self, state, legal):
            logits = torch.where(legal, self.body(state), torch.tensor(-1e8))
            policy = torch.distributions.Categorical(logits=logits)
            return policy.probs, policy.entropy(), logits.argmax(-1), self.value(state)

    model = Policy()
    return model, lambda rows: model(randn(rows, 6), torch.rand(rows, 5) > 0.3)


@case(ROWS, MORE_ROWS)
def dueling_values():
    class Dueling(nn.Module):
        def __init__(self):
            super().__init__()
            self.value, self.advantage = nn.Linear(6, 1), nn.Linear(6, 4)

        def forward(self, state, action):
            advantage = self.advantage(state)
            values = self.value(state) + advantage - advantage.mean(-1, keepdim=True)
            return values.gather(1, action), values.max(1)

    model = Dueling()
    return model, lambda rows: model(randn(rows, 6), ints(rows, 1, below=4))


@case([(4, 6), (5, 9)], [(1, 7), (8, 12)])
def set_transformer():
    class Sets(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.seeds, self.embed = nn.Parameter(randn(1, 3, 8)), nn.Linear(4, 8)

        def forward(self, x, present):
            x = self.embed(x)
            found, _ = self.attention(self.seeds.expand(len(x), -1, -1), x, x, key_padding_mask=~present)
            return found.flatten(1)

    model = Sets()

    def use(batch, members):
        present = torch.rand(batch, members) > 0.3
        present[:, 0] = True
        model(randn(batch, members, 4), present)

    return model, use


@case(ROWS, MORE_ROWS)
def ft_transformer():
    from rtdl_revisiting_models import FTTransformer

    model = FTTransformer(
        n_cont_features=3, cat_cardinalities=[4, 5], d_out=2, n_blocks=2, d_block=16, attention_n_heads=2,
        attention_dropout=0.0, ffn_d_hidden=None, ffn_d_hidden_multiplier=2.0, ffn_dropout=0.0, residual_dropout=0.0,
    )  # fmt: skip
    return model, lambda rows: model(randn(rows, 3), ints(rows, 2, below=4))


@case(ROWS, MORE_ROWS)
def piecewise_linear_embeddings():
    from rtdl_num_embeddings import PiecewiseLinearEmbeddings, compute_bins

    embeddings = PiecewiseLinearEmbeddings(compute_bins(randn(100, 3), n_bins=8), 4, activation=True, version="B")
    model = nn.Sequential(embeddings, nn.Flatten(), nn.Linear(12, 2))
    return model, lambda rows: model(randn(rows, 3))
