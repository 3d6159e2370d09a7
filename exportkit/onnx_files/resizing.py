"""Resized images and sequences in ONNX, with the sizes and pixels that torch computes.

``Resize`` multiplies sizes in single precision, so that 0.7 times 90 is 63 instead of 62, and takes other neighbours
where a quotient is close to a whole number: of 49 pixels resized to 7, it takes the sixth for the seventh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir
import torch

from exportkit._torch_compat.graph import BICUBIC_ANTIALIASED, BILINEAR_ANTIALIASED, NEAREST_EXACT
from exportkit.onnx_files.constants import constant, ints, op

aten = torch.ops.aten

_FLOAT, _DOUBLE, _INT = onnx_ir.DataType.FLOAT, onnx_ir.DataType.DOUBLE, onnx_ir.DataType.INT64
_NEXT = 2.0**-23  # one or two units in the last place of single precision
_IMAGE_RANK = 4
# Factors by which single precision multiplies all sizes exactly, and that leave no size of several pixels as it is.
_PLAIN_FACTORS = frozenset([1.0, *(0.5**power for power in range(1, 9)), *(half / 2 for half in range(3, 33))])


def _length(x: Any, axis: int) -> Any:
    """The size of an axis, as a tensor with one element."""
    return op.Shape(x, start=axis, end=axis + 1)


def _scaled_length(length: Any, factor: float) -> Any:
    product = op.Mul(op.Cast(length, to=_DOUBLE), constant([factor], _DOUBLE))
    return op.Cast(op.Floor(product), to=_INT)


def _given_length(sizes: Any, position: int) -> Any:
    if isinstance(sizes, onnx_ir.Value):
        return op.Slice(sizes, *(ints(limit) for limit in (position, position + 1)))
    size = sizes[position]
    return ints(size) if isinstance(size, int) else op.Reshape(size, ints(1))


# The nearest pixel.


def _nearest(exact: bool) -> Callable[..., Any]:
    """The form of nearest-neighbour resizing; ``exact`` compares the centres of pixels, as ``nearest-exact`` does."""

    def form(x: Any, sizes: Any = None, factors: Sequence[float] | None = None) -> Any:
        rank = len(x.shape)
        if factors is not None and not exact and _PLAIN_FACTORS.issuperset(factors) and _powers_of_two(factors):
            scales = op.Constant(value_floats=[1.0, 1.0, *factors])
            mode = "asymmetric"
            return op.Resize(x, None, scales, mode="nearest", coordinate_transformation_mode=mode, nearest_mode="floor")
        wide = x.dtype == _DOUBLE and rank != _IMAGE_RANK
        for axis in reversed(range(2, rank)):
            factor = None if factors is None else factors[axis - 2]
            length = _length(x, axis)
            wanted = _given_length(sizes, axis - 2) if factor is None else _scaled_length(length, factor)
            places = _places(length, wanted, factor, exact, wide, rank)
            x = op.Gather(x, places, axis=axis)
        return x

    return form


def _powers_of_two(factors: Sequence[float]) -> bool:
    return all(float(factor).hex().startswith("0x1.0000000000000p") for factor in factors)


def _places(length: Any, wanted: Any, factor: float | None, exact: bool, wide: bool, rank: int) -> Any:
    """The index of the pixel that each new one is. Images have a kernel of their own in torch."""
    zero, one = (constant(number, _INT) for number in (0, 1))
    new = op.Range(zero, op.Squeeze(wanted), one)
    dtype = _DOUBLE if wide else _FLOAT
    if factor is None:
        step = op.Div(op.Cast(length, to=dtype), op.Cast(wanted, to=dtype))
    else:
        step = constant([1 / factor], dtype)
    half = constant(0.5, dtype)
    place = op.Cast(new, to=dtype)
    if exact and rank != _IMAGE_RANK and not wide:  # one half is taken off and added again, fused with the product
        half = constant(0.5, _DOUBLE)
        centre = op.Mul(op.Cast(step, to=_DOUBLE), op.Add(op.Cast(new, to=_DOUBLE), half))
        place = op.Add(op.Cast(op.Sub(centre, half), to=_FLOAT), constant(0.5, _FLOAT))
    else:
        place = op.Mul(op.Add(place, half) if exact else place, step)
    found = op.Cast(op.Floor(op.Cast(place, to=_FLOAT)), to=_INT)
    if factor is not None and not exact and rank == _IMAGE_RANK:  # the same size, and twice the size, are exact
        found = op.Where(op.Equal(wanted, op.Add(length, length)), op.Div(new, constant(2, _INT)), found)
        found = op.Where(op.Equal(wanted, length), new, found)
    return op.Min(found, op.Sub(length, one))


# Between pixels.


def _smooth(mode: str, antialias: bool = False) -> Callable[..., Any]:
    def form(x: Any, sizes: Any, align_corners: bool, factors: Sequence[float] | None = None) -> Any:
        options = {
            "mode": mode,
            "coordinate_transformation_mode": "align_corners" if align_corners else "half_pixel",
            "cubic_coeff_a": -0.5 if antialias else -0.75,
            "antialias": int(antialias),
            "exclude_outside": int(antialias),
        }
        axes = range(2, len(x.shape))
        if x.dtype != onnx_ir.DataType.UINT8:
            return _resized(x, axes, sizes, factors, options)
        half, least, most = (constant(value, _FLOAT) for value in (0.5, 0, 255))
        found, dtype = op.Cast(x, to=_FLOAT), x.dtype
        for axis in reversed(axes):  # torch resizes bytes axis by axis, and rounds after each
            found = op.Floor(op.Add(_resized(found, axes, sizes, factors, options, axis), half))
            found = op.Clip(found, least, most)
        return op.Cast(found, to=dtype)

    return form


def _resized(
    x: Any, axes: range, sizes: Any, factors: Sequence[float] | None, options: dict[str, Any], only: int | None = None
) -> Any:
    """A tensor that is resized along all of these axes, or along only one of them."""
    factors = factors and [by if only in (None, axis) else 1.0 for axis, by in zip(axes, factors, strict=True)]
    if factors is None:
        lengths = [_given_length(sizes, axis - 2) if only in (None, axis) else _length(x, axis) for axis in axes]
        return op.Resize(x, None, None, op.Concat(op.Shape(x, end=2), *lengths, axis=0), **options)
    if _PLAIN_FACTORS.issuperset(factors):
        return op.Resize(x, None, op.Constant(value_floats=[1.0, 1.0, *factors]), **options)
    scales = [_scale(_length(x, axis), by, options["mode"] == "linear") for axis, by in zip(axes, factors, strict=True)]
    return op.Resize(x, None, op.Concat(op.Constant(value_floats=[1.0, 1.0]), *scales, axis=0), **options)


def _scale(length: Any, factor: float, keeps_size: bool) -> Any:
    """A factor, so little larger or smaller that single precision gives the size that double precision gives.

    Args:
        length: The size.
        factor: The factor.
        keeps_size: Whether an axis that keeps its size stays as it is.
    """
    wanted = _scaled_length(length, factor)
    below, scale, above = (constant([factor * (1 + by)], _FLOAT) for by in (-_NEXT, 0, _NEXT))
    rounded = op.Cast(op.Floor(op.Mul(op.Cast(length, to=_FLOAT), scale)), to=_INT)
    found = op.Where(op.Less(rounded, wanted), above, op.Where(op.Greater(rounded, wanted), below, scale))
    return op.Where(op.Equal(wanted, length), constant([1.0], _FLOAT), found) if keeps_size else found


RESIZING: dict[Any, Callable[..., Any]] = {
    aten.upsample_nearest1d.vec: _nearest(exact=False),
    aten.upsample_nearest2d.vec: _nearest(exact=False),
    aten.upsample_nearest3d.vec: _nearest(exact=False),
    **dict.fromkeys(NEAREST_EXACT, _nearest(exact=True)),
    aten.upsample_linear1d.vec: _smooth("linear"),
    aten.upsample_bilinear2d.vec: _smooth("linear"),
    aten.upsample_trilinear3d.vec: _smooth("linear"),
    aten.upsample_bicubic2d.vec: _smooth("cubic"),
    BILINEAR_ANTIALIASED: _smooth("linear", antialias=True),
    BICUBIC_ANTIALIASED: _smooth("cubic", antialias=True),
}
