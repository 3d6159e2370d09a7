"""Operators in ONNX where the form that torch.onnx writes computes other numbers than torch, or where it has none.

Each function writes one operator of torch with those of ONNX. Values are those of the graph, or numbers. The forms are
tested one by one in ``tests/onnx_files/test_forms.py``, and all operators by ``make conformance``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir
import torch
from onnxscript import opset18
from onnxscript.function_libs.torch_lib.ops import core

from exportkit._torch_compat.graph import FFT_R2C
from exportkit.onnx_files.reduction_forms import REDUCTION_FORMS, number
from exportkit.onnx_files.size_forms import SIZE_FORMS

aten = torch.ops.aten
op: Any = opset18  # its annotations know values of one graph, not numbers


def _as_value(value: Any, like: Any) -> Any:
    return number(value, like) if isinstance(value, bool | int | float) else value


# Division. The quotient of two floats may be rounded up to the next whole number; the remainder is exact.


def _remainder(x: Any, y: Any) -> Any:
    y = _as_value(y, x)
    if not x.dtype.is_floating_point():
        return op.Mod(x, y)
    rest = op.Mod(x, y, fmod=1)
    return op.Where(_has_other_sign(rest, y, x), op.Add(rest, y), rest)


def _fmod(x: Any, y: Any) -> Any:
    y = _as_value(y, x)
    if x.dtype.is_floating_point():
        return op.Mod(x, y, fmod=1)
    return op.Sub(x, op.Mul(op.Div(x, y), y))  # onnxruntime computes the rest of integers in double precision


def _has_other_sign(rest: Any, divisor: Any, like: Any) -> Any:
    zero = number(0, like)
    other = op.Xor(op.Less(rest, zero), op.Less(divisor, zero))
    return op.And(other, op.Not(op.Equal(rest, zero)))


def _div_mode(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    y = _as_value(y, x)
    if rounding_mode == "floor":
        return _floor_divide(x, y)
    quotient = op.Div(x, y)
    if not x.dtype.is_floating_point():
        return quotient
    return quotient if rounding_mode is None else _trunc(quotient)


def _trunc(x: Any) -> Any:
    return op.Mul(op.Sign(x), op.Floor(op.Abs(x)))


def _floor_divide(x: Any, y: Any) -> Any:
    y, zero = _as_value(y, x), number(0, x)
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


def _logaddexp(x: Any, y: Any) -> Any:
    return op.Add(op.Max(x, y), _log1p(op.Exp(op.Neg(_apart(x, y))), x))


def _logaddexp2(x: Any, y: Any) -> Any:
    smaller = op.Exp(op.Mul(_apart(x, y), number(-math.log(2), x)))
    return op.Add(op.Max(x, y), op.Mul(_log1p(smaller, x), number(1 / math.log(2), x)))


def _apart(x: Any, y: Any) -> Any:
    """The distance of two values; two equal infinities are not apart."""
    return op.Where(op.Equal(x, y), number(0, x), op.Abs(op.Sub(x, y)))


def _sign(x: Any) -> Any:
    if x.dtype == onnx_ir.DataType.BOOL:
        return op.Identity(x)
    sign = op.Sign(x)
    return op.Where(op.IsNaN(x), number(0, x), sign) if x.dtype.is_floating_point() else sign


# Limits. onnxruntime compares the lower halves of 64-bit integers in Max, Min and Clip; and a Clip without an upper
# limit takes the largest finite number for one.


def _maximum(x: Any, y: Any) -> Any:
    return _limited(x, y, op.Max, op.Greater, op.Or)


def _minimum(x: Any, y: Any) -> Any:
    return _limited(x, y, op.Min, op.Less, op.And)


def _limited(x: Any, y: Any, of_floats: Any, keeps: Any, of_booleans: Any) -> Any:
    y = _as_value(y, x)
    if x.dtype == onnx_ir.DataType.BOOL:
        return of_booleans(x, y)
    if x.dtype.is_floating_point():
        return of_floats(x, y)
    return op.Where(keeps(x, y), x, y)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    low, high = (None if limit is None else op.CastLike(_as_value(limit, x), x) for limit in (min, max))
    if x.dtype.is_floating_point():
        if low is None or high is None or len(getattr(min, "shape", ())) or len(getattr(max, "shape", ())):
            x = x if low is None else op.Max(x, low)
            return x if high is None else op.Min(x, high)
        return op.Clip(x, low, high)
    x = x if low is None else op.Where(op.Greater(x, low), x, low)
    return x if high is None else op.Where(op.Less(x, high), x, high)


def _clamp_min(x: Any, min: Any) -> Any:
    return _clamp(x, min)


def _clamp_max(x: Any, max: Any) -> Any:
    return _clamp(x, None, max)


# Angles, with the signs of zeros, and of infinities.


def _atan2(y: Any, x: Any) -> Any:
    kind = x.dtype
    if not kind.is_floating_point():
        kind = onnx_ir.DataType.FLOAT
        x, y = op.Cast(x, to=kind), op.Cast(y, to=kind)
    zero, one, half = (op.Constant(value=onnx_ir.tensor(value, dtype=kind)) for value in (0, 1, math.pi / 2))
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
    angle = op.Mul(turned, op.Constant(value=onnx_ir.tensor(math.pi, dtype=kind)))
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


# Powers of integers, which onnxruntime computes in double precision.


def _pow(x: Any, exponent: Any) -> Any:
    if not (x.dtype.is_integer() and exponent.dtype.is_integer()):
        return core.aten_pow(x, exponent)
    return _int_pow(x, exponent, x.dtype)


def _pow_to_number(x: Any, exponent: Any) -> Any:
    if x.dtype.is_floating_point() or isinstance(exponent, float):
        return core.aten_pow_tensor_scalar(x, exponent)
    return _product(x, exponent, x.dtype)


def _number_to_pow(x: Any, exponent: Any) -> Any:
    if isinstance(x, float) or not exponent.dtype.is_integer():
        return core.aten_pow_scalar(x, exponent)
    return _int_pow(number(x, exponent), exponent, exponent.dtype)


def _product(x: Any, exponent: int, dtype: Any) -> Any:
    """The power of integers by squaring, in the order of the bits of the exponent."""
    result = op.Constant(value=onnx_ir.tensor(1, dtype=dtype))
    if exponent == 0:
        return op.Expand(result, op.Shape(x))
    found = None
    while exponent:
        if exponent & 1:
            found = x if found is None else op.Mul(found, x)
        exponent >>= 1
        x = op.Mul(x, x) if exponent else x
    return op.Identity(found)


def _int_pow(x: Any, exponent: Any, dtype: Any) -> Any:
    """The same with exponents that are not known: 64 and more overflow, whatever the number."""
    one = op.Constant(value=onnx_ir.tensor(1, dtype=dtype))
    two = op.Constant(value=onnx_ir.tensor(2, dtype=dtype))
    zero = op.Constant(value=onnx_ir.tensor(0, dtype=dtype))
    is_negative = op.Less(exponent, zero)
    result, rest = one, op.Where(is_negative, zero, exponent)
    factor = x
    for _ in range(6):
        is_odd = op.Equal(op.Mod(rest, two), one)
        result = op.Where(is_odd, op.Mul(result, factor), result)
        rest, factor = op.Div(rest, two), op.Mul(factor, factor)
    # 1 / x**n is 0 unless x is 1 or -1
    sign = op.Where(op.Equal(op.Mod(exponent, two), zero), one, x)
    unit = op.Where(op.Equal(op.Abs(x), one), sign, zero)
    return op.Where(is_negative, unit, result)


# Products of matrices of integers, for which onnxruntime has no Gemm.


def _addmm(x: Any, one: Any, other: Any, beta: float = 1, alpha: float = 1) -> Any:
    if x.dtype.is_floating_point():
        return core.aten_addmm(x, one, other, beta, alpha)
    return op.Add(op.Mul(x, number(beta, x)), op.Mul(op.MatMul(one, other), number(alpha, x)))


# Fourier transforms, in double precision: onnxruntime's lose all digits but two at lengths that are not powers of two.


def _transform(x: Any, dim: Any, normalization: int, onesided: bool) -> Any:
    """The transform of real numbers; a complex number is a pair along the last axis."""
    wide = op.Unsqueeze(op.Cast(x, to=onnx_ir.DataType.DOUBLE), op.Constant(value_ints=[0, -1]))
    for axis in reversed(dim):
        wide = op.DFT(wide, axis=axis + 1, onesided=onesided and axis == dim[-1])
    if normalization:
        count = op.ReduceProd(op.Gather(op.Shape(x), op.Constant(value_ints=list(dim))), keepdims=False)
        count = op.Cast(count, to=onnx_ir.DataType.DOUBLE)
        wide = op.Div(wide, op.Sqrt(count) if normalization == 1 else count)
    return op.Cast(op.Squeeze(wide, op.Constant(value_ints=[0])), to=x.dtype)


def _short_transform(x: Any, n_fft: int, *options: Any, window: Any = None, **named: Any) -> Any:
    dtype = x.dtype
    x, window = (None if value is None else _wide(value) for value in (x, options[2] if len(options) > 2 else window))
    return op.Cast(core.aten_stft(x, n_fft, *options[:2], window, *options[3:], **named), to=dtype)


def _wide(x: Any) -> Any:
    wide = op.Cast(x, to=onnx_ir.DataType.DOUBLE)
    wide.shape = x.shape
    return wide


# Choosing between booleans, for which onnxruntime has no operator.


def _where(condition: Any, x: Any, y: Any) -> Any:
    if x.dtype != onnx_ir.DataType.BOOL:
        return op.Where(condition, x, y)
    return op.Or(op.And(condition, x), op.And(op.Not(condition), y))


def _masked_fill(x: Any, mask: Any, value: Any) -> Any:
    if x.dtype == onnx_ir.DataType.BOOL:
        value = op.Constant(value=onnx_ir.tensor(bool(value))) if isinstance(value, bool | int | float) else value
        return op.Or(op.And(mask, op.Cast(value, to=x.dtype)), op.And(op.Not(mask), x))
    return op.Where(mask, op.CastLike(_as_value(value, x), x), x)


FORMS: dict[Any, Callable[..., Any]] = {
    aten.remainder.Tensor: _remainder,
    aten.remainder.Scalar: _remainder,
    aten.fmod.Tensor: _fmod,
    aten.fmod.Scalar: _fmod,
    aten.div.Tensor_mode: _div_mode,
    aten.floor_divide.default: _floor_divide,
    aten.log1p.default: _log1p,
    aten.expm1.default: _expm1,
    aten.log_sigmoid.default: _log_sigmoid,
    aten.logaddexp.default: _logaddexp,
    aten.logaddexp2.default: _logaddexp2,
    aten.sign.default: _sign,
    aten.maximum.default: _maximum,
    aten.minimum.default: _minimum,
    aten.clamp.default: _clamp,
    aten.clamp.Tensor: _clamp,
    aten.clamp_min.default: _clamp_min,
    aten.clamp_min.Tensor: _clamp_min,
    aten.clamp_max.default: _clamp_max,
    aten.clamp_max.Tensor: _clamp_max,
    aten.atan2.default: _atan2,
    aten.angle.default: _angle,
    aten.signbit.default: _signbit,
    aten.heaviside.default: _heaviside,
    aten.pow.Tensor_Tensor: _pow,
    aten.pow.Tensor_Scalar: _pow_to_number,
    aten.pow.Scalar: _number_to_pow,
    aten.addmm.default: _addmm,
    FFT_R2C.default: _transform,
    aten.stft.default: _short_transform,
    aten.where.self: _where,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    **REDUCTION_FORMS,
    **SIZE_FORMS,
}
