"""How far two tensors are apart. In come two tensors, or what two traces say of them; out goes a `Distance`.

It is relative to the scale of the first one, so that it means the same at every layer and for every element type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from exportkit.module_traces.records import TensorRecord

# Elements that are worked on at a time: what is computed of them stays in the caches of a processor.
_CHUNK = 1 << 16
# Types that torch does not compute with.
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
# A mask holds the lowest value of its type, another one that of another type: both mean "hidden".
_LOWEST = 0.5
# Sums of the same numbers in another order, in single precision, differ by less than this part of them.
_SAME_SUM = 1e-7
# Elements that are computed alike are at most this many rounding errors apart, as a root mean square.
_SAME_ELEMENTS = 32.0
# What torch rounds the factors of a product to where a GPU may use TF32 (10 bits).
TF32_UNIT = 2.0**-11


@dataclass(frozen=True)
class Distance:
    """How far two tensors are apart.

    Attributes:
        rms: Root mean square of the difference, relative to that of the first tensor; 0 where they are bitwise equal.
        peak: Largest difference, relative to the same scale.
        largest: Largest difference.
        spread: Like ``rms``, relative to the standard deviation: what is left of the precision once a mean is removed.
        exact: Whether every element is equal.
        values: Whether values were compared, and not statistics alone.
        reordered: Whether the elements are the same in another order, or the statistics, where nothing else was
            compared, can be those of such.
        problem: Why there is nothing to measure, such as another shape; None where there is.
    """

    rms: float = 0.0
    peak: float = 0.0
    largest: float = 0.0
    spread: float = 0.0
    exact: bool = True
    values: bool = True
    reordered: bool = False
    problem: str | None = None


def distance(first: torch.Tensor, second: torch.Tensor, visible: torch.Tensor | None = None) -> Distance:
    """Returns how far the second tensor is from the first one.

    Element types may differ. NaN equals NaN, and an infinity the same infinity. The lowest finite value of a type, as
    in masks, counts as an infinity.

    Args:
        first: What is taken for right.
        second: What is compared with it.
        visible: Booleans that broadcast to the shape; other elements are not compared.
    """
    a, b = _plain(first), _plain(second)
    if a.shape != b.shape:
        return _misshapen(tuple(a.shape), tuple(b.shape))
    if a.numel() == 0:
        return Distance()
    if visible is not None:
        visible = visible.expand(a.shape)
        a, b = a[visible], b[visible]
        if a.numel() == 0:
            return Distance()
    if a.dtype == b.dtype and torch.equal(a, b):
        return Distance()
    if not a.is_floating_point() and not b.is_floating_point():
        return _of_integers(a, b)
    return _of_floats(a, b)


def located(first: torch.Tensor, second: torch.Tensor, visible: torch.Tensor | None = None) -> tuple[int, ...] | None:
    """Returns the position of the largest difference, or None where there is none."""
    a, b = _plain(first).to(torch.float64), _plain(second).to(torch.float64)
    if a.shape != b.shape or a.numel() == 0 or a.ndim == 0:
        return None
    far = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).nan_to_num(nan=math.inf)
    if visible is not None:
        far = far.where(visible, 0.0)
    position = torch.unravel_index(far.argmax(), a.shape)
    return tuple(int(i) for i in position) if bool(far.max() > 0) else None


def is_reordered(first: torch.Tensor, second: torch.Tensor, visible: torch.Tensor | None = None) -> bool:
    """Returns whether a tensor has the elements of another one in another order, up to rounding.

    Args:
        first: What is taken for right.
        second: A tensor of the same shape.
        visible: Booleans that broadcast to the shape; other elements are not compared.
    """
    a, b = _plain(first), _plain(second)
    if visible is not None:
        visible = visible.expand(a.shape)
        a, b = a[visible], b[visible]
    limit = _SAME_ELEMENTS * max(unit_of(str(a.dtype)), unit_of(str(b.dtype)))
    lengths = [values.to(torch.float64).square().sum().sqrt().item() for values in (a, b)]
    if abs(lengths[0] - lengths[1]) > 2 * limit * max(lengths):  # other elements; to sort them would take long
        return False
    return distance(a.reshape(-1).sort().values, b.reshape(-1).sort().values).rms <= limit


def distance_of_statistics(first: TensorRecord, second: TensorRecord) -> Distance:
    """Returns how far two tensors are apart at least, by what traces say of them without their values.

    Tensors whose statistics agree can still differ: then ``exact`` is False, and the distance 0.
    """
    if first.shape != second.shape:
        return _misshapen(tuple(first.shape), tuple(second.shape), values=False)
    if same_content(first, second) or (not first.hash and not second.hash):  # on meta there is nothing to compare
        return Distance(values=False)
    if (first.nan, first.inf) != (second.nan, second.inf):
        return Distance(math.inf, math.inf, math.inf, exact=False, values=False)
    pairs = [(getattr(first, name), getattr(second, name)) for name in ("mean", "std", "min", "max")]
    if any(value is None for pair in pairs for value in pair):
        return Distance(exact=False, values=False)
    mean, std, low, high = (abs(a - b) if a != b else 0.0 for a, b in pairs)
    scale = math.hypot(first.mean or 0.0, first.std or 0.0)
    far, moved = max(mean, std), max(low, high)
    same = first.dtype == second.dtype and moved == 0.0 and far <= _SAME_SUM * scale
    return Distance(
        _ratio(far, scale),
        _ratio(max(far, moved), scale),
        max(far, moved),
        spread=_ratio(far, first.std or 0.0),
        exact=False,
        values=False,
        reordered=same and math.prod(first.shape) > 1,
    )


def same_content(first: TensorRecord, second: TensorRecord) -> bool:
    """Returns whether two tensors are bitwise equal, by their hashes."""
    return bool(first.hash) and first.hash == second.hash and first.dtype == second.dtype


def unit_of(dtype: str) -> float:
    """Returns the relative error that rounding to an element type makes; 0 for integers.

    Args:
        dtype: Name of the type, with or without ``torch.``.
    """
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not (found.is_floating_point or found.is_complex):
        return 0.0
    return float(torch.finfo(found).eps) / 2


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as strided numbers on the CPU that can be subtracted from each other."""
    tensor = tensor.detach()
    if tensor.is_nested:
        tensor = torch.cat([part.reshape(-1) for part in tensor.unbind()])
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.to(torch.promote_types(tensor.dtype, torch.complex64)))
    if tensor.is_floating_point() and tensor.itemsize == 1:
        return tensor.to(torch.float32)
    return tensor.to(torch.int64) if tensor.dtype in _UNSIGNED else tensor


def _of_integers(a: torch.Tensor, b: torch.Tensor) -> Distance:
    """Integers are equal or not: the distance is the part of them that is not."""
    wrong = a != b
    share = wrong.sum().item() / a.numel()
    far = (a.to(torch.float64) - b.to(torch.float64)).abs().max().item()
    return Distance(share, 1.0 if share else 0.0, far, share, not share)


def _of_floats(a: torch.Tensor, b: torch.Tensor) -> Distance:
    wide = torch.promote_types(a.dtype, b.dtype)
    wide = wide if wide.itemsize >= 4 and wide.is_floating_point else torch.float32
    parts = [_sums(x, y, wide) for x, y in zip(_chunks(a), _chunks(b), strict=True)]
    total, squares, apart, largest = (float(v) for v in _combined(parts))
    if not math.isfinite(squares + apart + total):
        return _of_unusual(a, b)
    count = a.numel()
    rms_scale = math.sqrt(squares / count)
    deviation = math.sqrt(max(squares / count - (total / count) ** 2, 0.0))
    far = math.sqrt(apart / count)
    return Distance(_ratio(far, rms_scale), _ratio(largest, rms_scale), largest, _ratio(far, deviation), largest == 0.0)


def _chunks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    chunks: tuple[torch.Tensor, ...] = tensor.reshape(-1).split(_CHUNK)
    return chunks


def _sums(a: torch.Tensor, b: torch.Tensor, wide: torch.dtype) -> tuple[float, float, float, float]:
    """Sum and sum of squares of the first, sum of squares and largest of the differences."""
    a, b = a.to(wide), b.to(wide)
    apart = a - b
    low, high = torch.aminmax(apart)
    return (
        a.sum().item(),
        torch.dot(a, a).item(),
        torch.dot(apart, apart).item(),
        max(abs(low.item()), abs(high.item())),
    )


def _combined(parts: list[tuple[float, float, float, float]]) -> tuple[float, float, float, float]:
    totals, squares, apart, largest = zip(*parts, strict=True)
    return math.fsum(totals), math.fsum(squares), math.fsum(apart), max(largest)


def _of_unusual(a: torch.Tensor, b: torch.Tensor) -> Distance:
    """Of tensors with NaN, infinities, or values whose squares are none."""
    exact = bool(((a == b) | (a.isnan() & b.isnan())).all())
    a, b = (_infinite(tensor) for tensor in (a, b))
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return Distance(exact=exact)
    usual = a.isfinite() & b.isfinite()
    if not bool((same | usual).all()):
        return Distance(math.inf, math.inf, math.inf, math.inf, False)
    a, b = a[usual], b[usual]
    top = a.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    scale = (a / top).square().mean().sqrt() * top
    apart = (a - b).abs()
    largest = apart.max().item()
    far = largest and ((apart / largest).square().mean().sqrt() * largest).item()
    deviation = ((a / top).std(correction=0) * top).item()
    return Distance(_ratio(far, scale.item()), _ratio(largest, scale.item()), largest, _ratio(far, deviation), False)


def _infinite(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.to(torch.float64)
    if not tensor.is_floating_point():
        return wide
    limit = torch.finfo(tensor.dtype).max * _LOWEST
    return wide.where(wide.abs() < limit, wide.sign() * math.inf).where(~wide.isnan(), math.nan)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else (math.inf if part > 0 else 0.0)


def _misshapen(first: tuple[int, ...], second: tuple[int, ...], values: bool = True) -> Distance:
    problem = f"shape {second} instead of {first}"
    return Distance(math.inf, math.inf, math.inf, exact=False, values=values, problem=problem)
