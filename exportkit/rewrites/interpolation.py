"""Resizing by factors that are made of sizes, such as ``F.interpolate(positions, scale_factor=x.shape[2] / 14)``.

torch's operators take factors as numbers, which a trace would fix. torch has the same computations in Python, too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from exportkit._torch_compat.graph import resized

_original = torch.nn.functional.interpolate


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
    if antialias or not any(isinstance(factor, torch.SymFloat | torch.SymInt) for factor in factors):
        return _original(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    sizes = [torch.sym_int(length * factor) for length, factor in zip(input.shape[2:], factors, strict=True)]
    if not (recompute_scale_factor or align_corners):  # the pixels are apart by the factor, and not by the sizes
        found = resized(mode, input, sizes, list(map(torch.sym_float, factors)))
        if found is not None:
            return found
    return _original(input, sizes, mode=mode, align_corners=align_corners)
