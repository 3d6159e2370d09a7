"""Attention masks: which positions of a tensor they hide.

That a mask hides a position does not say that its value is arbitrary: `exportkit.proof.leeway` asks the model. Where
there is no model to ask, the mask is all that is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

# Values of a mask that are added to scores and lower than this hide a position: -10000, -1e9, the lowest of a dtype.
_HIDES = -1e3

# Booleans that broadcast to an output and say what of it is compared, given its path and shape; None for all of it.
Visible = Callable[[str, tuple[int, ...]], torch.Tensor | None]


def find_masks(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the attention masks ``(batch, length)`` among the inputs of a call, by path, True where they keep.

    Args:
        tensors: The inputs by path.
    """
    for path, tensor in tensors.items():
        if "mask" in path.rpartition(".")[2] and tensor.ndim == 2:
            kept = kept_positions(tensor)
            if kept is not None:
                yield path, kept


def find_mask(tensors: Mapping[str, torch.Tensor]) -> tuple[str, torch.Tensor] | None:
    """Returns the mask named ``attention_mask`` as `find_masks` yields it, or None if there is none."""
    return next((found for found in find_masks(tensors) if found[0].rpartition(".")[2] == "attention_mask"), None)


def kept_positions(mask: torch.Tensor) -> torch.Tensor | None:
    """Returns which positions a mask keeps, or None if it is not a mask or hides all of them.

    Booleans and integers keep where they are not 0. Floating-point masks are added to scores, and hide where they are
    very low; those that consist of zeros and ones keep the ones.
    """
    kept = mask != 0
    if mask.is_floating_point() and bool((mask <= _HIDES).any()):
        kept = mask > _HIDES
    elif mask.is_floating_point() and not bool(((mask == 0) | (mask == 1)).all()):
        return None
    return kept.cpu() if bool(kept.any()) else None


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
    """Returns the last columns of the mask, as many as the axis is long, ready to broadcast.

    None if the axis is longer than the mask, or nothing would be left to compare.
    """
    size = shape[axis]
    if size > mask.shape[1] or shape[0] != mask.shape[0]:
        return None
    tail = mask[:, mask.shape[1] - size :].bool()
    if not bool(tail.any()):
        return None
    return tail.reshape(len(tail), *([1] * (axis - 1)), size, *([1] * (len(shape) - axis - 1)))
