"""Caches in a trace: sliding windows of symbolic length, and one graph for the first call and for later ones.

transformers counts cached tokens in Python ints and asks its caches whether this is the first call. A trace freezes
both, so that its graph would serve prefill or decoding, but not both.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from exportkit._torch_compat.modules import forward_of
from exportkit._torch_compat.transformers import REDUCED_MASK, cache_class, causal_mask_shortcut
from exportkit.overrides import (
    Attribute,
    Replacing,
    classes_of,
    namespaces,
    original_attribute,
    original_in,
    replaced,
    replaced_attributes,
)

Adapted = tuple[dict[str, Any], Callable[[Any], Any]]  # arguments of a traced call, and what completes its result


# Sliding windows


def has_sliding_window(model: torch.nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Returns whether an argument is a cache with sliding-window layers, or the model makes one itself."""
    windowed = tuple(filter(None, map(cache_class, ("DynamicSlidingWindowLayer", "StaticSlidingWindowLayer"))))
    names = ("self_attention_cache", "cross_attention_cache")
    caches = [cache for v in arguments.values() for cache in (v, *(getattr(v, name, None) for name in names))]
    layers = [layer for c in caches if isinstance(found := getattr(c, "layers", None), list) for layer in found]
    if layers:
        return any(isinstance(layer, windowed) for layer in layers)
    return any(_has_window(getattr(module, "config", None)) for module in model.modules())


def _has_window(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    makes_caches = getattr(config, "use_cache", False) is True and type(getattr(config, "sliding_window", None)) is int
    return makes_caches and (kinds is None or any("sliding" in str(kind) for kind in kinds))


def symbolic_windows(_model: torch.nn.Module) -> Replacing:
    """Keeps the lengths of sliding-window layers symbolic.

    The counter comes from the inputs (the caller of the trace sets it), lengths are those of the tensors, and the slice
    that keeps the last ``window - 1`` tokens becomes a narrow with a symbolic start. Whether a causal mask is needed is
    not asked: in a trace it is, and asking limits the program to windows that are not full.
    """
    shortcut, changed = causal_mask_shortcut(), list[tuple[Any, str, Any]]()
    for name, update, sizes in _WINDOWED:
        windowed = cache_class(name)
        changed += [] if windowed is None else [(windowed, "update", update), (windowed, "get_mask_sizes", sizes)]
    if shortcut is not None:
        changed.append((*shortcut, lambda *_, **__: False))
    return replaced([(Attribute(owner, name), value) for owner, name, value in changed])


def _update(
    self: Any, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    if not self.is_initialized:
        self.lazy_initialization(key_states, value_states)
    self.cumulative_length += key_states.shape[-2]
    pairs = ((self.keys, key_states), (self.values, value_states))
    keys, values = (torch.cat([old, new], dim=-2) if old.ndim == new.ndim else new for old, new in pairs)
    length, stored = keys.shape[-2], self.sliding_window - 1
    records = getattr(self, "record_past", False)  # what left the window is kept, for a cache that may be cropped
    start = torch.sym_max(length - stored - (key_states.shape[-2] if records else 0), 0)
    seen = [states.narrow(-2, start, length - start) for states in (keys, values)]
    self.keys, self.values = (keys, values) if records else seen
    return (seen[0], seen[1]) if records else (keys, values)


def _mask_sizes(self: Any, query_length: int) -> tuple[Any, Any]:
    cached = self.keys.shape[-2] if self.is_initialized else 0
    if getattr(self, "record_past", False):
        cached = torch.sym_min(cached, self.sliding_window - 1)
    return cached + query_length, self.cumulative_length - cached


def _update_fixed(
    self: Any, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    if not self.is_initialized:
        self.lazy_initialization(key_states, value_states)
    window, count, new = self.max_cache_len, self.cumulative_length_int, key_states.shape[-2]
    self.cumulative_length_int = count + new
    visible = torch.sym_min(count, window - 1)
    length = torch.sym_max(visible + new, window)
    fits = torch.sym_max(torch.sym_min(window - count - new + 1, 1), 0)  # 1 or 0
    # Tokens that the new ones may look at (a full layer holds one more), the new ones, and what is left of the layer.
    start = visible + fits * (self.cumulative_length - visible)
    position = torch.arange(length, device=key_states.device)
    is_seen, is_new = position < visible, (position >= start) & (position < start + new)
    place = position + is_seen * torch.sym_min(count - visible, 1) + is_new * (window - start)
    returned = []
    for stored, states in ((self.keys, key_states), (self.values, value_states)):
        returned.append(torch.cat([stored, states], dim=-2).index_select(-2, place))
        stored.copy_(returned[-1].narrow(-2, length - window, window))
    self.cumulative_length.add_(new * fits)
    return returned[0], returned[1]


def _mask_sizes_fixed(self: Any, query_length: int) -> tuple[Any, Any]:
    window, count = self.max_cache_len, self.cumulative_length_int
    visible = torch.sym_min(count, window - 1)
    return torch.sym_max(visible + query_length, window), count - visible


_WINDOWED = (
    ("DynamicSlidingWindowLayer", _update, _mask_sizes),
    ("StaticSlidingWindowLayer", _update_fixed, _mask_sizes_fixed),
)


# Encoder-decoder models
#
# transformers projects the states of the encoder to keys and values in the first call, and reads them from the cache in
# later ones. In the graph, the cache is always extended by the part of the states that is not cached yet: all positions
# in the first call, and none in later ones.
#
# An audio encoder returns fewer states than it got frames. The mask over frames is then turned into a mask over all
# states beforehand, because the model would make it as long as the states that it gets.

_STATES, _MASK = "encoder_outputs", "attention_mask"
_MASK_MAKER = "create_bidirectional_mask"


def has_cross_cache(_model: torch.nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Returns whether the arguments hold the encoder's states, and a cache of the projections of some of them."""
    states = _states(arguments)
    caches = [layers for value in arguments.values() if (layers := _cross_layers(value))]
    return states is not None and any(layers[0].keys.shape[2] != states.shape[1] for layers in caches)


def masks_over_states(model: torch.nn.Module) -> Replacing:
    """Makes masks cover all states of the encoder, where the model would make them for those that it gets.

    Audio encoders take the mask that they are given for one over their states, and a decoder that is given no mask
    attends to all states without one.
    """
    changed = [(Attribute(cls, REDUCED_MASK), lambda _self, _length, mask, *_, **__: mask) for cls in _reducing(model)]
    makers = [Attribute(module, _MASK_MAKER) for module in namespaces(model) if hasattr(module, _MASK_MAKER)]
    return replaced([*changed, *((maker, _unmasked_states(original_in(maker))) for maker in makers)])


def _unmasked_states(make: Callable[..., Any]) -> Callable[..., Any]:
    names = inspect.signature(make)

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        given = names.bind(*args, **kwargs).arguments
        hides = [name for name in (_MASK, "or_mask_function", "and_mask_function") if given.get(name) is not None]
        return make(*args, **kwargs) if hides or given.get("encoder_hidden_states") is None else None

    return made


def with_uncached_states(model: torch.nn.Module, arguments: dict[str, Any], names: Collection[str]) -> Adapted:
    """Returns the arguments with the uncached part of the encoder's states, and what restores the whole in a result.

    Args:
        model: The model.
        arguments: Arguments by name.
        names: Names of all arguments that the method takes. A mask that it takes but was not given becomes one over all
            states: the model would make one over the uncached part.
    """
    states = _states(arguments)
    caches = [value for value in arguments.values() if _cross_layers(value)]
    if states is None or not caches:
        return arguments, lambda result: result
    rest = states[:, _cross_layers(caches[0])[0].keys.shape[2] :].contiguous()  # as encoders return it: models view it
    for cache in caches:
        cache.is_updated = dict.fromkeys(cache.is_updated, False)
    value, changed = arguments[_STATES], dict(arguments)
    ones = states.new_ones(states.shape[:2], dtype=torch.int64)
    if isinstance(value, Mapping):  # masks and other outputs of the encoder are over all positions, and stay
        changed[_STATES] = copy.copy(value)
        changed[_STATES][next(iter(value))] = rest
        if getattr(value, _MASK, ones) is None:  # the model would make one over the uncached part here, too
            changed[_STATES][_MASK] = ones
    else:
        changed[_STATES] = type(value)((rest, *value[1:]))
    reducing = next(iter(_reducing(model)), None)
    if _MASK in names and arguments.get(_MASK) is None:
        changed[_MASK] = ones
    elif _MASK in names and reducing is not None:
        module = next(module for module in model.modules() if isinstance(module, reducing))
        changed[_MASK] = original_attribute(reducing, REDUCED_MASK)(module, states.shape[1], arguments[_MASK])

    def restored(result: Any) -> Any:
        if isinstance(result, Mapping):
            for key in [key for key, value in result.items() if value is rest]:
                result[key] = states  # type: ignore[index]  # outputs of transformers can be assigned to
            return result
        if type(result) in (list, tuple):
            return type(result)(states if value is rest else value for value in result)
        return result

    return changed, restored


def _reducing(model: torch.nn.Module) -> list[type]:
    """The classes that define how the mask of an audio encoder is reduced to its states."""
    return [cls for cls in classes_of(model) if REDUCED_MASK in vars(cls)]


def _states(arguments: Mapping[str, Any]) -> torch.Tensor | None:
    value = arguments.get(_STATES)
    values = list(value.values()) if isinstance(value, Mapping) else value
    first = values[0] if isinstance(values, list | tuple) and values else None
    return first if isinstance(first, torch.Tensor) and first.ndim == 3 else None


def _cross_layers(value: Any) -> list[Any]:
    layers = getattr(getattr(value, "cross_attention_cache", None), "layers", [])
    return [layer for layer in layers if isinstance(getattr(layer, "keys", None), torch.Tensor)]


# Token types
#
# Some models read token types in the first call of a generation only, so they ask their cache whether it holds
# anything. In the graph the cache always says no, and as soon as it does hold something, the token types become a type
# without meaning to the model, as if they were not read.

_QUESTION = "is_initialized"
_TOKEN_TYPES = "token_type_ids"
_NO_TYPE = -1


def asks_for_first_call(model: torch.nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Returns whether a module asks a cache if this is the first call, and token types and a cache are given."""
    if not _token_types(arguments) or _cache_in(arguments) is None:
        return False
    codes = (getattr(inspect.unwrap(forward_of(module)), "__code__", None) for module in model.modules())
    return any(code is not None and _QUESTION in code.co_names for code in codes)


def always_first(_model: torch.nn.Module) -> Replacing:
    """Makes every cache say that it is empty."""
    return replaced_attributes(cache_class("Cache"), {_QUESTION: property(lambda _: False)})


def with_first_types(_model: torch.nn.Module, arguments: dict[str, Any], _names: Collection[str]) -> Adapted:
    """Returns the arguments with token types that mean nothing to the model once the cache holds something."""
    cache, changed = _cache_in(arguments), dict(arguments)
    for name in _token_types(arguments) if cache is not None else ():
        types = arguments[name]
        cached = types.new_ones(cache.get_seq_length()).sum()  # a sum: the trace would not see a size as a value
        changed[name] = torch.where(cached == 0, types, torch.full_like(types, _NO_TYPE))
    return changed, lambda result: result


def _token_types(arguments: Mapping[str, Any]) -> list[str]:
    return [name for name, value in arguments.items() if name.endswith(_TOKEN_TYPES) and torch.is_tensor(value)]


def _cache_in(arguments: Mapping[str, Any]) -> Any:
    cls = cache_class("Cache")
    return None if cls is None else next((value for value in arguments.values() if isinstance(value, cls)), None)
