"""Pools that torch.onnx does not translate, or not for all sizes, in terms of other operators of torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten


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
