"""Models that decide by the values of tensors: choices in their graphs, refused calls, and exports that fail."""

import onnx
import pytest
import torch

import exportkit
from exportkit.errors import ExportError, RuntimeFailure


class Of(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.layer = function, torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.function(self, x)


SMALL, LARGE = torch.rand(2, 4), torch.rand(3, 4) * 9 + 2


def exported(function, *calls):
    torch.manual_seed(0)
    model, observer = Of(function).eval(), exportkit.InputObserver()
    with observer(model, store_n_calls=len(calls)), torch.no_grad():
        for call in calls:
            model(call)
    return model, exportkit.export(model, observer)


def nested(model, x):
    if x.max() > 1:
        x = model.layer(x) + x - 5
        if float(x.mean()) > 0:
            return x - 1
    return x + 1


def test_decisions_behind_decisions_are_chosen_between(tmp_path):
    model, found = exported(nested, SMALL, torch.full((3, 4), 1.5), torch.full((2, 4), 900.0))
    graph = found.to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    for x in (torch.rand(5, 4), torch.rand(1, 4) * 50, torch.randn(7, 4) * 30, -torch.rand(2, 4)):
        torch.testing.assert_close(graph(x), model(x).detach())


def products(graph):
    """The number of matrix products in a graph, without those in its branches."""
    return sum(node.op_type in ("Gemm", "MatMul") for node in graph.node)


def test_what_one_way_alone_needs_is_in_its_branch(tmp_path):
    def leaves_early(model, x):
        x = model.layer(x)
        if x.max() > 1:
            return x
        return model.layer(model.layer(x))

    model, found = exported(leaves_early, SMALL * 0.01, LARGE * 100)
    graph = found.to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    main = onnx.load(tmp_path / "model.onnx").graph
    (choice,) = [node for node in main.node if node.op_type == "If"]
    assert products(main) == 1
    assert sorted(products(branch.g) for branch in choice.attribute) == [0, 2]
    for x in (torch.rand(5, 4) * 0.01, torch.rand(1, 4) * 500):
        torch.testing.assert_close(graph(x), model(x).detach())


def halved(_model, x):
    states = []
    while x.abs().max() > 1:
        x = x / 2
        states.append(x)
    return x


def test_a_loop_has_as_many_turns_as_in_some_recorded_call(tmp_path):
    model, found = exported(halved, SMALL, SMALL * 3 + 1, SMALL * 0.1 + 6)
    graph = found.to_onnx(tmp_path / "model.onnx")
    for largest in (0.5, 3.5, 7.5):
        x = torch.full((2, 4), largest)
        torch.testing.assert_close(graph(x), model(x))
    with pytest.raises(RuntimeFailure, match="refused"):
        graph(torch.full((2, 4), 60.0))


def test_a_proof_leaves_out_ways_that_no_recorded_call_went(tmp_path):
    _, found = exported(lambda _, x: x if x.sum() > 200 else x * 2, SMALL, LARGE)
    report = found.to_onnx(tmp_path / "model.onnx").verify()
    outside = [row for row in report.rows if "no recorded call takes another branch in" in row.where]
    assert outside
    assert all(row.status == "outside" for row in outside)
    assert all(row.status == "proven" for row in report.rows if row.kind == "recorded")


def test_a_proof_leaves_out_paths_on_which_an_operator_fails_before_the_graph_asserts_the_path(tmp_path):
    def largest_of_chosen(model, x):
        chosen = x[x[:, 0] > 0.5]
        if chosen.shape[0] == 0:
            return torch.zeros(0, 4)
        return chosen / chosen.max()

    _, found = exported(largest_of_chosen, torch.ones(6, 4), torch.ones(8, 4) * 2)
    report = found.to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok
    assert any(row.status == "outside" and "no recorded call takes another branch" in row.where for row in report.rows)


def test_results_of_different_shapes_cannot_be_chosen_between():
    with pytest.raises(ExportError, match="results of different types or shapes") as raised:
        exported(lambda _, x: x[:, :2] if x.max() > 1 else x, SMALL, LARGE)
    assert __file__ in str(raised.value)
    assert "float32 (s" in str(raised.value)


def test_writing_to_buffers_on_one_way_is_refused():
    def forward(model, x):
        if x.max() > 1:
            model.count += 1
        return x

    torch.manual_seed(0)
    model, observer = Of(forward), exportkit.InputObserver()
    model.register_buffer("count", torch.zeros(()))
    with observer(model):
        model(SMALL)
        model(LARGE)
    with pytest.raises(ExportError, match="branches on the values of a tensor"):
        exportkit.export(model, observer)


def test_torch_is_as_before_after_an_export():
    functions = torch.equal, torch.allclose, torch.Tensor.equal, torch.SymBool.__bool__, Of.forward
    exported(lambda _, x: x if torch.equal(x, x.round()) else x * 2, SMALL, LARGE.round())
    assert functions == (torch.equal, torch.allclose, torch.Tensor.equal, torch.SymBool.__bool__, Of.forward)
