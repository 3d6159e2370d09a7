"""Recurrent layers and pools at lengths that vary: one graph that equals eager, with ONNX's own operators."""

import onnx
import pytest
import torch

import exportkit
from exportkit.rewrites.lists import operators_at_any_length

aten = torch.ops.aten


class Recurrent(torch.nn.Module):
    """A recurrent layer whose state is an input after the first call."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, state=None):
        return self.layer(x, state)


class Averages(torch.nn.Module):
    """Averages a plane over windows, without a module for it."""

    def __init__(self, *sizes):
        super().__init__()
        self.sizes = sizes

    def forward(self, x):
        return torch.nn.functional.adaptive_avg_pool2d(x, self.sizes)


def exported(model, *calls):
    observer = exportkit.InputObserver()
    with observer(model.eval(), store_n_calls=len(calls)), torch.no_grad():
        for call in calls:
            model(*call)
    return exportkit.export(model, observer)


def assert_proven(exported, tmp_path, *operators):
    onnx_model = exported.to_onnx(tmp_path / "model.onnx")
    report = onnx_model.verify()
    assert report.ok, str(report)
    found = {node.op_type for node in onnx.load(tmp_path / "model.onnx", load_external_data=False).graph.node}
    assert set(operators) <= found


@pytest.mark.parametrize(
    "layer",
    [
        torch.nn.LSTM(4, 6, num_layers=2, bidirectional=True, batch_first=True),
        torch.nn.LSTM(4, 6, bias=False, batch_first=True),
        torch.nn.GRU(4, 6, num_layers=2, batch_first=True),
        torch.nn.GRU(4, 6, bidirectional=True, batch_first=True),
    ],
)
def test_recurrent_layers_take_sequences_of_any_length(layer, tmp_path):
    calls = [(torch.randn(2, 5, 4),), (torch.randn(3, 7, 4),)]
    assert_proven(exported(layer, *calls), tmp_path, type(layer).__name__)


@pytest.mark.parametrize("layer", [torch.nn.LSTM(4, 6), torch.nn.GRU(4, 6)])
def test_recurrent_layers_go_on_from_a_state(layer, tmp_path):
    model = Recurrent(layer)
    calls = []
    for length, batch in ((5, 2), (7, 3)):
        first = torch.randn(length, batch, 4)
        calls += [(first,), (torch.randn(1, batch, 4), layer(first)[1])]
    assert_proven(exported(model, *calls), tmp_path, type(layer).__name__)


@pytest.mark.parametrize(
    "pool",
    [
        torch.nn.MaxPool1d(2),
        torch.nn.MaxPool1d(3, stride=2, padding=1),
        torch.nn.MaxPool1d(3, stride=2, ceil_mode=True),
        torch.nn.MaxPool1d(3, stride=1, dilation=2),
        torch.nn.AdaptiveAvgPool1d(1),
        torch.nn.AdaptiveAvgPool1d(4),
    ],
)
def test_pools_take_sequences_of_any_length(pool, tmp_path):
    assert_proven(exported(pool, (torch.randn(2, 4, 24),), (torch.randn(3, 4, 30),)), tmp_path)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 3), (5, 1)])
def test_pools_take_planes_of_any_size(sizes, tmp_path):
    calls = [(torch.randn(2, 4, 12, 30),), (torch.randn(3, 4, 18, 24),)]
    assert_proven(exported(Averages(*sizes), *calls), tmp_path)


def test_torch_knows_afterwards_what_it_knew_before():
    operators = [aten.lstm.input, aten.gru.input, aten.max_pool1d.default, aten.adaptive_avg_pool2d.default]
    before = [dict(operator.py_kernels) for operator in operators]
    with pytest.raises(KeyError), operators_at_any_length():  # noqa: PT012 - the exception leaves the context
        assert [dict(operator.py_kernels) for operator in operators] != before
        raise KeyError
    assert [dict(operator.py_kernels) for operator in operators] == before


def test_values_are_computed_by_torch_meanwhile():
    layer, x = torch.nn.LSTM(4, 6), torch.randn(5, 2, 4)
    pool, expected = torch.nn.AdaptiveAvgPool1d(3), layer(x)[0]
    with operators_at_any_length():
        assert torch.equal(layer(x)[0], expected)
        torch.testing.assert_close(pool(x), pool(x.double()).float())
