"""Operators that torch.onnx has no form for, in terms of those that it has.

In comes a program; out goes one without them, sharing its weights. It computes the same numbers, at any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

aten = torch.ops.aten


def with_onnx_forms(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program without such operators, or the program itself if it has none."""
    needed = {node.target for node in program.graph.nodes if node.target in _FORMS and not _is_known(node)}
    return program.run_decompositions({target: _FORMS[target] for target in needed}) if needed else program


def _is_known(node: torch.fx.Node) -> bool:
    """Whether torch.onnx has a form for what it is asked here: attention over heads, pools to a single output."""
    if node.target is aten.scaled_dot_product_attention.default:
        return node.args[0].meta["val"].ndim >= _RANK  # type: ignore[union-attr]
    return node.target in _POOLS and set(node.args[1]) == {1}  # type: ignore[arg-type]


def _masked_select(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    values, mask = torch.broadcast_tensors(values, mask)
    return values[mask]


def _median(values: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return _kthvalue(values, (values.shape[dim] + 1) // 2, dim, keepdim)


def _kthvalue(values: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    found = [part.narrow(dim, k - 1, 1) for part in torch.sort(values, dim)]
    smallest, index = found if keepdim else [part.squeeze(dim) for part in found]
    return smallest, index


def _cumprod(values: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    factors = values.to(dtype or values.dtype).movedim(dim, -1)
    length = factors.shape[-1]
    position = torch.arange(length, device=values.device)
    one = torch.ones((), dtype=factors.dtype, device=values.device)
    return torch.where(position <= position[:, None], factors[..., None, :], one).prod(-1).movedim(-1, dim)


def _cdist(one: torch.Tensor, other: torch.Tensor, p: float = 2.0, _mode: int | None = None) -> torch.Tensor:
    distance = (one[..., :, None, :] - other[..., None, :, :]).abs()
    if math.isinf(p):
        return distance.amax(-1)
    return distance.sum(-1) if p == 1 else distance.pow(p).sum(-1).pow(1 / p)


def _adaptive_avg_pool1d(values: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    return _adaptive_avg_pool2d(values.unsqueeze(-2), [1, *sizes]).squeeze(-2)


def _adaptive_avg_pool2d(values: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    rows, columns = (inside.to(values.dtype) for inside in _windows(values, sizes))
    summed = rows @ values @ columns.transpose(0, 1)
    return summed / (rows.sum(1)[:, None] * columns.sum(1))


def _adaptive_max_pool1d(values: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    largest, index = _adaptive_max_pool2d(values.unsqueeze(-2), [1, *sizes])
    return largest.squeeze(-2), index.squeeze(-2)


def _adaptive_max_pool2d(values: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = _windows(values, sizes)
    inside = rows[:, None, :, None] & columns[None, :, None, :]
    seen = values[..., None, None, :, :].masked_fill(~inside, -math.inf).flatten(-2)
    return seen.amax(-1), seen.argmax(-1)


def _windows(values: torch.Tensor, sizes: Sequence[int]) -> Iterator[torch.Tensor]:
    """Which inputs an adaptive pool looks at for each of its outputs, (size, length), for the last two axes.

    torch.onnx takes windows of the size that they have in the trace, where the length is a multiple of the outputs.
    """
    for length, size in zip(values.shape[-2:], sizes, strict=True):
        position = torch.arange(length, device=values.device)
        output = torch.arange(size, device=values.device)[:, None]
        first, end = output * length // size, ((output + 1) * length + size - 1) // size
        yield (position >= first) & (position < end)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None, *rest: Any, **more: Any
) -> Any:
    """Attention without an axis for heads, as attention with one."""
    if query.ndim >= _RANK:
        return NotImplemented
    added = _RANK - query.ndim
    parts = [part[(None,) * added] for part in (query, key, value)]
    hidden = mask[(None,) * added] if mask is not None and mask.ndim == query.ndim else mask
    found = torch.nn.functional.scaled_dot_product_attention(*parts, hidden, *rest, **more)
    return found[(0,) * added]


_RANK = 4  # batch, heads, tokens, size
_POOLS = {
    aten.adaptive_avg_pool1d.default: _adaptive_avg_pool1d,
    aten.adaptive_avg_pool2d.default: _adaptive_avg_pool2d,
    aten.adaptive_max_pool1d.default: _adaptive_max_pool1d,
    aten.adaptive_max_pool2d.default: _adaptive_max_pool2d,
}
_FORMS: dict[Any, Callable[..., Any]] = {
    aten.masked_select.default: _masked_select,
    aten.median.dim: _median,
    aten.kthvalue.default: _kthvalue,
    aten.cumprod.default: _cumprod,
    aten.cdist.default: _cdist,
    aten.scaled_dot_product_attention.default: _attention,
    **_POOLS,
}
