"""Compares tensors and outputs: the one place that decides what is compared, what counts as equal, and how far it is.

There are two measures. A `Difference` is about elements: the largest and the worst one, and whether all of them are
within a tolerance. A `Distance` is about whole tensors, relative to the scale of the first one, so that it means the
same at every layer and for every dtype. Both follow one rule for special values: NaN equals NaN, an infinity equals
the same infinity, and nothing else equals either. Positions that an attention mask hides are left out, because what
a model computes at padding is arbitrary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

# Relative and absolute tolerance by dtype, for one model on two sets of kernels, which add up in different orders and
# fuse different operations. Integers and booleans have none.
_TOLERANCES = {torch.float64: (1e-6, 1e-8), torch.float16: (1e-2, 1e-2), torch.bfloat16: (3e-2, 3e-2)}
_DEFAULT = (1e-3, 1e-4)
# The same for two pieces of eager code that run the same kernels: the defaults of torch.testing.assert_close.
_SAME_KERNELS = {
    torch.float16: (1e-3, 1e-5), torch.complex32: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float64: (1e-7, 1e-7), torch.complex128: (1e-7, 1e-7),
}  # fmt: skip
_SAME_KERNELS_DEFAULT = (1.3e-6, 1e-5)
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
Visible = Callable[[str, torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True)
class Difference:
    """How far the elements of two tensors are apart.

    Attributes:
        path: Path of the output leaf.
        reason: Why they count as different, or None where they agree.
        absolute: Largest absolute difference; NaN where there is nothing to compare.
        relative: Largest difference relative to the expected value.
        index: Where the largest difference is, or the one that exceeds the tolerance most.
    """

    path: str
    reason: str | None
    absolute: float = 0.0
    relative: float = 0.0
    index: tuple[int, ...] = ()


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


def tolerances(dtype: torch.dtype, same_kernels: bool = False) -> tuple[float, float]:
    """Returns the relative and the absolute tolerance for values of a dtype; integers and booleans have none.

    Args:
        dtype: The dtype.
        same_kernels: Whether both results come from eager PyTorch, so that less may differ.
    """
    if not dtype.is_floating_point and not dtype.is_complex:
        return 0.0, 0.0
    if same_kernels:
        return _SAME_KERNELS.get(dtype, _SAME_KERNELS_DEFAULT)
    return _TOLERANCES.get(dtype, _DEFAULT)


def compare_tensors(
    path: str,
    expected: torch.Tensor,
    got: torch.Tensor,
    visible: torch.Tensor | None = None,
    tolerance: tuple[float, float] | None = None,
    offset: float = 0.0,
) -> Difference:
    """Returns how far ``got`` is from ``expected``.

    Shapes and dtypes must be equal, and every element within the tolerance: ``|expected - got| <= absolute +
    relative * |expected|``.

    Args:
        path: Path of the output leaf.
        expected: What the model returned.
        got: What is compared with it.
        visible: Booleans that broadcast to the shape; values elsewhere are arbitrary and not compared.
        tolerance: Relative and absolute tolerance; by default that of the dtype.
        offset: Is added to the expected value where the difference is divided by it.
    """
    if expected.shape != got.shape:
        return Difference(path, f"shape {tuple(got.shape)} instead of {tuple(expected.shape)}", math.nan)
    if expected.dtype != got.dtype:
        types = [str(tensor.dtype).removeprefix("torch.") for tensor in (got, expected)]
        return Difference(path, f"dtype {types[0]} instead of {types[1]}", math.nan)
    a, b = _numbers(expected), _numbers(got)
    if a.shape == b.shape and torch.equal(a, b):
        return Difference(path, None)
    apart = _apart(a, b, visible)
    scale = (a.abs() if a.is_complex() else a).to(apart.dtype).abs().nan_to_num(nan=0.0, posinf=0.0)
    share = (apart / (scale + offset)).where(apart > 0, 0.0).max().item()
    rtol, atol = tolerance or tolerances(expected.dtype)
    excess = apart - (atol + rtol * scale)
    largest = _position(apart)
    if not bool((excess > 0).any()):
        return Difference(path, None, apart[largest].item(), share, largest)
    worst = _position(excess)
    reason = f"{a[worst].item():.6g} became {b[worst].item():.6g} at {list(worst)}"
    return Difference(path, reason, apart[largest].item(), share, worst)


def compare_outputs(
    expected: Tensors, got: Tensors, visible: Visible | None = None, exactly: bool = False
) -> Iterator[Difference]:
    """Yields a difference for each output, in order.

    Args:
        expected: What the model returned, by path.
        got: What is compared with it, by path.
        visible: Says which elements of an output are compared, by its path and the expected tensor; all by default.
        exactly: Whether an output that only ``got`` has is a difference too.
    """
    for path, tensor in expected.items():
        if path not in got:
            yield Difference(path, "only the model returns it")
        else:
            yield compare_tensors(path, tensor, got[path], None if visible is None else visible(path, tensor))
    for path in got if exactly else ():
        if path not in expected:
            yield Difference(path, "only the graph returns it")


def close(expected: torch.Tensor, got: torch.Tensor) -> bool:
    """Returns whether two tensors have the same shape and dtype, and values within the tolerance of that dtype."""
    return compare_tensors("", expected, got).reason is None


def outputs_close(expected: Tensors, got: Tensors) -> bool:
    """Returns whether each expected output is in ``got``, within tolerance; what else is in there does not matter."""
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
    apart = _apart(a, b, visible)
    position = _position(apart)
    return position if apart[position].item() > 0 else None


def is_reordered(first: torch.Tensor, second: torch.Tensor, visible: torch.Tensor | None = None) -> bool:
    """Returns whether a tensor has the elements of another one in another order, up to rounding.

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


def find_mask(tensors: Tensors) -> tuple[str, torch.Tensor] | None:
    """Returns path and value of the attention mask among the inputs of a call: rank 2, and of that name."""
    for path, tensor in tensors.items():
        if path.rpartition(".")[2] == "attention_mask" and tensor.ndim == 2:
            return path, tensor
    return None


def visible_positions(
    mask: torch.Tensor | None, mask_axes: tuple[str | int, ...], axes: tuple[str | int, ...], shape: tuple[int, ...]
) -> torch.Tensor | None:
    """Returns which positions of an output an attention mask leaves visible, ready to broadcast; None for all.

    Args:
        mask: Attention mask ``(batch, length)``, or None.
        mask_axes: Names of its axes, such as ``("batch", "past_sequence + sequence")``.
        axes: Names of the output's axes.
        shape: Shape of the output.
    """
    if mask is None or mask.ndim != 2 or bool(mask.all()) or not axes or axes[0] != mask_axes[0]:
        return None
    if len(shape) != len(axes) or shape[0] != mask.shape[0]:
        return None
    length = set(str(mask_axes[1]).split(" + "))
    for axis, name in enumerate(axes[1:], start=1):
        # an axis of the mask's own length, or of its last part: the new tokens of "past + new"
        if isinstance(name, str) and length >= set(name.split(" + ")) and 0 < shape[axis] <= mask.shape[1]:
            return visible_tail(mask, axis, shape)
    return None


def visible_by_shape(mask: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Returns what `visible_positions` does for an output whose axes have no names, going by sizes alone.

    The length is looked for where outputs of language models have it: axis 2 of caches ``(batch, heads, length, dim)``,
    axis 1 of anything else.
    """
    if mask is None or bool(mask.all()) or len(shape) < 2 or shape[0] != mask.shape[0]:
        return None
    axis = 2 if len(shape) == 4 else 1
    return visible_tail(mask, axis, shape) if 1 < shape[axis] <= mask.shape[1] else None


def visible_tail(mask: torch.Tensor, axis: int, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Returns the last columns of the mask, as many as the axis is long, ready to broadcast; None if it is longer."""
    size = shape[axis]
    if size > mask.shape[1] or shape[0] != mask.shape[0]:
        return None
    tail = mask[:, mask.shape[1] - size :].bool()
    return tail.reshape(len(tail), *([1] * (axis - 1)), size, *([1] * (len(shape) - axis - 1)))


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


def _apart(a: torch.Tensor, b: torch.Tensor, visible: torch.Tensor | None = None) -> torch.Tensor:
    """The distance of each pair of elements: 0 where they are equal or hidden, infinite where only one is special."""
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    same = (a == b) | (a.isnan() & b.isnan())
    if visible is not None:
        same = same | ~visible.cpu()
    apart = (a.to(wide) - b.to(wide)).abs()
    apart = torch.where(apart.isnan(), math.inf, apart)
    if unit_of(a.dtype) == unit_of(b.dtype) == 0:  # large integers that differ may be equal as floats
        apart = apart.clamp_min(1.0)
    return torch.where(same, 0.0, apart)


def _position(values: torch.Tensor) -> tuple[int, ...]:
    return tuple(map(int, torch.unravel_index(values.argmax(), values.shape))) if values.ndim else ()


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
    exact = not bool(_apart(a, b).any())
    a, b = _lowest_made_infinite(a), _lowest_made_infinite(b)
    apart = _apart(a, b)
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
