"""Weights of fewer bits: what users ask for, and what onnxruntime's quantiser makes of a graph.

The quantiser takes products with a constant matrix; `Quantised` says what else has weights, and stays as it is.
"""

from __future__ import annotations

import ast
import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from exportkit.errors import InvalidRequestError
from exportkit.running.protos import all_nodes, set_nodes, weights_of

if TYPE_CHECKING:
    import onnx

Bits = Literal["int4", "int8"]
Dtype = Literal["float16"]
BITS: Mapping[Bits, int] = {"int4": 4, "int8": 8}
_SMALLEST_BLOCK = 16
# The operators that can be quantised, with the place of their weights.
_WEIGHTS_ALONE = {"MatMul": 1, "Gather": 0}
_WITH_ACTIVATIONS = {"MatMul": 1, "Conv": 1}
# Metadata of nodes: the modules that a node comes from, outermost first, and their classes; its own name comes last.
SCOPES, CLASSES = "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.class_hierarchy"


@dataclass(frozen=True)
class Quantisation:
    """How the weights of a graph are stored in fewer bits.

    `Exported.to_onnx` and `Exported.save` take it as ``weights``; ``weights="int4"`` is short for the defaults.

    Attributes:
        weights: How matrices are stored: "int4" or "int8".
        block_size: How many weights share a scale: a power of two, 16 or more. Smaller blocks are more accurate, and
            take more memory.
        symmetric: Whether blocks are symmetric around 0, without a zero point of their own.
        embedding: Whether the tables that tokens are looked up in are quantised, too; only to int4.
        head: Whether the product that computes the logits is quantised.
        activations: For int8: how activations are quantised as well, so that products and convolutions compute with
            integers: "dynamic" uses their range in each call, "static" their range in the recorded calls and in further
            data. The weights then have one scale for each channel, and no blocks.

    Raises:
        InvalidRequestError: if an option is unknown, or conflicts with another option.

    Example:
        >>> import exportkit
        >>> exportkit.Quantisation("int4", block_size=64, head=False)
        Quantisation(weights='int4', block_size=64, symmetric=False, embedding=False, head=False, activations=None)
    """

    weights: Bits = "int4"
    block_size: int = 32
    symmetric: bool = False
    embedding: bool = False
    head: bool = True
    activations: Literal["dynamic", "static"] | None = None

    def __post_init__(self) -> None:
        if self.weights not in BITS:
            raise InvalidRequestError(
                "Unsupported format of weights.", where="weights", expected="'int4' or 'int8'", got=self.weights
            )
        if self.block_size < _SMALLEST_BLOCK or self.block_size & (self.block_size - 1):
            raise InvalidRequestError(
                "Unsupported block size of weights.",
                where="block_size",
                expected="a power of two, 16 or more",
                got=self.block_size,
            )
        if self.embedding and self.weights != "int4":
            raise InvalidRequestError(
                "onnxruntime quantises embeddings to int4 only.", where="embedding", expected="False", got="True"
            )
        if self.activations is None:
            return
        if self.activations not in ("dynamic", "static"):
            raise InvalidRequestError(
                "Unsupported quantisation of activations.",
                where="activations",
                expected="'dynamic' or 'static'",
                got=self.activations,
            )
        if (self.weights, self.block_size, self.symmetric) != ("int8", Quantisation.block_size, False):
            raise InvalidRequestError(
                "Quantised activations require int8 weights with a scale for each channel.",
                where="activations",
                expected="weights='int8', and neither block_size nor symmetric",
                got=repr(self),
            )


@dataclass(frozen=True)
class WeightMatrix:
    """A matrix of weights in a graph.

    Attributes:
        name: Path of the module that it belongs to.
        node: Name of the node that takes it.
        operator: MatMul, Conv, or Gather for an embedding.
        elements: How many weights it has.
        dtype: The dtype that they have in the model, such as ``float32``.
        stored: What they are stored in: that dtype, int4 or int8.
        is_head: Whether the node makes logits.
        harm: Error of the outputs when only this layer is quantised; None if it was not measured.
    """

    name: str
    node: str
    operator: str
    elements: int
    dtype: str
    stored: str
    is_head: bool = False
    harm: float | None = None


@dataclass(frozen=True)
class Quantised:
    """How a graph was quantised.

    Attributes:
        request: How weights were quantised; None if they were not.
        layers: The matrices that can be quantised, in the order of the graph.
        left: What was left as it was, in words.
        logits: Paths of the outputs that are logits.
        problems: What stands against the proof of the graph before it was quantised.
        budget: The least ``top1``, the largest ``kl`` and the largest ``error`` that the user allows.
        dtype: What the graph computes in, if that is not the dtype of the model.
        kept: Modules of which a part keeps the dtype of the model, because its values are too large for the other one.
    """

    request: Quantisation | None
    layers: tuple[WeightMatrix, ...] = ()
    left: tuple[str, ...] = ()
    logits: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    budget: Mapping[str, float] = field(default_factory=dict)
    dtype: Dtype | None = None
    kept: tuple[str, ...] = ()

    @property
    def harm_name(self) -> str:
        """What the harm of a layer is measured as."""
        return "KL divergence alone" if self.logits else "error alone"

    @property
    def text(self) -> str:
        """What was quantised and converted, in sentences."""
        found = []
        if self.dtype is not None:
            kept = f"; not converted because of large values: parts of {', '.join(self.kept)}" if self.kept else ""
            found.append(f"computes in {self.dtype}{kept}.")
        if self.request is not None:
            counts = Counter(layer.stored for layer in self.layers)
            stored = ", ".join(f"{count} in {kind}" for kind, count in counts.most_common())
            left = f"; left as they were: {', '.join(self.left)}" if self.left else ""
            how = f"in blocks of {self.request.block_size}"
            if self.request.activations is not None:
                how = f"with {self.request.activations} activations"
            found.append(f"{len(self.layers)} weight matrices: {stored}, {how}{left}.")
        return " ".join(found)


def read_layers(model: onnx.ModelProto, outputs: Collection[str], request: Quantisation) -> tuple[WeightMatrix, ...]:
    """Returns the matrices of a graph that can be quantised, as `read_quantisable` returns it.

    Args:
        model: The graph.
        outputs: Names of the outputs that may be logits.
        request: What the user asked for.
    """
    graph, heads = model.graph, set(heads_of(model, outputs).values())
    weights = weights_of(graph)
    found = []
    for node in graph.node:
        place = (_WITH_ACTIVATIONS if request.activations else _WEIGHTS_ALONE).get(node.op_type)
        tensor = None if place is None else weights.get(node.input[place])
        if tensor is None or not _gets_smaller(tensor, node.op_type, request):
            continue
        is_head, kind = node.name in heads, onnx_dtype(tensor)
        wanted = request.embedding if node.op_type == "Gather" else request.head or not is_head
        elements = math.prod(tensor.dims)
        found.append(
            WeightMatrix(
                module_of(node), node.name, node.op_type, elements, kind, request.weights if wanted else kind, is_head
            )
        )
    return tuple(found)


def left_of(model: onnx.ModelProto, layers: Sequence[WeightMatrix]) -> tuple[str, ...]:
    """Returns what has weights and is left as it was, such as ``3 Conv`` or ``the embedding model.embed_tokens``.

    Args:
        model: The graph, as `read_quantisable` returns it.
        layers: Its matrices, with what each is stored in.
    """
    import onnx_ir

    weights = {
        tensor.name: math.prod(tensor.dims)
        for tensor in model.graph.initializer
        if onnx_ir.DataType(tensor.data_type).is_floating_point()
    }
    taken = {layer.node for layer in layers if layer.stored in BITS}
    named, counts = [], Counter[str]()
    by_node = {layer.node: layer for layer in layers}
    for node in model.graph.node:
        largest = max((weights.get(name, 0) for name in node.input), default=0)
        if node.name in taken or largest < _SMALLEST_BLOCK**2:
            continue
        layer = by_node.get(node.name)
        if layer is not None:
            named.append(f"{layer.name} ({'head' if layer.is_head else 'embedding'})")
        else:
            counts[node.op_type] += 1
    return (*named, *(f"{count} {operator}" for operator, count in counts.most_common()))


def onnx_dtype(tensor: onnx.TensorProto) -> str:
    """Returns the dtype of a tensor, such as ``float32``."""
    import onnx_ir

    return str(onnx_ir.DataType(tensor.data_type).numpy())


def _gets_smaller(tensor: onnx.TensorProto, operator: str, request: Quantisation) -> bool:
    """Whether a tensor is a matrix of floating-point numbers that takes less memory in fewer bits."""
    import onnx_ir

    dtype = onnx_ir.DataType(tensor.data_type)
    rows, columns = ([1, *tensor.dims])[-2:]
    if request.activations is not None:
        return dtype.is_floating_point() and math.prod(tensor.dims) >= _SMALLEST_BLOCK**2
    if not dtype.is_floating_point() or dtype.itemsize < 2 or math.prod(tensor.dims) != rows * columns:
        return False
    if operator == "Gather":
        rows, columns = columns, rows
    blocks = -(-rows // request.block_size)
    bits = BITS[request.weights]
    each = request.block_size * bits / 8 + dtype.itemsize + bits / 8
    return bool(rows > 1 and columns * blocks * each < rows * columns * dtype.itemsize)


def module_of(node: onnx.NodeProto) -> str:
    """Returns the path of the submodule that a node belongs to; the name of the node if it belongs to none."""
    return _scope_of(node) or str(node.name)


def part_of(node: onnx.NodeProto) -> str:
    """Returns the part of the model that a node belongs to, in words; the name of the node if that is not known."""
    return "the model itself" if _scope_of(node) == "" else module_of(node)


def _scope_of(node: onnx.NodeProto) -> str | None:
    """The path of the module that a node belongs to, which is empty for the model itself; None if it is not known."""
    scopes = next((entry.value for entry in node.metadata_props if entry.key == SCOPES), "")
    with contextlib.suppress(ValueError, SyntaxError):
        paths = ast.literal_eval(scopes)
        if len(paths) > 1:
            return str(paths[-2])
    return None


# Constant matrices in the form that the quantiser takes: the second input of a MatMul
#
# torch.onnx leaves large matrices behind a Transpose, and linear layers of two-dimensional values in a Gemm.


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
