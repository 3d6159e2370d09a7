"""Which elements of tensors mean something: in come the inputs of a model, out goes the mask of padding for any tensor.

What a model computes at padded positions is arbitrary, and differs between kernels that are equally right.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from exportkit.module_traces.records import ModuleCall
from exportkit.module_traces.trace import Trace
from exportkit.running.compare import visible_tail


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
        """Returns the padding that the inputs of a model tell of, by path."""
        masks = (tensor for path, tensor in tensors if path.endswith("attention_mask") and tensor.ndim == 2)
        return cls(next(masks, None))

    @classmethod
    def of_call(cls, trace: Trace, call: ModuleCall) -> Padding:
        """Returns the padding that the inputs of a traced model tell of, if their values are in the trace."""
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
        """Returns whether there is a row for each expert of each token: nobody knows which of them are of padding."""
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
