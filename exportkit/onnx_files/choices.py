"""Choices between two results in a graph, by one condition: what only one of them needs is computed in its branch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import onnx_ir
from onnx_ir.convenience import replace_nodes_and_values
from onnx_ir.tape import Tape

# Without one of these, a branch costs more than it saves.
_COSTLY = {
    "Attention", "Conv", "ConvTranspose", "Einsum", "Gemm", "GroupQueryAttention", "GRU", "If", "Loop", "LSTM",
    "MatMul", "MultiHeadAttention", "RNN", "Scan",
}  # fmt: skip


def choices_as_branches(graph: onnx_ir.Graph) -> None:
    """Replaces each ``Where`` by one condition with an ``If`` if either of its results is costly.

    Args:
        graph: A graph, or a branch of one.
    """
    choices = defaultdict[onnx_ir.Value, list[onnx_ir.Node]](list)
    for node in graph:
        if node.op_type == "Where" and node.domain == "" and _is_choice(node):
            choices[node.inputs[0]].append(node)  # type: ignore[index]  # a Where has all its inputs
    for condition, nodes in reversed(choices.items()):  # the decisions that a graph comes to last lead to the others
        if all(node.graph is graph for node in nodes):
            _make_branches(graph, condition, nodes)


def _is_choice(node: onnx_ir.Node) -> bool:
    condition, *results = node.inputs
    shapes = [None if value is None else value.shape for value in (*results, *node.outputs)]
    is_one = condition is not None and condition.shape is not None and not len(condition.shape)
    return is_one and shapes[0] is not None and all(shape == shapes[0] for shape in shapes)


def _make_branches(graph: onnx_ir.Graph, condition: onnx_ir.Value, choices: Sequence[onnx_ir.Node]) -> None:
    sides = [_needed_by_one(graph, choices, position) for position in (1, 2)]
    if _COSTLY.isdisjoint(node.op_type for side in sides for node in side):
        return
    branches = [
        _branch(graph, side, choices, position, f"{choices[-1].name}_{kind}")
        for side, position, kind in zip(sides, (1, 2), ("then", "else"), strict=True)
    ]
    tape = Tape()
    either = {"then_branch": branches[0], "else_branch": branches[1]}
    chosen = tape.op_multi_out("If", [condition], either, num_outputs=len(choices))
    old = [node.outputs[0] for node in choices]
    for value, found in zip(old, chosen, strict=True):
        found.shape, found.type = value.shape, value.type
    replace_nodes_and_values(graph, choices[-1], choices, tape.nodes, old, chosen)
    graph.sort()
    for branch in branches:
        choices_as_branches(branch)


def _needed_by_one(graph: onnx_ir.Graph, choices: Collection[onnx_ir.Node], position: int) -> list[onnx_ir.Node]:
    """The nodes that nothing needs but the results at a position of choices, in order."""
    found = dict[onnx_ir.Node, None]()
    for node in reversed(graph):
        uses = [use for value in node.outputs for use in value.uses()]
        is_inside = all(user in found or (user in choices and index == position) for user, index in uses)
        if uses and is_inside and not any(value.is_graph_output() for value in node.outputs):
            found[node] = None
    return [*reversed(found)]


def _branch(
    graph: onnx_ir.Graph, nodes: Sequence[onnx_ir.Node], choices: Sequence[onnx_ir.Node], position: int, name: str
) -> onnx_ir.Graph:
    """The graph of one side: it returns its results, each of which has to be made in it, once."""
    graph.remove(nodes)
    tape, results = Tape(), list[onnx_ir.Value]()
    for choice in choices:
        value = choice.inputs[position]
        if value in results or value is None or value.producer() not in nodes:
            copied = tape.op("Identity", [value])
            copied.name = f"{name}_{len(results)}"
            copied.shape, copied.type = choice.outputs[0].shape, choice.outputs[0].type
            value = copied
        results.append(value)
    return onnx_ir.Graph([], results, nodes=[*nodes, *tape.nodes], name=name)
