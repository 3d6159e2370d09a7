"""Norms and rotary embeddings as single operators of opset 23, which onnxscript fuses when torch writes that opset.

onnxscript does not look at whether their inputs are broadcast. The operators do not do that, or only in part.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import onnx_ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass
from onnx_ir.tape import Tape

_NOUNS = {"Attention": "attention", "RMSNormalization": "norm", "RotaryEmbedding": "rotary embedding"}


def fused_text(model: onnx_ir.Model) -> str:
    """Returns what is fused in a graph, such as ``24 attentions, 49 norms, 48 rotary embeddings``."""
    counts = Counter(node.op_type for node in model.graph if node.domain == "")
    parts = [f"{counts[kind]} {noun}{'s' if counts[kind] > 1 else ''}" for kind, noun in _NOUNS.items() if counts[kind]]
    return ", ".join(parts) or "nothing"


def complete_fusions(model: onnx_ir.Model) -> None:
    """Gives fused operators inputs of the sizes that they take, and computes what they share once."""
    for node in list(model.graph):
        if node.op_type == "RotaryEmbedding" and node.domain == "":
            _spread_angles(node, model.graph)
        elif node.op_type == "RMSNormalization" and node.domain == "":
            _scale_outside(node, model.graph)
    CommonSubexpressionEliminationPass()(model)
    RemoveUnusedNodesPass()(model)


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
        _replace(node, tape.op("Concat", turned, {"axis": -1}), tape)
    elif known is None or (known[0], known[1]) != (batch, tokens):
        sizes = [tape.op("Shape", [values], {"start": axis, "end": axis + 1}) for axis in (0, 2)]
        target = tape.op("Concat", [*sizes, tape.op("Constant", [], {"value_ints": [1]})], {"axis": 0})
        for place, angle in enumerate(angles, 1):
            node.replace_input_with(place, tape.op("Expand", [angle, target]))
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
    _replace(node, tape.op("Mul", [norm, scale]), tape)


def _replace(node: Any, value: onnx_ir.Value, tape: Tape) -> None:
    """Puts the nodes of a tape in place of a node, whose output is then a value of them."""
    (old,) = node.outputs
    value.name, value.shape, value.type = old.name, old.shape, old.type
    node.graph.insert_before(node, tape.nodes)
    onnx_ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
    node.graph.remove(node, safe=True)
