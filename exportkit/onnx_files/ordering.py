"""Operators that sort, count, accumulate or pool, where torch.onnx has no right form, as other operators of torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from exportkit.onnx_files.decomposition import SMALL_INTEGERS, Decomposition, computed_in, not_of
from exportkit.running.bounds import HALF

aten = torch.ops.aten
Pair = tuple[torch.Tensor, torch.Tensor]


# Elements at a place in the order.


def _sort(values: torch.Tensor, dim: int = -1, descending: bool = False, **_options: Any) -> Pair:
    if values.dtype in SMALL_INTEGERS:  # onnxruntime sorts 32 bits and more
        ordered, index = torch.sort(values.to(torch.int32), dim, descending)
        return ordered.to(values.dtype), index
    return torch.sort(values, dim, descending)  # always stable in ONNX


def _argsort(*arguments: Any, **options: Any) -> torch.Tensor:
    return _sort(*arguments, **options)[1]


def _topk(values: torch.Tensor, k: int, *options: Any) -> Pair:
    if not values.ndim:
        return values.clone(), torch.zeros((), dtype=torch.int64)
    found, index = torch.topk(values.to(torch.int32), k, *options)
    return found.to(values.dtype), index


def _kthvalue(values: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Pair:
    if not values.ndim:
        return values.clone(), torch.zeros((), dtype=torch.int64)
    found = [part.narrow(dim, k - 1, 1) for part in _sort(values, dim)]
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
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: torch.Tensor | None = None,
) -> Any:
    if not isinstance(values, torch.Tensor):
        kind = torch.result_type(limits, values)  # a number does not change the dtype of limits of its kind
        limits, values = limits.to(kind), torch.scalar_tensor(values, dtype=kind)
    if sorter is not None:
        limits = limits.gather(-1, sorter)
    limits, places = limits if limits.ndim == 1 else limits[..., None, :], values[..., None]
    # counted so that NaN, for which no comparison holds, is behind all limits
    before = ~(limits > places) if right or side == "right" else ~(limits >= places)
    return before.sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def _bucketize(values: Any, limits: torch.Tensor, **options: Any) -> Any:
    return _searchsorted(limits, values, **options)


def _isin(elements: Any, others: Any, invert: bool = False, **_options: Any) -> Any:
    """Whether elements are among others; either may be a number."""
    if isinstance(elements, torch.Tensor) and isinstance(others, torch.Tensor):
        found = (elements[..., None] == others.flatten()).any(-1)
    else:
        found = (others == elements).any() if isinstance(others, torch.Tensor) else elements == others
    return ~found if invert else found


# Along an axis, all elements up to one.


def _cumsum(values: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """torch.onnx computes sums of float16 and bfloat16 in float32, and leaves them so."""
    return computed_in(torch.float32, torch.cumsum)(values.to(dtype or values.dtype), dim)


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
    if values.dtype in HALF:
        return computed_in(torch.float32, _logcumsumexp)(values, dim)
    row = values.movedim(dim, -1)
    length = row.shape[-1]
    count = (length + 2 * _BLOCK - 1) // _BLOCK  # one more than needed: for a single block, sizes would be fixed
    padded = torch.cat([row, row.new_full((*row.shape[:-1], count * _BLOCK - length), -math.inf)], -1)
    blocks = padded.unflatten(-1, (count, _BLOCK))
    inside = _log_of_sum(torch.where(_earlier(_BLOCK), blocks[..., None, :], -math.inf))
    is_before = _earlier(count) & ~torch.eye(count, dtype=torch.bool)
    before = _log_of_sum(torch.where(is_before, inside[..., None, :, -1], -math.inf))
    found = _log_of_sum(torch.stack([inside, before[..., None].expand_as(inside)], -1))
    return found.flatten(-2)[..., :length].movedim(-1, dim)


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
    count = math.prod(kernel) if len(kernel) > 1 else kernel[0] ** rank
    return pool(values, kernel, *options[:3], True) * (count / options[4])


def _divides_by_its_size(_values: Any, _kernel: Any, *options: Any) -> bool:
    """Whether an average pool divides by the size of its window; or rounds its size up, with smaller windows there."""
    return len(options) < 5 or options[4] is None or options[2]


def _has_one_output(_values: Any, sizes: Sequence[int]) -> bool:
    return all(isinstance(size, int) and size == 1 for size in sizes)


def _in_double(pool: Any, values: torch.Tensor, *options: Any) -> torch.Tensor:
    """The largest of integers that onnxruntime has no pools for, and that double precision holds."""
    found: torch.Tensor = pool(values.double(), *options)
    return found.to(values.dtype)


POOLS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        [aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default],
        Decomposition(_averages, _has_one_output),
    ),
    **dict.fromkeys(
        [aten.adaptive_max_pool1d.default, aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default],
        Decomposition(_largest, _has_one_output),
    ),
    **{
        pool: Decomposition(functools.partial(_divided, pool, rank), _divides_by_its_size)
        for rank, pool in ((2, aten.avg_pool2d.default), (3, aten.avg_pool3d.default))
    },
    **{
        pool: Decomposition(functools.partial(_in_double, pool), not_of(torch.int16, torch.int32))
        for pool in (aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default)
    },
}


ORDERING: dict[Any, Callable[..., Any]] = {
    aten.argsort.default: Decomposition(_argsort, not_of(*SMALL_INTEGERS)),
    aten.argsort.stable: _argsort,
    aten.bucketize.Scalar: _bucketize,
    aten.bucketize.Tensor: _bucketize,
    aten.cummax.default: lambda values, dim: _extreme_so_far(values, dim, torch.amax, -1),
    aten.cummin.default: lambda values, dim: _extreme_so_far(values, dim, torch.amin, 1),
    aten.cumprod.default: _cumprod,
    aten.cumsum.default: Decomposition(_cumsum, lambda values, _, dtype=None: (dtype or values.dtype) not in HALF),
    aten.isin.Scalar_Tensor: _isin,
    aten.isin.Tensor_Scalar: _isin,
    aten.isin.Tensor_Tensor: _isin,
    aten.kthvalue.default: _kthvalue,
    aten.logcumsumexp.default: _logcumsumexp,
    aten.median.dim: _median,
    aten.median.default: lambda values: _median(values.flatten(), 0)[0],
    aten.nanmedian.dim: _median_of_known,
    aten.nanmedian.default: lambda values: _median_of_known(values.flatten(), 0)[0],
    aten.searchsorted.Scalar: _searchsorted,
    aten.searchsorted.Tensor: _searchsorted,
    aten.sort.default: Decomposition(_sort, not_of(*SMALL_INTEGERS)),
    aten.sort.stable: _sort,
    aten.msort.default: Decomposition(lambda values: _sort(values, 0)[0], not_of(*SMALL_INTEGERS)),
    aten.topk.default: Decomposition(_topk, lambda values, *_: values.ndim > 0 and values.dtype not in SMALL_INTEGERS),
}
