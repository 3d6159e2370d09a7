"""Operators without a kernel for the dtype of a model compute in float32, and the proof says so."""

import onnx
import pytest
import torch

import exportkit
from exportkit.running.session import Session


def session_of(nodes, dtype):
    values = [onnx.helper.make_tensor_value_info(name, dtype, ["n"]) for name in ("x", "y")]
    graph = onnx.helper.make_graph(nodes, "graph", values[:1], values[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    return Session(model.SerializeToString())


def test_only_operators_without_a_kernel_compute_in_float32():
    nodes = [onnx.helper.make_node("Erf", ["x"], ["z"]), onnx.helper.make_node("Add", ["z", "x"], ["y"])]
    session, x = session_of(nodes, onnx.TensorProto.DOUBLE), torch.tensor([0.25, 1e-12], dtype=torch.float64)

    assert session.in_float32 == ("Erf",)
    (found,) = session.run({"x": x}).values()
    torch.testing.assert_close(found, x.erf() + x, rtol=1e-6, atol=0)


def test_operators_with_kernels_stay_as_they_are():
    nodes = [onnx.helper.make_node("Exp", ["x"], ["y"])]
    assert session_of(nodes, onnx.TensorProto.DOUBLE).in_float32 == ()


@pytest.mark.runtime
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_of_any_dtype_is_proven(dtype, tmp_path):
    model, observer = (
        torch.nn.Sequential(torch.nn.Conv1d(3, 4, 3), torch.nn.GELU()).to(dtype),
        exportkit.InputObserver(),
    )
    with observer(model), torch.no_grad():
        for batch, length in ((2, 8), (3, 12)):
            model(torch.randn(batch, 3, length).to(dtype))
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    report = graph.verify()
    assert report.ok, str(report)
    assert any("compute in float32" in text and "Conv" in text for text in report.findings)
    assert onnx.load(tmp_path / "model.onnx").graph.input[0].type.tensor_type.elem_type in (11, 16)
