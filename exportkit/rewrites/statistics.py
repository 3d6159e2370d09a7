"""Covariances and quantiles of any number of values, which torch computes in C++ for numbers it knows only.

A trace that comes to torch's own ``quantile`` may also leave torch in a state in which it traces nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from exportkit.trees.tree import is_inexact

aten = torch.ops.aten


def _cov(
    values: torch.Tensor,
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:
    """The covariance of rows; torch asks for the values of the number of observations."""
    rows = values[None] if values.ndim < 2 else values
    rows = rows if is_inexact(rows) else rows.to(torch.get_default_dtype())
    weights = torch.ones_like(rows[0].real)
    for given in (fweights, aweights):
        weights = weights if given is None else weights * given
    total = weights.sum()
    mean = (rows * weights).sum(1, keepdim=True) / total
    taken = correction if aweights is None else correction * (weights * aweights).sum() / total
    rows = rows - mean
    found = (rows * weights) @ rows.mH / (total - taken).clamp(min=0)
    return found[0, 0] if values.ndim < 2 else found


def _corrcoef(values: torch.Tensor) -> torch.Tensor:
    found = _cov(values)
    if values.ndim < 2:
        return found / found
    deviation = found.diagonal().real.sqrt()
    ratio = found / deviation[:, None] / deviation[None]
    if ratio.is_complex():
        return torch.complex(ratio.real.clamp(-1, 1), ratio.imag.clamp(-1, 1))
    return ratio.clamp(-1, 1)


def _quantile(
    values: torch.Tensor,
    q: torch.Tensor | float,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
    leaves_out_nan: bool = False,
) -> torch.Tensor:
    """Elements at places in the order, or between two of them; torch counts places in the dtype of the values."""
    probabilities = q if isinstance(q, torch.Tensor) else torch.full((), q, dtype=values.dtype, device=values.device)
    rows = values.flatten() if dim is None else values.movedim(dim, -1)
    unknown = rows.isnan()
    ordered = rows.sort(-1).values  # NaN comes last
    if leaves_out_nan:
        last = ((~unknown).sum(-1, keepdim=True) - 1).clamp(min=0)
        places = probabilities.reshape(-1) * last
    else:
        places = probabilities.reshape(-1) * (rows.shape[-1] - 1)
        places = torch.where(unknown.any(-1, keepdim=True), rows.shape[-1] - 1, places)
    rounding = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}.get(interpolation)
    if rounding is not None:
        found = ordered.gather(-1, rounding(places).to(torch.int64))
    else:
        below, above = (rounded(places).to(torch.int64) for rounded in (torch.floor, torch.ceil))
        between = torch.full_like(places, 0.5) if interpolation == "midpoint" else places - below
        found = torch.lerp(ordered.gather(-1, below), ordered.gather(-1, above), between)
    if keepdim:
        found = found.reshape([*[1] * values.ndim, -1]) if dim is None else found.unsqueeze(dim % values.ndim)
    return found.movedim(-1, 0) if probabilities.ndim else found.squeeze(-1)


STATISTICS: dict[Any, Callable[..., Any]] = {
    aten.corrcoef.default: _corrcoef,
    aten.cov.default: _cov,
    aten.nanquantile.default: functools.partial(_quantile, leaves_out_nan=True),
    aten.nanquantile.scalar: functools.partial(_quantile, leaves_out_nan=True),
    aten.quantile.default: _quantile,
    aten.quantile.scalar: _quantile,
}
