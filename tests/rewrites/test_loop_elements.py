"""Loops that read the last elements of the lists to which they add one."""

import pytest
import torch

import exportkit


def the_last_one(self, x):
    states = [x[:, 0]]
    for step in x[:, 1:].unbind(1):
        states.append(self.cell(step, states[-1]))
    return torch.stack(states, 1), states[-1]


def the_last_two(self, x):
    found = [x[:, 0], x[:, 0] * 2]
    for t in range(x.shape[1]):
        found.append((self.layer(found[-1]) - found[-2] + found[0] + x[:, t]).tanh())
    return torch.stack(found[2:], 1)


def by_number(self, x):
    found, ahead = [x[:, 0]], [x[:, 0]]
    for t in range(1, x.shape[1]):
        found.append(self.layer(found[t - 1]) + x[:, t])
        last = found[t] + found[t - 1]
    for t in range(x.shape[1]):
        ahead.append(self.layer(ahead[t]) + x[:, t])
    return torch.stack(found, 1), last, torch.stack(ahead, 1)


def from_nothing(self, x):
    found = []
    for t in range(x.shape[1]):
        state = x[:, t] if t == 0 else self.layer(found[t - 1]) + x[:, t]
        found.append(state)
    return torch.stack(found, 1)


def in_two_lists(self, x):
    first, second = [x[:, 0]], [x[:, 0].relu()]
    for step in x.unbind(1):
        state = (self.layer(first[-1]) * second[-1]).tanh()
        first.append(state)
        second.append(second[-1].cos() + first[-1].sigmoid())
        state.add_(step)
    return torch.stack(first, 1), torch.stack(second, 1)


def until_a_value(self, x):
    found = [x[:, 0]]
    for t in range(1, x.shape[1]):
        new = self.layer(found[-1]) + x[:, t]
        if new.sum() > 9:
            break
        found.append(new)
    return torch.stack(found, 1)


def on_either_side(self, x):
    found = [x[:, 0]]
    for t in range(1, x.shape[1]):
        if x[:, t].sum() > 0:
            found.append(self.layer(found[-1]))
        else:
            found.append(found[-1] + 1)
    return torch.stack(found, 1)


def of_a_path(self, x):
    score, pointers = x[:, 0], []
    for t in range(1, x.shape[1]):
        best, index = (score[:, :, None] + self.layer.weight + x[:, t, None]).max(1)
        pointers.append(index)
        score = best
    path = [score.argmax(1)]
    for pointer in pointers[::-1]:
        path.append(pointer.gather(1, path[-1][:, None])[:, 0])
    return torch.stack(path[::-1], 1)


FUNCTIONS = [
    the_last_one, the_last_two, by_number, from_nothing, in_two_lists, until_a_value, on_either_side, of_a_path,
]  # fmt: skip


class Listing(torch.nn.Module):
    """Adds to lists in a loop."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.cell = torch.nn.Linear(4, 4), torch.nn.GRUCell(4, 4)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


@pytest.mark.runtime
@pytest.mark.parametrize("function", FUNCTIONS)
def test_elements_that_a_loop_reads_are_those_of_the_list(function, tmp_path):
    torch.manual_seed(0)
    model, observer = Listing(function).eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for shape in ((2, 5, 4), (3, 7, 4)):
            model(torch.randn(shape))
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    report = onnx_model.verify()
    assert report.ok, report.problems()
    for shape in ((1, 5, 4), (2, 2, 4), (1, 3, 4), (4, 30, 4)):
        x = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(onnx_model(x), model(x))


def of_a_longer_list(self, x):
    found = [x[:, 0], x[:, 1]]
    for t in range(1, x.shape[1]):
        found.append(self.layer(found[t - 1]) + x[:, t])
    return torch.stack(found, 1)


def the_first_of_none(self, x):
    found = []
    for t in range(x.shape[1]):
        first = found[0] if t > 0 and x[:, t].sum() > 50 else x[:, t]
        found.append(self.layer(first))
    return torch.stack(found, 1)


def one_that_is_not_there(self, x):
    found = [x[:, 0]]
    for t in range(1, x.shape[1]):
        last = found[t - 2] if x[:, t].sum() > 50 else x[:, t]
        found.append(self.layer(last))
    return torch.stack(found, 1)


def one_that_is_changed(self, x):
    found = [x[:, 0]]
    for t in range(1, x.shape[1]):
        last = found[-1]
        last.clamp_(max=9)
        found.append(self.layer(last) + x[:, t])
    return torch.stack(found, 1)


def one_with_items_that_are_changed(self, x):
    found = [x[:, 0]]
    for t in range(1, x.shape[1]):
        found[-1][found[-1] > 9] = 9.0
        found.append(self.layer(found[-1]) + x[:, t])
    return torch.stack(found, 1)


def by_another_number(self, x):
    found = [x[:, 0]]
    for t in range(1, x.shape[1]):
        largest = torch.stack([found[t] for t in range(1)]).amax(0)
        found.append(self.layer(largest) + x[:, t])
    return torch.stack(found, 1)


REFUSED = [
    of_a_longer_list, the_first_of_none, one_that_is_not_there, one_that_is_changed, one_with_items_that_are_changed,
    by_another_number,
]  # fmt: skip


@pytest.mark.parametrize("function", REFUSED)
def test_elements_that_may_be_others_are_refused(function):
    model, observer = Listing(function).eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for shape in ((2, 5, 4), (3, 7, 4)):
            model(torch.randn(shape))
    with pytest.raises(exportkit.errors.ExportError, match=r"became static|branches on the values"):
        exportkit.export(model, observer)
