"""Graphs that compute in float16, made by onnxruntime's converter; what would overflow stays in float32."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from exportkit.errors import InvalidRequestError
from exportkit.onnx_files.quantisers import quiet_logging, write
from exportkit.running.kernels import FLOATS, add_outputs
from exportkit.running.protos import copied, set_nodes, weights_of
from exportkit.running.session import Session

if TYPE_CHECKING:
    import onnx

# Values that were seen may be this part of the largest one in float16, so that others have some room.
_ROOM = 0.25
# What masks hide by, such as the lowest value of float32. It becomes the lowest value of float16, which hides as well.
_HIDDEN = -1e30
_LARGEST = torch.finfo(torch.float16).max
# Operators with small results whatever the integers that they are given.
_BOUNDED = {"Cos", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Sin"}
_SIZES = {"Shape", "Size"}
_LARGEST_PROTO = 2**31 - 2**20


def overflowing_nodes(model: onnx.ModelProto, calls: Iterable[Mapping[str, torch.Tensor]]) -> frozenset[str]:
    """Returns the names of nodes that take or return values which are too large for float16.

    Args:
        model: The graph, whose nodes have names; it is left as it is.
        calls: Tensors by name of the graph's input, for each call.
    """
    import onnx

    whole = copied(model)
    add_outputs(whole)
    too_large = {tensor.name for tensor in whole.graph.initializer if _overflows(onnx.numpy_helper.to_array(tensor))}
    with tempfile.TemporaryDirectory(prefix="exportkit-half-") as folder:
        path = Path(folder) / "model.onnx"
        write(whole, path)
        session = Session(path, optimised=False)
        for feeds in calls:
            values = {**feeds, **session.run(feeds)}
            too_large |= {name for name, tensor in values.items() if _overflows(tensor.detach().numpy())}
    return frozenset(node.name for node in model.graph.node if too_large.intersection([*node.input, *node.output]))


def counting_nodes(model: onnx.ModelProto) -> frozenset[str]:
    """Returns the names of nodes that compute with integers as floats: angles of positions, what they decide, results.

    float16 has no odd integers above 2048, and the recorded calls do not show how long others are.

    Args:
        model: The graph, whose nodes have names.
    """
    graph = model.graph
    tables = {tensor.name for tensor in graph.initializer if tensor.data_type in FLOATS}
    counted = {*weights_of(graph)}
    counted |= {value.name for value in graph.input if value.type.tensor_type.elem_type not in FLOATS}
    made = []
    for node in graph.node:
        is_looked_up = node.op_type.startswith("Gather") and node.input[0] in tables
        is_of_integers = not is_looked_up and counted.issuperset(filter(None, node.input))
        if is_of_integers or node.op_type in _SIZES:
            counted |= {*node.output}
            made.append(node)
    needed, found = {value.name for value in graph.output}, set[str]()
    for node in reversed(made):
        to = next((attribute.i for attribute in node.attribute if attribute.name == "to"), None)
        decides = node.op_type in _BOUNDED or (node.op_type == "Cast" and to not in FLOATS)
        if decides or needed.intersection(node.output):
            needed |= {*node.input}
            found.add(node.name)
    return frozenset(found)


def require_float32(model: onnx.ModelProto) -> None:
    """Returns if most weights of a graph are in float32.

    Raises:
        InvalidRequestError: if they are not.
    """
    import onnx_ir

    counts = Counter[onnx_ir.DataType]()
    for tensor in model.graph.initializer:
        dtype = onnx_ir.DataType(tensor.data_type)
        counts[dtype] += math.prod(tensor.dims) if dtype.is_floating_point() else 0
    most = max(counts, key=lambda dtype: counts[dtype], default=onnx_ir.DataType.FLOAT)
    if counts[most] and most is not onnx_ir.DataType.FLOAT:
        raise InvalidRequestError(
            "The model does not compute in float32.",
            where="dtype",
            expected="a model in float32",
            got=f"most weights in {most.name.lower()}",
            hint="leave out dtype=: a model is exported and proven in its own dtype.",
        )


def in_float16(model: onnx.ModelProto, kept: Collection[str]) -> onnx.ModelProto:
    """Returns a graph that computes in float16, with the inputs and outputs that it had.

    Args:
        model: The graph; it is changed.
        kept: Names of nodes that stay in float32.
    """
    with quiet_logging():
        from onnxruntime.transformers import float16

        converted: onnx.ModelProto = float16.convert_float_to_float16(
            model,
            keep_io_types=True,
            disable_shape_infer=model.ByteSize() > _LARGEST_PROTO,
            node_block_list=[*kept],
        )
    _drop_repeated_casts(converted.graph)
    _pass_on(converted.graph, kept)
    return converted


def _drop_repeated_casts(graph: onnx.GraphProto) -> None:
    """Keeps one of several casts with the same output: the converter adds a cast for each input that needs it."""
    nodes = {tuple(node.output): node for node in graph.node}
    if len(nodes) < len(graph.node):
        set_nodes(graph, nodes.values())


def _pass_on(graph: onnx.GraphProto, kept: Collection[str]) -> None:
    """Lets others take in float32 what nodes in float32 return: the converter casts it to float16 and back."""
    from onnx import TensorProto

    whole = {name for node in graph.node if node.name in kept for name in node.output}
    casts = [node for node in graph.node if node.op_type == "Cast"]
    narrowed = {node.output[0]: node.input[0] for node in casts if node.input[0] in whole}
    for node in casts:
        if node.attribute[0].i == TensorProto.FLOAT:
            node.input[0] = narrowed.get(node.input[0], node.input[0])


def _overflows(values: object) -> bool:
    import numpy

    array = numpy.asarray(values)
    if array.dtype not in (numpy.float32, numpy.float64) or not array.size:
        return False
    shown = numpy.abs(array[(array > _HIDDEN) & numpy.isfinite(array)])
    return bool(shown.size and shown.max() > _ROOM * _LARGEST)
