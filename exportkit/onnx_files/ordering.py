"""Operators that sort, count or accumulate, for which torch.onnx has no form, in terms of other operators of torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
Pair = tuple[torch.Tensor, torch.Tensor]


# Elements at a place in the order.


def _sort(values: torch.Tensor, dim: int = -1, descending: bool = False, **_options: Any) -> Pair:
    return torch.sort(values, dim, descending)  # always stable in ONNX


def _kthvalue(values: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Pair:
    if not values.ndim:
        return values.clone(), torch.zeros((), dtype=torch.int64)
    found = [part.narrow(dim, k - 1, 1) for part in torch.sort(values, dim)]
    smallest, index = found if keepdim else [part.squeeze(dim) for part in found]
    return smallest, index


def _median(values: torch.Tensor, dim: int, keepdim: bool = False) -> Pair:
    median, index = _kthvalue(values, (values.shape[dim] + 1) // 2 if values.ndim else 1, dim, keepdim)
    if not values.is_floating_point() or not values.ndim:
        return median, index
    unknown = values.isnan()  # a median with NaN is the first one of them
    has_unknown = unknown.any(dim, keepdim)
    first = unknown.to(torch.float32).argmax(dim, keepdim)
    return torch.where(has_unknown, math.nan, median), torch.where(has_unknown, first, index)


def _median_of_known(values: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
    """The median of the elements that are not NaN."""
    if not values.is_floating_point() or not values.ndim:
        return _median(values, dim, keepdim)
    known = ~values.isnan()
    count = known.sum(dim, keepdim=True)
    ordered, index = torch.where(known, values, math.inf).sort(dim)
    place = ((count - 1) // 2).clamp(min=0)
    median = torch.where(count > 0, ordered.gather(dim, place), math.nan)
    index = torch.where(count > 0, index.gather(dim, place), 0)
    return (median, index) if keepdim else (median.squeeze(dim), index.squeeze(dim))


def _searchsorted(
    limits: torch.Tensor,
    values: torch.Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: torch.Tensor | None = None,
) -> Any:
    if sorter is not None:
        limits = limits.gather(-1, sorter)
    limits, places = limits if limits.ndim == 1 else limits[..., None, :], values[..., None]
    # counted so that NaN, for which no comparison holds, is behind all limits
    before = ~(limits > places) if right or side == "right" else ~(limits >= places)
    return before.sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def _isin(elements: torch.Tensor, others: torch.Tensor, invert: bool = False, **_options: Any) -> Any:
    found = (elements[..., None] == others.flatten()).any(-1)
    return ~found if invert else found


# Along an axis, all elements up to one.


def _cumsum(values: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """torch.onnx computes sums of float16 and bfloat16 in float32, and leaves them so."""
    kind = dtype or values.dtype
    if kind not in (torch.float16, torch.bfloat16):
        return NotImplemented
    return values.to(kind).float().cumsum(dim).to(kind)


def _cumprod(values: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    kind = dtype or (values.dtype if values.is_floating_point() else torch.int64)
    if not values.ndim:
        return values.to(kind)
    factors = values.to(kind).movedim(dim, -1)
    earlier = _earlier(factors.shape[-1])
    one = torch.ones((), dtype=factors.dtype, device=values.device)
    return torch.where(earlier, factors[..., None, :], one).prod(-1).movedim(-1, dim)


def _earlier(length: int) -> torch.Tensor:
    """Which elements, along the last axis, come before each element, itself included."""
    position = torch.arange(length)
    return position <= position[:, None]


def _extreme_so_far(values: torch.Tensor, dim: int, reduce: Any, sign: int) -> Pair:
    if values.dtype is torch.bool:
        found, index = _extreme_so_far(values.to(torch.uint8), dim, reduce, sign)
        return found.to(torch.bool), index
    if not values.ndim:
        return values.clone(), torch.zeros((), dtype=torch.int64)
    row = values.movedim(dim, -1)
    earlier = _earlier(row.shape[-1])
    if values.is_floating_point():
        neutral: float = sign * math.inf
    else:
        info = torch.iinfo(values.dtype)
        neutral = info.max if sign > 0 else info.min
    found = reduce(torch.where(earlier, row[..., None, :], neutral), -1)
    same = row[..., None, :] == found[..., None]
    if values.is_floating_point():
        same = same | (row[..., None, :].isnan() & found[..., None].isnan())
    index = torch.where(same & earlier, torch.arange(row.shape[-1]), -1).amax(-1)
    return found.movedim(-1, dim), index.movedim(-1, dim)


ORDERING: dict[Any, Callable[..., Any]] = {
    aten.argsort.stable: lambda *args, **options: _sort(*args, **options)[1],
    aten.bucketize.Tensor: lambda values, limits, **options: _searchsorted(limits, values, **options),
    aten.cummax.default: lambda values, dim: _extreme_so_far(values, dim, torch.amax, -1),
    aten.cummin.default: lambda values, dim: _extreme_so_far(values, dim, torch.amin, 1),
    aten.cumprod.default: _cumprod,
    aten.cumsum.default: _cumsum,
    aten.isin.Tensor_Tensor: _isin,
    aten.kthvalue.default: _kthvalue,
    aten.median.dim: _median,
    aten.median.default: lambda values: _median(values.flatten(), 0)[0],
    aten.nanmedian.dim: _median_of_known,
    aten.nanmedian.default: lambda values: _median_of_known(values.flatten(), 0)[0],
    aten.searchsorted.Tensor: _searchsorted,
    aten.sort.stable: _sort,
}
