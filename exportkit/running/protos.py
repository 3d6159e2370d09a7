"""Walks, copies and changes the graphs of a ModelProto, those inside of nodes included."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx


def subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Returns the branches and bodies of a node."""
    return [part for attribute in node.attribute for part in (attribute.g, *attribute.graphs) if part.node]


def all_nodes(graph: Any) -> Iterator[onnx.NodeProto]:
    """Yields the nodes of a GraphProto or FunctionProto, and of the graphs inside of them."""
    for node in graph.node:
        yield node
        for part in subgraphs(node):
            yield from all_nodes(part)


def weights_of(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Returns the weights of a graph by name."""
    return {tensor.name: tensor for tensor in graph.initializer}


def copied(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a copy of a model."""
    copy = type(model)()
    copy.CopyFrom(model)
    return copy


def set_nodes(graph: Any, nodes: Iterable[onnx.NodeProto]) -> None:
    """Replaces the nodes of a GraphProto or FunctionProto."""
    nodes = list(nodes)
    del graph.node[:]
    graph.node.extend(nodes)
