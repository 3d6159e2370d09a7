"""Tensors go into an onnxruntime session and come back as they are; what cannot be run is said in our words."""

import sys

import onnx
import onnxruntime
import pytest
import torch

from exportkit.errors import InvalidRequestError, InvalidTypeError, MissingPackageError, RuntimeFailure
from exportkit.running.placement import Placement, require_onnxruntime
from exportkit.running.session import Session

pytestmark = pytest.mark.runtime


def session(text):
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> g {text}')
    return Session(model.SerializeToString())


@pytest.mark.parametrize("name", ["float", "double", "float16", "bfloat16", "int8", "int64", "uint16", "bool"])
def test_every_dtype_comes_back_as_it_is(name):
    dtype = {"float": torch.float32, "double": torch.float64}.get(name) or getattr(torch, name)
    tensor = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype).T  # not contiguous

    returned = session(f"({name}[N, M] x) => ({name}[N, M] y) {{ y = Identity(x) }}").run({"x": tensor})

    assert list(returned) == ["y"]
    assert torch.equal(returned["y"], tensor)
    assert returned["y"].dtype is dtype


def test_names_and_shapes_are_those_of_the_graph():
    graph = session("(float[N, 3] x, float[1] b) => (float[N, 3] y, float[N, 3] z) { y = Add(x, b) z = Neg(y) }")

    assert (graph.inputs, graph.outputs) == (["x", "b"], ["y", "z"])
    assert graph.shapes == {"x": ("N", 3), "b": (1,)}
    assert list(graph.run({"b": torch.ones(1), "x": torch.ones(2, 3), "more": torch.ones(1)})) == ["y", "z"]


def test_what_does_not_fit_is_refused():
    graph = session("(float[N, 3] x) => (float[N, 3] y) { y = Neg(x) }")

    with pytest.raises(InvalidRequestError, match=r"input of the ONNX model is missing.\n  where: x"):
        graph.run({"y": torch.ones(2, 3)})
    with pytest.raises(InvalidTypeError, match="no counterpart in onnxruntime"):
        graph.run({"x": torch.ones(2, 3, dtype=torch.complex64)})
    with pytest.raises(RuntimeFailure, match=r"refused the call.\n  where: x \(2, 4\)"):
        graph.run({"x": torch.ones(2, 4)})
    with pytest.raises(RuntimeFailure, match=r"cannot load the model.\n  where: serialised model"):
        Session(b"no model")


def test_without_onnxruntime_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)

    with pytest.raises(MissingPackageError, match="runtime"):
        require_onnxruntime()


@pytest.mark.parametrize("operator", ["GRU", "LSTM"])
def test_empty_input_that_would_end_the_process_is_refused(operator, tmp_path):
    text = f"(float[S, B, 3] x, float[1, G, 3] w, float[1, G, 4] r) => (float[S, 1, B, 4] y) {{ y = {operator}"
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 18]> g {text} <hidden_size: int = 4> (x, w, r) }}'
    )
    onnx.save(model, tmp_path / "model.onnx")
    gates = {"GRU": 12, "LSTM": 16}[operator]
    feeds = {"w": torch.ones(1, gates, 3), "r": torch.ones(1, gates, 4)}

    for source in (model.SerializeToString(), tmp_path / "model.onnx"):
        graph = Session(source)
        assert graph.run({"x": torch.ones(5, 2, 3), **feeds})["y"].shape == (5, 1, 2, 4)
        with pytest.raises(RuntimeFailure, match="would crash"):
            graph.run({"x": torch.ones(5, 0, 3), **feeds})


def test_empty_operand_of_a_fused_product_is_computed():
    text = "(float[A, B, C] a, float[D, E, F] b) => (float[G, H, I] y)"
    graph = session(f"{text} {{ c = Transpose <perm = [1, 2, 0]> (b) y = MatMul(a, c) }}")

    assert graph.run({"a": torch.ones(2, 3, 4), "b": torch.ones(5, 2, 4)})["y"].shape == (2, 3, 5)
    assert graph.run({"a": torch.ones(2, 3, 4), "b": torch.ones(0, 2, 4)})["y"].shape == (2, 3, 0)


def test_empty_input_of_an_operator_in_a_branch_is_refused():
    text = """<ir_version: 10, opset_import: ["" : 18]>
        g (float[S, B, 3] x, float[1, 12, 3] w, float[1, 12, 4] r, bool c) => (float[S, 1, B, 4] y) {
            y = If (c) <
                then_branch = one () => (float[S, 1, B, 4] a) { a = GRU <hidden_size = 4> (x, w, r) },
                else_branch = two () => (float[S, 1, B, 4] b) { b = GRU <hidden_size = 4> (x, w, r) }
            >
        }"""
    graph = Session(onnx.parser.parse_model(text).SerializeToString())
    feeds = {"w": torch.ones(1, 12, 3), "r": torch.ones(1, 12, 4), "c": torch.tensor(True)}

    assert graph.run({"x": torch.ones(5, 2, 3), **feeds})["y"].shape == (5, 1, 2, 4)
    with pytest.raises(RuntimeFailure, match="would crash"):
        graph.run({"x": torch.ones(5, 0, 3), **feeds})


def test_options_of_the_caller_serve_every_model_and_stay_as_they_are(tmp_path):
    text = '<ir_version: 10, opset_import: ["" : 18]> g (float[N] x) => (float[N] y) { y = Neg(x) }'
    model = onnx.parser.parse_model(text).SerializeToString()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.enable_profiling = 3, True
    options.profile_file_prefix = str(tmp_path / "profile")
    level = options.graph_optimization_level

    for given in ({"folder": tmp_path}, {"optimised": False}, {}):
        graph = Session(model, placement=Placement(options=options), **given)
        assert graph._session.get_session_options().intra_op_num_threads == 3
        assert graph.run({"x": torch.ones(2)})["y"].tolist() == [-1, -1]
    assert (options.graph_optimization_level, options.enable_profiling) == (level, True)
    graph._session.end_profiling()
    assert len(list(tmp_path.glob("profile*"))) == 1
