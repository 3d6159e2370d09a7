"""Operators without a kernel for the dtype of a model compute in float32, and the proof says so."""

import onnx
import pytest
import torch

import exportkit
from exportkit.running.kernels import late_nodes, without_cpu_branches
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
    assert any("run in float32" in text and "Conv" in text for text in report.findings)
    assert onnx.load(tmp_path / "model.onnx").graph.input[0].type.tensor_type.elem_type in (11, 16)


EITHER = """<ir_version: 11, opset_import: ["" : 23, "com.microsoft": 1]>
    either (bool which, float[2, 5, 16] q, float[2, 5, 16] k, float[2, 5, 16] v, float[2, 2, 0, 8] past,
            bool[2, 1, 5, 5] mask, int32[2] last, int32 total) => (float[2, 5, 16] z, float[2, 2, 5, 8] keys)
    {
        y, keys, values = If (which) <
            then_branch = quick () => (float[2, 5, 16] a, float[2, 2, 5, 8] b, float[2, 2, 5, 8] c) {
                [quick] a, b, c = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 2> (
                    q, k, v, past, past, last, total)
            },
            else_branch = any () => (float[2, 5, 16] d, float[2, 2, 5, 8] e, float[2, 2, 5, 8] f) {
                [any] d, e, f = Attention <q_num_heads = 2, kv_num_heads = 2> (q, k, v, mask, past, past)
            }
        >
        [last] z = Neg(y)
    }"""

EITHER_INSIDE = """<ir_version: 11, opset_import: ["" : 23, "com.microsoft": 1]>
    inside (bool first, bool which, float[2, 5, 16] q, float[2, 5, 16] k, float[2, 5, 16] v, float[2, 2, 0, 8] past,
            bool[2, 1, 5, 5] mask, int32[2] last, int32 total) => (float[2, 5, 16] z)
    {
        z = If (first) <
            then_branch = inner () => (float[2, 5, 16] y) {
                y, keys, values = If (which) <
                    then_branch = quick () => (float[2, 5, 16] a, float[2, 2, 5, 8] b, float[2, 2, 5, 8] c) {
                        a, b, c = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 2> (
                            q, k, v, past, past, last, total)
                    },
                    else_branch = any () => (float[2, 5, 16] d, float[2, 2, 5, 8] e, float[2, 2, 5, 8] f) {
                        d, e, f = Attention <q_num_heads = 2, kv_num_heads = 2> (q, k, v, mask, past, past)
                    }
                >
            },
            else_branch = other () => (float[2, 5, 16] x) { x = Neg(q) }
        >
    }"""


def feeds_of_either():
    states = [torch.randn(2, 5, 16) for _ in range(3)]
    mask = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5)
    counts = {"last": torch.tensor([4, 4], dtype=torch.int32), "total": torch.tensor(5, dtype=torch.int32)}
    return dict(zip("qkv", states, strict=True)) | {"past": torch.zeros(2, 2, 0, 8), "mask": mask, **counts}


def test_a_device_gets_the_attention_that_it_has_a_kernel_of():
    model = onnx.parser.parse_model(EITHER).SerializeToString()
    found = without_cpu_branches(model)

    assert [node.op_type for node in onnx.load_from_string(found).graph.node] == ["Attention", "Neg"]
    assert without_cpu_branches(found) is None
    within = without_cpu_branches(onnx.parser.parse_model(EITHER_INSIDE).SerializeToString())
    assert [node.op_type for node in onnx.load_from_string(within).graph.node[0].attribute[0].g.node] == ["Attention"]
    before, after, feeds = Session(model), Session(found), feeds_of_either()
    for which in (True, False):
        expected, got = (session.run({"which": torch.tensor(which), **feeds}) for session in (before, after))
        assert all(torch.allclose(expected[name], got[name], atol=1e-5) for name in expected)


def test_nodes_of_a_branch_that_would_not_be_waited_for_are_found():
    model = onnx.parser.parse_model(EITHER).SerializeToString()
    assert late_nodes(model, {"quick"}, {"any", "last"}) == ["quick"]
    assert late_nodes(model, set(), {"quick", "any", "last"}) == []
    inner = """<ir_version: 11, opset_import: ["" : 23]> g (float[2] x, bool which) => (float[2] y) {
        [first] a = Abs(x)
        y = If (which) <
            then_branch = one () => (float[2] b) { [here] c = Neg(a) [there] b = Neg(c) },
            else_branch = two () => (float[2] d) { [constant] d = Constant <value = float[2] {1, 2}> () }
        >
    }"""
    text = onnx.parser.parse_model(inner).SerializeToString()
    assert late_nodes(text, {"here", "there"}, {"first"}) == ["here"]
    assert late_nodes(text, {"first", "here", "there"}, {"constant"}) == []
