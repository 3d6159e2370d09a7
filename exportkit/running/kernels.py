"""ONNX models with operators that onnxruntime has no kernel of for a dtype: these run in float32, between casts."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx

_FLOAT32 = 1  # TensorProto.FLOAT
_DTYPES = {11: "double", 16: "bfloat16"}  # TensorProto.DOUBLE and BFLOAT16, by onnxruntime's names
_FOLDED = {"Constant"}  # has no kernel, and needs none


def with_float32_where_needed(source: str | bytes) -> tuple[bytes, tuple[str, ...]]:
    """Returns a model in which operators compute in float32 that have no kernel for bfloat16 or float64 on the CPU.

    What goes into them and comes out of them keeps its dtype, so their results are rounded as in torch.

    Args:
        source: Path of a file, or a serialised ModelProto.

    Returns:
        The model, without weights in files of their own, and the names of these operators; none if all have kernels.
    """
    import onnx

    model = onnx.load_from_string(source) if isinstance(source, bytes) else onnx.load(source, load_external_data=False)
    model = onnx.shape_inference.infer_shapes(model)
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    names: set[str] = set()
    _convert(model.graph, {}, opsets, names)
    return model.SerializeToString(), tuple(sorted(names))


def _convert(graph: onnx.GraphProto, outer: Mapping[str, int], opsets: Mapping[str, int], names: set[str]) -> None:
    from onnx import helper

    types = dict(outer)
    for value in (*graph.input, *graph.value_info, *graph.output):
        types[value.name] = value.type.tensor_type.elem_type
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for attribute in node.attribute:
            for part in (attribute.g, *attribute.graphs):
                if part.node:
                    _convert(part, types, opsets, names)
        kinds = {types.get(name, 0) for name in (*node.input, *node.output)} & {*_DTYPES}
        missing = {kind for kind in kinds if not _has_kernel(node.domain, node.op_type, opsets, _DTYPES[kind])}
        if not missing:
            nodes.append(node)
            continue
        names.add(node.op_type)
        for place, name in enumerate(node.input):
            if types.get(name) in missing:
                node.input[place] = f"{name}/float32/{len(nodes)}"
                nodes.append(helper.make_node("Cast", [name], [node.input[place]], to=_FLOAT32))
        nodes.append(node)
        for place, name in enumerate(node.output):
            if types.get(name) in missing:
                node.output[place] = f"{name}/float32"
                nodes.append(helper.make_node("Cast", [node.output[place]], [name], to=types[name]))
    del graph.node[:]
    graph.node.extend(nodes)


def _has_kernel(domain: str, name: str, opsets: Mapping[str, int], dtype: str) -> bool:
    import onnx

    if name in _FOLDED:
        return True
    try:
        version = onnx.defs.get_schema(name, opsets.get(domain, 1), domain).since_version
    except onnx.defs.SchemaError:
        version = opsets.get(domain, 1)
    return any(first <= version <= last for first, last in _kernels().get((domain, name, f"tensor({dtype})"), ()))


@functools.cache
def _kernels() -> dict[tuple[str, str, str], list[tuple[int, int]]]:
    """Versions of operators that have a kernel, by domain, name and dtype."""
    from onnxruntime.capi import onnxruntime_pybind11_state

    found: dict[Any, list[tuple[int, int]]] = {}
    for kernel in onnxruntime_pybind11_state.get_all_opkernel_def():
        if kernel.provider == "CPUExecutionProvider":
            for dtype in {dtype for dtypes in kernel.type_constraints.values() for dtype in dtypes}:
                found.setdefault((kernel.domain, kernel.op_name, dtype), []).append(kernel.version_range)
    return found
