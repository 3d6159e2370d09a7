"""Operators of opset 23 and of onnxruntime, in graphs that are fused for onnxruntime.

onnxscript fuses norms and rotary embeddings when torch writes that opset, and does not look at whether their inputs are
broadcast. The operators do not do that, or only in part.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import onnx_ir
from onnx_ir.convenience import replace_nodes_and_values
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass
from onnx_ir.tape import Tape
from onnxscript.rewriter.pattern import RewriteRuleSet

from exportkit._torch_compat.onnx import rotary_fusion
from exportkit.onnx_files.fused_attention import join_heads, size_of, stop_at_diagonal

_NOUNS = {
    "Attention": "attention",
    "RMSNormalization": "norm",
    "SkipSimplifiedLayerNormalization": "norm",
    "RotaryEmbedding": "rotary embedding",
}


def fused_text(model: onnx_ir.Model) -> str:
    """Returns what is fused in a graph, such as ``24 attentions, 49 norms, 48 rotary embeddings``."""
    counts = Counter(_NOUNS[node.op_type] for node in model.graph.all_nodes() if node.op_type in _NOUNS)
    parts = [f"{counts[noun]} {noun}{'s' if counts[noun] > 1 else ''}" for noun in dict.fromkeys(_NOUNS.values())]
    return ", ".join(part for part in parts if not part.startswith("0 ")) or "nothing"


@functools.cache
def _rotary_in_half_precision() -> Any:
    """The rule of onnxscript for rotary embeddings whose sines and cosines are converted to the dtype of the model."""
    rule, turned_half = rotary_fusion()

    class InHalfPrecision(rule):  # type: ignore[misc, valid-type]
        def pattern(  # noqa: PLR0917 (onnxscript reads the names)
            self, op: Any, x: Any, freqs: Any, start1: Any, end1: Any, start2: Any, end2: Any, one1: Any, one2: Any
        ) -> Any:
            repeated = op.Concat(freqs, freqs, axis=-1)
            cos, sin = (op.Unsqueeze(op.Cast(f(repeated)), axis) for f, axis in ((op.Cos, one1), (op.Sin, one2)))
            return x * cos + turned_half(op, x, start1, end1, start2, end2) * sin

        def rewrite(self, op: Any, x: Any, freqs: Any, **_: Any) -> Any:
            angles = [op.Cast(function(freqs), to=x.dtype) for function in (op.Cos, op.Sin)]
            for angle in angles:
                angle.shape, angle.type = freqs.shape, x.type
            return op.RotaryEmbedding(x, *angles, interleaved=0, num_heads=x.shape[1])

    return RewriteRuleSet([InHalfPrecision.rule()])


def complete_fusions(model: onnx_ir.Model) -> None:
    """Gives fused operators inputs of the sizes and layouts that they take, and computes what they share once."""
    _rotary_in_half_precision().apply_to_model(model)
    for node in list(model.graph):
        if node.op_type == "RotaryEmbedding" and node.domain == "":
            _spread_angles(node, model.graph)
        elif node.op_type == "RMSNormalization" and node.domain == "":
            _take_dtype_of_scale(node, model.graph)
            _scale_outside(node, model.graph)
    join_heads(model)
    CommonSubexpressionEliminationPass()(model)
    RemoveUnusedNodesPass()(model)


def fuse_across_layers(model: onnx_ir.Model) -> None:
    """Fuses what belongs to several layers of a whole graph: norms with the sum before them, and what masks say."""
    from onnxscript.rewriter.ort_fusions.skip_normalization import fuse_skip_rms_normalization

    _rename(model.graph, "RMSNormalization", "SimplifiedLayerNormalization")  # the older name, which onnxscript knows
    fuse_skip_rms_normalization(model)
    _rename(model.graph, "SimplifiedLayerNormalization", "RMSNormalization")
    stop_at_diagonal(model)
    RemoveUnusedNodesPass()(model)
    if any(node.domain == "com.microsoft" for node in model.graph.all_nodes()):
        model.opset_imports.setdefault("com.microsoft", 1)


def _rename(graph: onnx_ir.Graph, old: str, new: str) -> None:
    for node in graph:
        if (node.domain, node.op_type) == ("", old):
            node.op_type = new


def _spread_angles(node: Any, graph: onnx_ir.Graph) -> None:
    """Repeats the angles of a rotary embedding for each row and token.

    In double precision, for which there is no operator, and where there may be more angles than tokens, it becomes
    arithmetic again.
    """
    values, *angles = node.inputs
    for angle in angles:  # the sine or cosine of a value whose shape is known
        source = angle.producer().inputs[0]
        angle.shape, angle.type = angle.shape or source.shape, angle.type or source.type
    (batch, _, tokens, _), known = values.shape, angles[0].shape
    tape = Tape()
    if values.dtype is onnx_ir.DataType.DOUBLE or 1 in (batch, tokens):
        first, second = tape.op_multi_out("Split", [values], {"num_outputs": 2, "axis": -1}, num_outputs=2)
        heads = tape.op("Constant", [], {"value_ints": [1]})
        cos, sin = (tape.op("Unsqueeze", [angle, heads]) for angle in angles)
        turned = (
            tape.op("Sub", [tape.op("Mul", [first, cos]), tape.op("Mul", [second, sin])]),
            tape.op("Add", [tape.op("Mul", [second, cos]), tape.op("Mul", [first, sin])]),
        )
        result = tape.op("Concat", turned, {"axis": -1})
        replace_nodes_and_values(graph, node, [node], tape.nodes, node.outputs, [result])
    elif known is None or (known[0], known[1]) != (batch, tokens):
        sizes = [size_of(values, axis, graph, tape) for axis in (0, 2)]
        target = tape.op("Concat", [*sizes, tape.op("Constant", [], {"value_ints": [1]})], {"axis": 0})
        for place, angle in enumerate(angles, 1):
            node.replace_input_with(place, tape.op("Expand", [angle, target]))
        graph.insert_before(node, tape.nodes)


def _take_dtype_of_scale(node: Any, graph: onnx_ir.Graph) -> None:
    """Converts the values of a norm to the dtype of its scale and its result: onnxruntime knows norms of one dtype."""
    values, scale = node.inputs
    if None not in (values.dtype, scale.dtype) and values.dtype is not scale.dtype:
        tape = Tape()
        cast = tape.op("Cast", [values], {"to": scale.dtype})
        cast.shape, cast.dtype = values.shape, scale.dtype
        node.replace_input_with(0, cast)
        graph.insert_before(node, tape.nodes)


def _scale_outside(node: Any, graph: onnx_ir.Graph) -> None:
    """Multiplies after a norm if its scale is more than a number for each of the values that it normalises.

    Such a scale may have rows of its own, and more of them than the values.
    """
    values, scale = node.inputs
    width = None if values.shape is None else values.shape[-1]
    is_plain = scale.shape is not None and list(scale.shape) in ([width], [1], [])
    if is_plain or not isinstance(width, int):
        return
    tape = Tape()
    ones = onnx_ir.tensor([1.0] * width, dtype=scale.dtype)
    weight = tape.initializer(ones, name=f"{node.outputs[0].name}_ones")
    graph.register_initializer(weight)
    norm = tape.op("RMSNormalization", [values, weight], {key: item.value for key, item in node.attributes.items()})
    result = tape.op("Mul", [norm, scale])
    replace_nodes_and_values(graph, node, [node], tape.nodes, node.outputs, [result])
