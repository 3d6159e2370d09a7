"""Are two outputs of the same model the same, but for the order in which kernels add up?"""

from __future__ import annotations

from collections.abc import Mapping

import torch

# Relative and absolute tolerance by element type, for one model run in two ways.
_TOLERANCES = {torch.float64: (1e-6, 1e-8), torch.float16: (1e-2, 1e-2), torch.bfloat16: (3e-2, 3e-2)}
_DEFAULT = (1e-3, 1e-4)


def tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """Returns the relative and the absolute tolerance for values of that type; exact ones have none."""
    if not dtype.is_floating_point and not dtype.is_complex:
        return 0.0, 0.0
    return _TOLERANCES.get(dtype, _DEFAULT)


def close(expected: torch.Tensor, got: torch.Tensor) -> bool:
    """Returns whether two tensors have one shape and type, and values within tolerance; NaN equals NaN only."""
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    rtol, atol = tolerances(expected.dtype)
    if not rtol:
        return torch.equal(expected, got)
    wide = torch.complex128 if expected.is_complex() else torch.float64
    return torch.allclose(expected.to(wide), got.to(wide), rtol=rtol, atol=atol, equal_nan=True)


def outputs_close(expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor]) -> bool:
    """Returns whether two calls returned the same tensors at the same paths."""
    return expected.keys() == got.keys() and all(close(expected[path], got[path]) for path in expected)
