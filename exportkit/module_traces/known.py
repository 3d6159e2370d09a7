"""Tensors that a trace holds already: known by their memory and version, or in inference mode by their content.

In comes a tensor; out comes its number, if the very same content was recorded before and was not changed since.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from exportkit._torch_compat.memory import StorageRef, memory_state

_FIRST_CLEANING = 4096  # tensors; then whenever there are twice as many as were alive the last time


@dataclass(slots=True)
class Known:
    """A content that was recorded.

    Attributes:
        ref: Tells whether its memory is still the one that was seen.
        numbers: Numbers of its records, by shape.
        hash: Its hash.
        key: Under which name its values were stored, or None.
    """

    ref: StorageRef
    numbers: dict[tuple[int, ...], int]
    hash: str
    key: str | None = None


class KnownTensors:
    """Finds tensors again; holds none of them."""

    def __init__(self) -> None:
        self._known: dict[Any, Known] = {}
        self._clean_at = _FIRST_CLEANING

    def place_of(self, tensor: torch.Tensor) -> Any:
        """Returns what tells the content of a tensor from others, or None for one without memory of its own."""
        if type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter):
            return None  # of a class that may keep its values elsewhere
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_quantized:
            return None
        extent = tensor.numel() if tensor.is_contiguous() else (tensor.shape, tensor.stride())
        state = memory_state(tensor)
        return state, tensor.storage_offset(), extent, tensor.dtype, tensor.is_neg(), tensor.is_conj()

    def find(self, place: Any) -> Known | None:
        """Returns what is known of the content at a place."""
        return self._known.get(place)

    def add(self, place: Any, tensor: torch.Tensor, number: int, content_hash: str) -> Known:
        """Remembers that the content of a tensor was recorded."""
        if len(self._known) >= self._clean_at:
            self._known = {p: known for p, known in self._known.items() if not known.ref.is_gone()}
            self._clean_at = max(_FIRST_CLEANING, 2 * len(self._known))
        known = Known(StorageRef(tensor), {_shape(tensor): number}, content_hash)
        self._known[place] = known
        return known


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
