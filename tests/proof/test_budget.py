"""Which layers keep more bits so that a quantised graph stays within a budget."""

from dataclasses import replace

import pytest
import torch

import exportkit
from exportkit.errors import InvalidRequestError
from exportkit.onnx_files.quantised import Quantisation, Quantised
from exportkit.proof.figures import over_budget
from exportkit.proof.quantise import Case, _figures
from exportkit.proof.report import Report


class Uneven(torch.nn.Module):
    """Two branches; what the second one returns hardly matters."""

    def __init__(self):
        super().__init__()
        self.much, self.little = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.head = torch.nn.Linear(64, 32)

    def forward(self, x):
        return {"logits": self.head(self.much(x).tanh() + 0.01 * self.little(x).tanh())}


@pytest.fixture(scope="module")
def exported():
    torch.manual_seed(0)
    model, observer = Uneven().eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for size in (40, 50):
            model(3 * torch.randn(size, 64))
    return exportkit.export(model, observer)


def test_layers_that_do_harm_keep_more_bits_until_the_budget_holds(exported, tmp_path):
    plain = exported.to_onnx(tmp_path / "plain.onnx", weights="int4").verify()
    error = plain.figures["recorded"]["logits"].error
    budget = {"error": error / 2}
    onnx_model = exported.to_onnx(tmp_path / "model.onnx", weights="int4", accuracy=budget)
    report = onnx_model.verify()
    assert report.ok
    assert all(figures["logits"].error <= error / 2 for figures in report.figures.values())
    layers = {layer.name: layer for layer in onnx_model.file.quantised.layers}
    assert layers["little"].stored == "int4"
    assert layers["much"].stored == "int8"
    assert layers["little"].harm < layers["much"].harm / 10
    table = str(report).partition("stored in")[2]
    assert table.index("much") < table.index("little") < table.index("head")


def test_a_budget_that_no_quantised_layer_keeps_leaves_all_layers(exported, tmp_path):
    onnx_model = exported.to_onnx(tmp_path / "model.onnx", weights="int8", accuracy={"error": 1e-6, "top1": 1})
    assert {layer.stored for layer in onnx_model.file.quantised.layers} == {"float32"}
    report = onnx_model.verify()
    assert report.ok
    assert report.verdict().startswith("measured: top-1 agreement 1.0000")


def test_figures_over_the_budget_are_not_accepted(exported, tmp_path):
    onnx_model = exported.to_onnx(tmp_path / "model.onnx", weights="int4")
    graph = onnx_model.graph
    quantised = graph.contract.quantised
    object.__setattr__(graph.contract, "quantised", type(quantised)(**{**vars(quantised), "budget": {"kl": 1e-9}}))
    report = onnx_model.verify()
    assert not report.ok
    assert report.verdict().startswith("measured, NOT ACCEPTED: KL divergence ")
    assert "at recorded calls is more than 1e-09" in report.verdict()


def test_a_graph_that_was_not_proven_before_is_not_accepted():
    report = Report((), 0, quantised=Quantised(Quantisation(), (), problems=("recorded call 0: differs",)))
    assert "before it was quantised: recorded call 0: differs" in report.problems()
    whole = Report((), 0, parts={"encoder": report})
    assert whole.is_measured
    assert str(whole).startswith("measured, NOT ACCEPTED: ")


@pytest.mark.parametrize("accuracy", [1.5, {"bleu": 3}, {"top1": 2}, {"kl": -1}, "high"])
def test_budgets_that_make_no_sense_are_refused(exported, accuracy, tmp_path):
    with pytest.raises(InvalidRequestError, match="Not a valid budget"):
        exported.to_onnx(tmp_path / "model.onnx", weights="int4", accuracy=accuracy)


def test_a_budget_of_logits_needs_logits(tmp_path):
    model, observer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for size in (4, 5):
            model(torch.randn(size, 64))
    with pytest.raises(InvalidRequestError, match="the graph returns none"):
        exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx", weights="int4", accuracy=0.99)


def test_further_data_have_rows_and_the_budget_holds_there(exported, tmp_path):
    observer = exportkit.InputObserver()
    model = exported.model
    with observer(model), torch.no_grad():
        model(torch.randn(30, 64))
    onnx_model = exported.to_onnx(tmp_path / "model.onnx", weights="int8", accuracy={"error": 0.05}, data=observer)
    report = onnx_model.verify(data=observer)
    assert report.ok
    assert [row.status for row in report.rows if row.kind == "given"] == ["measured"]
    assert report.figures["given"]["logits"].positions == 30
    assert exported.to_onnx(tmp_path / "whole.onnx").verify(data=observer.observation).rows[-1].status == "proven"


def test_further_calls_give_what_they_give_also_where_recorded_calls_left_it_out(tmp_path):
    class Masked(torch.nn.Module):
        def forward(self, x, mask):
            return (x * mask).cumsum(1)

    model, observer, data = Masked(), exportkit.InputObserver(), exportkit.InputObserver()
    with observer(model):
        for size in (4, 5):
            model(torch.randn(2, size), torch.ones(2, size))
    with data(model):
        model(torch.randn(1, 3), torch.tensor([[0.0, 1.0, 1.0]]))
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    contract = onnx_model.graph.contract
    leaves = tuple(replace(leaf, restored=leaf.path == "mask") for leaf in contract.plan.leaves)
    onnx_model.graph.contract = replace(contract, plan=replace(contract.plan, leaves=leaves))
    row = onnx_model.verify(unseen=False, data=data).rows[-1]
    assert (row.kind, row.status) == ("given", "proven")


class _Longer:
    """A graph that returns one row too many."""

    def run(self, feeds, stored):
        return {"logits": torch.zeros(len(feeds["x"]) + 1, 32)}


def test_an_output_of_a_different_shape_is_never_within_a_budget(exported, tmp_path):
    graph = exported.to_onnx(tmp_path / "model.onnx", weights="int4").graph
    case = Case("recorded", {"x": torch.zeros(2, 64)}, {"logits": torch.zeros(2, 32)}, {})
    figures = _figures(graph, graph.contract.quantised, _Longer(), [case], {})["recorded"]
    assert [*over_budget(figures, {}, "recorded calls")] == [
        "an output at recorded calls has a different shape, or infinities"
    ]


class Counted(Uneven):
    """Returns a text and a number beside the logits."""

    def forward(self, x):
        return {**super().forward(x), "name": "logits", "total": x.sum().item()}


def test_python_values_of_a_quantised_graph_are_compared(tmp_path):
    model, observer = Counted().eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for size in (40, 50):
            model(torch.randn(size, 64))
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx", weights="int8")
    assert onnx_model.verify().ok
    graph = onnx_model.graph
    first, *others = graph.observation.calls
    outputs = first.outputs.map(lambda leaf: "scores" if leaf == "logits" else leaf)
    graph.observation = replace(graph.observation, calls=(replace(first, outputs=outputs), *others))
    row = onnx_model.verify().rows[0]
    assert (row.status, row.where) == ("differs", "name: 'scores' became 'logits'")
