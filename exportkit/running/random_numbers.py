"""Gives an ONNX graph the numbers in place of random ones that its model gets where both are compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from exportkit._torch_compat.random_numbers import (
    BITS,
    CONSTANT,
    LINEAR,
    QUANTILE_BITS,
    SQUARE,
    STEP,
    normal_quantiles,
    uniform_bits,
)
from exportkit.running.kernels import element_types
from exportkit.running.protos import all_nodes, copied, set_nodes, subgraphs
from exportkit.trees.tree import ONNX_DTYPES

if TYPE_CHECKING:
    import onnx

SEED = "exportkit.seed"
_DOMAIN = "exportkit.fixed"  # of functions in the model, which is never written
_DTYPES = {number: dtype for dtype, number in ONNX_DTYPES.items()}
_FLOAT32 = ONNX_DTYPES[torch.float32]
# The operators, with the names of the attributes that the numbers are shifted and scaled by.
_OPERATORS = {
    "RandomNormal": ("mean", "scale"),
    "RandomNormalLike": ("mean", "scale"),
    "RandomUniform": ("low", "high"),
    "RandomUniformLike": ("low", "high"),
}

Functions = dict[str, "onnx.FunctionProto"]


def with_fixed_numbers(model: onnx.ModelProto, seed: int | None = None) -> onnx.ModelProto:
    """Returns a model without operators that draw random numbers; the model itself if it has none.

    What takes their place returns for each shape what `exportkit._torch_compat.random_numbers.fixed_numbers` lets
    torch return.

    Args:
        model: The model. Its weights need not be there.
        seed: Of the numbers; None for a model that takes it as a further input, `SEED`.
    """
    from onnx import TensorProto, helper

    if not any(map(_draws, (model.graph, *model.functions))):
        return model
    functions: Functions = {}
    model = copied(model)
    version = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    for graph in (model.graph, *model.functions):
        _replace(graph, {}, functions, version)
    if seed is None:
        model.graph.input.append(helper.make_tensor_value_info(SEED, TensorProto.INT64, []))
    else:
        model.graph.initializer.append(helper.make_tensor(SEED, TensorProto.INT64, [], [seed]))
    for part in (model, *model.functions):
        part.opset_import.add(domain=_DOMAIN, version=1)
    model.functions.extend(functions.values())
    return model


def _draws(graph: Any) -> bool:
    return any(node.op_type in _OPERATORS for node in all_nodes(graph))


def _replace(graph: Any, outer: Mapping[str, int], functions: Functions, version: int) -> None:
    types, nodes = element_types(graph, outer), list["onnx.NodeProto"]()
    for node in graph.node:
        for part in subgraphs(node):
            _replace(part, types, functions, version)
        nodes += _fixed(node, types, functions, version) if node.op_type in _OPERATORS else [node]
    set_nodes(graph, nodes)


def _fixed(node: onnx.NodeProto, types: Mapping[str, int], functions: Functions, version: int) -> list[onnx.NodeProto]:
    """The nodes in place of one that draws numbers."""
    from onnx import helper

    given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    nodes: list[onnx.NodeProto] = []
    (result,) = node.output

    def add(operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"{result}/fixed/{len(nodes)}"
        nodes.append(helper.make_node(operator, [*inputs], [name], **attributes))
        return name

    like = node.input[0] if node.input else add("ConstantOfShape", add("Constant", value_ints=[*given["shape"]]))
    dtype = given.get("dtype") or types.get(like) or types.get(result) or _FLOAT32
    low, high = (given.get(name, default) for name, default in zip(_OPERATORS[node.op_type], (0.0, 1.0), strict=True))
    kind, scale = "normal", high
    if "Uniform" in node.op_type:
        kind, scale = f"uniform_{uniform_bits(_DTYPES[dtype])}", high - low
    if kind not in functions:
        functions[kind] = _function(kind, version)
    numbers = add(kind, like, SEED, domain=_DOMAIN)
    if scale != 1:
        numbers = add("Mul", numbers, add("Constant", value_float=scale))
    if low:
        numbers = add("Add", numbers, add("Constant", value_float=low))
    return [*nodes, helper.make_node("Cast", [numbers], [result], to=dtype)]


def _function(kind: str, version: int) -> onnx.FunctionProto:
    """The function that makes fixed numbers in float32, of the shape of a tensor."""
    import onnx.parser
    from onnx import numpy_helper

    _, _, bits = kind.partition("_")
    taken = BITS - int(bits or QUANTILE_BITS)
    values = "flat = Gather (scale, top)"
    if bits:
        values = f"whole = Cast <to = {_FLOAT32}> (top) flat = Mul (whole, scale)"
    text = f"""<domain: "{_DOMAIN}", opset_import: ["" : {version}]>
        {kind} (like, seed) => (numbers) {{
            shape = Shape (like)
            single = Constant <value_ints = [1]> ()
            factors = Concat <axis = 0> (single, shape)
            size = ReduceProd <keepdims = 0> (factors)
            zero = Constant <value_int = 0> ()
            one = Constant <value_int = 1> ()
            count = Constant <value_int = {2**BITS}> ()
            square = Constant <value_int = {SQUARE}> ()
            linear = Constant <value_int = {LINEAR}> ()
            constant = Constant <value_int = {CONSTANT}> ()
            divisor = Constant <value_int = {2**taken}> ()
            scale = Constant <value_float = {2.0 ** -int(bits or 0)!r}> ()
            step = Constant <value_int = {STEP}> ()
            first = Mul (seed, step)
            all = Range (zero, size, one)
            index = Add (all, first)
            place = Mod (index, count)
            squared = Mul (place, square)
            added = Add (squared, linear)
            factor = Mod (added, count)
            product = Mul (factor, place)
            shifted = Add (product, constant)
            numbered = Mod (shifted, count)
            top = Div (numbered, divisor)
            {values}
            numbers = Reshape <allowzero = 1> (flat, shape)
        }}"""
    function = onnx.parser.parse_function(text)
    if not bits:
        (scale,) = (node for node in function.node if node.output[0] == "scale")
        del scale.attribute[:]
        quantiles = numpy_helper.from_array(normal_quantiles().numpy())
        scale.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(quantiles)
    return function
