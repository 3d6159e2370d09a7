"""Attention in a trace: causal masks, top-k keys, several images in one sequence, and ``flex_attention``."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from exportkit._torch_compat.flexible_attention import (
    changes_nothing,
    flexible_attention_attributes,
    is_mask,
    mapped_over_places,
)
from exportkit._torch_compat.modules import causal_mask_detection, forward_parameters, has_hooks
from exportkit._torch_compat.traced_values import asserted
from exportkit._torch_compat.transformers import ATTENTION_STORED, attention_functions
from exportkit.overrides import Attribute, Item, Replacing, original_attribute, replaced, replaced_attributes

# The check for causal masks
#
# `TransformerEncoder` and `TransformerDecoder` compare a mask to the causal one to choose a faster kernel, which a
# trace cannot decide. The mask is applied either way, so the answer changes nothing but the kernel.


def has_torch_transformer(model: torch.nn.Module, _arguments: Mapping[str, Any]) -> bool:
    """Returns whether the model has stacks of torch's own Transformer layers."""
    stacks = (torch.nn.TransformerEncoder, torch.nn.TransformerDecoder)
    return any(isinstance(module, stacks) for module in model.modules())


def skipped_causal_check(_model: torch.nn.Module) -> Replacing:
    """Treats a mask as causal only if the caller declares it."""
    owner, name = causal_mask_detection()

    def detect(_mask: Any, is_causal: bool | None = None, _size: Any = None) -> bool:
        return is_causal is True

    return replaced_attributes(owner, {name: detect})


# Padding behind the sequences
#
# For inference, `TransformerEncoder` leaves padding out if it is behind all sequences of a batch, and puts zeros in
# its place. Whether it is there depends on the mask; in a trace, no padding is left out.


def _leaves_padding_out(module: Any) -> bool:
    if not isinstance(module, torch.nn.TransformerEncoder) or not torch.backends.mha.get_fastpath_enabled():
        return False
    layers: Any = module.layers
    return bool(module.use_nested_tensor) and not layers[0].training


def zeros_at_padding(_model: torch.nn.Module) -> Replacing:
    """Puts zeros in place of padding behind the sequences, as in eager mode without gradients."""
    forward = original_attribute(torch.nn.TransformerEncoder, "forward")

    def with_zeros(
        self: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None, *args: Any, **kw: Any
    ) -> Any:
        output = forward(self, src, mask, src_key_padding_mask, *args, **kw)
        if src_key_padding_mask is None or mask is not None or src.ndim != 3 or not _leaves_padding_out(self):
            return output
        is_padding = src_key_padding_mask != 0
        asserted((~is_padding).any(), "a batch of sequences is not padding alone")  # eager mode raises for it
        is_behind = (is_padding[:, 1:] >= is_padding[:, :-1]).all()
        zeros = torch.zeros_like(output)
        padding = zeros if self.norm is None else self.norm(zeros)
        return torch.where((is_padding & is_behind).unsqueeze(-1), padding, output)

    return replaced_attributes(torch.nn.TransformerEncoder, {"forward": with_zeros})


# Rows that are padding alone
#
# For inference, torch's own Transformer layers and self-attention have kernels, which return NaN for a query that may
# see no key, where they return numbers otherwise. The kernel of a layer also takes a mask of numbers for a boolean one.


def nan_for_hidden_rows(_model: torch.nn.Module) -> Replacing:
    """Makes torch's own attention return NaN for queries without a key where its kernels for inference do."""
    layer, attention = torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention
    run_layer, attend = original_attribute(layer, "forward"), original_attribute(attention, "forward")
    inside = list[bool]()  # an item for each layer with a kernel that is running

    def layer_forward(self: Any, src: Any, src_mask: Any = None, src_key_padding_mask: Any = None, **kw: Any) -> Any:
        if not _layer_has_kernel(self, src):
            return run_layer(self, src, src_mask, src_key_padding_mask, **kw)
        hidden = [None if mask is None else mask != 0 for mask in (src_mask, src_key_padding_mask)]
        inside.append(True)
        try:
            return run_layer(self, src, *hidden, **kw)
        finally:
            inside.pop()

    def attention_forward(  # noqa: PLR0917 (torch's positions)
        self: Any,
        query: Any,
        key: Any,
        value: Any,
        key_padding_mask: Any = None,
        need_weights: bool = True,
        attn_mask: Any = None,
        *args: Any,
        **kw: Any,
    ) -> Any:
        output, weights = attend(self, query, key, value, key_padding_mask, need_weights, attn_mask, *args, **kw)
        masks = [mask for mask in (attn_mask, key_padding_mask) if mask is not None]
        is_boolean = all(mask.dtype is torch.bool for mask in masks)
        is_self = query is key and key is value
        if masks and (inside or (is_boolean and is_self and _attention_has_kernel(self, query))):
            output = output.masked_fill(_sees_nothing(query, attn_mask, key_padding_mask), torch.nan)
        return output, weights

    return replaced(
        [(Attribute(layer, "forward"), layer_forward), (Attribute(attention, "forward"), attention_forward)]
    )


def _attention_has_kernel(module: Any, query: torch.Tensor) -> bool:
    """Whether self-attention with boolean masks is computed by a kernel, in the order of torch's own conditions."""
    return (
        torch.backends.mha.get_fastpath_enabled()
        and query.ndim == 3
        and module.in_proj_weight is not None
        and query.dtype == module.in_proj_weight.dtype
        and not module.training
        and module.num_heads % 2 == 0
        and module.batch_first
        and module.bias_k is None
        and not module.add_zero_attn
        and not torch.is_autocast_enabled()
    )


def _layer_has_kernel(layer: Any, src: torch.Tensor) -> bool:
    return (
        _attention_has_kernel(layer.self_attn, src)
        and layer.self_attn.in_proj_bias is not None
        and not layer.training
        and bool(layer.activation_relu_or_gelu)
        and layer.norm1.eps == layer.norm2.eps
        and not any(map(has_hooks, layer.modules()))
    )


def _sees_nothing(query: torch.Tensor, pairs: torch.Tensor | None, keys: torch.Tensor | None) -> torch.Tensor:
    """Whether all keys are hidden from a query, (batch, queries or 1, 1)."""
    hidden = torch.zeros(1, 1, 1, 1, dtype=torch.bool) if pairs is None else pairs != 0
    if hidden.ndim == 3:
        hidden = hidden.unflatten(0, (query.shape[0], -1))
    if keys is not None:
        hidden = hidden | (keys != 0)[:, None, None, :]
    while hidden.ndim < 4:
        hidden = hidden.unsqueeze(0)
    return hidden.all(-1).any(1).unsqueeze(-1)


# Top-k keys
#
# transformers picks the top k keys if there are more than k, and decides that in Python, which a trace freezes. In the
# graph the top min(k, keys) are picked: if there are fewer keys than k, these are all.

TOP_K_METHOD = "prepare_dynamic_mask"


def symbolic_top_k(model: torch.nn.Module) -> Replacing:
    """Makes attention with a dynamic mask pick its top keys in the same way for few keys and for many."""
    classes = {type(module) for module in model.modules() if hasattr(module, TOP_K_METHOD)}
    return replaced(
        [(Attribute(cls, TOP_K_METHOD), _top_k_mask(original_attribute(cls, TOP_K_METHOD))) for cls in classes]
    )


def _top_k_mask(scored: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The method that makes the mask; transformers' method only computes the scores of all keys for it."""

    def mask(
        self: Any,
        hidden_states: torch.Tensor,
        dt_states: torch.Tensor,
        keep_window_size: int = 2048,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        scores = scored(self, hidden_states, dt_states, sys.maxsize, attention_mask)
        count = torch.sym_min(keep_window_size, scores.shape[-1])
        top = torch.topk(scores, count, dim=-1, sorted=False).indices
        is_kept = torch.zeros_like(scores).scatter(-1, top, 1.0)
        return scores.masked_fill(is_kept == 0.0, torch.finfo(scores.dtype).min)

    return mask


# Packed images
#
# Encoders that take images of any size put the patches of all images in one sequence, with `cu_seqlens` to say where
# segments end, and split it in a Python loop. Attention functions named after flash attention get the whole sequence
# and the boundaries instead. This one is made of plain operators: each position attends within its own segment.

GRID_ARGUMENTS = ("grid_thw", "target_sizes")
_SEGMENTS = "exportkit_flash_segments"  # transformers looks for "flash" in the name


def has_packed_attention(model: torch.nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Returns whether modules of the model attend within segments, and the arguments hold grids of patches."""
    return has_grids(arguments) and any(_is_packed(module) for module in model.modules())


def has_grids(arguments: Mapping[str, Any]) -> bool:
    """Returns whether an argument holds grids of patches ``(images, 3)``, or without frames ``(images, 2)``."""
    grids = [value for name, value in arguments.items() if name.endswith(GRID_ARGUMENTS)]
    return any(isinstance(value, torch.Tensor) and value.ndim == 2 for value in grids)


def packed_attention(model: torch.nn.Module) -> Replacing:
    """Makes modules that attend within segments use a mask instead of a loop."""
    return masked_segments([module.config for module in model.modules() if _is_packed(module)])


def masked_segments(configs: Iterable[Any]) -> Replacing:
    """Makes models with these configs attend within segments by `attend_in_segments`."""
    chosen = [(Attribute(config, ATTENTION_STORED), _SEGMENTS) for config in configs]
    return replaced([(Item(attention_functions(), _SEGMENTS), attend_in_segments), *chosen])


def _is_packed(module: torch.nn.Module) -> bool:
    return "cu_seqlens" in forward_parameters(module) and hasattr(module, "config")


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
    """Returns attention ``(1, seq, heads, dim)`` in which each position attends within its segment.

    Args:
        query: ``(1, heads, seq, dim)``.
        key: Like the queries; the number of heads may be a divisor of theirs.
        value: Like the keys.
        attention_mask: Values to add to the scores, where there are no segments.
        scaling: Factor of the scores.
        cu_seq_lens_q: Boundaries of the segments, 0 first; they may be repeated.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    # Not scaled_dot_product_attention, which asks whether a length that follows from values is zero.
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if cu_seq_lens_q is not None:
        positions = torch.arange(query.shape[2], device=cu_seq_lens_q.device)
        segment = (positions[:, None] >= cu_seq_lens_q[None, 1:]).sum(-1)  # equal numbers, same segment
        scores = scores.masked_fill(segment[:, None] != segment[None], torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    output = scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
    return output.transpose(1, 2).contiguous(), None


# ``flex_attention``: scores, and modifications of them, as plain operators
#
# torch traces ``flex_attention`` as one operator with graphs for a modification of the scores and for a mask, for which
# ONNX has nothing, and makes a mask of blocks of 128 positions. In a trace, both modifications are computed for all
# positions at once, as eager mode does, and the blocks are left out: they save time, and change nothing.


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
