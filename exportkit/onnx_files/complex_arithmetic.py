"""Arithmetic and functions of complex tensors, in terms of their real and imaginary parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten
_MOST_EXPONENT = 1024  # of a power that is written as products


def has_complex(value: Any) -> bool:
    """Returns whether a value, or the value of a node, is a complex number or tensor, or has one in it."""
    if isinstance(value, torch.fx.Node):
        value = value.meta.get("val")
    if isinstance(value, list | tuple):
        return any(map(has_complex, value))
    return isinstance(value, complex) or (isinstance(value, torch.Tensor) and value.is_complex())


def parts(value: Any) -> tuple[Any, Any]:
    """Returns the real and the imaginary part; the latter is None for a real number or tensor."""
    if isinstance(value, complex):
        return value.real, value.imag
    if isinstance(value, torch.Tensor) and value.is_complex():
        real, imaginary = torch.view_as_real(value.resolve_conj()).unbind(-1)
        return real, imaginary
    return value, None


def joined(real: torch.Tensor, imaginary: torch.Tensor) -> torch.Tensor:
    """Returns the complex tensor with these parts, which are broadcast."""
    dtype = torch.promote_types(real.dtype, imaginary.dtype)
    parts = torch.broadcast_tensors(real.to(dtype), imaginary.to(dtype))
    return torch.view_as_complex(torch.stack(parts, -1))


def _product(one: Any, other: Any, times: Callable[[Any, Any], Any] = torch.mul) -> Any:
    """A product that is linear in both, such as one of matrices."""
    if not has_complex([one, other]):
        return NotImplemented
    (a, b), (c, d) = parts(one), parts(other)
    if b is None or d is None:
        return joined(times(a, c), times(a, d) if b is None else times(b, c))
    return joined(times(a, c) - times(b, d), times(a, d) + times(b, c))


def _product_of(times: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda one, other: _product(one, other, times)


def _einsum(equation: str, tensors: Sequence[torch.Tensor], **_options: Any) -> Any:
    if len(tensors) < 2 or not has_complex([*tensors]):
        return NotImplemented
    if len(tensors) > 2:  # the first two, with the letters that the others or the result need
        terms, _, result = equation.replace(" ", "").partition("->")
        one, other, *rest = terms.split(",")
        if "." in equation or not result:
            return NotImplemented
        kept = "".join(letter for letter in dict.fromkeys(one + other) if letter in "".join([*rest, result]))
        first = _einsum(f"{one},{other}->{kept}", tensors[:2])
        if first is NotImplemented:
            first = torch.einsum(f"{one},{other}->{kept}", *tensors[:2])
        return torch.einsum(",".join([kept, *rest]) + f"->{result}", first, *tensors[2:])
    return _product(tensors[0], tensors[1], lambda x, y: torch.einsum(equation, x, y))


def _tensordot(one: torch.Tensor, other: torch.Tensor, dims: Sequence[int], other_dims: Sequence[int]) -> Any:
    return _product(one, other, lambda x, y: torch.tensordot(x, y, (dims, other_dims)))


def _linear(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    found = _product(values, weight, torch.nn.functional.linear)
    return found if bias is None or found is NotImplemented else found + bias


def _sum(one: Any, other: Any, *, alpha: Any = 1, sign: int = 1) -> Any:
    if not has_complex([one, other, alpha]):
        return NotImplemented
    if alpha != 1 or sign != 1:
        other = other * (alpha * sign)
    (a, b), (c, d) = parts(one), parts(other)
    real = a + c
    zero = torch.zeros((), dtype=real.dtype)
    return joined(real, (zero if b is None else b) + (zero if d is None else d))


def _quotient(one: Any, other: Any) -> Any:
    if not has_complex([one, other]):
        return NotImplemented
    (a, b), (c, d) = parts(one), parts(other)
    if d is None:
        return joined(a / c, b / c)
    larger = torch.maximum(c.abs(), d.abs()) if isinstance(c, torch.Tensor) else max(abs(c), abs(d))
    a, c, d = a / larger, c / larger, d / larger  # the squares of other numbers may overflow
    size = c * c + d * d
    if b is None:
        return joined(a * c / size, a * -d / size)
    b = b / larger
    return joined((a * c + b * d) / size, (b * c - a * d) / size)


def _exp(value: torch.Tensor) -> Any:
    real, imaginary = parts(value)
    if imaginary is None:
        return NotImplemented
    size = real.exp()
    return joined(size * imaginary.cos(), size * imaginary.sin())


def _sqrt(value: torch.Tensor) -> Any:
    real, imaginary = parts(value)
    if imaginary is None:
        return NotImplemented
    root = ((value.abs() + real.abs()) / 2).sqrt()
    other = torch.where(root == 0, imaginary.abs(), imaginary.abs() / (root * 2))
    turned = torch.where(real < 0, other, root), torch.where(real < 0, root, other)
    return joined(turned[0], torch.where(imaginary.signbit(), -turned[1], turned[1]))


def _absolute(value: torch.Tensor) -> Any:
    real, imaginary = parts(value)
    if imaginary is None:
        return NotImplemented
    larger = torch.maximum(real.abs(), imaginary.abs())
    scale = torch.where(larger == 0, torch.ones_like(larger), larger)  # the squares may overflow, or vanish
    return scale * ((real / scale).square() + (imaginary / scale).square()).sqrt()


def _angle(value: torch.Tensor) -> Any:
    real, imaginary = parts(value)
    return NotImplemented if imaginary is None else torch.atan2(imaginary, real)


def _isnan(value: torch.Tensor) -> Any:
    real, imaginary = parts(value)
    return NotImplemented if imaginary is None else real.isnan() | imaginary.isnan()


def _log(value: torch.Tensor) -> Any:
    return joined(value.abs().log(), _angle(value)) if value.is_complex() else NotImplemented


def _whole_power(value: torch.Tensor, exponent: int) -> torch.Tensor:
    """A power by squaring, as a logarithm would lose the last digits of large exponents."""
    if exponent < 2:
        return value if exponent else torch.ones_like(value)
    half = _whole_power(value, exponent // 2)
    return half * half * value if exponent % 2 else half * half


def _pow(value: Any, exponent: Any) -> Any:
    if not has_complex([value, exponent]):
        return NotImplemented
    if isinstance(exponent, int | float) and abs(exponent) <= _MOST_EXPONENT and exponent == exponent // 1:
        result = _whole_power(value, int(abs(exponent)))
        return result.reciprocal() if exponent < 0 else result
    base = value if isinstance(value, torch.Tensor) else torch.full((), value)
    found = (base.to(torch.result_type(value, exponent)).log() * exponent).exp()
    return torch.where(base == 0, torch.zeros_like(found), found) if has_complex(exponent) else found


def _by_waves(form: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[[torch.Tensor], Any]:
    """A function whose parts follow from the sine and cosine of one part, and the hyperbolic ones of the other.

    See https://dlmf.nist.gov/4.21 and https://dlmf.nist.gov/4.35.

    Args:
        form: Returns the real and the imaginary part of the function, given both parts of a number.
    """

    def function(value: torch.Tensor) -> Any:
        real, imaginary = parts(value)
        return NotImplemented if imaginary is None else joined(*form(real, imaginary))

    return function


def _tanh(value: torch.Tensor) -> Any:
    real, imaginary = parts(value)
    if imaginary is None:
        return NotImplemented
    size, cos, sin = real.tanh(), imaginary.cos(), imaginary.sin()  # sinh and cosh of other numbers may overflow
    return joined(size * cos, sin) / joined(cos, size * sin)


def _if_complex(form: Callable[..., Any]) -> Callable[..., Any]:
    """What is done to a complex tensor in terms of other operators on complex tensors."""

    def function(*values: Any, **options: Any) -> Any:
        return form(*values, **options) if has_complex(values) else NotImplemented

    return function


def _norm(value: torch.Tensor, *options: Any, **named: Any) -> Any:
    return aten.linalg_vector_norm(value.abs(), *options, **named)


def _log1p(value: torch.Tensor) -> torch.Tensor:
    real, imaginary = parts(value)
    near = torch.log1p(real * (real + 2) + imaginary * imaginary) / 2  # which cancels out close to -1
    logarithm, is_near = (value + 1).log(), real * real + imaginary * imaginary < 0.25
    return joined(torch.where(is_near, near, parts(logarithm)[0]), parts(logarithm)[1])


def _sigmoid(value: torch.Tensor) -> torch.Tensor:
    is_positive = parts(value)[0] > 0
    power = torch.where(is_positive, -value, value).exp()  # of a number that does not overflow
    return torch.where(is_positive, torch.ones_like(power), power) / (power + 1)


def _sign(value: torch.Tensor) -> torch.Tensor:
    size = value.abs()
    return value / torch.where(size == 0, torch.ones((), dtype=size.dtype), size)


def _variance(name: str) -> Callable[..., Any]:
    operator = getattr(aten.var, name)
    return _if_complex(lambda value, *options, **named: sum(operator(x, *options, **named) for x in parts(value)))


def _deviation(name: str) -> Callable[..., Any]:
    operator = getattr(aten.var, name)
    return _if_complex(lambda value, *options, **named: operator(value, *options, **named).sqrt())


def _where(condition: torch.Tensor, one: Any, other: Any) -> Any:
    if not has_complex([one, other]):
        return NotImplemented
    (a, b), (c, d) = parts(one), parts(other)
    return joined(
        torch.where(condition, a, c), torch.where(condition, 0.0 if b is None else b, 0.0 if d is None else d)
    )


def _equal(one: Any, other: Any) -> Any:
    if not has_complex([one, other]):
        return NotImplemented
    (a, b), (c, d) = parts(one), parts(other)
    return (a == c) & ((0.0 if b is None else b) == (0.0 if d is None else d))


ARITHMETIC: dict[Any, Callable[..., Any]] = {
    aten.mul.Tensor: _product,
    aten.mul.Scalar: _product,
    aten.mm.default: _product_of(torch.mm),
    aten.bmm.default: _product_of(torch.bmm),
    aten.matmul.default: _product_of(torch.matmul),
    aten.mv.default: _product_of(torch.mv),
    aten.dot.default: _product_of(torch.dot),
    aten.outer.default: _product_of(torch.outer),
    aten.tensordot.default: _tensordot,
    aten.linear.default: _linear,
    aten.einsum.default: _einsum,
    aten.add.Tensor: _sum,
    aten.sub.Tensor: functools.partial(_sum, sign=-1),
    aten.div.Tensor: _quotient,
    aten.exp.default: _exp,
    aten.log.default: _log,
    aten.abs.default: _absolute,
    aten.angle.default: _angle,
    aten.isnan.default: _isnan,
    aten.sqrt.default: _sqrt,
    aten.pow.Tensor_Scalar: _pow,
    aten.pow.Tensor_Tensor: _pow,
    aten.pow.Scalar: _pow,
    aten.square.default: lambda value: _pow(value, 2),
    aten.rsqrt.default: lambda value: _pow(value, -0.5),
    aten.log1p.default: _if_complex(_log1p),
    aten.sin.default: _by_waves(lambda a, b: (a.sin() * b.cosh(), a.cos() * b.sinh())),
    aten.cos.default: _by_waves(lambda a, b: (a.cos() * b.cosh(), -a.sin() * b.sinh())),
    aten.sinh.default: _by_waves(lambda a, b: (a.sinh() * b.cos(), a.cosh() * b.sin())),
    aten.cosh.default: _by_waves(lambda a, b: (a.cosh() * b.cos(), a.sinh() * b.sin())),
    aten.tanh.default: _tanh,
    aten.sigmoid.default: _if_complex(_sigmoid),
    aten.silu.default: _if_complex(lambda value: value * value.sigmoid()),
    aten.sgn.default: _if_complex(_sign),
    aten.addcmul.default: _if_complex(lambda given, one, other, *, value=1: given + one * other * value),
    aten.addcdiv.default: _if_complex(lambda given, one, other, *, value=1: given + one / other * value),
    aten.lerp.Scalar: _if_complex(lambda one, other, weight: one + weight * (other - one)),
    aten.lerp.Tensor: _if_complex(lambda one, other, weight: one + weight * (other - one)),
    aten.linalg_vector_norm.default: _if_complex(_norm),
    aten.vdot.default: _if_complex(lambda one, other: (one.conj() * other).sum()),
    **{getattr(aten.var, name): _variance(name) for name in ("default", "dim", "correction")},
    **{getattr(aten.std, name): _deviation(name) for name in ("default", "dim", "correction")},
    aten.isfinite.default: _if_complex(lambda value: value.real.isfinite() & value.imag.isfinite()),
    aten.where.self: _where,
    aten.where.ScalarOther: _where,
    aten.where.ScalarSelf: _where,
    aten.masked_fill.Scalar: lambda value, mask, other: _where(mask, other, value),
    aten.masked_fill.Tensor: lambda value, mask, other: _where(mask, other, value),
    aten.eq.Tensor: _equal,
    aten.eq.Scalar: _equal,
    aten.ne.Tensor: _if_complex(lambda one, other: ~_equal(one, other)),
    aten.ne.Scalar: _if_complex(lambda one, other: ~_equal(one, other)),
}
