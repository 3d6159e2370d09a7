"""Lists of numbers that follow from a length: as a tensor, repeated, and as limits of other ranges."""

import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import exportkit
from exportkit.rewrites.symbolic_lists import RangeNumbers
from exportkit.rewrites.table import LOOPS, SYMBOLIC_LENGTHS


def as_tensors(x, table):
    length = x.shape[1]
    forward, backward = torch.tensor(list(range(length))), torch.LongTensor(range(length - 1, -1, -1))
    both = torch.tensor([list(range(length)), list(range(1, length + 1))])
    return x + table(forward) * table(torch.as_tensor(range(3, length + 3))) + table(backward) + table(both).sum(0)


def as_limits(x, table):
    places = list(range(x.shape[1]))
    kept = [-3] + places[1:-1][::2]  # noqa: RUF005 (as models have it)
    table_of_kept = table(torch.arange(kept[1], kept[-1] + len(kept)))
    return table_of_kept + kept[0], table(torch.tensor(kept[1:]))


def repeated(x, _):
    weights = torch.tensor([0.5, 2.0] * x.shape[1])
    return torch.cat([x[:, :1]] * x.shape[1], axis=1), torch.stack(x.shape[1] * [x[0, 0]], 1), weights


def computed(x, table):
    length = x.shape[1]
    places, weights = (
        torch.tensor([2 * i + 1 for i in range(length)]),
        torch.tensor([1.0 / (i + 1) for i in range(length)]),
    )
    return table(places) + x * weights[:, None]


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.table = function, torch.nn.Embedding(64, 4)

    def forward(self, x):
        return self.function(x, self.table)


@pytest.mark.parametrize("function", [as_tensors, as_limits, repeated, computed])
def test_list_of_numbers_follows_the_length(function, tmp_path):
    torch.manual_seed(0)
    model, observer = Model(function).eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        model(torch.randn(2, 5, 4))
        model(torch.randn(3, 8, 4))
    exported = exportkit.export(model, observer)
    onnx_model = exported.to_onnx(tmp_path / "model.onnx")
    assert (SYMBOLIC_LENGTHS.name in exported.rules, LOOPS.name in exported.rules) == (True, function is computed)
    assert onnx_model.verify().ok
    x = torch.randn(1, 21, 4)
    torch.testing.assert_close(onnx_model(x), model(x))
    assert torch.tensor([1, 2]).tolist() == [1, 2]  # nothing stays replaced
    assert isinstance(torch.LongTensor([1]), torch.LongTensor)


steps = st.integers(-4, 4).filter(bool)


@given(st.integers(-9, 9), st.integers(-9, 30), steps, st.lists(st.integers(-5, 5), max_size=3), st.data())
def test_numbers_are_those_of_a_list(start, stop, step, first, data):
    begin, end = data.draw(st.none() | st.integers(0, 6)), data.draw(st.none() | st.integers(-3, -1))
    part = slice(begin, end, data.draw(st.integers(1, 3)))
    expected = first + list(range(start, stop, step))
    numbers = first + RangeNumbers.of(start, stop, step)
    assert list(numbers) == expected
    assert numbers.whole().tolist() == expected
    assert len(numbers) == len(expected)
    for place in range(-len(expected) + len(first), len(expected)):
        assert numbers[place] == expected[place]
    with pytest.raises(IndexError):
        numbers[len(expected)]
    try:
        assert list(numbers[part]) == expected[part]
    except TypeError:  # it would cut into the first numbers from the end, or begin behind the last one
        assert (begin or 0) - len(first) > len(expected) - len(first) or -(end or 0) > len(expected) - len(first)


class Masks(torch.nn.Module):
    """Makes a mask of padding from a list of lengths, as toolkits for speech recognition do."""

    def forward(self, x, lengths):
        numbers = lengths.long().tolist()
        places = torch.arange(0, int(max(numbers)), dtype=torch.int64)
        hidden = places.unsqueeze(0).expand(len(numbers), int(max(numbers))) >= places.new(numbers).unsqueeze(-1)
        return hidden, x + x.new_tensor(numbers) * sum(numbers) - min(numbers)


def test_the_numbers_of_a_tensor_are_reduced_in_the_graph(tmp_path):
    model, observer = Masks(), exportkit.InputObserver()
    with observer(model):
        for lengths in ([4, 2], [3, 9, 5]):
            model(torch.randn(len(lengths)), torch.tensor(lengths))
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    for lengths in ([5], [2, 0, 6, 4], [0, -3, 0]):
        x = torch.randn(len(lengths))
        torch.testing.assert_close(graph(x, torch.tensor(lengths)), model(x, torch.tensor(lengths)))
    with pytest.raises(exportkit.ExportkitError):
        graph(torch.randn(2), torch.tensor([-1, -2]))


class Total(torch.nn.Module):
    def forward(self, x, lengths):
        return x * sum(lengths.tolist())


def test_a_sum_of_small_numbers_does_not_wrap(tmp_path):
    model, observer = Total(), exportkit.InputObserver()
    with observer(model):
        for count in (5, 7):
            model(torch.randn(count, 4), torch.ones(count, dtype=torch.int8))
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    x, lengths = torch.randn(6, 4), torch.full((6,), 100, dtype=torch.int8)
    torch.testing.assert_close(graph(x, lengths), model(x, lengths))


HELPERS = """
import torch

def centred(x):
    return torch.arange(x.shape[1])[None] - float(x.shape[1] - 1) / 2

def decayed(x):
    state, states = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = 0.5 * state + x[:, t]
        states.append(state)
    return torch.stack(states, 1)
"""


def test_functions_in_other_files_are_traced_like_methods(tmp_path, monkeypatch):
    (tmp_path / "signal_helpers.py").write_text(HELPERS)
    monkeypatch.syspath_prepend(tmp_path)
    helpers = importlib.import_module("signal_helpers")

    class Smoothed(torch.nn.Module):
        def forward(self, x):
            return helpers.decayed(x) * helpers.centred(x)

    model, observer = Smoothed(), exportkit.InputObserver()
    with observer(model):
        model(torch.randn(2, 5))
        model(torch.randn(3, 8))
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    x = torch.randn(1, 20)
    torch.testing.assert_close(onnx_model(x), model(x))


class Extremes(torch.nn.Module):
    """Compares numbers of which some are tensors, as experts with a capacity do."""

    def forward(self, x):
        places = (x[..., 0].abs() * 3).long()
        one_hot = torch.nn.functional.one_hot(places, max(places.max() + 1, 4))[..., :4]
        scale = max(min(x.sum(), x.mean() * 2), 0.5)
        return one_hot * 2, x * scale, torch.arange(min(places.max(), 2) + 1)


def test_numbers_and_tensors_of_one_element_are_compared_in_the_graph(tmp_path):
    model, observer = Extremes(), exportkit.InputObserver()
    with observer(model):
        model(torch.randn(2, 6, 4))
        model(torch.randn(3, 9, 4))
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    for scale in (0.01, 1.0, 5.0, -1.0):
        x = torch.randn(2, 5, 4).abs() * scale
        torch.testing.assert_close(graph(x), model(x))
