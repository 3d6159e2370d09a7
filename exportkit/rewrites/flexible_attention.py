"""``flex_attention`` in a trace: scores, and modifications of them, as plain operators.

torch traces ``flex_attention`` as one operator with graphs for a modification of the scores and for a mask, for which
ONNX has nothing, and makes a mask of blocks of 128 positions. In a trace, both modifications are computed for all
positions at once, as eager mode does, and the blocks are left out: they save time, and change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from exportkit._torch_compat.flexible_attention import (
    changes_nothing,
    flexible_attention_attributes,
    is_mask,
    mapped_over_places,
)
from exportkit.overrides import original_attribute

_Modification = Callable[..., torch.Tensor]


def flexible_attention() -> list[tuple[Any, dict[str, Any]]]:
    """Returns the attributes of torch that a trace replaces, by owner; none if nothing has imported the function."""
    return flexible_attention_attributes(_attention, _mask)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: _Modification,
    block_mask: tuple[Any, ...],
    scale: float,
    _options: Any = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention ``(batch, heads, queries, dim)``; logarithm to base 2 of the sum, and largest score, of each query.

    Where nothing modifies the scores, attention stays one operator, so that a runtime can fuse it. What the caller does
    not ask for is not in the graph.

    Args:
        query: ``(batch, heads, queries, dim)``.
        key: ``(batch or 1, heads or a divisor, keys, dim)``.
        value: Like the keys.
        score_mod: Computes a score from a score and its place: row, head, query and key.
        block_mask: The mask of blocks, of which the last item says whether a query sees a key.
        scale: Factor of the scores.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) if groups > 1 else states for states in (key, value))
    key, value = (states.expand(query.shape[0], *states.shape[1:]) for states in (key, value))
    shape = (*query.shape[:3], key.shape[2])
    mask_mod = block_mask[-1]
    mask = None if changes_nothing(mask_mod) else _at_places(mask_mod, (), shape, query.device)
    precision = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = (query.to(precision) @ key.to(precision).transpose(-2, -1)) * scale
    is_modified = not changes_nothing(score_mod)
    if is_modified:
        scores = _at_places(score_mod, (scores,), shape, query.device).to(precision).expand(shape)
    if mask is not None:
        scores = torch.where(mask, scores, -math.inf)
    is_hidden = (scores == -math.inf).all(-1)
    if is_modified:
        weights = torch.where(is_hidden.unsqueeze(-1), 0.0, scores.softmax(-1))
        output = weights.to(query.dtype) @ value.to(query.dtype)
    else:
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale)
        if mask is not None:
            output = torch.where(mask.any(-1, keepdim=True), output, 0.0)
    sums = torch.where(is_hidden, -math.inf, scores.logsumexp(-1))
    return output, sums / math.log(2), scores.amax(-1) / math.log(2)


def _at_places(
    modification: _Modification, scores: tuple[torch.Tensor, ...], shape: tuple[Any, ...], device: Any
) -> torch.Tensor:
    """What a modification returns for all places, which broadcasts to the shape of the scores.

    A modification is written for one place. Given the positions along four axes it does the same for all places, if it
    returns one value for each; otherwise torch maps it over the places.
    """
    positions = []
    for axis, size in enumerate(shape):
        sizes = [1, 1, 1, 1]
        sizes[axis] = -1
        positions.append(torch.arange(size, device=device).view(sizes))
    result = modification(*scores, *positions)
    if isinstance(result, torch.Tensor) and result.ndim in (0, 4):
        return result
    return mapped_over_places(modification, len(scores))(*scores, *[position.flatten() for position in positions])


def _mask(
    modification: _Modification, rows: Any, heads: Any, queries: Any, keys: Any, device: Any = None
) -> torch.Tensor:
    """The mask ``(rows, heads, queries, keys)`` of a modification."""
    if not is_mask(modification):
        made: torch.Tensor = original_attribute(torch.nn.attention.flex_attention, "create_mask")(
            modification, rows, heads, queries, keys, device
        )
        return made
    shape = (1 if rows is None else rows, 1 if heads is None else heads, queries, keys)
    return _at_places(modification, (), shape, device).expand(shape)
