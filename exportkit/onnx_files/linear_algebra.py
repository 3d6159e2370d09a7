"""Systems of linear equations with few unknowns, whose elimination is written out step by step.

Where torch raises, for matrices that are singular or not positive definite, there are infinities or NaN. Matrices that
are larger, or have a size that varies, stay without a translation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

# Each row adds about a dozen operators to the graph.
_LARGEST = 32


def _is_small(matrix: torch.Tensor) -> bool:
    size = matrix.shape[-1]
    return isinstance(size, int) and 0 < size <= _LARGEST and not matrix.is_complex()


def _eliminated(matrix: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The solution by Gauss and Jordan, the pivots, and for each of them -1 if its row was another one, otherwise 1."""
    size, rows = matrix.shape[-1], torch.cat([matrix, right], -1)
    order, pivots, signs = torch.arange(size), [], []
    for k in range(size):
        candidates = torch.where(order >= k, rows[..., k].abs(), -1.0)
        best = candidates.argmax(-1, keepdim=True)
        places = torch.where(order == k, best, torch.where(order == best, k, order))
        rows = rows.gather(-2, places[..., None].expand(rows.shape))
        pivot = rows[..., k : k + 1, k : k + 1]
        row = rows[..., k : k + 1, :] / pivot
        rows = torch.where(order[:, None] == k, row, rows - rows[..., k : k + 1] * row)
        pivots.append(pivot[..., 0, 0])
        signs.append(torch.where(best[..., 0] == k, 1.0, -1.0))
    return rows[..., size:], torch.stack(pivots, -1), torch.stack(signs, -1).to(matrix.dtype)


def _solve(matrix: torch.Tensor, right: torch.Tensor, *, left: bool = True) -> Any:
    if not _is_small(matrix):
        return NotImplemented
    if not left:
        return _solve(matrix.mT, right.mT).mT
    if right.ndim == 1 or right.shape == matrix.shape[:-1]:  # one vector for each matrix
        return _solve(matrix, right[..., None]).squeeze(-1)
    batch = torch.broadcast_shapes(matrix.shape[:-2], right.shape[:-2])
    matrix, right = (part.expand(*batch, *part.shape[-2:]) for part in (matrix, right))
    return _eliminated(matrix, right)[0]


def _inverse(matrix: torch.Tensor) -> Any:
    return _solve(matrix, torch.eye(matrix.shape[-1], dtype=matrix.dtype)) if _is_small(matrix) else NotImplemented


def _slogdet(matrix: torch.Tensor) -> Any:
    if not _is_small(matrix):
        return NotImplemented
    _, pivots, signs = _eliminated(matrix, matrix[..., :0])
    return (pivots.sign() * signs).prod(-1), pivots.abs().log().sum(-1)


def _logdet(matrix: torch.Tensor) -> Any:
    if not _is_small(matrix):
        return NotImplemented
    sign, size = _slogdet(matrix)
    return torch.where(sign < 0, torch.nan, size)


def _cholesky(matrix: torch.Tensor, *, upper: bool = False) -> Any:
    if not _is_small(matrix):
        return NotImplemented
    matrix = matrix.mT if upper else matrix
    order, columns = torch.arange(matrix.shape[-1]), []
    for k in range(matrix.shape[-1]):
        column = torch.where(order >= k, matrix[..., k] / matrix[..., k, k, None].sqrt(), 0.0)
        matrix = matrix - column[..., None] * column[..., None, :]
        columns.append(column)
    return torch.stack(columns, -2 if upper else -1)


def _solve_triangular(
    matrix: torch.Tensor, right: torch.Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    if not _is_small(matrix):
        return NotImplemented
    if not left:
        return _solve_triangular(matrix.mT, right.mT, upper=not upper, unitriangular=unitriangular).mT
    found: dict[int, torch.Tensor] = {}
    for k in range(matrix.shape[-1])[:: -1 if upper else 1]:
        row = right[..., k, :] - sum(matrix[..., k, other, None] * value for other, value in found.items())
        found[k] = row if unitriangular else row / matrix[..., k, k, None]
    return torch.stack([found[k] for k in sorted(found)], -2)


def _cholesky_solve(right: torch.Tensor, factor: torch.Tensor, upper: bool = False) -> Any:
    if not _is_small(factor):
        return NotImplemented
    lower = factor.mT if upper else factor
    return _solve_triangular(lower.mT, _solve_triangular(lower, right, upper=False), upper=True)


LINEAR_ALGEBRA: dict[Any, Callable[..., Any]] = {
    aten.cholesky_solve.default: _cholesky_solve,
    aten.inverse.default: _inverse,
    aten.linalg_cholesky.default: _cholesky,
    aten.linalg_inv.default: _inverse,
    aten.linalg_slogdet.default: _slogdet,
    aten.linalg_solve.default: _solve,
    aten.linalg_solve_triangular.default: _solve_triangular,
    aten.logdet.default: _logdet,
}
