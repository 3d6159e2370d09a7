"""Operators in ONNX that have to do with integers and booleans: onnxruntime lacks them, or computes them in floats."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir
import torch
from onnxscript.function_libs.torch_lib.ops import core

from exportkit.onnx_files.constants import constant, number, op
from exportkit.onnx_files.size_translations import constant_in, exact_like

aten = torch.ops.aten


def as_value(value: Any, like: Any) -> Any:
    """A number as a constant with the dtype of an argument; a value as it is, with all digits that the dtype has."""
    return number(value, like) if isinstance(value, bool | int | float) else exact_like(value, like.dtype)


# Limits. onnxruntime compares the lower halves of 64-bit integers in Max, Min and Clip. A Clip without an upper limit
# takes the largest finite number for one, and a limit that is not a number for none.


def _limited(x: Any, y: Any, of_floats: Any, keeps: Any, of_booleans: Any) -> Any:
    y = as_value(y, x)
    if x.dtype == onnx_ir.DataType.BOOL:
        return of_booleans(x, y)
    if x.dtype.is_floating_point():
        return of_floats(x, y)
    return op.Where(keeps(x, y), x, y)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    low, high = (None if limit is None else op.CastLike(as_value(limit, x), x) for limit in (min, max))
    if x.dtype.is_floating_point():
        constants = constant_in(min), constant_in(max)
        if any(constant is None or math.isnan(constant) for constant in constants):
            x = x if low is None else op.Max(x, low)
            return x if high is None else op.Min(x, high)
        return op.Clip(x, low, high)
    x = x if low is None else op.Where(op.Greater(x, low), x, low)
    return x if high is None else op.Where(op.Less(x, high), x, high)


def _hardtanh(x: Any, min_val: float = -1, max_val: float = 1) -> Any:
    return _clamp(x, min_val, max_val)


# Signs, whole numbers and NaN, which integers do not have.


def _sign(x: Any) -> Any:
    if x.dtype == onnx_ir.DataType.BOOL:
        return op.Identity(x)
    zero = number(0, x)
    if not x.dtype.is_floating_point():
        return op.Sub(op.Cast(op.Greater(x, zero), to=x.dtype), op.Cast(op.Less(x, zero), to=x.dtype))
    return op.Where(op.IsNaN(x), zero, op.Sign(x))


_UNSIGNED = {onnx_ir.DataType[f"UINT{bits}"] for bits in (8, 16, 32, 64)}


def _neg(x: Any) -> Any:
    return op.Sub(number(0, x), x) if x.dtype in _UNSIGNED else op.Neg(x)


def _of_floats(form: Callable[[Any], Any], otherwise: bool | None = None) -> Callable[[Any], Any]:
    """A form for floats; integers stay as they are, or give the same answer everywhere."""

    def of_any(x: Any) -> Any:
        if x.dtype.is_floating_point():
            return form(x)
        return (
            op.Identity(x) if otherwise is None else op.Expand(constant(otherwise, onnx_ir.DataType.BOOL), op.Shape(x))
        )

    return of_any


# Powers. onnxruntime computes those of integers in double precision.


def _pow(x: Any, exponent: Any) -> Any:
    if not (x.dtype.is_integer() and exponent.dtype.is_integer()):
        return core.aten_pow(x, exponent)
    return _int_pow(x, exponent, x.dtype)


def _pow_to_number(x: Any, exponent: Any) -> Any:
    if isinstance(exponent, onnx_ir.Value):
        return _pow_to_size(x, exponent)
    if x.dtype.is_floating_point() and abs(exponent) == 0.5:  # torch takes the root, which minus infinity has not
        return op.Sqrt(x) if exponent > 0 else op.Reciprocal(op.Sqrt(x))
    if x.dtype.is_floating_point() or isinstance(exponent, float):
        return core.aten_pow_tensor_scalar(x, exponent)
    if x.dtype == onnx_ir.DataType.BOOL:
        x, dtype = op.Cast(x, to=onnx_ir.DataType.INT64), onnx_ir.DataType.INT64
        return _product(x, exponent, dtype)
    return _product(x, exponent, x.dtype)


def _pow_to_size(x: Any, exponent: Any) -> Any:
    if x.dtype.is_floating_point():
        return op.Pow(x, op.Cast(as_value(exponent, x), to=x.dtype))
    if exponent.dtype.is_floating_point():
        return op.Pow(op.Cast(x, to=exponent.dtype), exponent)
    return _int_pow(x, op.Cast(exponent, to=x.dtype), x.dtype)


def _number_to_pow(x: Any, exponent: Any) -> Any:
    if not isinstance(x, bool | int | float):  # it follows from a size
        if x.dtype.is_floating_point() and exponent.dtype.is_integer():
            return op.Pow(x, op.Cast(exponent, to=x.dtype))
        x, dtype = op.Cast(x, to=exponent.dtype), exponent.dtype
        return _int_pow(x, exponent, dtype) if dtype.is_integer() else op.Pow(x, exponent)
    if isinstance(x, float) or not exponent.dtype.is_integer():
        return core.aten_pow_scalar(x, exponent)
    return _int_pow(number(x, exponent), exponent, exponent.dtype)


def _product(x: Any, exponent: int, dtype: Any) -> Any:
    """The power of integers by squaring, in the order of the bits of the exponent."""
    result = constant(1, dtype)
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
    """The same with exponents that are not known, up to 63; with larger ones, powers of even numbers overflow to 0."""
    one = constant(1, dtype)
    two = constant(2, dtype)
    zero = constant(0, dtype)
    is_negative = op.Less(exponent, zero)
    result, rest = one, op.Where(is_negative, zero, exponent)
    factor = x
    for _ in range(6):
        is_odd = op.Equal(op.Mod(rest, two), one)
        result = op.Where(is_odd, op.Mul(result, factor), result)
        rest, factor = op.Div(rest, two), op.Mul(factor, factor)
    overflows = op.And(op.Greater(rest, zero), op.Equal(op.Mod(x, two), zero))
    result = op.Where(overflows, zero, result)
    # 1 / x**n is 0 unless x is 1 or -1
    sign = op.Where(op.Equal(op.Mod(exponent, two), zero), one, x)
    unit = op.Where(op.Equal(op.Abs(x), one), sign, zero)
    return op.Where(is_negative, unit, result)


# Products of matrices of integers, for which onnxruntime has no Gemm.


def _addmm(x: Any, one: Any, other: Any, beta: float = 1, alpha: float = 1) -> Any:
    if x.dtype.is_floating_point():
        return core.aten_addmm(x, one, other, beta, alpha)
    return op.Add(op.Mul(x, number(beta, x)), op.Mul(op.MatMul(one, other), number(alpha, x)))


# Sums of booleans, and choosing between them, for which onnxruntime has no operator.


def _add(x: Any, y: Any, alpha: float = 1) -> Any:
    if getattr(x, "dtype", None) == getattr(y, "dtype", None) == onnx_ir.DataType.BOOL:
        return op.Or(x, y) if alpha else op.Identity(x)
    return core.aten_add(x, y, alpha)


def _where(condition: Any, x: Any, y: Any) -> Any:
    if x.dtype != onnx_ir.DataType.BOOL:
        return op.Where(condition, x, y)
    return op.Or(op.And(condition, x), op.And(op.Not(condition), y))


def _masked_fill(x: Any, mask: Any, value: Any) -> Any:
    if x.dtype == onnx_ir.DataType.BOOL:
        value = constant(bool(value), x.dtype) if isinstance(value, bool | int | float) else value
        return op.Or(op.And(mask, op.Cast(value, to=x.dtype)), op.And(op.Not(mask), x))
    return op.Where(mask, op.CastLike(as_value(value, x), x), x)


# Numbers that follow from a size, such as (length - 1) / 2: torch.onnx takes those of these operators for constants.


def as_operand(value: Any, like: Any) -> Any:
    """Returns a number, or a value of the graph without axes, as a value with the dtype of an argument."""
    value = as_value(value, like)
    return value if value.dtype == like.dtype else op.Cast(value, to=like.dtype)


def _less_number(x: Any, value: Any, alpha: Any = 1) -> Any:
    value = as_operand(value, x)
    return op.Sub(x, value if alpha == 1 else op.Mul(value, as_operand(alpha, x)))


def _int_mm(x: Any, y: Any) -> Any:
    return op.MatMulInteger(x, y)


INTEGER_TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten._int_mm.default: _int_mm,
    aten.add.Tensor: _add,
    aten.addmm.default: _addmm,
    aten.ceil.default: _of_floats(op.Ceil),
    aten.clamp.default: _clamp,
    aten.clamp.Tensor: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_min.Tensor: _clamp,
    aten.clamp_max.default: lambda x, max: _clamp(x, None, max),
    aten.clamp_max.Tensor: lambda x, max: _clamp(x, None, max),
    aten.floor.default: _of_floats(op.Floor),
    aten.isfinite.default: _of_floats(lambda x: op.Not(op.Or(op.IsNaN(x), op.IsInf(x))), True),
    aten.isinf.default: _of_floats(op.IsInf, False),
    aten.isnan.default: _of_floats(op.IsNaN, False),
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten.maximum.default: lambda x, y: _limited(x, y, op.Max, op.Greater, op.Or),
    aten.minimum.default: lambda x, y: _limited(x, y, op.Min, op.Less, op.And),
    aten.mul.Scalar: lambda x, value: op.Mul(x, as_operand(value, x)),
    aten.neg.default: _neg,
    aten.pow.Scalar: _number_to_pow,
    aten.pow.Tensor_Scalar: _pow_to_number,
    aten.pow.Tensor_Tensor: _pow,
    aten.hardtanh.default: _hardtanh,
    aten.relu6.default: lambda x: _clamp(x, 0, 6),
    aten.relu.default: lambda x: op.Relu(x) if x.dtype.is_floating_point() else _clamp(x, 0),
    aten.round.default: _of_floats(op.Round),
    aten.sign.default: _sign,
    aten.sub.Scalar: _less_number,
    aten.trunc.default: _of_floats(core.aten_trunc),
    aten.where.self: _where,
}
