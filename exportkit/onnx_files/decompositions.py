"""Operators that torch.onnx cannot translate, in terms of others that it can, at any size.

Each step returns the program itself if it has nothing to replace; otherwise a new one that shares its weights and
computes the same numbers.
"""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import torch

from exportkit._torch_compat.graph import (
    BATCH_NORM,
    BATCH_NORMS,
    DISTANCES,
    IS_ALL_TRUE,
    IS_ANY_TRUE,
    arguments_of,
    draws_numbers,
    nodes_in,
    not_in_place,
    written_tensors,
)
from exportkit._torch_compat.random_numbers import DROPOUT, RANDOM_OPERATORS
from exportkit.onnx_files.complex_numbers import complex_decompositions, with_complex_as_pairs
from exportkit.onnx_files.decomposition import (
    SMALL_INTEGERS,
    Decomposition,
    applies_to,
    computed_in,
    either,
    not_of,
)
from exportkit.onnx_files.exact import (
    ADDITIONS,
    EXACT,
    is_half,
    with_half_outputs,
    with_zeros_for_masked_rows,
)
from exportkit.onnx_files.ordering import ORDERING, POOLS
from exportkit.onnx_files.preparation import prepared
from exportkit.onnx_files.refusals import with_checked_indices
from exportkit.onnx_files.special_functions import SPECIAL_FUNCTIONS
from exportkit.rewrites.sized_operators import conv2d_in_groups, slices_of

aten = torch.ops.aten


def translatable(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program without run-time assertions and without operators that torch.onnx cannot translate."""
    for step in (
        prepared,
        with_complex_as_pairs,
        with_zeros_for_masked_rows,
        with_checked_indices,
        decomposed,
        with_half_outputs,
    ):
        program = step(program)
    return program


def decomposed(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program without operators that torch.onnx has no translation for."""
    nodes = nodes_in(program.graph_module)
    targets = {
        target
        for node in nodes
        for target in (node.target, not_in_place(node.target))
        if target in _DECOMPOSITIONS and applies_to(_DECOMPOSITIONS[target], node)
    }
    if any(node.target is aten.diagonal.default for node in nodes) and written_tensors(program.graph):
        targets.add(aten.diagonal_scatter.default)  # what a write to a diagonal becomes
    targets |= {DROPOUT[node.target] for node in nodes if node.target in DROPOUT and draws_numbers(node)}
    if any(node.target in BATCH_NORMS and arguments_of(node)["training"] for node in nodes):
        targets.add(BATCH_NORM)  # what they become
    tables = (
        ADDITIONS if any(map(is_half, nodes)) else {},
        complex_decompositions(program),
        {target: _DECOMPOSITIONS[target] for target in targets},
    )
    forms: dict[Any, list[Callable[..., Any]]] = {}
    for table in tables:
        for target, function in table.items():
            forms.setdefault(target, []).append(function)
    found = {target: either(*functions) for target, functions in forms.items()}
    return program.run_decompositions(found) if found else program


def _cdist(one: torch.Tensor, other: torch.Tensor, p: float = 2.0, _mode: int | None = None) -> torch.Tensor:
    distance = (one[..., :, None, :] - other[..., None, :, :]).abs()
    if math.isinf(p):
        return distance.amax(-1)
    if p == 0:
        return torch.where(distance.isnan(), distance, (distance != 0).to(one.dtype)).sum(-1)
    return distance.sum(-1) if p == 1 else distance.pow(p).sum(-1).pow(1 / p)


def _with_long_indices(operator: Callable[..., torch.Tensor]) -> Decomposition:
    """An operator that takes indices for several axes; torch.onnx passes on 32-bit ones, which onnxruntime refuses."""

    def indexed(values: torch.Tensor, indices: Sequence[torch.Tensor | None], *rest: Any) -> torch.Tensor:
        return operator(values, [_long(index) for index in indices], *rest)

    return Decomposition(indexed, lambda _, indices, *__: all(_long(index) is index for index in indices))


def _long(index: torch.Tensor | None) -> torch.Tensor | None:
    return index.long() if index is not None and index.dtype is torch.int32 else index


def _shifted(shift: Callable[..., torch.Tensor], is_other_name: bool = False) -> Callable[..., Any]:
    """A shift; of small integers torch.onnx makes signed ones, and onnxruntime shifts only some of them."""

    def shifted(values: torch.Tensor, by: Any) -> Any:
        dtype = torch.result_type(values, by)
        if dtype not in (torch.uint8, torch.int8, torch.int16):
            return shift(values, by) if is_other_name else NotImplemented
        return shift(values.to(torch.int32), by.to(torch.int32) if isinstance(by, torch.Tensor) else by).to(dtype)

    return shifted


def _diagonal_scatter(
    values: torch.Tensor, source: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    """A choice between two tensors; torch's own form writes to a copy, which a program may not."""
    matrices = values.movedim((dim1, dim2), (-2, -1))
    rows, columns = (torch.arange(size, device=values.device) for size in matrices.shape[-2:])
    last = source.shape[-1] - 1
    if offset >= 0:
        spread = source.index_select(-1, rows.clamp(max=last))[..., :, None]
    else:
        spread = source.index_select(-1, columns.clamp(max=last))[..., None, :]
    return torch.where(columns - rows[:, None] == offset, spread, matrices).movedim((-2, -1), (dim1, dim2))


def _pow(values: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Powers of two dtypes: torch.onnx would round the exponents of integers to integers."""
    dtype = torch.result_type(values, exponents)
    return torch.pow(values.to(dtype), exponents if dtype.is_floating_point else exponents.to(dtype))


def _is_plain_pow(values: torch.Tensor, exponents: torch.Tensor) -> bool:
    dtype = torch.result_type(values, exponents)
    return values.dtype is dtype and (dtype.is_floating_point or exponents.dtype is dtype)


def _rsub(values: torch.Tensor, number: Any, alpha: Any = 1) -> Any:
    return number + values.to(torch.result_type(values, number)) * -alpha


def _is_plain_rsub(values: torch.Tensor, number: Any, *_: Any) -> bool:
    """Whether a number follows from no size, and has the dtype of the values."""
    return isinstance(number, int | float) and torch.result_type(values, number) is values.dtype


def _roll(values: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> torch.Tensor:
    if not dims:
        return _roll(values.flatten(), shifts, [0]).view(values.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        length = values.shape[dim]
        start = (length - shift) % length
        values = torch.cat([values.narrow(dim, start, length - start), values.narrow(dim, 0, start)], dim)
    return values


def _split(values: torch.Tensor, size: Any, dim: int = 0) -> Any:
    """Slices where the size of the parts varies; torch.onnx's form is a list, which its optimiser cannot take."""
    return slices_of(values, size, dim) if isinstance(size, torch.SymInt) else NotImplemented


def _fftshift(values: torch.Tensor, dim: Sequence[int] | None = None) -> torch.Tensor:
    dims = range(values.ndim) if dim is None else dim
    return _roll(values, [values.shape[axis] // 2 for axis in dims], dims)


def _ifftshift(values: torch.Tensor, dim: Sequence[int] | None = None) -> torch.Tensor:
    dims = range(values.ndim) if dim is None else dim
    return _roll(values, [(values.shape[axis] + 1) // 2 for axis in dims], dims)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any = None,
    *rest: Any,
    scale: float | None = None,
    **more: Any,
) -> Any:
    """Attention without an axis for heads, as attention with one; and with a scale that has no root."""
    added = max(_RANK - query.ndim, 0)
    parts = [part[(None,) * added] for part in (query, key, value)]
    hidden = mask[(None,) * added] if mask is not None and mask.ndim == query.ndim else mask
    if scale is not None and scale <= 0:
        parts[0], scale = parts[0] * scale, 1.0
    attend: Any = torch.nn.functional.scaled_dot_product_attention
    found = attend(*parts, hidden, *rest, scale=scale, **more)
    return found[(0,) * added]


def _is_plain_attention(query: torch.Tensor, *_: Any, scale: float | None = None, **__: Any) -> bool:
    return query.ndim >= _RANK and (scale is None or scale > 0)


def _without_share(product: Callable[..., torch.Tensor]) -> Decomposition:
    """A product to which nothing of the first argument is added: torch.onnx adds its NaN and infinities."""

    def shared(_: Any, one: torch.Tensor, other: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:  # noqa: ARG001
        found = product(one, other)
        return found if alpha == 1 else found * alpha

    return Decomposition(shared, lambda *_, beta=1, **__: beta != 0)


def _in_32_bits(operator: Callable[..., torch.Tensor], *dtypes: torch.dtype) -> Decomposition:
    """An operator on integers of these dtypes: onnxruntime has it for larger ones, and products overflow alike."""

    def is_plain(values: torch.Tensor, *others: Any, **_: Any) -> bool:
        given = {other.dtype for other in (values, *others) if isinstance(other, torch.Tensor)}
        return len(given) > 1 or given.isdisjoint(dtypes)

    return Decomposition(computed_in(torch.int32, operator), is_plain)


def _place_in_32_bits(operator: Callable[..., torch.Tensor]) -> Decomposition:
    return Decomposition(lambda values, *options: operator(values.int(), *options), not_of(torch.int16))


def _of_bytes(operator: Any) -> Decomposition:
    """Whether any or all bytes are true, which torch returns as a byte."""

    def byte(values: torch.Tensor, *options: Any) -> torch.Tensor:
        found: torch.Tensor = operator(values.bool(), *options)
        return found.to(torch.uint8)

    return Decomposition(byte, not_of(torch.uint8))


def _einsum(equation: str, tensors: Sequence[torch.Tensor], **_options: Any) -> torch.Tensor:
    """``torch.einsum`` in the form that ONNX has: one dtype, and a letter for every axis."""
    kind = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    computed = torch.int32 if kind in SMALL_INTEGERS else kind
    found = torch.einsum(_with_letters(equation, tensors), *[tensor.to(computed) for tensor in tensors])
    return found.to(kind)


def _is_plain_einsum(equation: str, tensors: Sequence[torch.Tensor], **_options: Any) -> bool:
    kinds = {tensor.dtype for tensor in tensors}
    is_product = len(tensors) > 1  # a sum of one operand may have another dtype
    return not is_product or ("." not in equation and len(kinds) == 1 and kinds.isdisjoint(SMALL_INTEGERS))


def _with_letters(equation: str, tensors: Sequence[torch.Tensor]) -> str:
    """The equation with letters for the axes that an ellipsis stands for, of which an operand may have fewer.

    ONNX requires the same number of them in every operand and in the result.
    """
    equation = equation.replace(" ", "")
    if "." not in equation:
        return equation
    terms, arrow, result = equation.partition("->")
    operands = terms.split(",")
    counts = [tensor.ndim - len(term.replace(".", "")) for term, tensor in zip(operands, tensors, strict=True)]
    letters = "".join(letter for letter in string.ascii_letters if letter not in equation)[: max(counts)]
    if not arrow:
        named = terms.replace(",", "").replace(".", "")
        result = "..." + "".join(letter for letter in sorted({*named}) if named.count(letter) == 1)
    written = [
        term.replace("...", letters[len(letters) - count :]) for term, count in zip(operands, counts, strict=True)
    ]
    return ",".join(written) + "->" + result.replace("...", letters)


_RANK = 4  # batch, heads, tokens, size
_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    IS_ALL_TRUE: torch.all,
    IS_ANY_TRUE: torch.any,
    aten.bitwise_left_shift.Tensor: _shifted(torch.bitwise_left_shift),
    aten.bitwise_left_shift.Tensor_Scalar: _shifted(torch.bitwise_left_shift),
    aten.bitwise_right_shift.Tensor: _shifted(torch.bitwise_right_shift),
    aten.bitwise_right_shift.Tensor_Scalar: _shifted(torch.bitwise_right_shift),
    **{kind: _of_bytes(kind) for packet in (aten.any, aten.all) for kind in (packet.default, packet.dim, packet.dims)},
    aten.cdist.default: _cdist,
    DISTANCES.default: _cdist,
    aten.conv2d.default: Decomposition(
        conv2d_in_groups, lambda *given, groups=1: isinstance(given[6] if len(given) > 6 else groups, int)
    ),
    # other names, which torch.onnx does not know, or with which it does not convert operands to one dtype
    aten.__lshift__.Scalar: _shifted(torch.bitwise_left_shift, True),
    aten.__lshift__.Tensor: _shifted(torch.bitwise_left_shift, True),
    aten.__rshift__.Scalar: _shifted(torch.bitwise_right_shift, True),
    aten.__rshift__.Tensor: _shifted(torch.bitwise_right_shift, True),
    aten.addmm.default: _without_share(torch.mm),
    aten.addmv.default: _without_share(torch.mv),
    aten.baddbmm.default: _without_share(torch.bmm),
    aten.bmm.default: _in_32_bits(torch.bmm, *SMALL_INTEGERS),
    aten.matmul.default: _in_32_bits(torch.matmul, *SMALL_INTEGERS),
    aten.mm.default: _in_32_bits(torch.mm, *SMALL_INTEGERS),
    aten.amax.default: _in_32_bits(torch.amax, torch.int16),
    aten.amin.default: _in_32_bits(torch.amin, torch.int16),
    aten.argmax.default: _place_in_32_bits(torch.argmax),
    aten.argmin.default: _place_in_32_bits(torch.argmin),
    aten.maximum.default: _in_32_bits(torch.maximum, torch.int16),
    aten.minimum.default: _in_32_bits(torch.minimum, torch.int16),
    aten.diagonal_scatter.default: _diagonal_scatter,
    aten.divide.Tensor: torch.div,
    aten.einsum.default: Decomposition(_einsum, _is_plain_einsum),
    aten.greater.Tensor: torch.gt,
    aten.greater_equal.Tensor: torch.ge,
    aten.index.Tensor: _with_long_indices(aten.index.Tensor),
    aten.index_put.default: _with_long_indices(torch.index_put),
    aten.less.Tensor: torch.lt,
    aten.less_equal.Tensor: torch.le,
    aten.multiply.Tensor: torch.mul,
    aten.subtract.Tensor: torch.sub,
    # a copy of a vector, which torch.onnx would return as the input itself
    aten.t.default: Decomposition(lambda x: x.transpose(0, 1) if x.ndim > 1 else x.clone(), lambda x: x.ndim == 2),
    aten.true_divide.Tensor: torch.div,
    aten.pow.Tensor_Tensor: Decomposition(_pow, _is_plain_pow),
    aten.rsub.Scalar: Decomposition(_rsub, _is_plain_rsub),
    aten.roll.default: Decomposition(_roll, lambda _, shifts, *__: all(isinstance(shift, int) for shift in shifts)),
    aten.split.Tensor: _split,
    aten.fft_fftshift.default: _fftshift,
    aten.fft_ifftshift.default: _ifftshift,
    aten.scaled_dot_product_attention.default: Decomposition(_attention, _is_plain_attention),
    **EXACT,
    **ORDERING,
    **POOLS,
    **RANDOM_OPERATORS,
    **SPECIAL_FUNCTIONS,
}
