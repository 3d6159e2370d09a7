"""Bounds on the difference of results that count as equal; they depend on the values.

A bound is relative to the scale of the values around an element. `rounding_bound` allows for the rounding errors of
well-conditioned code, and a proof measures what a model adds to them (`exportkit.proof.leeway`). `usual_bound` is for
questions where nothing is measured, such as whether outputs repeat with the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from exportkit.trees.tree import is_inexact

# The rounding errors, in units of the dtype, that a model on two sets of kernels may make, relative to the local scale.
# docs/proof.rst has the largest that were measured: 26 for layers of torch.nn, 55 for models of transformers.
_ROUNDINGS = 64.0
# ONNX stores attributes (an epsilon, the scale of attention) in float32, whose error float64 code keeps: this part of
# the scale is a 64th of the bound.
_ATTRIBUTES = 2.0**-27
# The largest relative difference by dtype that can count as rounding. Integers and booleans have none.
_USUAL = {
    torch.float64: 1e-6, torch.complex128: 1e-6,
    torch.float32: 1e-3, torch.complex64: 1e-3,
    torch.float16: 1e-2, torch.complex32: 1e-2,
    torch.bfloat16: 3e-2,
}  # fmt: skip
# Relative and absolute tolerance for two pieces of eager code that run the same kernels: the defaults of
# torch.testing.assert_close.
_SAME_KERNELS = {
    torch.float16: (1e-3, 1e-5), torch.complex32: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float64: (1e-7, 1e-7), torch.complex128: (1e-7, 1e-7),
}  # fmt: skip
_SAME_KERNELS_DEFAULT = (1.3e-6, 1e-5)
# With fewer elements at an index of an axis, their mean says little about the scale there.
_FEWEST = 8

HALF = (torch.float16, torch.bfloat16)

# The largest difference that each element of a tensor of numbers may have, ready to broadcast.
Bound = Callable[[torch.Tensor], torch.Tensor]


def local_scale(sizes: torch.Tensor) -> torch.Tensor:
    """Returns the scale of the values around each element, ready to broadcast.

    It is the root mean square of all elements that have the same index along an axis, the smallest one over the axes:
    a matrix with pixels in one column and probabilities in another, or with a large row and a small one, has a
    scale for each. Not less than the magnitude of the element itself.

    Args:
        sizes: Magnitudes of the values, as `magnitudes` returns them.
    """
    top = sizes.max().clamp_min(torch.finfo(torch.float64).tiny) if sizes.numel() else 1.0
    squares = (sizes / top).square()
    scales = [mean.sqrt() * top for mean in index_means(squares)]
    scale = scales[0] if scales else squares.mean().sqrt() * top
    for other in scales[1:]:
        scale = torch.minimum(scale, other)
    return torch.maximum(sizes, scale)


def index_means(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the means of the elements that have the same index along an axis, for each axis with enough of them."""
    for axis, size in enumerate(values.shape):
        if size > 1 and values.numel() >= _FEWEST * size:
            yield values.mean([other for other in range(values.ndim) if other != axis], keepdim=True)


def magnitudes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns absolute values as float64; 0 for NaN and infinities."""
    sizes = (tensor if tensor.is_complex() else tensor.to(torch.float64)).abs().to(torch.float64)
    return sizes.nan_to_num(nan=0.0, posinf=0.0)


def rounding_bound(expected: torch.Tensor, times: float = 1.0) -> torch.Tensor:
    """Returns how far rounding alone may move each element of a result, if it is well conditioned.

    Args:
        expected: The result.
        times: A factor, for results that were rounded on other machines.
    """
    if not is_inexact(expected):
        return torch.zeros((), dtype=torch.float64)
    info, sizes = torch.finfo(expected.dtype), magnitudes(expected)
    unit, largest = info.eps / 2, sizes.max().item() if sizes.numel() else 0.0
    relative = min(times * _ROUNDINGS * max(unit, _ATTRIBUTES), _usual(expected.dtype))
    # Denormals are rounded in absolute steps, and flushed to zero by some kernels (those of float16 are not). Sigmoids
    # and exponentials that end at a limit are 0 where torch still has 1e-27.
    least = max(_ROUNDINGS * info.smallest_normal * info.eps, min(info.smallest_normal, 2.0**-100))
    return relative * local_scale(sizes) + max(times * least, relative * unit * largest)


def usual_bound(expected: torch.Tensor) -> torch.Tensor:
    """Returns how far each element of a result may be off if its rounding error was not measured."""
    if not is_inexact(expected):
        return torch.zeros((), dtype=torch.float64)
    return torch.maximum(_usual(expected.dtype) * local_scale(magnitudes(expected)), rounding_bound(expected))


def half_bound(expected: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns how far each element of a result may be off at most if it was computed in half precision.

    That is 64 rounding errors, where `usual_bound` allows for less: models of a few layers move by more than that.

    Args:
        expected: The result, of any dtype.
        dtype: The dtype in half precision.
    """
    usual = usual_bound(expected)
    if not is_inexact(expected):
        return usual
    return torch.maximum(usual, _ROUNDINGS * torch.finfo(dtype).eps / 2 * local_scale(magnitudes(expected)))


def _usual(dtype: torch.dtype) -> float:
    return _USUAL.get(dtype, 1e-3)


def fixed_bound(relative: float, absolute: float) -> Bound:
    """Returns the bound ``absolute + relative * |expected|``."""
    return lambda expected: absolute + relative * magnitudes(expected)


def same_kernels_tolerance(dtype: torch.dtype) -> tuple[float, float]:
    """Returns the relative and the absolute tolerance for two results of eager PyTorch; integers have none."""
    if not dtype.is_floating_point and not dtype.is_complex:
        return 0.0, 0.0
    return _SAME_KERNELS.get(dtype, _SAME_KERNELS_DEFAULT)
