"""Operators in ONNX where the form that torch.onnx writes computes other numbers than torch, or where it has none.

Each function writes one operator of torch with those of ONNX. Values are those of the graph, or numbers. The
translations are tested one by one in ``tests/onnx_files/test_forms.py``, and all operators by ``make conformance``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir
import torch
from onnx_ir.convenience import replace_nodes_and_values
from onnx_ir.tape import Tape
from onnxscript.function_libs.torch_lib.ops import core, special

from exportkit._torch_compat.graph import FFT_R2C
from exportkit.onnx_files.constants import constant, ints, number, op
from exportkit.onnx_files.integer_translations import INTEGER_TRANSLATIONS, as_operand, as_value
from exportkit.onnx_files.reduction_translations import REDUCTION_TRANSLATIONS
from exportkit.onnx_files.resizing import RESIZING
from exportkit.onnx_files.selected_matrices import SELECTED_TRANSLATIONS
from exportkit.onnx_files.size_translations import SIZE_TRANSLATIONS

aten = torch.ops.aten


# Division. The quotient of two floats may be rounded up to the next whole number; the remainder is exact.


def _remainder(x: Any, y: Any) -> Any:
    y = as_value(y, x)
    if not x.dtype.is_floating_point():
        return op.Mod(x, y)
    rest = op.Mod(x, y, fmod=1)
    return op.Where(_has_other_sign(rest, y, x), op.Add(rest, y), rest)


def _fmod(x: Any, y: Any) -> Any:
    y = as_value(y, x)
    if x.dtype.is_floating_point():
        return op.Mod(x, y, fmod=1)
    return op.Sub(x, op.Mul(op.Div(x, y), y))  # onnxruntime computes the rest of integers in double precision


def _has_other_sign(rest: Any, divisor: Any, like: Any) -> Any:
    zero = number(0, like)
    other = op.Xor(op.Less(rest, zero), op.Less(divisor, zero))
    return op.And(other, op.Not(op.Equal(rest, zero)))


def _div_mode(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    x, y = _operands(x, y)
    if rounding_mode == "floor":
        return _floor_divide(x, y)
    quotient = op.Div(x, y)
    if not x.dtype.is_floating_point():
        return quotient
    return quotient if rounding_mode is None else op.Mul(op.Sign(quotient), op.Floor(op.Abs(quotient)))


def _operands(x: Any, y: Any) -> tuple[Any, Any]:
    """Both operands as values of one dtype; the first one may be a number, as in ``7 // y``."""
    if isinstance(x, bool | int | float):
        x = number(x, y)
        x.dtype = y.dtype
    return x, as_value(y, x)


def _floor_divide(x: Any, y: Any) -> Any:
    x, y = _operands(x, y)
    zero = number(0, x)
    if not x.dtype.is_floating_point():
        negative = op.Xor(op.Less(x, zero), op.Less(y, zero))
        inexact = op.Not(op.Equal(op.Mod(x, y), zero))
        return op.Sub(op.Div(x, y), op.Cast(op.And(negative, inexact), to=x.dtype))
    rest = op.Mod(x, y, fmod=1)
    quotient = op.Div(op.Sub(x, rest), y)  # a whole number but for rounding
    lower = op.Sub(quotient, number(1, x))
    quotient = op.Round(op.Where(_has_other_sign(rest, y, x), lower, quotient))
    return op.Where(op.Equal(y, zero), op.Div(x, y), quotient)


# Logarithms and exponentials near 0, where 1 + x has lost the digits of x, and where exp(x) is 0 or infinite.


def _log1p(x: Any, like: Any = None) -> Any:
    one = number(1, x if like is None else like)
    total = op.Add(one, x)
    # log(total) * x / (total - 1): the error of total is in both, and cancels
    ratio = op.Where(op.IsInf(total), one, op.Div(x, op.Sub(total, one)))
    return op.Where(op.Equal(total, one), x, op.Mul(op.Log(total), ratio))


def _expm1(x: Any) -> Any:
    one, two = number(1, x), number(2, x)
    half = op.Tanh(op.Div(x, two))
    near = op.Div(op.Mul(two, half), op.Sub(one, half))
    near = op.Where(op.Less(op.Abs(x), number(1e-20, x)), x, near)  # onnxruntime's Tanh of subnormal numbers is rough
    return op.Where(op.Less(op.Abs(x), one), near, op.Sub(op.Exp(x), one))


def _log_sigmoid(x: Any) -> Any:
    return op.Sub(op.Min(x, number(0, x)), _log1p(op.Exp(op.Neg(op.Abs(x))), x))


def _softmax(translated: Callable[..., Any]) -> Callable[..., Any]:
    """The form of a softmax that computes in the dtype that it returns, as in torch, also of integers."""

    def form(x: Any, dim: int, dtype: int | None = -1) -> Any:
        if dtype in (-1, None) or x.dtype == dtype:
            return translated(x, dim)
        converted = op.Cast(x, to=dtype)
        converted.shape = x.shape
        return translated(converted, dim)

    return form


# What passes relative errors of its operands on. A sum or a product of matrices does not: there, 6e-8 is little.
_PROPORTIONAL = {
    "Cast", "Clip", "Concat", "Div", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Log",
    "Max", "Min", "Mul", "Pad", "Pow", "Reciprocal", "ReduceMax", "ReduceMin", "ReduceProd", "Reshape", "Slice",
    "Split", "Sqrt", "Squeeze", "Tile", "TopK", "Transpose", "Unsqueeze", "Where",
}  # fmt: skip


def keep_small_probabilities(model: onnx_ir.Model) -> None:
    """Writes the sigmoids that outputs are proportional to as ``1 / (1 + exp(-x))``.

    The sigmoid of onnxruntime 1.31.1 has an absolute error of up to 1e-7, which is 1 % of the result at -12 and 20 % at
    -15. This is negligible inside a model, but not for a score whose logarithm is taken. The exact form takes 8 times
    as long.
    """
    graph, values, seen = model.graph, list(model.graph.outputs), set[onnx_ir.Value]()
    while values:
        value = values.pop()
        node = value.producer()
        if node is None or value in seen or node.graph is not graph:
            continue
        seen.add(value)
        if node.op_type in _PROPORTIONAL:
            values.extend(given for given in node.inputs if given is not None)
        elif node.op_type == "Sigmoid" and value.dtype == onnx_ir.DataType.FLOAT:
            tape = Tape()
            one = tape.op("Constant", [], {"value": onnx_ir.tensor(1.0, dtype=value.dtype)})
            found = tape.op("Reciprocal", [tape.op("Add", [one, tape.op("Exp", [tape.op("Neg", node.inputs)])])])
            for new in tape.nodes:
                new.metadata_props.update(node.metadata_props)
            replace_nodes_and_values(graph, node, [node], tape.nodes, [value], [found])


def _logaddexp(x: Any, y: Any) -> Any:
    return op.Add(op.Max(x, y), _log1p(op.Exp(op.Neg(_apart(x, y))), x))


def _logaddexp2(x: Any, y: Any) -> Any:
    smaller = op.Exp(op.Mul(_apart(x, y), number(-math.log(2), x)))
    return op.Add(op.Max(x, y), op.Mul(_log1p(smaller, x), number(1 / math.log(2), x)))


def _apart(x: Any, y: Any) -> Any:
    """The distance of two values; two equal infinities are not apart."""
    return op.Where(op.Equal(x, y), number(0, x), op.Abs(op.Sub(x, y)))


# Angles, with the signs of zeros, and of infinities.


def _atan2(y: Any, x: Any) -> Any:
    kind = x.dtype
    if not kind.is_floating_point():
        kind = onnx_ir.DataType.FLOAT
        x, y = op.Cast(x, to=kind), op.Cast(y, to=kind)
    zero, one, half = (constant(value, kind) for value in (0, 1, math.pi / 2))
    width, height = op.Abs(x), op.Abs(y)
    is_steep = op.Greater(height, width)
    longer = op.Where(is_steep, height, width)
    ratio = op.Div(op.Where(is_steep, width, height), longer)
    ratio = op.Where(op.Equal(longer, zero), zero, op.Where(op.Equal(width, height), one, ratio))
    angle = op.Atan(ratio)
    angle = op.Where(is_steep, op.Sub(half, angle), angle)
    angle = op.Where(_is_negative(x, zero, one), op.Sub(op.Add(half, half), angle), angle)
    angle = op.Where(_is_negative(y, zero, one), op.Neg(angle), angle)
    return op.Where(op.Or(op.IsNaN(x), op.IsNaN(y)), op.Add(x, y), angle)


def _angle(x: Any) -> Any:
    kind = x.dtype if x.dtype.is_floating_point() else onnx_ir.DataType.FLOAT
    turned = op.Cast(op.Less(x, number(0, x)), to=kind)
    angle = op.Mul(turned, constant(math.pi, kind))
    return op.Where(op.IsNaN(x), x, angle) if x.dtype.is_floating_point() else angle


def _signbit(x: Any) -> Any:
    if x.dtype == onnx_ir.DataType.BOOL:
        return op.And(x, op.Not(x))
    zero = number(0, x)
    return _is_negative(x, zero, number(1, x)) if x.dtype.is_floating_point() else op.Less(x, zero)


def _heaviside(x: Any, at_zero: Any) -> Any:
    zero = number(0, x)
    return op.Where(op.Equal(x, zero), at_zero, op.Cast(op.Greater(x, zero), to=x.dtype))


def _is_negative(x: Any, zero: Any, one: Any) -> Any:
    """Whether the sign bit is set, that of a zero too."""
    return op.Less(op.Where(op.Equal(x, zero), op.Div(one, x), x), zero)


# Fourier transforms, in double precision: onnxruntime's lose all digits but two at lengths that are not powers of two.


def _transform(x: Any, dim: Any, normalization: int, onesided: bool) -> Any:
    """The transform of real numbers; a complex number is a pair along the last axis."""
    wide = op.Unsqueeze(op.Cast(x, to=onnx_ir.DataType.DOUBLE), ints(0, -1))
    for axis in reversed(dim):
        wide = op.DFT(wide, axis=axis + 1, onesided=onesided and axis == dim[-1])
    if normalization:
        count = op.ReduceProd(op.Gather(op.Shape(x), ints(*dim)), keepdims=False)
        count = op.Cast(count, to=onnx_ir.DataType.DOUBLE)
        wide = op.Div(wide, op.Sqrt(count) if normalization == 1 else count)
    return op.Cast(op.Squeeze(wide, ints(0)), to=x.dtype)


def _short_transform(x: Any, n_fft: int, *options: Any, window: Any = None, **named: Any) -> Any:
    dtype = x.dtype
    x, window = (None if value is None else _wide(value) for value in (x, options[2] if len(options) > 2 else window))
    return op.Cast(core.aten_stft(x, n_fft, *options[:2], window, *options[3:], **named), to=dtype)


def _wide(x: Any) -> Any:
    wide = op.Cast(x, to=onnx_ir.DataType.DOUBLE)
    wide.shape = x.shape
    return wide


# Elements that a mask picks.


def _masked_select(x: Any, mask: Any) -> Any:
    shape = op.Shape(op.Expand(mask, op.Shape(x)))
    rows = [op.Reshape(op.Expand(value, shape), ints(-1)) for value in (x, mask)]
    return op.Compress(*rows, axis=0)


def _nonzero(x: Any) -> Any:
    if len(x.shape):
        return op.Transpose(op.NonZero(x), perm=[1, 0])
    found = op.NonZero(op.Reshape(x, ints(1)))  # without axes: as many rows, and no columns
    return op.Slice(op.Transpose(found, perm=[1, 0]), *(ints(i) for i in (0, 0, 1)))


def _unique_consecutive(x: Any, _inverse: bool = False, _counts: bool = False, dim: Any = None) -> Any:
    """Neighbours compared with each other; torch.onnx takes no last axis, and one value for another one."""
    if len(x.shape) > 1 and dim is not None:
        raise NotImplementedError("unique_consecutive() along an axis of several")
    zero, one, end = (ints(number) for number in (0, 1, 2**63 - 1))
    flat = op.Reshape(x, ints(-1))
    differs = op.Not(op.Equal(op.Slice(flat, one, end), op.Slice(flat, zero, ints(-1))))
    first = op.Cast(op.Shape(op.Slice(flat, zero, one)), to=onnx_ir.DataType.INT64)
    is_new = op.Concat(op.Expand(constant([True], onnx_ir.DataType.BOOL), first), differs, axis=0)
    inverse = op.Sub(op.CumSum(op.Cast(is_new, to=onnx_ir.DataType.INT64), zero), one)
    count = op.Shape(flat)
    places = op.Compress(op.Range(*(op.Squeeze(limit) for limit in (zero, count, one))), is_new, axis=0)
    counts = op.Sub(op.Concat(op.Slice(places, one, end), op.Slice(count, zero, op.Shape(places)), axis=0), places)
    return op.Compress(flat, is_new, axis=0), op.Reshape(inverse, op.Shape(x)), counts


def _copy(x: Any, source: Any, _non_blocking: bool = False) -> Any:
    """What is written into a tensor has its dtype and shape; torch.onnx leaves out the shape."""
    found = source if source.dtype == x.dtype else op.Cast(source, to=x.dtype)
    if source.shape is not None and list(source.shape) == list(x.shape):
        return op.Identity(found)
    return op.Expand(found, op.Shape(x))


def _repeat_evenly(x: Any, repeats: Any, dim: int | None = None, **_options: Any) -> Any:
    """Along the first axis, torch's own form needs ``repeats`` as a number."""
    if isinstance(repeats, int):
        return core.aten_repeat_interleave_self_int(x, repeats, dim)
    axis, rank = (0, 1) if dim is None else (dim % len(x.shape), len(x.shape))
    x = op.Reshape(x, ints(-1)) if dim is None else x
    ones = [ints(*[1] * count) for count in (axis + 1, rank - axis - 1)]
    repeated = op.Expand(
        op.Unsqueeze(x, ints(axis + 1)),
        op.Concat(ones[0], op.Reshape(repeats, ints(1)), ones[1], axis=0),
    )
    size = op.Mul(op.Shape(x, start=axis, end=axis + 1), op.Reshape(repeats, ints(1)))
    return op.Reshape(repeated, op.Concat(op.Shape(x, end=axis), size, op.Shape(x, start=axis + 1), axis=0))


def _bincount(x: Any, weights: Any = None, minlength: Any = 0) -> Any:
    """With weights, and with a size as ``minlength``; torch's own form has neither."""
    kind = onnx_ir.DataType.INT64
    x, one, zero = op.Cast(x, to=kind), ints(1), ints(0)
    length = op.ReduceMax(op.Concat(zero, op.Add(x, one), axis=0), keepdims=True)
    least = ints(minlength) if isinstance(minlength, int) else op.Reshape(minlength, one)
    length = op.Max(length, least)
    if weights is not None:
        kind = onnx_ir.DataType.FLOAT if weights.dtype == onnx_ir.DataType.FLOAT else onnx_ir.DataType.DOUBLE
    added = op.Expand(one, op.Shape(x)) if weights is None else op.Cast(weights, to=kind)
    return op.ScatterElements(op.Expand(op.Cast(zero, to=kind), length), x, added, axis=0, reduction="add")


def _silu_backward(gradient: Any, x: Any) -> Any:
    """The derivative of silu is s(x) + x s(x) s(-x), where s is the sigmoid function."""
    sigmoid = op.Sigmoid(x)
    return op.Mul(gradient, op.Add(sigmoid, op.Mul(op.Mul(x, sigmoid), op.Sigmoid(op.Neg(x)))))


def _mish_backward(gradient: Any, x: Any) -> Any:
    """The derivative of mish is t(x) + x s(x) (1 - t(x)**2), where s is the sigmoid function and t = tanh(softplus)."""
    bent = op.Tanh(op.Add(op.Max(x, number(0, x)), _log1p(op.Exp(op.Neg(op.Abs(x))), x)))
    return op.Mul(gradient, op.Add(bent, op.Mul(op.Mul(x, op.Sigmoid(x)), op.Sub(number(1, x), op.Mul(bent, bent)))))


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.remainder.Tensor: _remainder,
    aten.remainder.Scalar: _remainder,
    aten.fmod.Tensor: _fmod,
    aten.fmod.Scalar: _fmod,
    aten.div.Tensor_mode: _div_mode,
    aten.floor_divide.default: _floor_divide,
    aten.floor_divide.Scalar: lambda x, y: _floor_divide(x, as_operand(y, x)),
    aten.log1p.default: _log1p,
    aten.expm1.default: _expm1,
    aten.log_sigmoid.default: _log_sigmoid,
    aten.softmax.int: _softmax(core.aten_softmax),
    aten.log_softmax.int: _softmax(special.aten_special_log_softmax),
    aten.logaddexp.default: _logaddexp,
    aten.logaddexp2.default: _logaddexp2,
    aten.atan2.default: _atan2,
    aten.angle.default: _angle,
    aten.signbit.default: _signbit,
    aten.heaviside.default: _heaviside,
    FFT_R2C.default: _transform,
    aten.stft.default: _short_transform,
    aten.bincount.default: _bincount,
    aten.masked_select.default: _masked_select,
    aten.nonzero.default: _nonzero,
    aten.copy.default: _copy,
    aten.unique_consecutive.default: _unique_consecutive,
    aten.silu_backward.default: _silu_backward,
    aten.mish_backward.default: _mish_backward,
    aten.repeat_interleave.Tensor: lambda repeats, **_: core.aten_repeat_interleave_Tensor(repeats),
    aten.repeat_interleave.self_int: _repeat_evenly,
    **INTEGER_TRANSLATIONS,
    **REDUCTION_TRANSLATIONS,
    **RESIZING,
    **SELECTED_TRANSLATIONS,
    **SIZE_TRANSLATIONS,
}
