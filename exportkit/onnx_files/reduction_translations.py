"""Reductions in ONNX where the operators of ONNX return other numbers: with NaN, and along axes of any size."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import onnx_ir
import torch
from onnx_ir.tape import Tape
from onnxscript.function_libs.torch_lib.ops import core, linalg, nn

from exportkit.onnx_files.constants import axes_of, constant, ints, number, op

aten = torch.ops.aten

_BLOCK = 256  # numbers that are added one after the other


# The largest and the smallest, where NaN wins over every number; onnxruntime skips it.


def _reduced(x: Any, dim: Any = None, keepdim: bool = False, *, reduce: Any) -> Any:
    if not len(x.shape):
        return op.Identity(x)
    dims = axes_of(dim, len(x.shape))
    axes = None if dim in (None, [], ()) else ints(*dims)
    if x.dtype == onnx_ir.DataType.BOOL:
        return op.Cast(reduce(op.Cast(x, to=onnx_ir.DataType.UINT8), axes, keepdims=keepdim), to=x.dtype)
    if x.dtype == onnx_ir.DataType.INT64 and not _is_narrow(x):
        return _reduced_int64(x, dims, keepdim, op.ArgMax if reduce == op.ReduceMax else op.ArgMin)
    found = reduce(x, axes, keepdims=keepdim)
    if not x.dtype.is_floating_point():
        return found
    return op.Where(_any_nan(x, axes, keepdim), number(math.nan, x), found)


def _reduced_int64(x: Any, dims: Sequence[int], keepdim: bool, place: Any) -> Any:
    """The element at its place: onnxruntime compares the lower halves of 64-bit integers in ReduceMax and ReduceMin."""
    rank = len(x.shape)
    if len(dims) == rank:
        flat = op.Reshape(x, ints(-1))
        found = op.Gather(flat, place(flat, axis=0, keepdims=0))
        return op.Reshape(found, ints(*[1] * rank)) if keepdim else found
    for axis in dims:
        x = op.GatherElements(x, place(x, axis=axis, keepdims=1), axis=axis)
    return x if keepdim else op.Squeeze(x, ints(*dims))


def _any_nan(x: Any, axes: Any, keepdim: bool) -> Any:
    found = op.Cast(op.IsNaN(x), to=onnx_ir.DataType.UINT8)
    return op.Cast(op.ReduceMax(found, axes, keepdims=keepdim), to=onnx_ir.DataType.BOOL)


def _place(x: Any, dim: int | None = None, keepdim: bool = False, *, place: Any) -> Any:
    """The index of the largest or smallest element, or of the first NaN; without an axis, in the flattened tensor."""
    rank, dtype = len(x.shape), x.dtype
    if not rank:
        return op.Constant(value_int=0)
    if dim is None:
        found = _place_along(op.Reshape(x, ints(-1)), dtype, 0, False, place)
        return op.Reshape(found, ints(*[1] * rank)) if keepdim else found
    return _place_along(x, dtype, dim, keepdim, place)


def _place_along(x: Any, dtype: Any, dim: int, keepdim: bool, place: Any) -> Any:
    if dtype == onnx_ir.DataType.BOOL:
        x = op.Cast(x, to=onnx_ir.DataType.UINT8)
    found = place(x, axis=dim, keepdims=keepdim)
    if not dtype.is_floating_point():
        return found
    first = op.ArgMax(op.Cast(op.IsNaN(x), to=onnx_ir.DataType.FLOAT), axis=dim, keepdims=keepdim)
    return op.Where(_any_nan(x, ints(dim), keepdim), first, found)


def _with_place(x: Any, dim: int, keepdim: bool = False, *, reduce: Any, place: Any) -> tuple[Any, Any]:
    return _reduced(x, dim, keepdim, reduce=reduce), _place(x, dim, keepdim, place=place)


def _vector_norm(x: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, dtype: int = -1) -> Any:
    if not math.isinf(ord):
        dim = [*range(len(x.shape))] if dim is None and keepdim else dim
        return linalg.aten_linalg_vector_norm(x, ord, dim, keepdim, dtype=dtype)
    size = op.Abs(x)
    size.dtype, size.shape = x.dtype, x.shape
    found = _reduced(size, dim, keepdim, reduce=op.ReduceMax if ord > 0 else op.ReduceMin)
    return found if dtype in (-1, None) else op.Cast(found, to=dtype)


# Sums of 64-bit integers, which onnxruntime adds up in double precision.


def _sum(x: Any, dim: Any = None, keepdim: bool = False, dtype: int = -1) -> Any:
    def added(part: Any) -> Any:
        part.shape = x.shape
        return core.aten_sum_dim_IntList(part, [dim] if isinstance(dim, int) else dim, keepdim, dtype)

    rank = len(x.shape)
    if x.dtype.is_floating_point() and rank:
        x = x if dtype in (-1, None) else op.Cast(x, to=dtype)
        return _axis_by_axis(op.ReduceSum, x, axes_of(dim, rank), keepdim, rank)
    if x.dtype != onnx_ir.DataType.INT64 or not len(x.shape) or _is_narrow(x):
        return added(x)
    half = number(2**32, x)
    low = op.Mod(x, half)
    high = added(op.Div(op.Sub(x, low), half))
    return op.Add(op.Mul(high, op.CastLike(half, high)), added(low))


def _any(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """`any` of an empty tensor is False; torch.onnx's ReduceMax of no 64-bit integers is not 0."""
    found = op.Cast(x, to=onnx_ir.DataType.BOOL)
    if not len(x.shape):
        return found
    axes = None if dim in (None, [], ()) else ints(*axes_of(dim, len(x.shape)))
    found = op.ReduceMax(op.Cast(found, to=onnx_ir.DataType.UINT8), axes, keepdims=keepdim)
    return op.Cast(found, to=onnx_ir.DataType.BOOL)


def _is_narrow(x: Any) -> bool:
    """Whether 64-bit integers were booleans or smaller integers before: sums of these are exact in double precision."""
    made = x.producer()
    source = made.inputs[0].dtype if made is not None and made.op_type == "Cast" else x.dtype
    return bool(
        source == onnx_ir.DataType.BOOL or (source and source.is_integer() and source.bitwidth < x.dtype.bitwidth)
    )


# What may be empty: onnxruntime does not remove axes that are counted from the end then.

_SIZE = re.compile(r"s\d+")  # of an input, by torch's name: the domain says whether it may be 0


def count_axes_from_first(model: onnx_ir.Model) -> None:
    """Counts the axes of reductions from the first, where the values may be empty."""
    for node in model.graph.all_nodes():
        if node.op_type.startswith("Reduce") and node.domain == "" and len(node.inputs) > 1:
            values, axes = node.inputs[:2]
            constant = None if axes is None else onnx_ir.convenience.get_const_tensor(axes)
            if values is None or values.shape is None or constant is None or node.graph is None:
                continue
            listed = constant.numpy().tolist()
            if any(axis < 0 for axis in listed) and _may_be_empty(values.shape, listed):
                counted = onnx_ir.tensor([axis % len(values.shape) for axis in listed])
                made = onnx_ir.Value(
                    name=f"{node.outputs[0].name}_axes",
                    type=onnx_ir.TensorType(counted.dtype),
                    shape=onnx_ir.Shape([len(listed)]),
                    const_value=counted,
                )
                node.graph.register_initializer(made)
                node.replace_input_with(1, made)


def _may_be_empty(shape: onnx_ir.Shape, reduced: Sequence[int]) -> bool:
    """Whether sizes of 0 are possible: where values decide about the size, and along the axes that are reduced."""
    decided = [size if isinstance(size, int) else _SIZE.fullmatch(str(size.value)) for size in shape]
    return not (all(decided) and all(isinstance(shape[axis], int) for axis in reduced))


# Axes of any size: the mean of nothing is 0 in onnxruntime, and it refuses to remove an axis whose size is not 1.


def _mean(x: Any, dim: Any = None, keepdim: bool = False, dtype: int | None = None) -> Any:
    shape, kind = x.shape, x.dtype
    if dtype not in (-1, None):
        x, kind = op.Cast(x, to=dtype), onnx_ir.DataType(dtype)
    if not len(shape):
        return op.Identity(x)
    dims = axes_of(dim, len(shape))
    axes = ints(*dims)
    is_known = all(isinstance(shape[axis], int) for axis in dims)
    if len(dims) > 1 and kind in (onnx_ir.DataType.FLOAT, onnx_ir.DataType.DOUBLE):
        # one division, as in torch: numbers that add up to 0 have a mean of 0; sums of half precision may overflow
        total = _axis_by_axis(op.ReduceSum, x, dims, keepdim, len(shape))
        if is_known:
            return op.Div(total, constant(math.prod(shape[axis] for axis in dims), kind))
        return op.Div(total, op.Cast(op.ReduceProd(op.Gather(op.Shape(x), axes), keepdims=False), to=kind))
    mean = _axis_by_axis(op.ReduceMean, x, dims, keepdim, len(shape))
    if is_known and all(shape[axis] for axis in dims):
        return mean
    count = op.ReduceProd(op.Gather(op.Shape(x), axes), keepdims=False)
    nothing = constant(math.nan, kind)
    return op.Where(op.Equal(count, op.Constant(value_int=0)), nothing, mean)


def _var(x: Any, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Any:
    """The variance; torch never divides by a negative number, however large the correction is."""
    rank, kind = len(x.shape), x.dtype
    dims = axes_of(dim, rank)
    axes = ints(*dims)
    distance = op.Sub(x, _axis_by_axis(op.ReduceMean, x, dims, True, rank))
    squares = op.Mul(distance, distance)
    taken = float(1 if correction is None else correction)
    if not taken:
        squares.shape, squares.dtype = x.shape, kind
        return _mean(squares, dims, keepdim)
    total = _axis_by_axis(op.ReduceSum, squares, dims, keepdim, rank)
    if all(isinstance(x.shape[axis], int) for axis in dims):
        divisor = number(max(math.prod(x.shape[axis] for axis in dims) - taken, 0.0), x)
    else:
        count = op.Cast(op.ReduceProd(op.Gather(op.Shape(x), axes), keepdims=False), to=kind)
        divisor = op.Max(op.Sub(count, number(taken, x)), number(0, x))
    return op.Div(total, divisor)


def _axis_by_axis(reduce: Any, x: Any, dims: Sequence[int], keepdim: bool, rank: int) -> Any:
    """A sum or a mean along several axes, in sums of fewer numbers: onnxruntime adds all of them one after the other.

    For 64 channels of 8000 numbers, that is off by 2e-6 of the result, and axis by axis by 1e-7.
    """
    # a single one stays as it is: fusions of norms look for the last axis, -1
    for axis in dims if len(dims) == 1 else sorted((dim % rank for dim in dims), reverse=True):
        x = reduce(x, ints(axis), keepdims=keepdim)
    return x


def _prims_var(x: Any, dims: Any, correction: Any = 1.0, output_dtype: int | None = None) -> Any:
    found = _var(x, dims, correction)
    return found if output_dtype in (-1, None) else op.Cast(found, to=output_dtype)


def _var_mean(x: Any, dim: Any = None, correction: Any = None, keepdim: bool = False) -> tuple[Any, Any]:
    return _var(x, dim, correction, keepdim), _mean(x, dim, keepdim)


def _diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Picks the elements, where torch.onnx sums rows that are 0 elsewhere and so spreads NaN."""
    rank = len(x.shape)
    first, second = dim1 % rank, dim2 % rank
    others = [axis for axis in range(rank) if axis not in (first, second)]
    shape = op.Shape(x)
    rows, columns = op.Gather(shape, op.Constant(value_int=first)), op.Gather(shape, op.Constant(value_int=second))
    below, right = op.Constant(value_int=max(-offset, 0)), op.Constant(value_int=max(offset, 0))
    zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
    length = op.Max(op.Min(op.Sub(rows, below), op.Sub(columns, right)), zero)
    steps = op.Range(zero, length, one)
    places = op.Add(op.Mul(op.Add(steps, below), columns), op.Add(steps, right))
    flat = ints(-1)
    if others:
        flat = op.Concat(op.Gather(shape, ints(*others)), flat, axis=0)
    return op.Gather(op.Reshape(op.Transpose(x, perm=[*others, first, second]), flat), places, axis=-1)


def _squeeze(x: Any, dim: Any = None) -> Any:
    """A trace with an axis of any size means sizes other than 1, for which torch keeps the axis."""
    dims = range(len(x.shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    ones = [axis for axis in dims if len(x.shape) and x.shape[axis] == 1]
    return op.Squeeze(x, ints(*ones)) if ones else op.Identity(x)


# Pools of padded values. onnxruntime's optimiser merges a Pad of zeros into the pool behind it, whose own padding is
# less than any number.


def keep_padding_apart(model: onnx_ir.Model) -> None:
    """Lets the zeros that a model pads with count in pools that take the largest values."""
    for node in list(model.graph.all_nodes()):
        if (node.domain, node.op_type) != ("", "MaxPool") or node.graph is None:
            continue
        values = node.inputs[0]
        made_by = None if values is None else values.producer()
        while made_by is not None and made_by.op_type == "Cast" and made_by.inputs[0] is not None:
            made_by = made_by.inputs[0].producer()
        if values is not None and made_by is not None and made_by.op_type == "Pad":
            tape = Tape()
            kept = tape.op("Max", [values])  # the same values
            kept.shape, kept.type = values.shape, values.type
            node.replace_input_with(0, kept)
            node.graph.insert_before(node, tape.nodes)


# Normalised sequences. onnxruntime adds float32 numbers one after the other, which loses digits along a long axis, most
# of all where numbers are equal, as in padded audio: results are off by 2e-4 of their scale for 32000 frames.


def _group_norm(x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Any:
    if not _is_sequence(x):
        return nn.aten_group_norm(x, groups, weight, bias, eps)
    count = op.Mul(op.Shape(x, start=2), ints(x.shape[1] // groups))
    grouped = op.Reshape(x, op.Concat(ints(0, groups), count, axis=0))
    distance = op.Sub(grouped, _mean_of_blocks(grouped, count))
    variance = _mean_of_blocks(op.Mul(distance, distance), count)
    normalised = op.Div(distance, op.Sqrt(op.Add(variance, number(eps, x))))
    found, last = op.Reshape(normalised, op.Shape(x), allowzero=True), ints(1)
    found = found if weight is None else op.Mul(found, op.Unsqueeze(weight, last))
    return found if bias is None else op.Add(found, op.Unsqueeze(bias, last))


def _is_sequence(x: Any) -> bool:
    """Whether the tensor is ``(batch, channels, length)``. Images are left as they are, for speed."""
    return len(x.shape) == 3 and isinstance(x.shape[1], int) and x.dtype == onnx_ir.DataType.FLOAT


def _mean_of_blocks(x: Any, count: Any) -> Any:
    """The mean along the last of three axes, which has ``count`` numbers, from the sums of short blocks."""
    block = ints(_BLOCK)
    padding = op.Mod(op.Neg(count), block)
    padded = op.Pad(x, op.Concat(ints(*[0] * 5), padding, axis=0))
    blocks = op.Div(op.Add(count, padding), block)
    parts = op.Reshape(padded, op.Concat(ints(0, 0), blocks, block, axis=0))
    last = ints(-1)
    total = op.ReduceSum(op.ReduceSum(parts, last, keepdims=False), last, keepdims=True)
    return op.Div(total, op.Cast(count, to=onnx_ir.DataType.FLOAT))


def _instance_norm(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, use_input_stats: bool, *options: Any
) -> Any:
    if not use_input_stats or not _is_sequence(x):
        return core.aten_instance_norm(x, weight, bias, running_mean, running_var, use_input_stats, *options)
    return _group_norm(x, x.shape[1], weight, bias, options[1])


REDUCTION_TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys([aten.amax.default, aten.max.default], partial(_reduced, reduce=op.ReduceMax)),
    **dict.fromkeys([aten.amin.default, aten.min.default], partial(_reduced, reduce=op.ReduceMin)),
    aten.max.dim: partial(_with_place, reduce=op.ReduceMax, place=op.ArgMax),
    aten.min.dim: partial(_with_place, reduce=op.ReduceMin, place=op.ArgMin),
    aten.any.default: _any,
    aten.any.dim: _any,
    aten.any.dims: _any,
    aten.argmax.default: partial(_place, place=op.ArgMax),
    aten.argmin.default: partial(_place, place=op.ArgMin),
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.var.correction: _var,
    torch.ops.prims.var.default: _prims_var,
    aten.var_mean.correction: _var_mean,
    aten.group_norm.default: _group_norm,
    aten.instance_norm.default: _instance_norm,
    aten.diagonal.default: _diagonal,
    aten.diagonal_copy.default: _diagonal,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
}
