"""Attention within the segments of one packed sequence, as one masked attention.

Encoders that take images of any size put the patches of all of them in one sequence, with ``cu_seqlens`` to say where
segments end, and split it in a Python loop. Implementations named after flash attention get the whole sequence and the
boundaries instead; here is one of plain operators: each position sees those of its own segment.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from exportkit._torch_compat.transformers import own_attention

IMPLEMENTATION = "exportkit_flash_segments"  # transformers looks for "flash" in the name


def is_packed(module: torch.nn.Module) -> bool:
    """Returns whether a module attends within the segments that it is told."""
    return "cu_seqlens" in inspect.signature(type(module).forward).parameters and hasattr(module, "config")


def has_packed_attention(model: torch.nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Returns whether the model attends within segments, and the arguments say which grids of patches there are."""
    return has_grids(arguments) and any(is_packed(module) for module in model.modules())


def has_grids(arguments: Mapping[str, Any]) -> bool:
    """Returns whether an argument holds grids of patches ``(images, 3)``."""
    grids = [value for name, value in arguments.items() if name.endswith("grid_thw")]
    return any(isinstance(value, torch.Tensor) and value.ndim == 2 for value in grids)


@contextlib.contextmanager
def masked_segments(model: torch.nn.Module) -> Iterator[None]:
    """Lets packed attention be computed with a mask."""
    configs = {id(module.config): module.config for module in model.modules() if is_packed(module)}
    with own_attention(list(configs.values()), IMPLEMENTATION, attend_in_segments):
        yield


def attend_in_segments(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Returns the attention ``(1, seq, heads, dim)`` of each position over those of its segment.

    Args:
        query: ``(1, heads, seq, dim)``.
        key: Likewise; a divisor of the heads is enough.
        value: Like the keys.
        attention_mask: Values to add to the scores, where there are no segments.
        scaling: Factor of the scores.
        cu_seq_lens_q: Boundaries of the segments, 0 first; they may be repeated.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    # Not scaled_dot_product_attention: it asks whether a length that follows from values is zero.
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if cu_seq_lens_q is not None:
        segment = segments(cu_seq_lens_q, query.shape[2])
        scores = scores.masked_fill(segment[:, None] != segment[None], torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    output = scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
    return output.transpose(1, 2).contiguous(), None


def segments(boundaries: torch.Tensor, length: Any) -> torch.Tensor:
    """Returns the number of the segment that each of ``length`` positions is in; equal numbers, same segment."""
    positions = torch.arange(length, device=boundaries.device)
    return (positions[:, None] >= boundaries[None, 1:]).sum(-1)
