"""Brings constant matrices into the form that quantisers take: the second input of a MatMul.

torch.onnx leaves large matrices behind a Transpose, and linear layers of two-dimensional values in a Gemm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from exportkit.running.protos import all_nodes, set_nodes, weights_of

if TYPE_CHECKING:
    import onnx

# What may come between the product that makes logits and the output: none of it mixes two values.
_ONE_BY_ONE = {"Add", "Sub", "Mul", "Div", "Tanh", "Cast", "Clip", "Identity"}
_FIRST_INPUT = {"Slice", "Gather", "GatherND", "Squeeze", "Unsqueeze"}


def read_quantisable(path: Path) -> onnx.ModelProto:
    """Returns a graph with its weights, in which constant matrices are the second inputs of products.

    Args:
        path: The ONNX file.
    """
    import onnx
    from onnx import numpy_helper

    model = onnx.load(path)
    graph = model.graph
    weights = weights_of(graph)
    takers = defaultdict[str, list[onnx.NodeProto]](list)
    for node in all_nodes(graph):
        for name in node.input:
            takers[name].append(node)
    turned: dict[str, str] = {}

    def transposed(name: str, new: str) -> str:
        if name not in turned:
            tensor = numpy_helper.from_array(numpy_helper.to_array(weights[name]).T.copy(), new)
            graph.initializer.append(tensor)
            turned[name] = new
        return turned[name]

    nodes = []
    for number, node in enumerate(graph.node):
        node.name = node.name or f"node_{number}_{node.op_type}"
        attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        if node.op_type == "Transpose" and _is_matrix(weights.get(node.input[0])):
            (made,) = node.output
            if {taker.op_type for taker in takers[made]} == {"MatMul"} and attributes.get("perm", [1, 0]) == [1, 0]:
                transposed(node.input[0], made)
                for taker in takers[made]:
                    taker.input[:] = [turned[node.input[0]] if name == made else name for name in taker.input]
                continue
        plain = attributes.get("alpha", 1.0) == attributes.get("beta", 1.0) == 1.0 and not attributes.get("transA")
        if node.op_type == "Gemm" and plain and _is_matrix(weights.get(node.input[1])):
            matrix = transposed(node.input[1], f"{node.input[1]}_transposed") if attributes.get("transB") else None
            has_bias = len(node.input) > 2 and bool(node.input[2])
            product = f"{node.output[0]}_product" if has_bias else node.output[0]
            new = onnx.helper.make_node("MatMul", [node.input[0], matrix or node.input[1]], [product], node.name)
            new.metadata_props.extend(node.metadata_props)
            nodes.append(new)
            if has_bias:
                new = onnx.helper.make_node("Add", [product, node.input[2]], list(node.output), f"{node.name}_bias")
                new.metadata_props.extend(node.metadata_props)
                nodes.append(new)
            continue
        nodes.append(node)
    set_nodes(graph, nodes)
    remove_unused(graph)
    return model


def heads_of(model: onnx.ModelProto, outputs: Collection[str]) -> dict[str, str]:
    """Returns the node that makes the logits of each output that has some: a product with a constant matrix.

    Args:
        model: The graph, as `read_quantisable` returns it.
        outputs: Names of the outputs that may be logits.
    """
    makers = {name: node for node in model.graph.node for name in node.output}
    constant = {*weights_of(model.graph)}
    constant |= {name for name, node in makers.items() if node.op_type == "Constant"}
    found = {}
    for output in outputs:
        node = makers.get(output)
        while node is not None:
            if node.op_type == "MatMul":
                if node.input[1] in constant:
                    found[output] = node.name
                break
            values = [name for name in node.input if name and name not in constant]
            if node.op_type in _FIRST_INPUT:
                values = [node.input[0]]
            node = makers.get(values[0]) if len(values) == 1 and node.op_type in _ONE_BY_ONE | _FIRST_INPUT else None
    return found


def remove_unused(graph: onnx.GraphProto) -> None:
    """Removes the weights that no node takes."""
    used = {name for node in all_nodes(graph) for name in node.input} | {value.name for value in graph.output}
    for place in reversed(range(len(graph.initializer))):
        if graph.initializer[place].name not in used:
            del graph.initializer[place]


def _is_matrix(tensor: onnx.TensorProto | None) -> bool:
    return tensor is not None and len(tensor.dims) == 2
