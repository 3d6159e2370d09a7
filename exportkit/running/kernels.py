"""ONNX models with operators that onnxruntime has no kernel for, in a dtype or on a device.

For a dtype, they run in float32, between casts. On a device, the CPU computes them; in the branches and bodies of
control flow, where onnxruntime does not wait for what it copies there, that is avoided or refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from exportkit.running.protos import all_nodes, copied, set_nodes, subgraphs
from exportkit.trees.tree import ONNX_DTYPES

if TYPE_CHECKING:
    import onnx

Opened = TypeVar("Opened")

_EITHER = ([["GroupQueryAttention"], ["Attention"]], [["Attention"], ["GroupQueryAttention"]])
_FLOAT32 = ONNX_DTYPES[torch.float32]
_WITHOUT_KERNELS = {ONNX_DTYPES[torch.float64], ONNX_DTYPES[torch.bfloat16]}  # which few operators have kernels for
FLOATS = {_FLOAT32, ONNX_DTYPES[torch.float16], *_WITHOUT_KERNELS}
# How onnxruntime names the first operator without a kernel, or without one by its definition. It can list its
# kernels, too, but ends the process by SIGSEGV on the way if it was built for TensorRT, and the libraries of TensorRT
# are missing (seen in 1.31.1).
_MISSING = re.compile(r"Could not find an implementation for (\w+)\(|of operator \((\w+)\) in node .* is invalid")
_NO_TENSOR = ("Sequence", "SplitToSequence", "Optional")  # operators that return sequences or optional values


def opened_with_float32(
    source: str | bytes, open_model: Callable[[bytes], Opened], error: Exception
) -> tuple[Opened, tuple[str, ...]]:
    """Returns a model that was opened with casts to float32 around operators without a kernel for their dtype.

    What goes into these operators and comes out of them keeps its dtype, bfloat16 or float64, so their results are
    rounded as in torch.

    Args:
        source: Path of a file, or a serialised ModelProto.
        open_model: Opens a serialised ModelProto, which has no weights in files of their own.
        error: What was raised for the model as it is.

    Returns:
        What ``open_model`` returned, and the names of the operators.

    Raises:
        Exception: the error of ``open_model`` that is about something else; ``error`` if it is that one.
    """
    import onnx

    names, model, functions = set[str](), onnx.ModelProto(), list[str]()
    while True:
        found = _MISSING.search(str(error))
        if found is None:
            raise error
        if not names:
            loaded = without_weights(source)
            model = onnx.shape_inference.infer_shapes(loaded)
            functions = _with_bodies(model)
        left = [name for name in (found[1] or found[2], *functions) if name not in names]
        if not left:
            raise error
        names.add(left[0])
        converted = copied(model)
        in_float32 = _convert(converted.graph, {}, names)
        try:
            return open_model(converted.SerializeToString()), tuple(sorted(in_float32))
        except Exception as another:
            error = another


def without_weights(source: str | bytes) -> onnx.ModelProto:
    """Returns a model, given as a path or serialised; weights in files of their own are not read."""
    import onnx

    return onnx.load_from_string(source) if isinstance(source, bytes) else onnx.load(source, load_external_data=False)


def _with_bodies(model: onnx.ModelProto) -> list[str]:
    """Operators that are made of others: without a kernel, onnxruntime misses one of those that they are made of."""
    import onnx

    versions = {entry.domain: entry.version for entry in model.opset_import}
    found = []
    for domain, name in dict.fromkeys((node.domain, node.op_type) for node in all_nodes(model.graph)):
        if onnx.defs.has(name, domain):
            schema = onnx.defs.get_schema(name, versions.get(domain, 1), domain)
            if any(getattr(schema, kind) for kind in ("has_function", "has_context_dependent_function")):
                found.append(name)
    return found


def element_types(graph: Any, outer: Mapping[str, int]) -> dict[str, int]:
    """Returns the types of the elements of values by name, as far as a graph says them.

    Args:
        graph: A GraphProto or FunctionProto.
        outer: The same of the graph around it.
    """
    types = dict(outer)
    is_graph = hasattr(graph, "initializer")
    for value in (*graph.input, *graph.value_info, *graph.output) if is_graph else graph.value_info:
        types[value.name] = value.type.tensor_type.elem_type
    return types | {tensor.name: tensor.data_type for tensor in (graph.initializer if is_graph else ())}


def _convert(graph: onnx.GraphProto, outer: Mapping[str, int], names: Collection[str]) -> set[str]:
    """Adds the casts to a graph; returns the operators that have some."""
    from onnx import helper

    types, changed = element_types(graph, outer), set[str]()
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for part in subgraphs(node):
            changed |= _convert(part, types, names)
        kind = next((types[name] for name in node.input if types.get(name) in FLOATS), 0)
        for name in node.output:  # onnx infers nothing for onnxruntime's own operators, nor for what comes after them
            types[name] = types.get(name) or kind
        if node.op_type not in names:
            nodes.append(node)
            continue
        for place, name in enumerate(node.input):
            if types.get(name) in _WITHOUT_KERNELS:
                changed.add(node.op_type)
                node.input[place] = f"{name}/float32/{len(nodes)}"
                nodes.append(helper.make_node("Cast", [name], [node.input[place]], to=_FLOAT32))
        nodes.append(node)
        for place, name in enumerate(node.output):
            if types.get(name) in _WITHOUT_KERNELS:
                changed.add(node.op_type)
                node.output[place] = f"{name}/float32"
                nodes.append(helper.make_node("Cast", [node.output[place]], [name], to=types[name]))
    set_nodes(graph, nodes)
    return changed


def without_cpu_branches(source: str | bytes) -> bytes | None:
    """Returns a model that computes attention with the operator that devices have kernels for; None if it does anyway.

    A graph that was fused may choose between GroupQueryAttention for prompts and Attention; see
    `exportkit.onnx_files.fused`. In float32, only the CPU has a kernel for the first one.

    Args:
        source: Path of a file, or a serialised ModelProto. Weights in files of their own are not read.
    """
    import onnx

    model, changed = without_weights(source), False
    for node in all_nodes(model.graph):
        parts = subgraphs(node) if node.op_type == "If" else []
        if [[inner.op_type for inner in part.node] for part in parts] in _EITHER:
            (part,) = (part for part in parts if part.node[0].op_type == "Attention")
            names = dict(zip([value.name for value in part.output], node.output, strict=True))
            replacement = onnx.NodeProto()
            replacement.CopyFrom(part.node[0])
            replacement.name = node.name
            replacement.output[:] = [names.get(name, name) for name in replacement.output]
            node.CopyFrom(replacement)
            changed = True
    return bytes(model.SerializeToString()) if changed else None


def add_outputs(model: onnx.ModelProto) -> None:
    """Makes all values in a graph outputs, except for sequences and optional values: no session returns them."""
    known = {value.name for value in model.graph.output}
    for node in model.graph.node:
        for name in node.output if not node.op_type.startswith(_NO_TENSOR) else ():
            if name and name not in known:
                model.graph.output.add().name = name


def late_nodes(source: str | bytes, on_cpu: Collection[str], on_device: Collection[str]) -> list[str]:
    """Returns the nodes in branches and bodies that the CPU computes from values of a device outside of them.

    onnxruntime 1.31.1 copies these values without waiting for them, so the nodes may read what was there before: seen
    with GroupQueryAttention in a branch of If, with the If, and what it was given, on CUDA.

    Args:
        source: Path of a file, or a serialised ModelProto.
        on_cpu: Names of the nodes that the CPU computes.
        on_device: Names of the nodes that another device computes.
    """
    model = without_weights(source)

    def late(graph: onnx.GraphProto, outside: Collection[str]) -> list[str]:
        found, made = [], {name for node in graph.node if node.name in on_device for name in node.output}
        if graph is model.graph:  # its inputs may be on the device
            made |= {value.name for value in graph.input}
        known = {name for node in graph.node for name in node.output} | {value.name for value in graph.input}
        for node in graph.node:
            if node.name in on_cpu and not {*node.input}.isdisjoint({*outside} - known):
                found.append(node.name)
            for part in subgraphs(node):
                found += late(part, ({*outside} - known) | made)
        return found

    return late(model.graph, ())
