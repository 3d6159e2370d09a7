"""Builds transformers caches from given tensors: for tests, examples and hand-written calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from exportkit.errors import InvalidRequestError

KeyValue = tuple[torch.Tensor, torch.Tensor]


def make_dynamic_cache(key_value_pairs: Sequence[KeyValue], sliding_window: int | None = None) -> Any:
    """Returns a DynamicCache that holds the given tensors themselves, one (keys, values) pair for each layer.

    Args:
        key_value_pairs: Tensors of shape ``(batch, heads, past, head_dim)``.
        sliding_window: Make sliding-window layers with this window instead of full ones.

    Raises:
        InvalidRequestError: if a pair is not two tensors of rank 4 with equal batch, heads and length.

    Example:
        >>> cache = make_dynamic_cache([(torch.zeros(1, 4, 10, 32), torch.zeros(1, 4, 10, 32))])
        >>> cache.get_seq_length()
        10
    """
    from transformers import cache_utils

    layers: list[Any] = []
    for index, (keys, values) in enumerate(_checked(key_value_pairs)):
        if sliding_window is None:
            layer = cache_utils.DynamicLayer()
        else:
            layer = cache_utils.DynamicSlidingWindowLayer(sliding_window)
            layer.cumulative_length = keys.shape[-2]
            if keys.shape[-2] > sliding_window - 1:
                raise InvalidRequestError(
                    "A sliding-window layer stores at most window - 1 tokens.",
                    where=f"layer {index}",
                    expected=f"length <= {sliding_window - 1}",
                    got=keys.shape[-2],
                    hint="cut the tensors to their last window - 1 tokens.",
                )
        _fill(layer, keys, values)
        layers.append(layer)
    cache = cache_utils.DynamicCache()
    if layers:
        cache.layers, cache.layer_class_to_replicate = layers, None
    return cache


def make_static_cache(key_value_pairs: Sequence[KeyValue], max_cache_len: int | None = None) -> Any:
    """Returns a StaticCache whose layers hold the given tensors as their first tokens.

    Args:
        key_value_pairs: Tensors of shape ``(batch, heads, past, head_dim)``.
        max_cache_len: Length that is allocated; by default the length of the given tensors. Longer than these, the
            tensors are copied into zeros of that length.
    """
    from transformers import cache_utils

    layers: list[Any] = []
    for keys, values in _checked(key_value_pairs):
        length = keys.shape[2]
        layer = cache_utils.StaticLayer(max_cache_len=length if max_cache_len is None else max_cache_len)
        if layer.max_cache_len < length:
            raise InvalidRequestError(
                "A static cache is shorter than the tensors it is to hold.",
                expected=f"max_cache_len >= {length}",
                got=max_cache_len,
            )
        padding = (0, 0, 0, layer.max_cache_len - length)
        _fill(layer, *(torch.nn.functional.pad(t, padding) if padding[-1] else t for t in (keys, values)))
        layer.batch_size, layer.num_heads = keys.shape[:2]
        layer.k_head_dim, layer.v_head_dim = keys.shape[-1], values.shape[-1]
        layer.cumulative_length = torch.tensor(length, dtype=torch.int64, device=keys.device)
        layers.append(layer)
    cache = cache_utils.StaticCache.__new__(cache_utils.StaticCache)
    cache_utils.Cache.__init__(cache, layers=layers)
    return cache


def make_encoder_decoder_cache(self_attention_cache: Any, cross_attention_cache: Any) -> Any:
    """Returns an EncoderDecoderCache of two caches, or of two sequences of (keys, values) pairs."""
    from transformers import cache_utils

    halves = [
        half if isinstance(half, cache_utils.Cache) else make_dynamic_cache(half)
        for half in (self_attention_cache, cross_attention_cache)
    ]
    return cache_utils.EncoderDecoderCache(*halves)


def _checked(pairs: Sequence[KeyValue]) -> Sequence[KeyValue]:
    for index, pair in enumerate(pairs):
        shapes = [tuple(getattr(tensor, "shape", ())) for tensor in pair]
        if len(shapes) != 2 or {len(shape) for shape in shapes} != {4} or shapes[0][:3] != shapes[1][:3]:
            raise InvalidRequestError(
                "A cache layer needs its keys and its values.",
                where=f"layer {index}",
                expected="two tensors (batch, heads, past, head_dim) with equal batch, heads and past",
                got=shapes,
            )
    return pairs


def _fill(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    layer.dtype, layer.device = keys.dtype, keys.device
    layer.keys, layer.values, layer.is_initialized = keys, values, True
