"""What a mask selects without its axis, in a call where it selects a single row; the recorded calls select several."""

import torch

from tests.trust.cases import call, case, x


def on(rows, *places):
    mask = torch.zeros(rows, dtype=torch.bool)
    mask[list(places)] = True
    return mask


SELECTED = [call(x(6, 3), on(6, 0, 2, 5)), call(x(9, 3), on(9, 1, 2, 3, 8))]
ONE = [call(x(5, 3), on(5, 3))]
OTHERS = [call(x(5, 3), on(5, 1, 3)), call(x(7, 3), on(7, 0, 1, 2, 4, 6))]


@case(SELECTED, serves=OTHERS, truth=ONE)
def rows_at_squeezed_places(self, x, mask):
    return x[mask.nonzero().squeeze()]


@case(SELECTED, serves=OTHERS, truth=ONE)
def sums_without_the_first_axis(self, x, mask):
    return x[mask].squeeze(0).sum(0)


@case(SELECTED, serves=OTHERS, truth=ONE)
def squeezed_scores(self, x, mask):
    return (x[mask] @ torch.ones(3, 1)).squeeze(), x[mask][:, :1].squeeze((0, 1))


@case(SELECTED, serves=OTHERS, truth=ONE)
def covariances_of_a_selection(self, x, mask):
    return x[mask].cov(), torch.corrcoef(x[mask])


@case([call(x(3, 4)), call(x(5, 4))], serves=[call(x(7, 4))], truth=[call(torch.ones(2, 4))])
def squeezed_values(self, x):
    return torch.unique(x).squeeze()
