"""Attention masks: which positions of a tensor they hide.

A hidden position does not necessarily have an arbitrary value: `exportkit.proof.leeway` runs the model to find out.
Without a model, the mask is the only information.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

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


class Padding:
    """Positions that an attention mask hides, going by the sizes of tensors alone.

    The mask says which positions of a length are padding: of its own, and of the last part of it, as long as the new
    tokens behind a cache. If a call has another sequence beside that of the mask, such as that of a decoder, a tensor
    of its length has no padding.

    Args:
        mask: The attention mask ``(batch, length)``, or None.
        lengths: Lengths that belong to the mask; by default all that are not longer.
    """

    def __init__(self, mask: torch.Tensor | None, lengths: Collection[int] | None = None) -> None:
        kept = None if mask is None else kept_positions(mask)
        self._mask = None if kept is None or bool(kept.all()) else kept
        self._lengths = lengths
        self._found: dict[tuple[int, ...], torch.Tensor | None] = {}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Padding:
        """Returns the padding that the inputs of a model, by path, describe."""
        found = find_mask(tensors)
        if found is None:
            return cls(None)
        described = {path: (tensor.dtype, tensor.shape) for path, tensor in tensors.items()}
        return cls(tensors[found[0]], lengths_of_mask(found[0], described))

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns booleans that broadcast to a tensor, or None if all of it counts."""
        if self._mask is None:
            return None
        shape = tuple(tensor.shape)
        if shape not in self._found:
            self._found[shape] = self._of_shape(self._mask, shape)
        return self._found[shape]

    def has_several_rows_of_a_token(self, tensor: torch.Tensor) -> bool:
        """Returns whether there is a row for each expert of each token, so that it is not known which are padding."""
        if self._mask is None or tensor.ndim < 2:
            return False
        several, rest = divmod(tensor.shape[0], self._mask.numel())
        return several > 1 and not rest

    def _of_shape(self, mask: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor | None:
        batch, length = mask.shape
        if len(shape) < 2 or shape[0] not in (batch, batch * length):
            return None
        if shape[0] == batch * length:  # all tokens in one axis
            return mask.reshape(-1, *(1 for _ in shape[1:]))
        axis = 2 if len(shape) == 4 and shape[2] <= length and shape[1] != length else 1
        if not 1 < shape[axis] <= length or (self._lengths is not None and shape[axis] not in self._lengths):
            return None
        return visible_tail(mask, axis, shape)


def lengths_of_mask(path: str, inputs: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> Collection[int] | None:
    """Returns the lengths that belong to an attention mask; None for all, as there is no other sequence in the call.

    Args:
        path: Path of the mask.
        inputs: Dtype and shape of each input, by path.
    """
    batch, length = inputs[path][1]
    cached = {shape[2] for _, shape in inputs.values() if len(shape) == 4}
    sequences = {
        int(shape[1])
        for dtype, shape in inputs.values()
        if len(shape) == 2 and shape[0] == batch and not (dtype.is_floating_point or dtype.is_complex)
    }
    own = {count for count in sequences if count == length or length - count in cached}
    return None if own == sequences else own | {length}
