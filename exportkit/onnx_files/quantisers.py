"""Calls what onnxruntime has for fewer bits: quantisers of weights alone, of activations as well, and for float16."""

from __future__ import annotations

import ast
import contextlib
import logging
import math
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from exportkit.errors import InvalidRequestError, RuntimeFailure
from exportkit.onnx_files.contract import weights_beside
from exportkit.onnx_files.quantised import BITS, CLASSES, SCOPES, Quantisation, WeightMatrix, remove_unused
from exportkit.running.compare import Tensors
from exportkit.running.kernels import FLOATS, add_outputs
from exportkit.running.placement import require_onnxruntime
from exportkit.running.protos import all_nodes, copied, set_nodes, subgraphs, weights_of
from exportkit.running.session import Session

if TYPE_CHECKING:
    import onnx

# MatMulNBits rounds activations to int8 in blocks and computes with integers, several times as fast on a CPU. On a
# trained model of two layers that moved the KL divergence from 0.0265 to 0.0268, of int4 weights.
_COMPUTE_IN_INT8 = 4


def quantise(
    model: onnx.ModelProto, layers: Sequence[WeightMatrix], request: Quantisation, calibration: Sequence[Tensors] = ()
) -> onnx.ModelProto:
    """Returns a graph with some of its layers quantised by onnxruntime.

    Args:
        model: The graph, as `read_quantisable` returns it; it is changed.
        layers: Its matrices, with what each is stored in.
        request: What the user asked for.
        calibration: Tensors by name of the graph's input, for each call by which static activations are calibrated.

    Raises:
        MissingPackageError: if onnxruntime is not installed.
        RuntimeFailure: if it cannot quantise the graph.
    """
    require_onnxruntime()
    with quiet_logging():
        try:
            if request.activations is None:
                _quantise_weights(model, layers, request)
                return model
            return _quantise_activations(model, layers, request, calibration)
        except Exception as error:
            raise RuntimeFailure("onnxruntime cannot quantise the graph.", got=error) from error


def _quantise_weights(model: onnx.ModelProto, layers: Sequence[WeightMatrix], request: Quantisation) -> None:
    from onnxruntime.quantization import matmul_nbits_quantizer

    described = {node.name: list(node.metadata_props) for node in model.graph.node}
    opsets = {item.domain: item.version for item in model.opset_import}
    for kind, bits in BITS.items():
        for operator in ("MatMul", "Gather"):
            chosen = {layer.node for layer in layers if layer.stored == kind and layer.operator == operator}
            if chosen:
                before = {*weights_of(model.graph)}
                matmul_nbits_quantizer.MatMulNBitsQuantizer(
                    model,
                    bits=bits,
                    block_size=request.block_size,
                    is_symmetric=request.symmetric,
                    accuracy_level=_COMPUTE_IN_INT8,
                    nodes_to_exclude=[*({node.name for node in all_nodes(model.graph)} - chosen)],
                    op_types_to_quantize=(operator,),
                ).process()
                _name_apart(model.graph, before, f"{operator}_{kind}")
        for node in model.graph.node:
            if node.domain == "com.microsoft" and not node.metadata_props:
                node.metadata_props.extend(described.get(node.name.removesuffix(f"_Q{bits}"), ()))
    for item in model.opset_import:  # for embeddings it is raised, without changing what depends on it
        item.version = opsets.get(item.domain, item.version)


def _name_apart(graph: onnx.GraphProto, before: Collection[str], ending: str) -> None:
    """Gives new weights names of their own: those of one matrix that is stored in two ways are the same otherwise."""
    new = {tensor.name: tensor for tensor in graph.initializer if tensor.name not in before}
    kept = [tensor for tensor in graph.initializer if tensor.name in before]
    for node in graph.node:
        node.input[:] = [f"{name}_{ending}" if name in new else name for name in node.input]
    for tensor in new.values():  # once, where two products share a matrix
        tensor.name = f"{tensor.name}_{ending}"
    del graph.initializer[:]
    graph.initializer.extend([*kept, *new.values()])


def _quantise_activations(
    model: onnx.ModelProto, layers: Sequence[WeightMatrix], request: Quantisation, calibration: Sequence[Tensors]
) -> onnx.ModelProto:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic, quantize_static

    chosen = [layer.node for layer in layers if layer.stored in BITS]
    if not chosen:
        return model
    options: dict[str, Any] = {
        "op_types_to_quantize": sorted({layer.operator for layer in layers}),
        "nodes_to_quantize": chosen,
        "per_channel": True,
        "weight_type": QuantType.QInt8,
        "use_external_data_format": True,
    }
    with tempfile.TemporaryDirectory(prefix="exportkit-quantised-") as folder:
        path = Path(folder) / f"{Path(folder).name}.onnx"  # a name that the working directory does not have
        if request.activations == "dynamic":
            quantize_dynamic(model, path, **options)
        else:
            quantize_static(model, path, _Calibration(calibration), activation_type=QuantType.QUInt8, **options)
        return onnx.load(path)


class _Calibration:
    """Calls, as the calibration of onnxruntime reads them."""

    def __init__(self, calls: Sequence[Tensors]) -> None:
        self._calls = iter(calls)

    def get_next(self) -> dict[str, Any] | None:
        """Returns the arrays of the next call by name of the input; None at the end."""
        call = next(self._calls, None)
        return None if call is None else {name: tensor.detach().cpu().numpy() for name, tensor in call.items()}


def pack_products(model: onnx.ModelProto) -> None:
    """Makes one product of those that multiply the same values, such as the queries, keys and values of attention.

    The values are then rounded once instead of for each product. The results are the same, bit for bit, as each column
    of a product has weights, scales and zero points of its own. With 12 layers of Qwen3 of about 100 M parameters, a
    step of one token took 0.96 of the time (one thread, 512 tokens cached).

    Args:
        model: A graph with weights of few bits; it is changed.
    """
    from onnx import helper, numpy_helper

    graph = model.graph
    uses = Counter(name for node in all_nodes(graph) for name in node.input)
    weights = weights_of(graph)
    alike: dict[object, list[onnx.NodeProto]] = {}
    for node in graph.node:
        if node.op_type == "MatMulNBits" and all(uses[name] == 1 and name in weights for name in node.input[1:]):
            options = sorted((item.name, item.i) for item in node.attribute if item.name != "N")
            alike.setdefault((node.input[0], len(node.input), *options), []).append(node)
    packed: dict[str, list[onnx.NodeProto]] = {}  # by output of the first product, what comes in place of it
    for products in alike.values():
        if len(products) == 1:
            continue
        first, name = products[0], f"{products[0].name}_packed"
        widths = [next(item.i for item in node.attribute if item.name == "N") for node in products]
        parts = zip(*(node.input[1:] for node in products), strict=True)
        tensors = [
            numpy_helper.from_array(
                np.concatenate([numpy_helper.to_array(weights[part]) for part in same]), f"{same[0]}_packed"
            )
            for same in parts
        ]
        sizes = numpy_helper.from_array(np.array(widths), f"{name}_sizes")
        graph.initializer.extend([*tensors, sizes])
        whole = helper.make_node(
            "MatMulNBits", [first.input[0], *(tensor.name for tensor in tensors)], [name], name, domain=first.domain
        )
        whole.attribute.extend(item for item in first.attribute if item.name != "N")
        whole.attribute.append(helper.make_attribute("N", sum(widths)))
        outputs = [output for node in products for output in node.output]
        split = helper.make_node("Split", [name, sizes.name], outputs, f"{name}_split", axis=-1)
        for node in (whole, split):
            node.metadata_props.extend(_common_scopes(products))
        packed.update({node.output[0]: [] for node in products})
        packed[first.output[0]] = [whole, split]
    nodes = [new for node in graph.node for new in packed.get((*node.output, "")[0], [node])]
    del graph.node[:]
    graph.node.extend(nodes)
    remove_unused(graph)


def _common_scopes(nodes: Sequence[onnx.NodeProto]) -> list[onnx.StringStringEntryProto]:
    """The modules that all of some nodes belong to, as metadata."""
    import onnx

    described = [{item.key: item.value for item in node.metadata_props} for node in nodes]
    if any(SCOPES not in entries for entries in described):
        return []
    modules = zip(*(ast.literal_eval(entries[SCOPES])[:-1] for entries in described), strict=False)
    shared = sum(1 for _ in takewhile(lambda same: len(set(same)) == 1, modules))
    found = []
    for key in (SCOPES, CLASSES):
        *outer, operator = ast.literal_eval(described[0][key])
        found.append(onnx.StringStringEntryProto(key=key, value=str([*outer[:shared], operator])))
    return found


def write(model: onnx.ModelProto, path: Path) -> None:
    """Writes a graph over its file.

    Args:
        model: The graph.
        path: The file; its weights go beside it.
    """
    import onnx_ir

    # onnx.save refuses a name of the weights that the working directory has already
    data = weights_beside(path)
    data.unlink(missing_ok=True)  # which another session may read
    onnx_ir.save(onnx_ir.from_proto(model), path, external_data=data.name)


@contextlib.contextmanager
def quiet_logging() -> Iterator[None]:
    """Keeps onnxruntime's tools from writing logs, and from setting up the logging of the whole process."""
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level
    root.handlers[:] = [logging.NullHandler()]
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


# Graphs that compute in float16, made by onnxruntime's converter; what would overflow stays in float32


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
        kept: Names of nodes that stay in float32. Loops do not: the converter casts what a body takes from around it.
    """
    kept = {node.name for node in model.graph.node if node.name in kept and not subgraphs(node)}
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
    return _with_casts_inside(converted)


def _with_casts_inside(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with casts of what the body of a loop computes in this body: the converter puts all casts outside."""
    import onnx_ir

    bodies = {}
    for body in (part for node in all_nodes(model.graph) for part in subgraphs(node)):
        names = [*(value.name for value in body.input), *(name for node in body.node for name in node.output)]
        bodies.update(dict.fromkeys(names, body))
    casts = [node for node in model.graph.node if node.op_type == "Cast"]
    moved: dict[str, onnx.NodeProto] = {}
    while inside := [node for node in casts if node.input[0] in bodies and node.output[0] not in moved]:
        for node in inside:
            body = bodies[node.output[0]] = bodies[node.input[0]]
            moved[node.output[0]] = body.node.add()
            moved[node.output[0]].CopyFrom(node)
    if not moved:
        return model
    set_nodes(model.graph, [node for node in model.graph.node if node.output[0] not in moved])
    found = onnx_ir.from_proto(model)
    found.graph.sort()
    sorted_model: onnx.ModelProto = onnx_ir.to_proto(found)
    return sorted_model


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
