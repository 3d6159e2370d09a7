"""Operators that sort, count, accumulate or pool, where torch.onnx has no right form, as other operators of torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
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


_BLOCK = 16  # elements that are compared with each other: an axis of 4,096 elements takes 32 times its memory


def _logcumsumexp(values: torch.Tensor, dim: int) -> Any:
    """Within blocks of the axis, then over the blocks: torch.onnx takes the exponentials themselves, which overflow."""
    if values.is_complex():
        return NotImplemented
    if not values.ndim:
        return values.clone()
    row = values.movedim(dim, -1)
    row = row.float() if row.dtype in (torch.float16, torch.bfloat16) else row
    length = row.shape[-1]
    count = (length + 2 * _BLOCK - 1) // _BLOCK  # one more than needed: for a single block, sizes would be fixed
    padded = torch.cat([row, row.new_full((*row.shape[:-1], count * _BLOCK - length), -math.inf)], -1)
    blocks = padded.unflatten(-1, (count, _BLOCK))
    inside = _log_of_sum(torch.where(_earlier(_BLOCK), blocks[..., None, :], -math.inf))
    is_before = _earlier(count) & ~torch.eye(count, dtype=torch.bool)
    before = _log_of_sum(torch.where(is_before, inside[..., None, :, -1], -math.inf))
    found = _log_of_sum(torch.stack([inside, before[..., None].expand_as(inside)], -1))
    return found.flatten(-2)[..., :length].movedim(-1, dim).to(values.dtype)


def _log_of_sum(values: torch.Tensor) -> torch.Tensor:
    """The logarithm of the sum of exponentials along the last axis."""
    largest = values.amax(-1, keepdim=True)
    largest = torch.where(largest.isinf(), 0.0, largest)
    return (values - largest).exp().sum(-1).log() + largest.squeeze(-1)


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


# Adaptive pools, whose windows follow the size of their input. torch.onnx uses the windows of the trace if the length
# is a multiple of the outputs, and has no form otherwise.


def _windows(length: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The places that each output looks at, (size, longest window), and which of them belong to its window."""
    output = torch.arange(size)[:, None]
    first, end = output * length // size, ((output + 1) * length + size - 1) // size
    places = first + torch.arange((length + size - 1) // size + 1)
    return places.clamp(max=length - 1), places < end


def _averages(values: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    for axis, size in zip(range(-len(sizes), 0), sizes, strict=True):
        if size == 1:
            values = values.mean(axis, keepdim=True)
            continue
        places, inside = _windows(values.shape[axis], size)
        seen = values.index_select(axis, places.flatten()).unflatten(axis, (size, -1))
        inside = inside.view(size, -1, *[1] * (-1 - axis))
        values = torch.where(inside, seen, 0.0).sum(axis) / inside.sum(1)
    return values


def _largest(values: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    rank = len(sizes)
    lengths = values.shape[-rank:]
    windows = [_windows(length, size) for length, size in zip(lengths, sizes, strict=True)]
    inside = torch.ones([1] * 2 * rank, dtype=torch.bool)
    for number, (_, shown) in enumerate(windows):
        before, after = [1] * number, [1] * (rank - 1 - number)
        inside = inside & shown.view(*before, sizes[number], *after, *before, -1, *after)

    def seen(tensor: torch.Tensor) -> torch.Tensor:
        """What each output looks at, along the last axis."""
        for axis, (places, _) in enumerate(windows, tensor.ndim - rank):
            tensor = tensor.index_select(axis, places.flatten()).unflatten(axis, places.shape).movedim(axis + 1, -1)
        return tensor.flatten(-rank)

    candidates = seen(values).masked_fill(~inside.flatten(-rank), -math.inf)
    places = seen(torch.arange(math.prod(lengths)).view(lengths)).expand(candidates.shape)
    return candidates.amax(-1), places.gather(-1, candidates.argmax(-1, keepdim=True)).squeeze(-1)


# Averages that are divided by a number of the model's choice, which torch.onnx forgets.


def _divided(pool: Any, rank: int, values: torch.Tensor, kernel: Sequence[int], *options: Any) -> Any:
    if len(options) < 5 or options[4] is None or options[2]:  # at the end of a padded axis, windows are smaller
        return NotImplemented
    count = math.prod(kernel) if len(kernel) > 1 else kernel[0] ** rank
    return pool(values, kernel, *options[:3], True) * (count / options[4])


def is_plain_pool(_values: Any, _kernel: Any, *options: Any) -> bool:
    """Whether torch.onnx translates an average pool: it divides by the size of its window."""
    return len(options) < 5 or options[4] is None


POOLS: dict[Any, Callable[..., Any]] = {
    aten.adaptive_avg_pool1d.default: _averages,
    aten.adaptive_avg_pool2d.default: _averages,
    aten.adaptive_avg_pool3d.default: _averages,
    aten.adaptive_max_pool1d.default: _largest,
    aten.adaptive_max_pool2d.default: _largest,
    aten.adaptive_max_pool3d.default: _largest,
    aten.avg_pool2d.default: functools.partial(_divided, aten.avg_pool2d.default, 2),
    aten.avg_pool3d.default: functools.partial(_divided, aten.avg_pool3d.default, 3),
}


ORDERING: dict[Any, Callable[..., Any]] = {
    aten.argsort.stable: lambda *args, **options: _sort(*args, **options)[1],
    aten.bucketize.Tensor: lambda values, limits, **options: _searchsorted(limits, values, **options),
    aten.cummax.default: lambda values, dim: _extreme_so_far(values, dim, torch.amax, -1),
    aten.cummin.default: lambda values, dim: _extreme_so_far(values, dim, torch.amin, 1),
    aten.cumprod.default: _cumprod,
    aten.cumsum.default: _cumsum,
    aten.isin.Tensor_Tensor: _isin,
    aten.kthvalue.default: _kthvalue,
    aten.logcumsumexp.default: _logcumsumexp,
    aten.median.dim: _median,
    aten.median.default: lambda values: _median(values.flatten(), 0)[0],
    aten.nanmedian.dim: _median_of_known,
    aten.nanmedian.default: lambda values: _median_of_known(values.flatten(), 0)[0],
    aten.searchsorted.Tensor: _searchsorted,
    aten.sort.stable: _sort,
}
