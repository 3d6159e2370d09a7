"""Operators on complex numbers that torch.onnx does not translate, in terms of their real and imaginary parts.

Fourier transforms come down to one operator, the transform of real numbers, which ``translations`` writes. Operators
that only move elements work on pairs of reals.
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
    nodes_in,
    rewritten,
    schema_of,
)
from exportkit.onnx_files.complex_arithmetic import ARITHMETIC, has_complex, joined, parts
from exportkit.rewrites.sized_functions import inverse_short_transform

aten = torch.ops.aten


def complex_decompositions(program: torch.export.ExportedProgram) -> dict[Any, Callable[..., Any]]:
    """Returns how the operators of a program that has complex numbers are decomposed; nothing for any other program."""
    nodes = [node for node in nodes_in(program.graph_module) if node.op == "call_function"]
    if not any(has_complex([node.meta.get("val"), node.args]) for node in nodes):
        return {}
    # Transforms of any kind, as torch composes them of those with a name like _fft_r2c.
    composed: set[Any] = {node.target for node in nodes if str(node.target).startswith("aten.fft_")}
    table = torch.export.default_decompositions() if composed else {}
    return {**{target: table[target] for target in composed}, **_DECOMPOSITIONS}


# Making and writing complex tensors.


def _filled(make: Callable[..., Any]) -> Callable[..., Any]:
    def form(size: Sequence[int], *value: Any, dtype: torch.dtype | None = None, **options: Any) -> Any:
        if dtype is None or not dtype.is_complex:
            return NotImplemented
        real, imaginary = parts(value[0]) if value else (None, None)
        options.pop("pin_memory", None)
        first = make(size, *([real] if value else []), dtype=dtype.to_real(), **options)
        zeros = torch.full(size, imaginary or 0.0, dtype=dtype.to_real())
        return joined(first, zeros)

    return form


def _like(make: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that makes a tensor with the size or the dtype of a given tensor."""

    def form(other: torch.Tensor, *value: Any, dtype: torch.dtype | None = None, **_options: Any) -> Any:
        dtype = dtype or other.dtype
        return make(other, *value, dtype=dtype) if dtype.is_complex else NotImplemented

    return form


def _apart(apply: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that does the same to the real and to the imaginary parts of its operands.

    Numbers, and tensors of integers, which are places, are the same for both. Other real tensors are real
    parts.
    """

    def operands(value: Any) -> tuple[Any, Any]:
        real, imaginary = parts(value)
        if imaginary is not None:
            return real, imaginary
        is_operand = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value, torch.zeros_like(value) if is_operand else value

    def form(value: torch.Tensor, *options: Any, **named: Any) -> Any:
        if not value.is_complex():
            return NotImplemented
        both = zip(*map(operands, (value, *options)), strict=True)
        return joined(*(apply(*each, **named) for each in both))

    return form


def _padded(pad: Any) -> Callable[..., Any]:
    def form(image: torch.Tensor, widths: Sequence[Any], *given: Any, **named: Any) -> Any:
        real, imaginary = parts(image)
        if imaginary is None:
            return NotImplemented
        options, fill = [*given], named.pop("value", None)
        if options and not isinstance(options[-1], str):  # otherwise it is the mode
            fill = options.pop()
        fills = [{} if fill is None else {"value": part or 0.0} for part in parts(fill)]
        padded = [pad(x, widths, *options, **named, **value) for x, value in zip((real, imaginary), fills, strict=True)]
        return joined(*padded)

    return form


def _same(value: torch.Tensor) -> Any:
    return value.clone() if value.is_complex() else NotImplemented


def _conjugate(value: torch.Tensor) -> Any:
    real, imaginary = parts(value)
    return NotImplemented if imaginary is None else joined(real, -imaginary)


def _copy(into: torch.Tensor, source: torch.Tensor, _non_blocking: bool = False) -> Any:
    if not into.is_complex():
        return NotImplemented
    real, imaginary = parts(source)
    real = real.to(into.dtype.to_real())
    imaginary = torch.zeros_like(real) if imaginary is None else imaginary
    return joined(real.expand(into.shape), imaginary.expand(into.shape))


# Fourier transforms, in terms of those of real numbers.


def _transform(value: torch.Tensor, dim: Sequence[int], normalization: int, forward: bool) -> torch.Tensor:
    a, b = (FFT_R2C(part, dim, normalization, False) for part in parts(value))
    (ar, ai), (br, bi) = parts(a), parts(b)
    return joined(ar - bi, ai + br) if forward else joined(ar + bi, br - ai)


def _transform_to_real(value: torch.Tensor, dim: Sequence[int], normalization: int, size: int) -> Any:
    *others, last = dim
    if others:
        value = _transform(value, others, normalization, False)
    real, imaginary = parts(value)
    rest = (size - 1) // 2  # of the frequencies that are not given, since they are the conjugates of others
    real = torch.cat([real, real.narrow(last, 1, rest).flip(last)], last)
    imaginary = torch.cat([imaginary, -imaginary.narrow(last, 1, rest).flip(last)], last)
    a, b = (FFT_R2C(part, [last], normalization, False) for part in (real, imaginary))
    return parts(a)[0] + parts(b)[1]


def _frames(spectrum: torch.Tensor, n_fft: int, normalized: bool) -> torch.Tensor:
    found: torch.Tensor = _transform_to_real(spectrum, [2], 1 if normalized else 2, n_fft)
    return found


_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    **ARITHMETIC,
    aten.zeros.default: _filled(torch.zeros),
    aten.ones.default: _filled(torch.ones),
    aten.full.default: _filled(torch.full),
    aten.zeros_like.default: _like(lambda other, dtype: torch.zeros(other.shape, dtype=dtype)),
    aten.ones_like.default: _like(lambda other, dtype: torch.ones(other.shape, dtype=dtype)),
    aten.full_like.default: _like(lambda other, value, dtype: torch.full(other.shape, value, dtype=dtype)),
    aten.new_zeros.default: _like(lambda _, size, dtype: torch.zeros(size, dtype=dtype)),
    aten.new_ones.default: _like(lambda _, size, dtype: torch.ones(size, dtype=dtype)),
    aten.new_full.default: _like(lambda _, size, value, dtype: torch.full(size, value, dtype=dtype)),
    CONJUGATE.default: _conjugate,
    aten.constant_pad_nd.default: _padded(aten.constant_pad_nd.default),
    aten.pad.default: _padded(aten.pad.default),
    **{
        target: _apart(target)
        for target in (
            aten.cumsum.default,
            aten.gather.default,
            aten.index_add.default,
            aten.index_copy.default,
            aten.index_put.default,
            aten.masked_scatter.default,
            aten.mean.default,
            aten.mean.dim,
            aten.scatter.src,
            aten.scatter_add.default,
            aten.select_scatter.default,
            aten.slice_scatter.default,
            aten.tril.default,
            aten.triu.default,
        )
    },
    aten.copy.default: _copy,
    aten.alias.default: _same,
    aten.detach.default: _same,
    FFT_C2C.default: _transform,
    FFT_C2R.default: _transform_to_real,
    aten.istft.default: functools.partial(inverse_short_transform, _frames),
}


# Complex tensors as pairs of reals, where operators pick, repeat or rearrange their elements


# torch.onnx stores a complex tensor as a real one with a last axis of 2. It translates arithmetic on these, but
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
    return rewritten(program, _moves_complex, _move_pairs)


def _moves_complex(node: torch.fx.Node) -> bool:
    return node.target in _MOVES and has_complex(node.all_input_nodes[:1])


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
        again.meta = {name: value for name, value in result.meta.items() if name != "unbacked_bindings"}
        result.replace_all_uses_with(again, delete_user_cb=functools.partial(operator.is_not, again))
    for result in {node, *members}:
        result.meta["val"] = _pairs_of(result.meta["val"])


def _for_pairs(name: str, value: Any, node: torch.fx.Node) -> Any:
    if isinstance(value, torch.fx.Node) and has_complex(value):
        pairs = node.graph.call_function(aten.view_as_real.default, (value,))
        pairs.meta = {**node.meta, "val": _pairs_of(value.meta["val"])}
        return pairs
    return _FOR_PAIRS[name](value) if name in _FOR_PAIRS else value


def _pairs_of(value: Any) -> Any:
    return (
        torch.view_as_real(value) if isinstance(value, torch.Tensor) else [torch.view_as_real(item) for item in value]
    )
