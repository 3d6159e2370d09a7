"""Functions of numbers and of small matrices that torch.onnx has no form for, in terms of other operators of torch.

Gamma functions, and quantiles and tails of the normal distribution, are computed in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from exportkit.onnx_files.decomposition import Decomposition, computed_in

aten = torch.ops.aten


# Two numbers.


def _unless_nan(x: torch.Tensor, y: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), y, torch.where(y.isnan(), x, found)) if found.is_floating_point() else found


def _hypot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    longer, shorter = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    ratio = torch.where(longer == shorter, 1.0, shorter / longer)  # of zeros and infinities, too
    length = torch.where(longer == 0, 0.0, longer * (ratio * ratio + 1).sqrt())
    return torch.where(x.isinf() | y.isinf(), math.inf, length)


def _copysign(x: torch.Tensor, y: Any) -> torch.Tensor:
    dtype = torch.result_type(x, y)
    y = y if isinstance(y, torch.Tensor) else torch.full((), y)
    size = x.to(dtype if dtype.is_floating_point else torch.get_default_dtype()).abs()
    return torch.where(y.signbit(), -size, size)


# Functions of one number, in double precision.


def _in_double(function: Callable[[torch.Tensor], torch.Tensor], most: int = 8) -> Callable[[torch.Tensor], Any]:
    """Returns the function for any dtype with at most so many bytes."""

    def is_larger(x: torch.Tensor) -> bool:
        return x.is_floating_point() and x.dtype.itemsize > most

    return Decomposition(computed_in(torch.float64, function), is_larger)


def _polynomial(x: torch.Tensor, coefficients: Sequence[float]) -> torch.Tensor:
    found = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        found = found * x + coefficient
    return found


# Lanczos' approximation with g = 7.
_LANCZOS = (
    676.5203681218851, -1259.1392167224028, 771.32342877765313, -176.61502916214059,
    12.507343278686905, -0.13857109526572012, 9.9843695780195716e-6, 1.5056327351493116e-7,
)  # fmt: skip


def _lgamma(x: torch.Tensor) -> torch.Tensor:
    mirrored = x < 0.5
    z = torch.where(mirrored, -x, x - 1)
    total: Any = sum([c / (z + i) for i, c in enumerate(_LANCZOS, 1)], 0.99999999999980993)
    found = (z + 0.5) * (z + 7.5).log() - (z + 7.5) + (total * math.sqrt(2 * math.pi)).log()
    pi = math.pi
    other = (pi / ((x - x.round()) * pi).sin().abs()).log() - found
    found = torch.where((x == 1) | (x == 2), 0.0, torch.where(mirrored, other, found))
    return torch.where(x.isinf(), math.inf, found)


# The asymptotic series, from the last term; its numbers are those of Bernoulli.
_SERIES = (-691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12, 0.0)


def _digamma(x: torch.Tensor) -> torch.Tensor:
    mirrored = x < 0.5
    y = torch.where(mirrored, 1 - x, x)
    z = y + 8
    found = z.log() - 0.5 / z - _polynomial(1 / (z * z), _SERIES) - sum(1 / (y + i) for i in range(8))
    pi = math.pi
    angle = (x - x.round()) * pi
    whole = (x == x.round()) & (x < 0)
    cosine = 1 - 2 * (angle / 2).sin().square()  # onnxruntime 1.26 has no Cos of double precision
    found = torch.where(mirrored, found - pi * cosine / angle.sin(), found)
    found = torch.where(whole, math.nan, torch.where(x == 0, -1 / x, found))
    return torch.where(x == math.inf, math.inf, found)


# Acklam's approximation of the quantiles of a normal distribution, to 1.2e-9.
_MIDDLE = (
    -39.69683028665376, 220.9460984245205, -275.9285104469687, 138.3577518672690, -30.66479806614716, 2.506628277459239,
)  # fmt: skip
_BELOW_MIDDLE = (-54.47609879822406, 161.5858368580409, -155.6989798598866, 66.80131188771972, -13.28068155288572, 1.0)
_TAIL = (
    -0.007784894002430293, -0.3223964580411365, -2.400758277161838, -2.549732539343734, 4.374664141464968,
    2.938163982698783,
)  # fmt: skip
_BELOW_TAIL = (0.007784695709041462, 0.3224671290700398, 2.445134137142996, 3.754408661907416, 1.0)


def _quantile(x: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """The quantile at a distance from the median, given also how much is beyond it."""
    square = x * x
    middle = x * _polynomial(square, _MIDDLE) / _polynomial(square, _BELOW_MIDDLE)
    far = (tail.log() * -2).sqrt()
    far = -_polynomial(far, _TAIL) / _polynomial(far, _BELOW_TAIL)
    far = torch.where(tail == 0, math.inf, far)
    return torch.where(x.abs() <= 0.47575, middle, torch.where(x < 0, -far, far))


def _erfinv(x: torch.Tensor) -> torch.Tensor:
    return _quantile(x / 2, (1 - x.abs()) / 2) * math.sqrt(0.5)


# An approximation of log(erfc(x) * exp(x * x)) + log(1 + x / 2), to 1.2e-7: Press and others, "Numerical Recipes".
_TAILS = (
    0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368,
    -1.26551223,
)  # fmt: skip


def _log_erfcx(x: torch.Tensor) -> torch.Tensor:
    """The logarithm of the function for numbers that are not negative."""
    part = 1 / (1 + x / 2)
    return _polynomial(part, _TAILS) + part.log()


def _erfcx(x: torch.Tensor) -> torch.Tensor:
    found = _log_erfcx(x.abs()).exp()
    return torch.where(x < 0, 2 * (x * x).exp() - found, found)


def _log_ndtr(x: torch.Tensor) -> torch.Tensor:
    size = _log_erfcx(x.abs() * math.sqrt(0.5)) - x * x / 2 - math.log(2)
    return torch.where(x < 0, size, torch.log1p(-size.exp()))


def _histc(values: torch.Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> torch.Tensor:
    """Counts of values in bins; without limits these are those of the values, apart by one if all are the same."""
    values = values.flatten()
    if min == max:
        low, high = values.amin(), values.amax()
    else:
        low, high = (torch.full((), float(limit), dtype=values.dtype, device=values.device) for limit in (min, max))
    is_one = low == high
    low, high = torch.where(is_one, low - 1, low), torch.where(is_one, high + 1, high)
    place = ((values - low) * bins / (high - low)).nan_to_num(0).to(torch.int64).clamp(0, bins - 1)
    return values.new_zeros(bins).scatter_add(0, place, ((values >= low) & (values <= high)).to(values.dtype))


def _logit(x: torch.Tensor, eps: float | None = None) -> torch.Tensor:
    x = x if eps is None else x.clamp(eps, 1 - eps)
    return (x / (1 - x)).log()


def _xlogy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(y.isnan(), y, torch.where(x == 0, 0.0, x * y.log()))


def _logarithm(base: float) -> Callable[..., Any]:
    """A logarithm that is exact for powers of its base, as torch's is; a quotient of natural ones is not."""

    def logarithm(x: torch.Tensor) -> torch.Tensor:
        value = x.log() / math.log(base)
        whole = value.round()
        return torch.where(base**whole == x, whole, value)

    return logarithm


# Systems of linear equations with few unknowns, whose elimination is written out step by step. Where torch raises, for
# matrices that are singular or not positive definite, there are infinities or NaN. Matrices that are larger, or have a
# size that varies, stay without a translation.

# Each row adds about a dozen operators to the graph.
_LARGEST = 32


def _is_small(matrix: torch.Tensor) -> bool:
    size = matrix.shape[-1]
    return isinstance(size, int) and 0 < size <= _LARGEST and not matrix.is_complex()


def _eliminated(matrix: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The solution by Gauss and Jordan, the pivots, and for each of them -1 if rows were swapped, otherwise 1."""
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
    return _eliminated(*_broadcast(matrix, right))[0]


def _broadcast(matrix: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch = torch.broadcast_shapes(matrix.shape[:-2], right.shape[:-2])
    return matrix.expand(*batch, *matrix.shape[-2:]), right.expand(*batch, *right.shape[-2:])


def _inverse(matrix: torch.Tensor) -> Any:
    if not _is_small(matrix):
        return NotImplemented
    return _eliminated(matrix, torch.eye(matrix.shape[-1], dtype=matrix.dtype).expand(matrix.shape))[0]


def _slogdet(matrix: torch.Tensor) -> Any:
    if not _is_small(matrix):
        return NotImplemented
    _, pivots, signs = _eliminated(matrix, matrix[..., :0])
    is_singular = (pivots == 0).any(-1)  # the next pivots are not numbers
    sign, size = (pivots.sign() * signs).prod(-1), pivots.abs().log().sum(-1)
    return torch.where(is_singular, 0.0, sign), torch.where(is_singular, -math.inf, size)


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
    matrix, right = _broadcast(matrix, right)
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


def _cholesky_inverse(factor: torch.Tensor, upper: bool = False) -> Any:
    return _cholesky_solve(torch.eye(factor.shape[-1], dtype=factor.dtype), factor, upper)


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that also returns where it failed, as functions with a name like ``inv_ex`` do.

    torch numbers the pivot that is 0; the function has other results than numbers there.
    """

    def checked(matrix: torch.Tensor, *rest: Any, check_errors: bool = False, **options: Any) -> Any:
        found = NotImplemented if check_errors else function(matrix, *rest, **options)
        if found is NotImplemented or found.shape[: matrix.ndim - 2] != matrix.shape[:-2]:
            return NotImplemented
        fails = found.isfinite().logical_not()
        while fails.ndim > matrix.ndim - 2:
            fails = fails.any(-1)
        return found, fails.to(torch.int32)

    return checked


def _qr(matrix: torch.Tensor, mode: str = "reduced") -> Any:
    """Householder's reflections, with the signs of LAPACK, which reflects no column that has zeros below already."""
    rows, columns = matrix.shape[-2:]
    count = min(rows, columns) if isinstance(rows, int) and isinstance(columns, int) else 0
    if not 0 < count <= _LARGEST or matrix.is_complex():
        return NotImplemented
    order = torch.arange(rows)
    left = torch.eye(rows, dtype=matrix.dtype).expand(*matrix.shape[:-2], rows, rows)
    for k in range(count):
        column = torch.where(order >= k, matrix[..., k], 0.0)
        length, first = column.square().sum(-1, keepdim=True).sqrt(), column[..., k, None]
        vector = column + torch.where(order == k, torch.where(first < 0, -length, length), 0.0)
        is_reflected = ((order > k) & (column != 0)).any(-1, keepdim=True)
        scaled = torch.where(is_reflected, 2 / vector.square().sum(-1, keepdim=True), 0.0) * vector
        matrix = matrix - scaled[..., :, None] * (vector[..., None, :] @ matrix)
        left = left - (left @ vector[..., :, None]) * scaled[..., None, :]
    upper = matrix.triu()
    if mode == "complete":
        return left, upper
    return left[..., :count] if mode == "reduced" else matrix.new_zeros(0), upper[..., :count, :]


SPECIAL_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    aten.copysign.Scalar: _copysign,
    aten.copysign.Tensor: _copysign,
    aten.digamma.default: _in_double(_digamma),
    aten.erfinv.default: _in_double(_erfinv, 4),
    aten.fmax.default: lambda x, y: _unless_nan(x, y, torch.maximum(x, y)),
    aten.fmin.default: lambda x, y: _unless_nan(x, y, torch.minimum(x, y)),
    aten.hypot.default: _hypot,
    aten.histc.default: _histc,
    aten.lgamma.default: _in_double(_lgamma),
    aten.log10.default: _in_double(_logarithm(10.0)),
    aten.log2.default: _in_double(_logarithm(2.0)),
    aten.logit.default: _logit,
    aten.xlogy.Tensor: _xlogy,
    aten.special_erfcx.default: _in_double(_erfcx, 4),
    aten.special_log_ndtr.default: _in_double(_log_ndtr, 4),
    aten.special_ndtri.default: _in_double(lambda x: _quantile(x - 0.5, torch.minimum(x, 1 - x)), 4),
    aten.cholesky.default: lambda matrix, upper=False: _cholesky(matrix, upper=upper),
    aten.cholesky_inverse.default: _cholesky_inverse,
    aten.cholesky_solve.default: _cholesky_solve,
    aten.linalg_cholesky.default: _cholesky,
    aten.linalg_cholesky_ex.default: _checked(_cholesky),
    aten.linalg_inv.default: _inverse,
    aten.linalg_inv_ex.default: _checked(_inverse),
    aten.linalg_qr.default: _qr,
    aten.linalg_slogdet.default: _slogdet,
    aten.linalg_solve.default: _solve,
    aten.linalg_solve_ex.default: _checked(_solve),
    aten.linalg_solve_triangular.default: _solve_triangular,
    aten.logdet.default: _logdet,
}
_OTHER_NAMES = {
    aten.inverse.default: aten.linalg_inv.default,
    aten.special_digamma.default: aten.digamma.default,
    aten.special_erfinv.default: aten.erfinv.default,
    aten.special_gammaln.default: aten.lgamma.default,
    aten.special_logit.default: aten.logit.default,
    aten.special_xlogy.default: aten.xlogy.Tensor,
}
SPECIAL_FUNCTIONS |= {other: SPECIAL_FUNCTIONS[name] for other, name in _OTHER_NAMES.items()}
