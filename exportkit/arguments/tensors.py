"""Builds tensors of wanted shapes out of recorded ones, so that types, devices, value ranges and masks stay valid."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from exportkit.plan.placeholders import Blocks, Marker, place_blocks

_MASK_VALUES = 2


def resize(tensor: torch.Tensor, shape: Sequence[int], dynamic: Sequence[int] = ()) -> torch.Tensor:
    """Returns a tensor of ``shape`` made of the values of ``tensor``.

    Longer axes repeat the recorded values; masks (integers or booleans with at most two values) are stretched, so that
    padding stays where it was, on the left or on the right. Repeated rows are rolled along another axis, so that rows
    differ and an export which mixes them up is found out.

    Args:
        tensor: A recorded tensor of the same rank.
        shape: Wanted size of each axis.
        dynamic: Axes along which integers may be rolled; floating-point tensors are rolled along their last axis.
    """
    if tuple(tensor.shape) == tuple(shape):
        return tensor.clone()
    if tensor.numel() == 0:
        return _invented(tensor, shape)
    is_mask = not tensor.is_floating_point() and not tensor.is_complex() and len(tensor.unique()) <= _MASK_VALUES
    result = tensor
    for axis, size in enumerate(shape):
        have = result.shape[axis]
        if size == have:
            continue
        if is_mask:
            result = result.index_select(axis, _stretched(result, axis, size))
            continue
        index = torch.arange(size, device=tensor.device) % have
        repeated = result.index_select(axis, index)
        result = _rolled(repeated, axis, have, dynamic) if size > have else repeated
    return result.contiguous()


def integers_below(tensor: torch.Tensor, limit: int) -> torch.Tensor:
    """Returns the remainders of integers, all below a limit; other types and masks of zeros and ones as they are."""
    other = tensor.dtype is torch.bool or tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return tensor if other or limit < 1 or not tensor.numel() or int(tensor.max()) < _MASK_VALUES else tensor % limit


def padded(mask: torch.Tensor) -> torch.Tensor:
    """Returns a mask of ones with the first position of its first row hidden, as padding on the left does."""
    if mask.shape[0] and mask.shape[-1] > 1:
        mask[0, 0] = 0
    return mask


def _stretched(mask: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Indices that shrink or stretch a mask; one single position is the one that most rows keep."""
    have = mask.shape[axis]
    if size == 1:
        others = [other for other in range(mask.ndim) if other != axis]
        kept = mask.to(torch.int64).sum(dim=others) if others else mask.to(torch.int64)
        return kept.argmax().reshape(1)
    return torch.linspace(0, have - 1, size, device=mask.device).round().to(torch.int64)


def _rolled(repeated: torch.Tensor, axis: int, period: int, dynamic: Sequence[int]) -> torch.Tensor:
    along = [other for other in range(repeated.ndim) if other != axis]
    if not repeated.is_floating_point():
        along = [other for other in along if other in dynamic]
    if not along or axis != 0:
        return repeated
    chunks = repeated.split(period, dim=axis)
    return torch.cat([chunk.roll(turn, dims=along[-1]) for turn, chunk in enumerate(chunks)], dim=axis)


def _invented(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Values for a tensor that was only ever seen empty: standard normal, or zeros for integers."""
    if not tensor.is_floating_point():
        return tensor.new_zeros(tuple(shape))
    generator = torch.Generator(device=tensor.device).manual_seed(0)
    return torch.randn(tuple(shape), generator=generator, device=tensor.device, dtype=torch.float32).to(tensor.dtype)


def with_tokens(ids: torch.Tensor, values: Collection[int], blocks: Blocks) -> torch.Tensor:
    """Returns token ids in which tokens occur in the given runs, and nowhere else.

    Args:
        ids: Token ids ``(batch, length)``.
        values: The tokens.
        blocks: Token and length of each run; there is room for them.
    """
    others = [value for value in ids.unique().tolist() if value not in values]
    result = ids.clone()
    for value in values:
        result[result == value] = others[0] if others else 0
    for value, row, column, length in place_blocks(blocks, ids.shape) or ():
        result[row, column : column + length] = value
    return result


def marked(tensor: torch.Tensor, ids: torch.Tensor, marker: Marker) -> torch.Tensor:
    """Returns a tensor of the type of ``tensor`` that marks where a placeholder stands in token ids."""
    inside, outside = (tensor.new_full((), value) for value in (marker.inside, marker.outside))
    return torch.where(ids == marker.value, inside, outside)
