"""Compares tensors and outputs: the one place that decides what is compared, what counts as equal, and how far it is.

There are two measures. A `Difference` is about elements: the largest and the worst one, and whether all of them are
within a bound. A `Distance` is about whole tensors, relative to the scale of the first one, so that it means the
same at every layer and for every dtype. Both follow one rule for special values: NaN equals NaN, an infinity equals
the same infinity, and nothing else equals either.

Bounds follow the numbers, see `exportkit.running.bounds`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from exportkit.running.bounds import Bound, magnitudes, usual_bound
from exportkit.trees.tree import dtype_name

# Elements that are measured at a time: what is computed from them stays in the caches of a processor.
_CHUNK = 1 << 16
# Unsigned dtypes that torch stores but does not compute with.
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
# A mask hides by the lowest value of its dtype, which differs between dtypes. So values beyond this part of the largest
# one count as infinite.
_LOWEST = 0.5
# Elements that are computed in the same way are at most this many rounding errors apart, as a root mean square.
_SAME_ELEMENTS = 32.0
# What torch rounds the factors of a product to where a GPU may use TF32 (10 bits).
TF32_UNIT = 2.0**-11

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """How far the elements of two tensors are apart.

    Attributes:
        path: Path of the output leaf.
        reason: Why they count as different, or None where they agree.
        absolute: Largest absolute difference; NaN where there is nothing to compare.
        relative: Largest difference relative to the expected value.
        index: Where the largest difference is, or the one that exceeds the bound most.
        left_out: Number of elements that say nothing, because the model's own result is arbitrary there.
    """

    path: str
    reason: str | None
    absolute: float = 0.0
    relative: float = 0.0
    index: tuple[int, ...] = ()
    left_out: int = 0


@dataclass(frozen=True)
class Distance:
    """How far two tensors are apart as a whole.

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


def compare_tensors(
    path: str,
    expected: torch.Tensor,
    got: torch.Tensor,
    visible: torch.Tensor | None = None,
    *,
    bound: Bound = usual_bound,
    leeway: torch.Tensor | None = None,
    most: Bound = usual_bound,
    offset: float = 0.0,
) -> Difference:
    """Returns how far ``got`` is from ``expected``.

    Shapes and dtypes must be equal, and every element within the bound.

    Args:
        path: Path of the output leaf.
        expected: What the model returned.
        got: What is compared with it.
        visible: Booleans that broadcast to the shape; values elsewhere are not compared.
        bound: How far each element may be off.
        leeway: How far each element may be off by what was measured, ready to broadcast. It widens the bound;
            elements with more than ``most`` say nothing, and a tensor that has only such elements is not equal.
        most: The largest leeway of elements that are compared.
        offset: Is added to the expected value where the difference is divided by it.
    """
    if expected.shape != got.shape:
        return Difference(path, f"shape {tuple(got.shape)} instead of {tuple(expected.shape)}", math.nan)
    if expected.dtype != got.dtype:
        types = [dtype_name(tensor.dtype) for tensor in (got, expected)]
        return Difference(path, f"dtype {types[0]} instead of {types[1]}", math.nan)
    a, b = _numbers(expected), _numbers(got)
    if a.shape == b.shape and torch.equal(a, b):
        return Difference(path, None)
    apart = elements_apart(a, b, visible)
    share = (apart / (magnitudes(a) + offset)).where(apart > 0, 0.0).max().item()
    allowed, left_out, reason = bound(a).expand(a.shape), 0, None
    if leeway is not None:
        leeway = leeway.cpu()
        unknown = (leeway > most(a)).expand(a.shape)
        left_out = int(unknown.sum())
        if left_out == a.numel() and bool((apart > allowed).any()):
            reason = "nothing can be compared: the model's own result is arbitrary here"
        allowed = torch.maximum(allowed, leeway)
    wrong, (largest, place) = apart > allowed, _largest(apart)
    if not bool(wrong.any()):
        return Difference(path, reason, largest, share, place, left_out)
    _, worst = _largest(torch.where(wrong, apart - allowed, -1.0))
    reason = f"{a[worst].item():.6g} became {b[worst].item():.6g} at {list(worst)}"
    return Difference(path, reason, largest, share, worst, left_out)


def compare_outputs(
    expected: Tensors,
    got: Tensors,
    exactly: bool = False,
    bound: Bound = usual_bound,
    leeway: Tensors | None = None,
    most: Bound = usual_bound,
) -> Iterator[Difference]:
    """Yields a difference for each output, in order.

    Args:
        expected: What the model returned, by path.
        got: What is compared with it, by path.
        exactly: Whether an output that only ``got`` has is a difference too.
        bound: How far each element may be off.
        leeway: How far the elements of some outputs were measured to move, by path; see `compare_tensors`.
        most: The largest leeway of elements that are compared.
    """
    for path, tensor in expected.items():
        if path not in got:
            yield Difference(path, "only the model returns it")
        else:
            yield compare_tensors(path, tensor, got[path], bound=bound, leeway=(leeway or {}).get(path), most=most)
    for path in got if exactly else ():
        if path not in expected:
            yield Difference(path, "only the graph returns it")


def close(expected: torch.Tensor, got: torch.Tensor) -> bool:
    """Returns whether two tensors have the same shape and dtype, and values within the usual bound."""
    return compare_tensors("", expected, got).reason is None


def outputs_close(expected: Tensors, got: Tensors) -> bool:
    """Returns whether each expected output is in ``got``, within the usual bound; ``got`` may hold more."""
    return all(difference.reason is None for difference in compare_outputs(expected, got))


def distance(first: torch.Tensor, second: torch.Tensor, visible: torch.Tensor | None = None) -> Distance:
    """Returns how far the second tensor is from the first one.

    Dtypes may differ. The lowest finite value of a dtype, as in masks, counts as an infinity.

    Args:
        first: What is taken for right.
        second: What is compared with it.
        visible: Booleans that broadcast to the shape; other elements are not compared.
    """
    a, b = _numbers(first), _numbers(second)
    if a.shape != b.shape:
        return misshapen(tuple(a.shape), tuple(b.shape))
    a, b = _elements(a, visible), _elements(b, visible)
    if a.numel() == 0 or (a.dtype == b.dtype and torch.equal(a, b)):
        return Distance()
    if a.is_complex() or b.is_complex():
        wide = torch.promote_types(a.dtype, b.dtype)
        a, b = torch.view_as_real(a.to(wide)), torch.view_as_real(b.to(wide))
    elif not a.is_floating_point() and not b.is_floating_point():  # equal or not: the distance is the share that is not
        wrong = (a != b).sum().item() / a.numel()
        far = (a.to(torch.float64) - b.to(torch.float64)).abs().max().item()
        return Distance(wrong, 1.0 if wrong else 0.0, far, wrong, not wrong)
    return _of_floats(a, b)


def same_value(first: Any, second: Any) -> bool:
    """Returns whether two values are the same: tensors, numbers and texts, lists and dicts of them; or one object."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.dtype == second.dtype and distance(first, second).exact
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same_value, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same_value(first[key], second[key]) for key in first)
    plain = isinstance(first, bool | int | float | str | set)
    return first is second or (plain and type(first) is type(second) and first == second)


def misshapen(first: tuple[int, ...], second: tuple[int, ...], values: bool = True) -> Distance:
    """Returns the distance of tensors of different shapes: there is nothing to measure."""
    problem = f"shape {second} instead of {first}"
    return Distance(math.inf, math.inf, math.inf, exact=False, values=values, problem=problem)


def position_of_largest(
    first: torch.Tensor, second: torch.Tensor, visible: torch.Tensor | None = None
) -> tuple[int, ...] | None:
    """Returns where the largest difference is, or None where there is none.

    Args:
        first: What is taken for right.
        second: What is compared with it.
        visible: Booleans that broadcast to the shape; other elements are not compared.
    """
    a, b = _numbers(first), _numbers(second)
    if a.shape != b.shape or a.numel() == 0 or a.ndim == 0:
        return None
    largest, position = _largest(elements_apart(a, b, visible))
    return position if largest > 0 else None


def is_reordered(first: torch.Tensor, second: torch.Tensor, visible: torch.Tensor | None) -> bool:
    """Returns whether two tensors have the same elements in different orders, up to rounding.

    Args:
        first: What is taken for right.
        second: A tensor of the same shape.
        visible: Booleans that broadcast to the shape; other elements are not compared.
    """
    a, b = (_elements(_numbers(tensor), visible).reshape(-1) for tensor in (first, second))
    limit = _SAME_ELEMENTS * max(unit_of(a.dtype), unit_of(b.dtype))
    if a.is_complex() or b.is_complex():
        a, b = (torch.view_as_real(tensor.to(torch.complex128)).reshape(-1) for tensor in (a, b))
    lengths = [values.to(torch.float64).square().sum().sqrt().item() for values in (a, b)]
    if abs(lengths[0] - lengths[1]) > 2 * limit * max(lengths):  # other elements; sorting them would take long
        return False
    return distance(a.sort().values, b.sort().values).rms <= limit


def ratio(part: float, whole: float) -> float:
    """Returns a part of a scale: 0 where both are 0, infinity where only the scale is."""
    return part / whole if whole > 0 else (math.inf if part > 0 else 0.0)


def unit_of(dtype: str | torch.dtype) -> float:
    """Returns the relative error that rounding to a dtype makes; 0 for integers.

    Args:
        dtype: The dtype, or its name with or without ``torch.``.
    """
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not (found.is_floating_point or found.is_complex):
        return 0.0
    return float(torch.finfo(found).eps) / 2


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as strided numbers on the CPU that can be subtracted from each other."""
    tensor = tensor.detach()
    if tensor.is_nested:
        tensor = torch.cat([part.reshape(-1) for part in tensor.unbind()])
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    if tensor.dtype is torch.complex32:
        return tensor.to(torch.complex64)
    if tensor.is_floating_point() and tensor.itemsize == 1:
        return tensor.to(torch.float32)
    return tensor.to(torch.int64) if tensor.dtype in _UNSIGNED else tensor


def _elements(tensor: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    return tensor if visible is None else tensor[visible.expand(tensor.shape)]


def elements_apart(a: torch.Tensor, b: torch.Tensor, visible: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the distance of each pair of elements: 0 where equal or hidden, infinite where only one is special."""
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    apart = (a.to(wide) - b.to(wide)).abs()
    are_integers = unit_of(a.dtype) == unit_of(b.dtype) == 0
    if visible is None and not are_integers and math.isfinite(apart.sum().item()):
        return apart
    same = (a == b) | (a.isnan() & b.isnan())
    if visible is not None:
        same = same | ~visible.cpu()
    apart = torch.where(apart.isnan(), math.inf, apart)
    if are_integers:  # large ones that differ may be equal as floats
        apart = apart.clamp_min(1.0)
    return torch.where(same, 0.0, apart)


def _largest(values: torch.Tensor) -> tuple[float, tuple[int, ...]]:
    """The largest element and its index; `torch.unravel_index` takes longer than the comparison."""
    value, position = values.reshape(-1).max(0)
    flat, found = int(position), list[int]()
    for size in reversed(values.shape):
        flat, index = divmod(flat, size)
        found.insert(0, index)
    return value.item(), tuple(found)


def _of_floats(a: torch.Tensor, b: torch.Tensor) -> Distance:
    wide = torch.promote_types(a.dtype, b.dtype)
    wide = wide if wide.itemsize >= 4 and wide.is_floating_point else torch.float32
    parts = []
    for chunk, other in zip(a.reshape(-1).split(_CHUNK), b.reshape(-1).split(_CHUNK), strict=True):
        x = chunk.to(wide)
        apart = x - other.to(wide)
        low, high = torch.aminmax(apart)
        sums = x.sum().item(), torch.dot(x, x).item(), torch.dot(apart, apart).item()
        parts.append((*sums, max(abs(low.item()), abs(high.item()))))
    totals, squares_of_parts, squares_apart, peaks = zip(*parts, strict=True)
    total, squares, far = math.fsum(totals), math.fsum(squares_of_parts), math.fsum(squares_apart)
    if not math.isfinite(squares + far + total):
        return _of_unusual(a, b)
    count, largest = a.numel(), max(peaks)
    scale, far = math.sqrt(squares / count), math.sqrt(far / count)
    deviation = math.sqrt(max(squares / count - (total / count) ** 2, 0.0))
    return Distance(ratio(far, scale), ratio(largest, scale), largest, ratio(far, deviation), largest == 0.0)


def _of_unusual(a: torch.Tensor, b: torch.Tensor) -> Distance:
    """The distance of tensors with NaN, infinities, or values whose squares overflow."""
    exact = not bool(elements_apart(a, b).any())
    a, b = _lowest_made_infinite(a), _lowest_made_infinite(b)
    apart = elements_apart(a, b)
    largest = apart.max().item()
    if largest == 0.0:
        return Distance(exact=exact)
    if math.isinf(largest):
        return Distance(math.inf, math.inf, math.inf, math.inf, False)
    usual = a.isfinite()
    a, apart = a[usual], apart[usual]
    top = a.abs().max().clamp_min(torch.finfo(torch.float64).tiny)  # divided by it, no square overflows
    scale = ((a / top).square().mean().sqrt() * top).item()
    deviation = ((a / top).std(correction=0) * top).item()
    far = ((apart / largest).square().mean().sqrt() * largest).item()
    return Distance(ratio(far, scale), ratio(largest, scale), largest, ratio(far, deviation), False)


def _lowest_made_infinite(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.to(torch.float64)
    if not tensor.is_floating_point():
        return wide
    limit = torch.finfo(tensor.dtype).max * _LOWEST
    return wide.where(wide.abs() < limit, wide.sign() * math.inf).where(~wide.isnan(), math.nan)
