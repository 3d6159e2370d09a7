"""Attention of tokens that a mask lets see nothing: zeros in the graph too, as torch computes it.

A caller who makes the mask ``(batch, 1, new, length)`` by itself, as ``generate`` does for a static cache, hides all
from a token of the padding. torch returns zeros for it, while the translated softmax returns an average of everything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from exportkit.rewrites.attributes import replaced_attributes

_RANK = 4


def has_square_mask(_model: torch.nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Returns whether the arguments have a mask of booleans for each token and each that it may see.

    There may be several by kind of layer.
    """
    given = arguments.get("attention_mask")
    masks = given.values() if isinstance(given, Mapping) else [given]
    return any(isinstance(mask, torch.Tensor) and mask.ndim == _RANK and mask.dtype is torch.bool for mask in masks)


@contextlib.contextmanager
def zeros_for_blind_rows(_model: torch.nn.Module) -> Iterator[None]:
    """Puts an attention in force that says by itself what a token gets that sees nothing."""
    real = torch.nn.functional.scaled_dot_product_attention

    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        result = real(query, key, value, attn_mask, *args, **kwargs)
        if attn_mask is None or attn_mask.dtype is not torch.bool:
            return result
        return torch.where(attn_mask.any(-1, keepdim=True), result, 0.0)

    with replaced_attributes(torch.nn.functional, {"scaled_dot_product_attention": attention}):
        yield
