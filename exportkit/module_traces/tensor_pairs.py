"""Pairs the tensors of two module calls, and says what can be compared of them.

Positions that the model's attention mask hides are left out: what a model computes there is arbitrary, and differs
between kernels that are equally right.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from exportkit.module_traces.trace_data import ModuleCall, TensorRecord, TraceData
from exportkit.running.compare import TF32_UNIT, Distance, misshapen, ratio, unit_of, visible_tail

# Statistics of the same numbers in another order differ by less than this part of their scale: 97 % of 600 permuted
# tensors of float32 did, with means of 0, 1 and 30 standard deviations.
_SAME_SUM = 1e-7


def match_records(
    first: Sequence[TensorRecord], second: Sequence[TensorRecord]
) -> list[tuple[TensorRecord, TensorRecord]]:
    """Returns which tensor of a call is which tensor of another: by path, else by content, else by shape and order.

    Args:
        first: Tensors of one call.
        second: Tensors of the other.
    """
    by_path = {record.path: record for record in second}
    found = {record.path: by_path.pop(record.path) for record in first if record.path in by_path}
    left = list(by_path.values())
    for record in first:
        if record.path not in found:
            same = (other for other in left if same_content(record, other))
            alike = (
                other
                for other in left
                if other.shape == record.shape and (unit_of(other.dtype) > 0) == (unit_of(record.dtype) > 0)
            )
            match = next(same, None) or next(alike, None)
            if match is not None:
                found[record.path] = match
                left.remove(match)
    pairs = [(record, found[record.path]) for record in first if record.path in found]
    # A mask of booleans and one that is added to the scores say the same in different ways.
    return [(a, b) for a, b in pairs if (a.dtype == "bool") == (b.dtype == "bool")]


def rounding_unit(a: TensorRecord, b: TensorRecord) -> float:
    """Returns the rounding error of the coarser dtype; a product on a GPU may also have been rounded to TF32."""
    unit = max(unit_of(a.dtype), unit_of(b.dtype))
    devices = {record.device.partition(":")[0] for record in (a, b)}
    return max(unit, TF32_UNIT) if len(devices) > 1 and "cuda" in devices and unit else unit


def distance_of_statistics(first: TensorRecord, second: TensorRecord) -> Distance:
    """Returns how far two tensors are apart at least, by their statistics alone.

    Tensors whose statistics agree can still differ: then ``exact`` is False, and the distance 0.
    """
    if first.shape != second.shape:
        return misshapen(tuple(first.shape), tuple(second.shape), values=False)
    if same_content(first, second) or (not first.hash and not second.hash):  # tensors on meta have no content
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


class Padding:
    """Positions that an attention mask hides, for every tensor that has the same batch and length.

    Args:
        mask: Attention mask ``(batch, length)`` of zeros and ones, or None.
    """

    def __init__(self, mask: torch.Tensor | None) -> None:
        self._mask = None if mask is None or bool(mask.all()) else mask.bool().cpu()
        self._found: dict[tuple[int, ...], torch.Tensor | None] = {}

    @classmethod
    def of_tensors(cls, tensors: Iterable[tuple[str, torch.Tensor]]) -> Padding:
        """Returns the padding that the inputs of a model, by path, describe."""
        masks = (tensor for path, tensor in tensors if path.endswith("attention_mask") and tensor.ndim == 2)
        return cls(next(masks, None))

    @classmethod
    def of_call(cls, trace: TraceData, call: ModuleCall) -> Padding:
        """Returns the padding that the inputs of a traced call describe, if their values were stored."""
        masks = [r for r in call.inputs if r.path.endswith("attention_mask") and len(r.shape) == 2]
        return cls(trace.tensor(masks[0]) if masks and masks[0].key is not None else None)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns booleans that broadcast to the tensor, or None if all of it counts."""
        if self._mask is None:
            return None
        shape = tuple(tensor.shape)
        if shape not in self._found:
            self._found[shape] = self._of_shape(shape)
        return self._found[shape]

    def has_several_rows_of_a_token(self, tensor: torch.Tensor) -> bool:
        """Returns whether there is a row for each expert of each token, so that it is not known which are padding."""
        if self._mask is None or tensor.ndim < 2:
            return False
        several, rest = divmod(tensor.shape[0], self._mask.numel())
        return several > 1 and not rest

    def _of_shape(self, shape: tuple[int, ...]) -> torch.Tensor | None:
        mask = self._mask
        assert mask is not None
        batch, length = mask.shape
        if len(shape) < 2 or shape[0] not in (batch, batch * length):
            return None
        if shape[0] == batch * length:  # all tokens in one axis
            return mask.reshape(-1, *(1 for _ in shape[1:]))
        axis = 2 if len(shape) == 4 and shape[2] <= length and shape[1] != length else 1
        return visible_tail(mask, axis, shape) if 1 < shape[axis] <= length else None
