"""Arithmetic on sizes in ONNX, as Python computes it: ``-(-n // 2)``, ``round(n / 2)``, ``1 / n``, ``n ** 0.5``.

Python's floats have double precision. torch.onnx computes with single precision, in which ``int(100 * 0.29)`` is 29
instead of 28, and rounds quotients toward zero. Here numbers are computed in double precision as long as they stay
numbers; operators on tensors in double precision get them like that, others in single precision, as they always do.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable
from typing import Any

import onnx_ir
import torch
from onnxscript.function_libs.torch_lib.ops import core

from exportkit._torch_compat.graph import ITEM
from exportkit._torch_compat.symbolic_shapes import symbolic_square_root
from exportkit.onnx_files.constants import constant, ints, op

aten = torch.ops.aten

_DOUBLE, _SINGLE, _INT = onnx_ir.DataType.DOUBLE, onnx_ir.DataType.FLOAT, onnx_ir.DataType.INT64
# Where a number in single precision keeps the same one in double precision.
_EXACT = "exportkit.exact"
# Where a tensor keeps the constant that it was made of.
_CONSTANT = "exportkit.constant"


def _is_float(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, onnx_ir.Value) and value.dtype == _SINGLE)


def _exact(value: Any) -> Any:
    """The number in double precision."""
    if isinstance(value, bool | int | float):
        return constant(float(value), _DOUBLE)
    return value.meta.get(_EXACT) or op.Cast(value, to=_DOUBLE)


def _float(exact: Any) -> Any:
    """A number in single precision that remembers the exact one."""
    value = op.Cast(exact, to=_SINGLE)
    value.meta[_EXACT] = exact
    return value


def _binary(write: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The form of an operator on two numbers: of integers if both are."""

    def form(x: Any, y: Any) -> Any:
        if _is_float(x) or _is_float(y):
            return _float(write(_exact(x), _exact(y)))
        return write(x, y)

    return form


def _comparison(write: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The form of a comparison, in which numbers in single precision are compared with all digits of the others."""

    def form(x: Any, y: Any) -> Any:
        convert = _exact if _is_float(x) or _is_float(y) else _whole
        return write(convert(x), convert(y))

    return form


def _unary(write: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def form(x: Any) -> Any:
        return _float(write(_exact(x))) if _is_float(x) else write(x)

    return form


def _to_int(write: Callable[[Any], Any]) -> Callable[..., Any]:
    def form(x: Any, _digits: Any = None) -> Any:
        return op.Cast(write(_exact(x)), to=_INT) if _is_float(x) else op.Identity(x)

    return form


def _bitwise(write: Callable[[Any, Any], Any], of_booleans: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The form of an operator on the bits of two numbers, as in ``(n + 7) & ~7``, or on two booleans."""

    def form(x: Any, y: Any) -> Any:
        are_booleans = any(isinstance(value, bool) or getattr(value, "dtype", _INT) != _INT for value in (x, y))
        return (of_booleans if are_booleans else write)(_whole(x), _whole(y))

    return form


def _floordiv(x: Any, y: Any) -> Any:
    if _is_float(x) or _is_float(y):
        return _float(op.Floor(op.Div(_exact(x), _exact(y))))
    return op.Div(op.Sub(x, op.Mod(x, y)), y)  # Mod has the sign of the divisor, as in Python


def exact_like(value: Any, dtype: Any) -> Any:
    """Returns a number in double precision for a tensor of that dtype, if it is one with that many digits.

    Args:
        value: A number or value of the graph.
        dtype: The dtype of the tensor.
    """
    if isinstance(value, float):  # of which torch.onnx keeps the digits of single precision
        return constant(value, _DOUBLE) if dtype == _DOUBLE else value
    return value.meta[_EXACT] if dtype == _DOUBLE and _EXACT in getattr(value, "meta", {}) else value


def _item(x: Any) -> Any:
    """The number in a tensor."""
    if x.dtype.is_floating_point():
        return _float(op.Cast(op.Reshape(x, ints()), to=_DOUBLE))
    return core.aten__local_scalar_dense(x)


def _scalar_tensor(value: Any, dtype: int = _SINGLE, **_options: Any) -> Any:
    kind = _SINGLE if dtype in (-1, None) else onnx_ir.DataType(dtype)
    tensor = core.aten_scalar_tensor(exact_like(value, kind), kind)
    if isinstance(value, bool | int | float):
        tensor.meta[_CONSTANT] = value
    return tensor


def constant_in(value: Any) -> float | None:
    """Returns the Python number that a value of the graph was made of, or that it is; None for any other value."""
    return value if isinstance(value, bool | int | float) else getattr(value, "meta", {}).get(_CONSTANT)


def _full(size: Any, value: Any, dtype: int = -1, **_options: Any) -> Any:
    return core.aten_full(size, exact_like(value, dtype), dtype)


def _full_like(x: Any, value: Any, dtype: int = -1, **_options: Any) -> Any:
    return core.aten_full_like(x, exact_like(value, x.dtype if dtype in (-1, None) else dtype), dtype)


def _arange_to(end: Any, dtype: int | None = None, **options: Any) -> Any:
    return _arange(0, end, 1, dtype, **options)


def _arange_between(start: Any, end: Any, dtype: int | None = None, **options: Any) -> Any:
    return _arange(start, end, 1, dtype, **options)


def _arange(start: Any, end: Any, step: Any = 1, dtype: int | None = None, **_options: Any) -> Any:
    """Counts the elements in double precision, as torch does: a rounded step may make one more."""
    floats = any(map(_is_float, (start, end, step)))
    kind = onnx_ir.DataType(dtype) if dtype not in (-1, None) else _SINGLE if floats else _INT
    if not floats:
        return op.Cast(op.Range(*(_whole(value) for value in (start, end, step))), to=kind)
    first, by = _exact(start), _exact(step)
    count = op.Cast(op.Ceil(op.Div(op.Sub(_exact(end), first), by)), to=_INT)
    if not kind.is_floating_point():
        first, by = (op.Cast(op.Cast(value, to=_INT), to=_DOUBLE) for value in (first, by))
    places = op.Cast(op.Range(_whole(0), count, _whole(1)), to=_DOUBLE)
    return op.Cast(op.Add(first, op.Mul(places, by)), to=kind)


def _whole(value: Any) -> Any:
    return op.Constant(value_int=value) if isinstance(value, int) else value


SIZE_TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    operator.add: _binary(op.Add),
    operator.sub: _binary(op.Sub),
    operator.mul: _binary(op.Mul),
    operator.pow: _binary(op.Pow),
    operator.neg: _unary(op.Neg),
    operator.eq: _comparison(op.Equal),
    operator.ne: _comparison(lambda x, y: op.Not(op.Equal(x, y))),
    operator.lt: _comparison(op.Less),
    operator.le: _comparison(op.LessOrEqual),
    operator.gt: _comparison(op.Greater),
    operator.ge: _comparison(op.GreaterOrEqual),
    operator.truediv: lambda x, y: _float(op.Div(_exact(x), _exact(y))),
    operator.floordiv: _floordiv,
    operator.and_: _bitwise(op.BitwiseAnd, op.And),
    operator.or_: _bitwise(op.BitwiseOr, op.Or),
    operator.lshift: lambda x, y: op.Mul(x, op.Pow(_whole(2), y)),
    operator.rshift: lambda x, y: _floordiv(x, op.Pow(_whole(2), y)),
    torch.sym_float: lambda x: _float(_exact(x)),
    symbolic_square_root(): lambda x: _float(op.Sqrt(_exact(x))),
    math.floor: _to_int(op.Floor),
    math.ceil: _to_int(op.Ceil),
    builtins.round: _to_int(op.Round),
    math.trunc: _to_int(lambda x: op.Cast(x, to=_INT)),
    ITEM: _item,
    aten.scalar_tensor.default: _scalar_tensor,
    aten.full.default: _full,
    aten.full_like.default: _full_like,
    aten.arange.default: _arange_to,
    aten.arange.start: _arange_between,
    aten.arange.start_step: _arange,
}
