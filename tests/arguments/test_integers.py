"""Made-up integers are like the recorded ones: their order, and the sizes that they reach or stay below."""

import pytest
import torch

import exportkit
from exportkit.arguments.build import build_call


class Anything(torch.nn.Module):
    def forward(self, x, numbers):
        return x.sum() + numbers.sum()


def fitted_numbers(calls, rows, count, **options):
    """So many integers, in a call with these rows, after calls with such rows and integers."""
    model, observer = Anything(), exportkit.InputObserver()
    with observer(model):
        for number, values in calls:
            model(torch.zeros(number, 3), torch.tensor(values))
    plan = observer.plan(probe=False)
    axis = torch.tensor(calls[0][1]).ndim - 1
    if plan.by_path["numbers"].sizes[axis].is_static:
        plan = plan.dynamic("numbers", axis)
    names = {plan.by_path["x"].sizes[0].variable: rows, plan.by_path["numbers"].sizes[axis].variable: count}
    return build_call(plan, observer.observation, names, **options).tensors()["numbers"]


@pytest.mark.parametrize(
    ("calls", "rows", "count", "expected"),
    [
        ([(5, [5, 3]), (8, [8, 4, 2])], 16, 4, [16, 10, 7, 1]),  # lengths, the longest first
        ([(5, [3, 5]), (8, [4, 8, 2])], 4, 3, [2, 4, 1]),  # in any order
        ([(5, [5]), (8, [8])], 4, 3, [4, 3, 2]),  # of single rows: different ones
        ([(6, [0, 2]), (9, [0, 2, 5])], 4, 5, [0, 1, 2, 2, 3]),  # offsets stay below the number of rows
        ([(6, [0, 2, 6]), (9, [0, 2, 5, 9])], 20, 3, [0, 8, 20]),  # ends of segments
        ([(6, [[0, 2], [0, 4]]), (9, [[0, 2, 5], [0, 4, 6]])], 10, 4, [[0, 2, 4, 6], [0, 4, 5, 9]]),  # of two tables
        ([(6, [[0, 5], [1, 2]]), (9, [[8, 5, 1], [0, 4, 6]])], 3, 2, [[2, 1], [0, 1]]),  # edges between rows
        ([(6, [-100, 3]), (9, [2, -100, 4])], 3, 2, [2, -100]),  # labels with a mark
    ],
)
def test_integers_keep_their_order_and_fit_the_sizes(calls, rows, count, expected):
    assert fitted_numbers(calls, rows, count).tolist() == expected


def test_integers_can_stay_below_the_sizes_that_they_reached():
    assert fitted_numbers([(5, [5, 3]), (8, [8, 4, 2])], 16, 2, reaching=False).tolist() == [8, 4]
