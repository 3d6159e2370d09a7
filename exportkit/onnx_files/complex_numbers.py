"""Operators on complex numbers that torch.onnx does not translate, in terms of their real and imaginary parts.

Fourier transforms come down to one operator, the transform of real numbers, which ``translations`` writes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from exportkit._torch_compat.graph import (
    CONJUGATE,
    FFT_C2C,
    FFT_C2R,
    FFT_R2C,
    arguments_of,
    copied_module,
    nodes_in,
    schema_of,
    with_graph_module,
)
from exportkit.rewrites.fourier import inverse_short_transform

aten = torch.ops.aten


def complex_decompositions(program: torch.export.ExportedProgram) -> dict[Any, Callable[..., Any]]:
    """Returns how the operators of a program that has complex numbers are decomposed; nothing for any other program."""
    nodes = [node for node in nodes_in(program.graph_module) if node.op == "call_function"]
    if not any(_has_complex([node.meta.get("val"), node.args]) for node in nodes):
        return {}
    # Transforms of any kind, as torch composes them of those with a name like _fft_r2c.
    composed: set[Any] = {node.target for node in nodes if str(node.target).startswith("aten.fft_")}
    table = torch.export.default_decompositions() if composed else {}
    return {**{target: table[target] for target in composed}, **_DECOMPOSITIONS}


def _has_complex(value: Any) -> bool:
    if isinstance(value, torch.fx.Node):
        value = value.meta.get("val")
    if isinstance(value, list | tuple):
        return any(map(_has_complex, value))
    return isinstance(value, complex) or (isinstance(value, torch.Tensor) and value.is_complex())


def _parts(value: Any) -> tuple[Any, Any]:
    """The real and the imaginary part; the latter is None for a real number."""
    if isinstance(value, complex):
        return value.real, value.imag
    if isinstance(value, torch.Tensor) and value.is_complex():
        real, imaginary = torch.view_as_real(value.resolve_conj()).unbind(-1)
        return real, imaginary
    return value, None


def _joined(real: torch.Tensor, imaginary: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(torch.stack(torch.broadcast_tensors(real, imaginary), -1))


# Arithmetic.


def _product(one: Any, other: Any, times: Callable[[Any, Any], Any] = torch.mul) -> Any:
    """A product that is linear in both, such as one of matrices."""
    if not _has_complex([one, other]):
        return NotImplemented
    (a, b), (c, d) = _parts(one), _parts(other)
    if b is None or d is None:
        return _joined(times(a, c), times(a, d) if b is None else times(b, c))
    return _joined(times(a, c) - times(b, d), times(a, d) + times(b, c))


def _product_of(times: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda one, other: _product(one, other, times)


def _einsum(equation: str, tensors: Sequence[torch.Tensor], **_options: Any) -> Any:
    if len(tensors) < 2 or not _has_complex([*tensors]):
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
    if not _has_complex([one, other, alpha]):
        return NotImplemented
    if alpha != 1 or sign != 1:
        other = other * (alpha * sign)
    (a, b), (c, d) = _parts(one), _parts(other)
    zero = torch.zeros((), dtype=(b if isinstance(b, torch.Tensor) else c if b is None else a).dtype)
    return _joined(a + c, (zero if b is None else b) + (zero if d is None else d))


def _quotient(one: Any, other: Any) -> Any:
    if not _has_complex([one, other]):
        return NotImplemented
    (a, b), (c, d) = _parts(one), _parts(other)
    if d is None:
        return _joined(a / c, b / c)
    larger = torch.maximum(c.abs(), d.abs()) if isinstance(c, torch.Tensor) else max(abs(c), abs(d))
    a, c, d = a / larger, c / larger, d / larger  # the squares of other numbers may overflow
    size = c * c + d * d
    if b is None:
        return _joined(a * c / size, a * -d / size)
    b = b / larger
    return _joined((a * c + b * d) / size, (b * c - a * d) / size)


def _exp(value: torch.Tensor) -> Any:
    real, imaginary = _parts(value)
    if imaginary is None:
        return NotImplemented
    size = real.exp()
    return _joined(size * imaginary.cos(), size * imaginary.sin())


def _sqrt(value: torch.Tensor) -> Any:
    real, imaginary = _parts(value)
    if imaginary is None:
        return NotImplemented
    root = ((value.abs() + real.abs()) / 2).sqrt()
    other = torch.where(root == 0, imaginary.abs(), imaginary.abs() / (root * 2))
    turned = torch.where(real < 0, other, root), torch.where(real < 0, root, other)
    return _joined(turned[0], torch.where(imaginary.signbit(), -turned[1], turned[1]))


def _angle(value: torch.Tensor) -> Any:
    real, imaginary = _parts(value)
    return NotImplemented if imaginary is None else torch.atan2(imaginary, real)


def _isnan(value: torch.Tensor) -> Any:
    real, imaginary = _parts(value)
    return NotImplemented if imaginary is None else real.isnan() | imaginary.isnan()


def _log(value: torch.Tensor) -> Any:
    return _joined(value.abs().log(), _angle(value)) if value.is_complex() else NotImplemented


def _pow(value: torch.Tensor, exponent: Any) -> Any:
    is_whole = isinstance(exponent, int | float) and exponent >= 1 and exponent == exponent // 1
    if not value.is_complex() or not is_whole:
        return NotImplemented
    result = value
    for _ in range(int(exponent) - 1):
        result = _product(result, value)
    return result


def _where(condition: torch.Tensor, one: Any, other: Any) -> Any:
    if not _has_complex([one, other]):
        return NotImplemented
    (a, b), (c, d) = _parts(one), _parts(other)
    return _joined(
        torch.where(condition, a, c), torch.where(condition, 0.0 if b is None else b, 0.0 if d is None else d)
    )


# Making and writing complex tensors.


def _filled(make: Callable[..., Any]) -> Callable[..., Any]:
    def form(size: Sequence[int], *value: Any, dtype: torch.dtype | None = None, **options: Any) -> Any:
        if dtype is None or not dtype.is_complex:
            return NotImplemented
        real, imaginary = _parts(value[0]) if value else (None, None)
        options.pop("pin_memory", None)
        first = make(size, *([real] if value else []), dtype=dtype.to_real(), **options)
        zeros = torch.full(size, imaginary or 0.0, dtype=dtype.to_real())
        return _joined(first, zeros)

    return form


def _like(make: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that makes a tensor with the size or the dtype of a given tensor."""

    def form(other: torch.Tensor, *value: Any, dtype: torch.dtype | None = None, **_options: Any) -> Any:
        dtype = dtype or other.dtype
        return make(other, *value, dtype=dtype) if dtype.is_complex else NotImplemented

    return form


def _apart(apply: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that does the same to the real and to the imaginary part."""

    def form(value: torch.Tensor, *options: Any, **named: Any) -> Any:
        real, imaginary = _parts(value)
        return (
            NotImplemented if imaginary is None else _joined(*(apply(x, *options, **named) for x in (real, imaginary)))
        )

    return form


def _same(value: torch.Tensor) -> Any:
    return value.clone() if value.is_complex() else NotImplemented


def _conjugate(value: torch.Tensor) -> Any:
    real, imaginary = _parts(value)
    return NotImplemented if imaginary is None else _joined(real, -imaginary)


def _equal(one: Any, other: Any) -> Any:
    if not _has_complex([one, other]):
        return NotImplemented
    (a, b), (c, d) = _parts(one), _parts(other)
    return (a == c) & ((0.0 if b is None else b) == (0.0 if d is None else d))


def _scattered(scatter: Any) -> Callable[..., Any]:
    """An operator that inserts a tensor into another along an axis that is counted from the front."""

    def form(into: torch.Tensor, source: torch.Tensor, *places: Any, **named: Any) -> Any:
        if not into.is_complex():
            return NotImplemented
        parts = zip(_parts(into), _parts(source), strict=True)
        return _joined(*(scatter(a, torch.zeros_like(a) if b is None else b, *places, **named) for a, b in parts))

    return form


def _copy(into: torch.Tensor, source: torch.Tensor, _non_blocking: bool = False) -> Any:
    if not into.is_complex():
        return NotImplemented
    real, imaginary = _parts(source)
    real = real.to(into.dtype.to_real())
    imaginary = torch.zeros_like(real) if imaginary is None else imaginary
    return _joined(real.expand(into.shape), imaginary.expand(into.shape))


# Fourier transforms, in terms of those of real numbers.


def _transform(value: torch.Tensor, dim: Sequence[int], normalization: int, forward: bool) -> torch.Tensor:
    a, b = (FFT_R2C(part, dim, normalization, False) for part in _parts(value))
    (ar, ai), (br, bi) = _parts(a), _parts(b)
    return _joined(ar - bi, ai + br) if forward else _joined(ar + bi, br - ai)


def _transform_to_real(value: torch.Tensor, dim: Sequence[int], normalization: int, size: int) -> Any:
    *others, last = dim
    if others:
        value = _transform(value, others, normalization, False)
    real, imaginary = _parts(value)
    rest = (size - 1) // 2  # of the frequencies that are not given, since they are the conjugates of others
    real = torch.cat([real, real.narrow(last, 1, rest).flip(last)], last)
    imaginary = torch.cat([imaginary, -imaginary.narrow(last, 1, rest).flip(last)], last)
    a, b = (FFT_R2C(part, [last], normalization, False) for part in (real, imaginary))
    return _parts(a)[0] + _parts(b)[1]


def _frames(spectrum: torch.Tensor, n_fft: int, normalized: bool) -> torch.Tensor:
    found: torch.Tensor = _transform_to_real(spectrum, [2], 1 if normalized else 2, n_fft)
    return found


_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
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
    aten.angle.default: _angle,
    aten.isnan.default: _isnan,
    aten.sqrt.default: _sqrt,
    aten.gather.default: _apart(torch.gather),
    aten.pow.Tensor_Scalar: _pow,
    aten.where.self: _where,
    aten.where.ScalarOther: _where,
    aten.where.ScalarSelf: _where,
    aten.zeros.default: _filled(torch.zeros),
    aten.ones.default: _filled(torch.ones),
    aten.full.default: _filled(torch.full),
    aten.zeros_like.default: _like(lambda other, dtype: torch.zeros(other.shape, dtype=dtype)),
    aten.ones_like.default: _like(lambda other, dtype: torch.ones(other.shape, dtype=dtype)),
    aten.full_like.default: _like(lambda other, value, dtype: torch.full(other.shape, value, dtype=dtype)),
    aten.new_zeros.default: _like(lambda _, size, dtype: torch.zeros(size, dtype=dtype)),
    aten.new_ones.default: _like(lambda _, size, dtype: torch.ones(size, dtype=dtype)),
    aten.new_full.default: _like(lambda _, size, value, dtype: torch.full(size, value, dtype=dtype)),
    aten.constant_pad_nd.default: _apart(aten.constant_pad_nd.default),
    aten.pad.default: _apart(aten.pad.default),
    aten.cumsum.default: _apart(aten.cumsum.default),
    CONJUGATE.default: _conjugate,
    aten.masked_fill.Scalar: lambda value, mask, other: _where(mask, other, value),
    aten.masked_fill.Tensor: lambda value, mask, other: _where(mask, other, value),
    aten.eq.Tensor: _equal,
    aten.eq.Scalar: _equal,
    aten.slice_scatter.default: _scattered(torch.slice_scatter),
    aten.select_scatter.default: _scattered(torch.select_scatter),
    aten.copy.default: _copy,
    aten.alias.default: _same,
    aten.detach.default: _same,
    FFT_C2C.default: _transform,
    FFT_C2R.default: _transform_to_real,
    aten.istft.default: functools.partial(inverse_short_transform, _frames),
}


# Pairs. torch.onnx stores a complex tensor as a real one with a last axis of 2. It translates arithmetic on these, but
# only some of the operators that pick, repeat or rearrange; the others work on the pairs here.

# Operators that treat all numbers alike; arguments of the names below say what they do with the axes.
_MOVES = {
    aten.broadcast_to.default, aten.chunk.default, aten.expand.default, aten.expand_as.default, aten.index.Tensor,
    aten.index_select.default, aten.repeat.default, aten.select.int, aten.split.Tensor,
    aten.split_with_sizes.default, aten.tile.default, aten.unbind.int, aten.unsqueeze.default,
}  # fmt: skip

# How to turn an argument for a complex tensor into one for its pairs, whose axis comes last and stays as it is.
_FOR_PAIRS: dict[str, Callable[[Any], Any]] = {
    "dim": lambda dim: dim if dim >= 0 else dim - 1,
    "dims": lambda repeats: [*repeats, 1],
    "repeats": lambda repeats: [*repeats, 1],
    "size": lambda size: [*size, 2],
}


def with_complex_as_pairs(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program with complex numbers moved as pairs of reals.

    Args:
        program: As torch.export.export returns it. A view stays a view of the same tensor: it may be written to.
    """
    if not any(map(_moves_complex, nodes_in(program.graph_module))):
        return program
    module = copied_module(program)
    for node in filter(_moves_complex, nodes_in(module)):
        _move_pairs(node)
    return with_graph_module(program, module)


def _moves_complex(node: torch.fx.Node) -> bool:
    return node.target in _MOVES and _has_complex(node.all_input_nodes[:1])


def _move_pairs(node: torch.fx.Node) -> None:
    """Lets the operator take and return pairs, which are made before it and made complex again after it."""
    named = {argument.name for argument in schema_of(node.target).arguments if argument.kwarg_only}
    with node.graph.inserting_before(node):
        given = {name: _for_pairs(name, value, node) for name, value in arguments_of(node).items()}
    node.args = tuple(value for name, value in given.items() if name not in named)
    node.kwargs = {name: value for name, value in given.items() if name in named}
    members = [user for user in node.users if user.target is operator.getitem]
    for result in members or [node]:
        with node.graph.inserting_after(result):
            again = node.graph.call_function(aten.view_as_complex.default, (result,))
        again.meta = dict(result.meta)
        result.replace_all_uses_with(again, delete_user_cb=functools.partial(operator.is_not, again))
    for result in {node, *members}:
        result.meta["val"] = _pairs_of(result.meta["val"])


def _for_pairs(name: str, value: Any, node: torch.fx.Node) -> Any:
    if isinstance(value, torch.fx.Node) and _has_complex(value):
        pairs = node.graph.call_function(aten.view_as_real.default, (value,))
        pairs.meta = {**node.meta, "val": _pairs_of(value.meta["val"])}
        return pairs
    return _FOR_PAIRS[name](value) if name in _FOR_PAIRS else value


def _pairs_of(value: Any) -> Any:
    return (
        torch.view_as_real(value) if isinstance(value, torch.Tensor) else [torch.view_as_real(item) for item in value]
    )
