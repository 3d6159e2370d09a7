"""Operators of opset 23 and of onnxruntime, in graphs that are fused for onnxruntime.

onnxscript fuses norms and rotary embeddings when torch writes that opset, and does not look at whether their inputs are
broadcast. The operators do not do that, or only in part.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import Any

import onnx_ir
from onnx_ir.convenience import replace_nodes_and_values
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, NameFixPass, RemoveUnusedNodesPass
from onnx_ir.tape import Tape
from onnxscript.rewriter.pattern import RewriteRuleSet

from exportkit._torch_compat.onnx import rotary_fusion
from exportkit.plan.tables import count

_TOKENS_FIRST = [0, 2, 1, 3]  # also the way back


def size_of(value: onnx_ir.Value, axis: int, graph: onnx_ir.Graph, tape: Tape) -> onnx_ir.Value:
    """Returns the size of an axis of a value as ``(1,)``, read off an input of the graph where one has it.

    What is read off an input is the same in all layers, and computed once.
    """
    size = value.shape[axis] if value.shape is not None else None
    if isinstance(size, onnx_ir.SymbolicDim) and size.value is not None:
        for given in graph.inputs:
            for place, other in enumerate(given.shape or ()):
                if other == size:
                    return tape.op("Shape", [given], {"start": place, "end": place + 1})
    return tape.op("Shape", [value], {"start": axis, "end": axis + 1})


# Heads side by side. torch moves heads before tokens for attention, and back. onnxruntime's kernels take them as they
# were as well, which saves the moves.


def join_heads(model: onnx_ir.Model) -> None:
    """Gives attention and rotary embeddings ``(batch, tokens, heads * size)`` where heads were moved before tokens."""
    for node in list(model.graph):
        if (node.domain, node.op_type) == ("", "Attention"):
            _join(node, model.graph)
    RemoveUnusedNodesPass()(model)


def _join(node: Any, graph: onnx_ir.Graph) -> None:
    moved: Any = _only_user(node.outputs[0])
    if moved is None or not _is_moved(moved) or _width(moved.outputs[0], 2) is None:
        return
    tape, (query, key, value, *others) = Tape(), node.inputs
    joined = [_joined(part, tape) for part in (query, key, value)]
    if None in joined:
        return
    heads = {"q_num_heads": query.shape[1], "kv_num_heads": key.shape[1]}
    options = {name: item.value for name, item in node.attributes.items()} | heads
    result, *states = tape.op_multi_out("Attention", [*joined, *others], options, num_outputs=len(node.outputs))
    old, flat = [node, moved], _only_user(moved.outputs[0])
    if flat is not None and flat.op_type == "Reshape" and _is_flat(flat.outputs[0], moved.outputs[0]):
        old.append(flat)
    else:
        sizes = moved.outputs[0].shape[2:]
        result = tape.op("Reshape", [result, tape.op("Constant", [], {"value_ints": [0, 0, *sizes]})])
    values = [old[-1].outputs[0], *node.outputs[1:]]
    replace_nodes_and_values(graph, node, old, tape.nodes, values, [result, *states])


def _joined(value: Any, tape: Tape) -> onnx_ir.Value | None:
    """What a value ``(batch, heads, tokens, size)`` was as ``(batch, tokens, heads * size)``; None if it was not so."""
    node, shape, width = value.producer(), value.shape, _width(value, 1)
    if node is None or width is None:
        return None
    if node.op_type == "RotaryEmbedding" and _only_user(value) is not None:
        inner, *angles = node.inputs
        source = _joined(inner, tape)
        if source is None:
            return None
        options = {name: item.value for name, item in node.attributes.items()} | {"num_heads": shape[1]}
        joined = tape.op("RotaryEmbedding", [source, *angles], options)
    elif _is_moved(node):
        source = node.inputs[0]
        split = source.producer()
        if split is not None and split.op_type == "Reshape" and _is_flat(split.inputs[0], source):
            return split.inputs[0]  # type: ignore[no-any-return]
        joined = tape.op("Reshape", [source, tape.op("Constant", [], {"value_ints": [0, 0, width]})])
    else:
        return None
    joined.shape, joined.type = onnx_ir.Shape([shape[0], shape[2], width]), value.type
    return joined


def _is_moved(node: onnx_ir.Node) -> bool:
    return node.op_type == "Transpose" and list(node.attributes.get_ints("perm", ())) == _TOKENS_FIRST


def _is_flat(value: Any, source: Any) -> bool:
    """Whether a value is ``(batch, tokens, heads * size)`` where a source is ``(batch, tokens, heads, size)``."""
    width = _width(source, 2)
    if value.shape is None or width is None:
        return False
    outer = list(source.shape)[:2]
    unknown = any(isinstance(axis, onnx_ir.SymbolicDim) and axis.value is None for axis in outer)
    return not unknown and list(value.shape) == [*outer, width]


def _width(value: Any, heads: int) -> int | None:
    """The number of heads, which is the size of that axis, times the size of a head, which is the last one."""
    if value.shape is None or len(value.shape) != 4:
        return None
    sizes = value.shape[heads], value.shape[3]
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None


def _only_user(value: onnx_ir.Value) -> onnx_ir.Node | None:
    users = [node for node, _ in value.uses()]
    return users[0] if len(users) == 1 and not value.is_graph_output() else None


# Prompts. For one with nothing before it, whose mask hides the future and nothing else, onnxruntime has a kernel that
# does not compute the hidden part.


def stop_at_diagonal(model: onnx_ir.Model) -> None:
    """Lets onnxruntime's ``GroupQueryAttention`` compute prompts that nothing comes before and no mask shortens.

    It does not compute what is in the future: a prompt of 2048 tokens takes 0.6 of the time, one of 256 takes 1.1 of it
    (one thread, heads of 64). Whether a call is of this kind is asked once for each mask, at run time.
    """
    known: dict[Any, tuple[onnx_ir.Value, ...]] = {}
    for node in list(model.graph):
        if (node.domain, node.op_type) == ("", "Attention") and _may_stop(node):
            mask = node.inputs[3]
            if mask not in known:
                known[mask] = _asked(node, model.graph)
            _choose(node, model.graph, *known[mask])
    if known:
        NameFixPass()(model)  # the branches have names of their own


def _may_stop(node: Any) -> bool:
    """Whether attention is over a cache, with a mask of pairs, and of a form that both kernels compute."""
    if len(node.inputs) != 6 or None in node.inputs or "q_num_heads" not in node.attributes:
        return False
    _, key, value, mask, *_ = node.inputs
    if mask.dtype is not onnx_ir.DataType.BOOL or mask.shape is None or len(mask.shape) != 4:
        return False
    if node.attributes.get_int("is_causal", 0) or key.shape is None or value.shape is None:
        return False
    width, rest = divmod(key.shape[-1], node.attributes.get_int("kv_num_heads"))
    return key.shape[-1] == value.shape[-1] and not rest and width % 8 == 0  # heads of other sizes are refused


def _asked(node: Any, graph: onnx_ir.Graph) -> tuple[onnx_ir.Value, ...]:
    """Whether a call is a prompt as above, the place of each row's last token, and how many tokens there are."""
    query, mask, tape = node.inputs[0], node.inputs[3], Tape()
    rows, keys = (tape.op("Shape", [mask], {"start": axis, "end": axis + 1}) for axis in (2, 3))
    zero, one, axis = (tape.op("Constant", [], {"value": onnx_ir.tensor(number)}) for number in (0, 1, [1]))
    end = tape.op("Squeeze", [keys])
    places = tape.op("Range", [zero, end, one])
    own = tape.op("Range", [tape.op("Sub", [end, tape.op("Squeeze", [rows])]), end, one])
    past = tape.op("LessOrEqual", [places, tape.op("Unsqueeze", [own, axis])])
    same = tape.op("Cast", [tape.op("Equal", [mask, past])], {"to": onnx_ir.DataType.INT32})
    every = tape.op("Cast", [tape.op("ReduceMin", [same], {"keepdims": 0})], {"to": onnx_ir.DataType.BOOL})
    is_plain = tape.op("And", [tape.op("Squeeze", [tape.op("Equal", [rows, keys])]), every])
    total = tape.op("Cast", [keys], {"to": onnx_ir.DataType.INT32})
    last = tape.op("Cast", [tape.op("Sub", [keys, axis])], {"to": onnx_ir.DataType.INT32})
    last = tape.op("Expand", [last, size_of(query, 0, graph, tape)])
    graph.insert_before(node, tape.nodes)
    return is_plain, last, total


def _choose(node: Any, graph: onnx_ir.Graph, is_plain: Any, last: Any, total: Any) -> None:
    query, key, value, _, *past = node.inputs
    options = {name: item.value for name, item in node.attributes.items()}
    same = {"num_heads": options["q_num_heads"], "kv_num_heads": options["kv_num_heads"]}
    same |= {name: options[name] for name in ("scale", "softcap") if name in options}
    branches = []
    for kind, domain, inputs, given in (
        ("GroupQueryAttention", "com.microsoft", [query, key, value, *past, last, total], same),
        ("Attention", "", node.inputs, options),
    ):
        inside = Tape()
        results = inside.op_multi_out(kind, inputs, given, domain=domain, num_outputs=3)
        for result, old in zip(results, node.outputs, strict=True):
            result.shape, result.type = old.shape, old.type
        branches.append(onnx_ir.Graph([], results, nodes=inside.nodes, name=f"{node.name}_{kind}"))
    tape = Tape()
    either = dict(zip(("then_branch", "else_branch"), branches, strict=True))
    results = tape.op_multi_out("If", [is_plain], either, num_outputs=3)
    replace_nodes_and_values(graph, node, [node], tape.nodes, node.outputs, results)


_NOUNS = {
    "Attention": "attention",
    "RMSNormalization": "norm",
    "SkipSimplifiedLayerNormalization": "norm",
    "RotaryEmbedding": "rotary embedding",
}


def fused_text(model: onnx_ir.Model) -> str:
    """Returns what is fused in a graph, such as ``24 attentions, 49 norms, 48 rotary embeddings``."""
    counts = Counter(_NOUNS[node.op_type] for node in model.graph.all_nodes() if node.op_type in _NOUNS)
    return ", ".join(count(counts[noun], noun) for noun in dict.fromkeys(_NOUNS.values()) if counts[noun]) or "nothing"


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
