"""How far two tensors are apart at least, by the statistics that traces hold of them, without their values."""

from __future__ import annotations

import math

from exportkit.module_traces.records import TensorRecord
from exportkit.running.compare import Distance, misshapen, ratio

# Sums of the same numbers in another order, in single precision, differ by less than this part of them.
_SAME_SUM = 1e-7


def distance_of_statistics(first: TensorRecord, second: TensorRecord) -> Distance:
    """Returns how far two tensors are apart at least, by what traces say of them without their values.

    Tensors whose statistics agree can still differ: then ``exact`` is False, and the distance 0.
    """
    if first.shape != second.shape:
        return misshapen(tuple(first.shape), tuple(second.shape), values=False)
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
        ratio(far, scale),
        ratio(max(far, moved), scale),
        max(far, moved),
        spread=ratio(far, first.std or 0.0),
        exact=False,
        values=False,
        reordered=same and math.prod(first.shape) > 1,
    )


def same_content(first: TensorRecord, second: TensorRecord) -> bool:
    """Returns whether two tensors are bitwise equal, by their hashes."""
    return bool(first.hash) and first.hash == second.hash and first.dtype == second.dtype
