"""Inputs that a model overwrites: graphs return the new values, and layers that do it are translated once."""

from __future__ import annotations

import pytest
import torch

import exportkit
from exportkit.onnx_files import repeated_layers
from exportkit.onnx_files.preparation import without_writes_to_inputs


def whole(x, state):
    state.copy_(state * 2 + x)
    return x + state.sum(), state


def read_before(x, state):
    before = state.transpose(0, 1) + 1
    state.copy_(x)
    return before, state.clone()


def view_read_later(x, state):
    row = state[0]
    state.copy_(x)
    return row + 1, state


def broadcast(x, state):
    state.copy_(x[:1])
    return x, state


def twice(x, state):
    state.copy_(x)
    state.copy_(state + 1)
    return x, state


class Method(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, state):
        return self.function(x, state)


@pytest.mark.parametrize(
    ("function", "removed"),
    [(whole, True), (read_before, True), (view_read_later, False), (broadcast, False), (twice, False)],
)
def test_graphs_return_what_the_model_writes(function, removed, tmp_path):
    model, observer = Method(function), exportkit.InputObserver()
    with observer(model):
        for rows in (2, 3):
            model(torch.randn(rows, 4), torch.randn(rows, 4))
    exported = exportkit.export(model, observer)
    writes = [node for node in without_writes_to_inputs(exported.program).graph.nodes if "copy_" in str(node.target)]
    assert (not writes) == removed
    onnx_model = exported.to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    x, state = torch.randn(5, 4), torch.randn(5, 4)
    expected, got = model(x, kept := state.clone()), onnx_model(x, given := state.clone())
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(given, kept)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x, state):
        state.copy_(state + self.linear(x))
        return x + state.relu()


class Deep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(5))

    def forward(self, x, states):
        for layer, state in zip(self.layers, states, strict=True):
            x = layer(x, state)
        return x, states


def test_layers_with_states_are_translated_once(tmp_path, monkeypatch):
    repeated = []
    repeat = repeated_layers.RepeatedLayers.repeat
    monkeypatch.setattr(repeated_layers.RepeatedLayers, "repeat", lambda *args: repeated.append(repeat(*args)))
    model, observer = Deep().eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for rows in (2, 3):
            model(torch.randn(rows, 4), [torch.randn(rows, 4) for _ in range(5)])
    assert exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx").verify().ok
    assert repeated
