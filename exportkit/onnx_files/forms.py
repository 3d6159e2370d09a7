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
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops import core, linalg

from exportkit.onnx_files.size_forms import SIZE_FORMS

aten = torch.ops.aten


def _number(value: float, like: Any) -> Any:
    """A constant with the dtype of an argument. The dtypes of values that a form makes on the way are not known."""
    return op.Constant(value=onnx_ir.tensor(value, dtype=like.dtype))


def _as_value(value: Any, like: Any) -> Any:
    return _number(value, like) if isinstance(value, bool | int | float) else value


# Division. The quotient of two floats may be rounded up to the next whole number; the remainder is exact.


def _remainder(x: Any, y: Any) -> Any:
    y = _as_value(y, x)
    if not x.dtype.is_floating_point():
        return op.Mod(x, y)
    rest = op.Mod(x, y, fmod=1)
    return op.Where(_has_other_sign(rest, y, x), op.Add(rest, y), rest)


def _has_other_sign(rest: Any, divisor: Any, like: Any) -> Any:
    zero = _number(0, like)
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
    y, zero = _as_value(y, x), _number(0, x)
    if not x.dtype.is_floating_point():
        negative = op.Xor(op.Less(x, zero), op.Less(y, zero))
        inexact = op.Not(op.Equal(op.Mod(x, y), zero))
        return op.Sub(op.Div(x, y), op.Cast(op.And(negative, inexact), to=x.dtype))
    rest = op.Mod(x, y, fmod=1)
    quotient = op.Div(op.Sub(x, rest), y)  # a whole number but for rounding
    lower = op.Sub(quotient, _number(1, x))
    quotient = op.Round(op.Where(_has_other_sign(rest, y, x), lower, quotient))
    return op.Where(op.Equal(y, zero), op.Div(x, y), quotient)


# Logarithms and exponentials near 0, where 1 + x has lost the digits of x, and where exp(x) is 0 or infinite.


def _log1p(x: Any, like: Any = None) -> Any:
    one = _number(1, x if like is None else like)
    total = op.Add(one, x)
    # log(total) * x / (total - 1): the error of total is in both, and cancels
    ratio = op.Where(op.IsInf(total), one, op.Div(x, op.Sub(total, one)))
    return op.Where(op.Equal(total, one), x, op.Mul(op.Log(total), ratio))


def _expm1(x: Any) -> Any:
    one, two = _number(1, x), _number(2, x)
    half = op.Tanh(op.Div(x, two))
    near = op.Div(op.Mul(two, half), op.Sub(one, half))
    return op.Where(op.Less(op.Abs(x), one), near, op.Sub(op.Exp(x), one))


def _log_sigmoid(x: Any) -> Any:
    return op.Sub(op.Min(x, _number(0, x)), _log1p(op.Exp(op.Neg(op.Abs(x))), x))


def _logaddexp(x: Any, y: Any) -> Any:
    return op.Add(op.Max(x, y), _log1p(op.Exp(op.Neg(_apart(x, y))), x))


def _logaddexp2(x: Any, y: Any) -> Any:
    smaller = op.Exp(op.Mul(_apart(x, y), _number(-math.log(2), x)))
    return op.Add(op.Max(x, y), op.Mul(_log1p(smaller, x), _number(1 / math.log(2), x)))


def _apart(x: Any, y: Any) -> Any:
    """The distance of two values; two equal infinities are not apart."""
    return op.Where(op.Equal(x, y), _number(0, x), op.Abs(op.Sub(x, y)))


# The largest, the smallest and the sign, where NaN wins over every number; onnxruntime skips it.


def _reduced(x: Any, dim: Any, keepdim: bool, reduce: Any) -> Any:
    axes = None if dim is None else op.Constant(value_ints=[dim] if isinstance(dim, int) else list(dim))
    if not len(x.shape):
        return op.Identity(x)
    if x.dtype == onnx_ir.DataType.BOOL:
        return op.Cast(reduce(op.Cast(x, to=onnx_ir.DataType.UINT8), axes, keepdims=keepdim), to=x.dtype)
    found = reduce(x, axes, keepdims=keepdim)
    if not x.dtype.is_floating_point():
        return found
    return op.Where(_any_nan(x, axes, keepdim), _number(math.nan, x), found)


def _any_nan(x: Any, axes: Any, keepdim: bool) -> Any:
    found = op.Cast(op.IsNaN(x), to=onnx_ir.DataType.UINT8)
    return op.Cast(op.ReduceMax(found, axes, keepdims=keepdim), to=onnx_ir.DataType.BOOL)


def _place(x: Any, dim: int | None, keepdim: bool, place: Any) -> Any:
    """The index of the largest or smallest element, or of the first NaN; without an axis, in the flattened tensor."""
    rank, dtype = len(x.shape), x.dtype
    if not rank:
        return op.Constant(value_int=0)
    if dim is None:
        found = _place_along(op.Reshape(x, op.Constant(value_ints=[-1])), dtype, 0, False, place)
        return op.Reshape(found, op.Constant(value_ints=[1] * rank)) if keepdim else found
    return _place_along(x, dtype, dim, keepdim, place)


def _place_along(x: Any, dtype: Any, dim: int, keepdim: bool, place: Any) -> Any:
    if dtype == onnx_ir.DataType.BOOL:
        x = op.Cast(x, to=onnx_ir.DataType.UINT8)
    found = place(x, axis=dim, keepdims=keepdim)
    if not dtype.is_floating_point():
        return found
    first = op.ArgMax(op.Cast(op.IsNaN(x), to=onnx_ir.DataType.FLOAT), axis=dim, keepdims=keepdim)
    return op.Where(_any_nan(x, op.Constant(value_ints=[dim]), keepdim), first, found)


def _amax(x: Any, dim: Any = (), keepdim: bool = False) -> Any:
    return _reduced(x, dim or None, keepdim, op.ReduceMax)


def _amin(x: Any, dim: Any = (), keepdim: bool = False) -> Any:
    return _reduced(x, dim or None, keepdim, op.ReduceMin)


def _argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return _place(x, dim, keepdim, op.ArgMax)


def _argmin(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return _place(x, dim, keepdim, op.ArgMin)


def _largest(x: Any) -> Any:
    return _reduced(x, None, False, op.ReduceMax)


def _smallest(x: Any) -> Any:
    return _reduced(x, None, False, op.ReduceMin)


def _max_along(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    return _reduced(x, dim, keepdim, op.ReduceMax), _place(x, dim, keepdim, op.ArgMax)


def _min_along(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    return _reduced(x, dim, keepdim, op.ReduceMin), _place(x, dim, keepdim, op.ArgMin)


def _sign(x: Any) -> Any:
    if x.dtype == onnx_ir.DataType.BOOL:
        return op.Identity(x)
    sign = op.Sign(x)
    return op.Where(op.IsNaN(x), _number(0, x), sign) if x.dtype.is_floating_point() else sign


def _vector_norm(x: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, dtype: int = -1) -> Any:
    if not math.isinf(ord):
        return linalg.aten_linalg_vector_norm(x, ord, dim, keepdim, dtype=dtype)
    size = op.Abs(x)
    size.dtype, size.shape = x.dtype, x.shape
    found = _amax(size, dim, keepdim) if ord > 0 else _amin(size, dim, keepdim)
    return found if dtype in (-1, None) else op.Cast(found, to=dtype)


# Powers of integers, which onnxruntime computes in double precision.


def _pow(x: Any, exponent: Any) -> Any:
    if not (x.dtype.is_integer() and exponent.dtype.is_integer()):
        return core.aten_pow(x, exponent)
    return _int_pow(x, exponent, x.dtype)


def _pow_to_number(x: Any, exponent: float) -> Any:
    if x.dtype.is_floating_point() or isinstance(exponent, float):
        return core.aten_pow_tensor_scalar(x, exponent)
    return _product(x, exponent, x.dtype)


def _number_to_pow(x: float, exponent: Any) -> Any:
    if isinstance(x, float) or not exponent.dtype.is_integer():
        return core.aten_pow_scalar(x, exponent)
    return _int_pow(_number(x, exponent), exponent, exponent.dtype)


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
    result, rest = one, op.Max(exponent, zero)
    factor = x
    for _ in range(6):
        is_odd = op.Equal(op.Mod(rest, two), one)
        result = op.Where(is_odd, op.Mul(result, factor), result)
        rest, factor = op.Div(rest, two), op.Mul(factor, factor)
    # 1 / x**n is 0 unless x is 1 or -1
    sign = op.Where(op.Equal(op.Mod(exponent, two), zero), one, x)
    unit = op.Where(op.Equal(op.Abs(x), one), sign, zero)
    return op.Where(is_negative, unit, result)


# Axes of any size: the mean of nothing is 0 in onnxruntime, and it refuses to remove an axis whose size is not 1.


def _mean(x: Any, dim: Any = None, keepdim: bool = False, dtype: int | None = None) -> Any:
    rank, kind = len(x.shape), x.dtype
    if dtype not in (-1, None):
        x, kind = op.Cast(x, to=dtype), onnx_ir.DataType(dtype)
    if not rank:
        return op.Identity(x)
    dims = [dim] if isinstance(dim, int) else [*(dim or range(rank))]
    axes = op.Constant(value_ints=dims)
    mean = op.ReduceMean(x, axes, keepdims=keepdim)
    if all(isinstance(x.shape[axis], int) and x.shape[axis] for axis in dims):
        return mean
    count = op.ReduceProd(op.Gather(op.Shape(x), axes), keepdims=False)
    nothing = op.Constant(value=onnx_ir.tensor(math.nan, dtype=kind))
    return op.Where(op.Equal(count, op.Constant(value_int=0)), nothing, mean)


def _mean_of_all(x: Any, dtype: int | None = None) -> Any:
    return _mean(x, None, False, dtype)


def _squeeze(x: Any, dim: Any = None) -> Any:
    """A trace with an axis of any size means sizes other than 1, for which torch keeps the axis."""
    dims = range(len(x.shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    ones = [axis for axis in dims if len(x.shape) and x.shape[axis] == 1]
    return op.Squeeze(x, op.Constant(value_ints=ones)) if ones else op.Identity(x)


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
    aten.div.Tensor_mode: _div_mode,
    aten.floor_divide.default: _floor_divide,
    aten.log1p.default: _log1p,
    aten.expm1.default: _expm1,
    aten.log_sigmoid.default: _log_sigmoid,
    aten.logaddexp.default: _logaddexp,
    aten.logaddexp2.default: _logaddexp2,
    aten.amax.default: _amax,
    aten.amin.default: _amin,
    aten.max.default: _largest,
    aten.min.default: _smallest,
    aten.max.dim: _max_along,
    aten.min.dim: _min_along,
    aten.argmax.default: _argmax,
    aten.argmin.default: _argmin,
    aten.sign.default: _sign,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.pow.Tensor_Tensor: _pow,
    aten.pow.Tensor_Scalar: _pow_to_number,
    aten.pow.Scalar: _number_to_pow,
    aten.mean.default: _mean_of_all,
    aten.mean.dim: _mean,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.where.self: _where,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    **SIZE_FORMS,
}
