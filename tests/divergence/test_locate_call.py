"""A call that is not proven is never located nowhere."""

from dataclasses import replace

import onnx
import pytest
import torch
from torch import nn

import exportkit
from exportkit.divergence.locate_call import AROUND, CHANGED, GRAPH, MODEL

pytestmark = pytest.mark.runtime


class Choosing(nn.Module):
    """Chooses among equal scores, then among rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.values = nn.Linear(6, 8, bias=False), nn.Embedding(8, 4)
        nn.init.zeros_(self.gate.weight)

    def forward(self, x):
        return {"y": self.values(self.gate(x).topk(2).indices).sum(-2)}


class Scaled(nn.Module):
    """Returns large numbers and small ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 4)
        self.scale = nn.Buffer(torch.tensor([1e6, 1e6, 1e6, 1.0]))

    def forward(self, x):
        return {"y": self.linear(x) * self.scale}


def onnx_of(model, path):
    observer = exportkit.InputObserver()
    with observer(model.eval()), torch.no_grad():
        model(torch.randn(2, 6))
        model(torch.randn(3, 6))
    return exportkit.export(model, observer).to_onnx(path)


def test_a_choice_among_equal_values_is_proven_and_can_be_located(tmp_path):
    model = Choosing()
    onnx_model = onnx_of(model, tmp_path / "model.onnx")

    found = exportkit.locate_divergence(model, onnx_model, (torch.randn(2, 6),))

    assert onnx_model.verify().ok
    assert found.operator == "TopK"
    assert "equal values" in found.reason


def with_first_recorded_output(onnx_model, change):
    """The model with another output on record."""
    graph = onnx_model.graph
    first, *others = graph.observation.calls
    first = replace(first, outputs=first.outputs.map(change))
    graph.observation = replace(graph.observation, calls=(first, *others))
    return onnx_model


def test_a_model_that_was_changed_since_its_calls_were_recorded_is_named(tmp_path):
    onnx_model = with_first_recorded_output(onnx_of(Scaled(), tmp_path / "model.onnx"), lambda y: y + 1)

    found = onnx_model.verify().locate()

    assert (found.stage, found.reason) == (MODEL, CHANGED)
    assert str(found).splitlines()[:2] == ["The model diverges.", f"  reason  {CHANGED}"]


def test_what_is_wrong_around_the_graph_is_named(tmp_path, monkeypatch):
    onnx_model = onnx_of(Scaled(), tmp_path / "model.onnx")
    monkeypatch.setattr(onnx_model.graph, "structured", lambda tensors: {"y": tensors["y"] * 2})

    found = onnx_model.verify().locate()

    assert found.stage == AROUND
    assert found.reason.startswith("the graph by itself agrees, while the proof says: y: ")


def test_a_difference_no_larger_than_rounding_elsewhere_is_named(tmp_path):
    model = Scaled()
    onnx_model = onnx_of(model, tmp_path / "model.onnx")
    proto = onnx.load(onnx_model.path)
    bias = next(value for value in proto.graph.initializer if value.name == "linear.bias")
    changed = onnx.numpy_helper.to_array(bias).copy()
    changed[3] += 0.01
    bias.CopyFrom(onnx.numpy_helper.from_array(changed, bias.name))
    onnx.save(proto, onnx_model.path)
    onnx_model.graph._session = None

    report = onnx_model.verify()

    assert not report.ok
    assert report.locate().diverges
    assert report.locate().module == "linear"


def test_an_output_that_differs_by_less_than_rounding_of_its_largest_elements_is_named(tmp_path):
    onnx_model = onnx_of(Scaled(), tmp_path / "model.onnx")
    proto = onnx.load(onnx_model.path)
    scale = next(value for value in proto.graph.initializer if onnx.numpy_helper.to_array(value).max() == 1e6)
    changed = onnx.numpy_helper.to_array(scale).copy()
    changed[..., 3] += 0.03
    scale.CopyFrom(onnx.numpy_helper.from_array(changed, scale.name))
    onnx.save(proto, onnx_model.path)
    onnx_model.graph._session = None

    report = onnx_model.verify()

    assert not report.ok
    found = report.locate()
    assert (found.stage, found.tensor) == (GRAPH, "y")
    assert "No stage" not in str(found)


def test_a_module_among_several_is_located_with_the_application(tmp_path):
    model, observer = Scaled(), exportkit.InputObserver()
    with observer({"net": model}):
        for rows in (2, 3):
            model(torch.randn(rows, 6))
    exportkit.export({"net": model}, observer).save(tmp_path / "folder")
    loaded = exportkit.load(tmp_path / "folder")
    with_first_recorded_output(loaded.parts["net"], lambda y: y * 2)

    assert loaded.verify().locate({"net": model}).stage == MODEL
