"""Pools whose windows, or whose results, have symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from exportkit.rewrites.symbolic_lists import any_symbolic

_Reduction = Callable[[torch.Tensor, torch.Tensor], Any]


def _sizes_of(given: Any, axes: int) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, list | tuple) else (given,) * axes


def _pool(name: str, over: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A pool, which is a reduction where its window is as large as the input: ``max_pool1d(x, x.shape[-1])``."""
    original, axes = getattr(torch.nn.functional, name), int(name[-2])

    def pool(input: torch.Tensor, kernel_size: Any, *options: Any, **named: Any) -> Any:
        sizes = _sizes_of(kernel_size, axes)
        if not (any_symbolic(*sizes) and _same(sizes, input.shape[-axes:])) or options or named:
            return original(input, kernel_size, *options, **named)
        return over(input, dim=[*range(-axes, 0)], keepdim=True)

    return pool


def _same(sizes: Any, others: Any) -> bool:
    """Whether sizes are the same expressions; comparing them would make a condition of them."""
    pairs = [[getattr(getattr(n, "node", None), "expr", n) for n in pair] for pair in zip(sizes, others, strict=False)]
    return len(sizes) == len(others) and all(one == other for one, other in pairs)


def _adaptive_pool(name: str, over: _Reduction) -> Callable[..., Any]:
    """A pool to symbolic sizes, ``adaptive_avg_pool1d(x, x.shape[-1] // 2)``, one axis after the other."""
    original, axes = getattr(torch.nn.functional, name), int(name[-2])

    def pool(input: torch.Tensor, output_size: Any, *options: Any, **named: Any) -> Any:
        sizes = _sizes_of(output_size, axes)
        if not any_symbolic(*sizes) or options or named:
            return original(input, output_size, *options, **named)
        for axis, size in enumerate(sizes, -axes):
            if size is not None:
                input = over(*_windows(input.movedim(axis, -1), size)).movedim(-1, axis)
        return input

    return pool


def _windows(values: torch.Tensor, size: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The values that each result is made of, as torch chooses them, and which places are beyond its window."""
    length, results = values.shape[-1], torch.arange(size, device=values.device)
    start, end = results * length // size, ((results + 1) * length + size - 1) // size
    places = start[:, None] + torch.arange(length // size + 2, device=values.device)
    return values[..., places.clamp(max=length - 1)], places >= end[:, None]


def _averages(windows: torch.Tensor, is_beyond: torch.Tensor) -> torch.Tensor:
    precise = torch.promote_types(windows.dtype, torch.float32)  # a sum in half precision may overflow
    return (windows.masked_fill(is_beyond, 0).sum(-1, dtype=precise) / (~is_beyond).sum(-1)).to(windows.dtype)


def _largest(windows: torch.Tensor, is_beyond: torch.Tensor) -> torch.Tensor:
    return windows.masked_fill(is_beyond, -torch.inf).amax(-1)


POOLS: dict[str, Callable[..., Any]] = {
    **{name: _pool(name, torch.amax) for name in ("max_pool1d", "max_pool2d", "max_pool3d")},
    **{name: _pool(name, torch.mean) for name in ("avg_pool1d", "avg_pool2d", "avg_pool3d")},
    **{f"adaptive_avg_pool{n}d": _adaptive_pool(f"adaptive_avg_pool{n}d", _averages) for n in (1, 2, 3)},
    **{f"adaptive_max_pool{n}d": _adaptive_pool(f"adaptive_max_pool{n}d", _largest) for n in (1, 2, 3)},
}
