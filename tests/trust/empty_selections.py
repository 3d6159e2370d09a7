"""Reductions of what a mask selects, in a call where it selects nothing; the recorded calls always select something."""

import torch
from torch.nn import functional as F

from tests.trust.cases import call, case, x

SELECTED = [call(x(rows, 4).abs()) for rows in (5, 9)]
NOTHING = [call(-1 - x(6, 4).abs())]
SOME = [call(torch.cat([-1 - x(3, 4).abs(), x(2, 4).abs()]))]


def selected(x):
    return x[x[:, 0] > 0]


@case(SELECTED, serves=NOTHING + SOME)
def sums_counted_from_the_end(self, x):
    part = selected(x)
    return part.sum(-1), part.sum(-2), part.sum((-1, -2), keepdim=True), part.sum(0)


@case(SELECTED, serves=NOTHING + SOME)
def means(self, x):
    part = selected(x)
    return part.mean(-1), part.mean(-2), part.mean(), part.nanmean(0)


@case(SELECTED, serves=NOTHING + SOME)
def products(self, x):
    part = selected(x)
    return part.prod(-1), part.prod(-2), part.prod()


@case(SELECTED, serves=NOTHING + SOME)
def any_and_all(self, x):
    part = selected(x)
    return [found for value in (part, part > 2) for found in (value.any(-2), value.any(), value.all(0), value.all(-1))]


@case(SELECTED, serves=NOTHING + SOME)
def norms(self, x):
    part = selected(x)
    return part.norm(dim=-2), part.norm(p=1, dim=-1), torch.linalg.vector_norm(part, ord=3)


@case(SELECTED, truth=NOTHING + SOME)
def variances(self, x):
    part = selected(x)
    return part.var(0), part.var(-2, unbiased=False), part.std(-1)


@case(SELECTED, serves=NOTHING + SOME)
def losses(self, x):
    part = selected(x)
    return F.mse_loss(part, 2 * part), F.l1_loss(part, 2 * part), F.smooth_l1_loss(part, 2 * part)


@case(SELECTED, truth=NOTHING + SOME)
def other_reductions(self, x):
    part = selected(x)
    return part.count_nonzero(-2), part.nansum(-1), part.softmax(-2).sum(-2), part.cumsum(0).sum(-1), part.T @ part


@case(SELECTED, serves=NOTHING + SOME)
def copied_into_rows(self, x):
    rows = torch.zeros(3, 4)
    return rows.clone().copy_(selected(x).sum(-2))


@case(SELECTED, serves=SOME, truth=NOTHING)
class AsksForTheNumber(torch.nn.Module):
    """torch's own code decides by how many rows are selected, which a trace does not know."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x):
        part = selected(x)
        return self.norm(part), F.group_norm(part, 2), part.roll(1, 0), part.cummax(0).values, part.diff(dim=0)
