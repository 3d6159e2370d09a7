"""Sliding-window cache layers whose lengths stay symbolic in a trace.

transformers counts the stored tokens in a Python int and cuts with a slice whose start depends on it, both of which a
trace freezes. Here the counter comes from the inputs (whoever traces sets it), lengths are those of the tensors, and
the cut is a narrow with a symbolic start. Nothing else changes: the layer stores the last ``window - 1`` tokens.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from exportkit.rewrites.attributes import replaced_attributes


def has_windows(_model: torch.nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Returns whether an argument is a cache with sliding-window layers."""
    layer = _layer_class()
    caches = [cache for value in arguments.values() for cache in _caches(value)]
    return layer is not None and any(isinstance(item, layer) for cache in caches for item in cache.layers)


@contextlib.contextmanager
def traced_windows(_model: torch.nn.Module) -> Iterator[None]:
    """Puts the symbolic methods in place of those of transformers' sliding-window layers."""
    layer = _layer_class()
    if layer is None:
        yield
        return
    with replaced_attributes(layer, {"update": _update, "get_mask_sizes": _mask_sizes}):
        yield


def _layer_class() -> type | None:
    module = sys.modules.get("transformers.cache_utils")
    return getattr(module, "DynamicSlidingWindowLayer", None)


def _caches(value: Any) -> list[Any]:
    halves = [getattr(value, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    return [cache for cache in (value, *halves) if isinstance(getattr(cache, "layers", None), list)]


def _update(
    self: Any, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    if not self.is_initialized:
        self.lazy_initialization(key_states, value_states)
    self.cumulative_length += key_states.shape[-2]
    keys = torch.cat([self.keys, key_states], dim=-2)
    values = torch.cat([self.values, value_states], dim=-2)
    self.keys, self.values = (_last(states, self.sliding_window - 1) for states in (keys, values))
    return keys, values


def _last(states: torch.Tensor, count: int) -> torch.Tensor:
    """The last ``count`` positions, or all if there are fewer."""
    length = states.shape[-2]
    start = torch.sym_max(length - count, 0)
    return states.narrow(-2, start, length - start)


def _mask_sizes(self: Any, query_length: int) -> tuple[Any, Any]:
    stored = self.keys.shape[-2] if self.is_initialized else 0
    return stored + query_length, self.cumulative_length - stored
