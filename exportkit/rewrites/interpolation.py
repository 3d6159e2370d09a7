"""Resizing by factors that are made of sizes, such as ``F.interpolate(positions, scale_factor=x.shape[2] / 14)``.

torch's operators take factors as numbers, which a trace would fix. Here the places of the new pixels are computed with
tensors, axis by axis. As in torch, linear modes, and ``nearest`` for images, do not change an axis that keeps its size,
whatever the factor is; and ``nearest`` for images takes each pixel twice if the size doubles.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_original = torch.nn.functional.interpolate
_LINEAR = ("linear", "bilinear", "trilinear")
_MODES = {*_LINEAR, "bicubic", "nearest", "nearest-exact", "area"}
_CUBIC = -0.75  # the coefficient of torch's cubic convolution


@functools.wraps(_original)  # modes know it by its name
def interpolate(  # noqa: PLR0917  # as in torch
    input: torch.Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """Returns the resized input."""
    factors = [*scale_factor] if isinstance(scale_factor, list | tuple) else [scale_factor] * (input.ndim - 2)
    is_symbolic = any(isinstance(factor, torch.SymFloat | torch.SymInt) for factor in factors)
    if antialias or mode not in _MODES or not (is_symbolic and input.is_floating_point()):
        return _original(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    sizes = [torch.sym_int(length * factor) for length, factor in zip(input.shape[2:], factors, strict=True)]
    if recompute_scale_factor or align_corners or mode == "area":  # the factors are those of the sizes
        return _original(input, sizes, mode=mode, align_corners=align_corners)
    found = input.to(torch.promote_types(input.dtype, torch.float32))
    for axis, (wanted, factor) in enumerate(zip(sizes, factors, strict=True), 2):
        found = _resized(found, axis, wanted, factor, mode)
    return found.to(input.dtype)


def _resized(values: torch.Tensor, axis: int, wanted: Any, factor: Any, mode: str) -> torch.Tensor:
    length = values.shape[axis]
    options: dict[str, Any] = {"dtype": values.dtype, "device": values.device}
    new = torch.arange(wanted, **options)
    step = torch.full((), 1 / torch.sym_float(factor), **options)
    keeps, doubles = (torch.full_like(new, wanted) == torch.full_like(new, times * length) for times in (1, 2))

    def taken(places: torch.Tensor) -> torch.Tensor:
        return values.index_select(axis, places.long().clamp(0, length - 1))

    if mode == "nearest-exact":
        return taken(((new + 0.5) * step).floor())
    if mode == "nearest":
        places = (new * step).floor()
        is_image = values.ndim == 4
        return taken(torch.where(keeps, new, torch.where(doubles, new // 2, places)) if is_image else places)
    shape = [-1 if other == axis else 1 for other in range(values.ndim)]
    if mode in _LINEAR:
        places = torch.where(keeps, new, ((new + 0.5) * step - 0.5).clamp(min=0))
        share = (places - places.floor()).view(shape)
        return taken(places.floor()) * (1 - share) + taken(places.floor() + 1) * share
    places = (new + 0.5) * step - 0.5
    share = places - places.floor()
    weights = [_far(share + 1), _close(share), _close(1 - share), _far(2 - share)]
    parts = [taken(places.floor() + by - 1) * weight.view(shape) for by, weight in enumerate(weights)]
    return parts[0] + parts[1] + parts[2] + parts[3]


def _close(distance: torch.Tensor) -> torch.Tensor:
    """The weight of a pixel at most one away, by cubic convolution."""
    return ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance * distance + 1


def _far(distance: torch.Tensor) -> torch.Tensor:
    """The weight of a pixel one to two away."""
    return ((_CUBIC * distance - 5 * _CUBIC) * distance + 8 * _CUBIC) * distance - 4 * _CUBIC
