"""What is known about key-value and state caches: their classes, how they grow, what they count, how they are built."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exportkit._torch_compat.transformers import cache_bases
from exportkit.errors import InvalidRequestError

KeyValue = tuple[torch.Tensor, torch.Tensor]

# Tensors that transformers derives from another attribute of the same layer: rebuilt, never an input of a graph.
DERIVED = {"_sliding_window_tensor": "sliding_window"}

# Sizes that a layer with tensors of a fixed length notes: of which tensor, along which axis.
_NOTED = {
    "batch_size": ("keys", 0),
    "num_heads": ("keys", 1),
    "max_cache_len": ("keys", 2),
    "k_head_dim": ("keys", 3),
    "v_head_dim": ("values", 3),
}

# What transformers keeps in caches besides tensors, and what follows from them and from the calls so far.
_FOLLOWED = frozenset({"cumulative_length", "is_initialized", "is_updated", "dtype", "device"})

# Values of these types are immutable, and most attributes of a cache have one of them: they are skipped quickly.
ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})

# Tokens that a layer of a fixed length has seen, with those that left its window. All layers of a cache count the same
# tokens, and no tensor shows how many there were: the counter is a leaf of the cache.
COUNTER = "cumulative_length_int"

# Whether a layer keeps tokens that left its window, so that the cache can be cropped.
_RECORDS = "record_past"

# The axis of these attributes grows by one with each token, in layers that do not preallocate it.
GROWING = {"keys": 2, "values": 2, "indexer_keys": 1}


@dataclass(frozen=True)
class Growth:
    """How the length of a dynamic cache grows.

    Attributes:
        axis: The axis that grows by one with each token.
        limit: Its largest size in a layer with a sliding window, or None.
    """

    axis: int
    limit: int | None = None


def _is_cache_class(cls: Any) -> bool:
    if issubclass(cls, torch.nn.Module | torch.Tensor | tuple | list | dict) or not cls.__dictoffset__:
        return False  # without __dict__ there are no attributes to look into
    return issubclass(cls, cache_bases())


# These are called for every leaf of every call, hence the cache.

is_cache_class: Callable[[type], bool] = functools.lru_cache(maxsize=1024)(_is_cache_class)
"""Returns whether a class is a cache of transformers or a layer of one. Other classes are objects like any other."""


_keeps_state: Callable[[type], bool] = functools.lru_cache(maxsize=1024)(
    lambda cls: is_cache_class(cls) and cls.__module__.partition(".")[0] != "transformers"
)


def own_state(cache: Any) -> dict[str, Any]:
    """Returns the attributes of a cache, or of a layer, that classes from elsewhere add to those of transformers.

    What transformers itself keeps besides tensors follows from these (see `set_stored_length`), but for a few.
    """
    state = vars(cache)
    if _keeps_state(type(cache)):
        return {name: value for name, value in state.items() if name not in _FOLLOWED and name not in DERIVED}
    found = {name: value for name, value in state.items() if type(value) not in ATOMS and _holds_own_state(value)}
    return found | _unseen(state)


def _unseen(state: Mapping[str, Any]) -> dict[str, Any]:
    """What no tensor shows among the attributes of a layer: a counter, and that it keeps what left its window."""
    found = {COUNTER: state[COUNTER]} if type(state.get(COUNTER)) is int else {}
    return found | {_RECORDS: True} if state.get(_RECORDS) is True else found


def _holds_own_state(value: Any) -> bool:
    if type(value) is list:
        classes = set(map(type, value))
        is_of_layers = all(map(is_cache_class, classes))
        return any(map(_keeps_state, classes)) or (is_of_layers and any(map(_unseen, map(vars, value))))
    return is_cache_class(type(value)) and bool(own_state(value))


def growth_of(name: str, cls: type, state: Mapping[str, Any]) -> Growth | None:
    """Returns how an attribute of a cache layer grows with each token, or None if it does not.

    Args:
        name: The attribute.
        cls: Class of the layer.
        state: Attributes of the layer.
    """
    if name not in GROWING or "max_cache_len" in state or hasattr(cls, "max_cache_len"):
        return None
    window = state["sliding_window"] if "sliding_window" in state else getattr(cls, "sliding_window", None)
    records = state.get(_RECORDS)
    return _growth(GROWING[name], window - 1 if isinstance(window, int) and not records else None)


@functools.lru_cache(maxsize=1024)  # one object for equal ones: they are compared by the hundred
def _growth(axis: int, limit: int | None) -> Growth:
    return Growth(axis, limit)


def sizes_noted(state: Mapping[str, Any]) -> dict[str, int]:
    """Returns the sizes of its tensors that a static layer notes, by attribute; nothing for any other layer.

    Args:
        state: Attributes of the layer.
    """
    found = {}
    for name, (source, axis) in _NOTED.items() if "max_cache_len" in state else ():
        tensor = state.get(source)
        if name in state and isinstance(tensor, torch.Tensor) and tensor.dim() == 4:
            found[name] = tensor.shape[axis]
    return found


def shared_count(layers: Sequence[Any]) -> Any:
    """Returns how many tokens all layers with a `COUNTER` have seen; None if there is none, or they differ."""
    counts = [vars(layer)[COUNTER] for layer in layers if COUNTER in getattr(layer, "__dict__", ())]
    return counts[0] if counts and all(count is counts[0] or count == counts[0] for count in counts) else None


def unfilled_layers(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the layers of a fixed length that hold no tensors yet, each with its path.

    transformers makes their tensors, which are zeros, in the first call. The encoder's part of a cache is left out.

    Args:
        value: A cache, or lists, tuples and dicts that hold some; any other value has no such layers.
        path: Its path.
    """
    if isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from unfilled_layers(item, f"{path}[{number}]")
    elif isinstance(value, dict) or is_cache_class(type(value)):
        state = value if isinstance(value, dict) else vars(value)
        is_layer = value is not state and "max_cache_len" in state and hasattr(value, "lazy_initialization")
        if is_layer and not isinstance(getattr(value, "keys", None), torch.Tensor):
            yield path, value
        for name, item in () if is_layer else state.items():
            if name != "cross_attention_cache":
                yield from unfilled_layers(item, f"{path}.{name}".lstrip("."))


def set_stored_length(cache: Any, length: int) -> None:
    """Sets the Python attributes that describe the cached tokens and that cannot be derived from the tensors.

    That is the counter of a sliding window, whether a layer was ever filled, and whether the encoder's part of an
    encoder-decoder cache is filled.

    Args:
        cache: A cache, changed in place, or lists, tuples and dicts of caches; any other value is left alone. Of an
            encoder-decoder cache, the decoder's part is changed.
        length: Number of tokens cached so far.
    """
    waiting = [cache]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list | tuple | dict):
            waiting += part.values() if isinstance(part, dict) else part
        for name, value in vars(part).items() if is_cache_class(type(part)) else ():
            if name == "cumulative_length" and isinstance(value, int | torch.SymInt):
                part.cumulative_length = length
            elif name == "is_initialized" and not length and isinstance(getattr(part, "keys", None), torch.Tensor):
                # False as in the first call of a generation, which models ask for.
                part.is_initialized = value and bool(part.keys.numel())
            elif name == "is_updated" and isinstance(value, dict):
                layers = part.cross_attention_cache.layers
                part.is_updated = {i: layers[i].get_seq_length() > 0 if i < len(layers) else False for i in value}
            elif name != "cross_attention_cache":
                waiting.append(value)


def stored_length(value: Any) -> int:
    """Returns how many tokens a cache counted, including those that left a sliding window; 0 without a counter.

    Args:
        value: A cache, or lists, tuples and dicts of caches; for any other value the result is 0.
    """
    longest, waiting = 0, [value]  # in a trace, a count may be symbolic
    while waiting:
        part = waiting.pop()
        if isinstance(part, list | tuple | dict):
            waiting += part.values() if isinstance(part, dict) else part
        elif is_cache_class(type(part)):
            count = getattr(part, "cumulative_length", 0)
            if isinstance(count, int) and isinstance(longest, int):
                longest = max(longest, count)
            elif isinstance(count, int | torch.SymInt):
                longest = torch.sym_max(longest, count)
            for name, item in vars(part).items():
                if not (type(item) in ATOMS or isinstance(item, torch.Tensor) or name == "cross_attention_cache"):
                    waiting.append(item)
    return longest


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
                    "A sliding-window layer holds at most window - 1 tokens.",
                    where=f"layer {index}",
                    expected=f"length <= {sliding_window - 1}",
                    got=keys.shape[-2],
                    hint="keep the last window - 1 tokens of the tensors.",
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
        max_cache_len: Length to allocate; by default the length of the given tensors. If it is longer, the
            tensors are copied into zeros of that length.
    """
    from transformers import cache_utils

    layers: list[Any] = []
    for keys, values in _checked(key_value_pairs):
        length = keys.shape[2]
        layer = cache_utils.StaticLayer(max_cache_len=length if max_cache_len is None else max_cache_len)
        if layer.max_cache_len < length:
            raise InvalidRequestError(
                "A static cache is shorter than the tensors it has to hold.",
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
        shapes = [tuple(getattr(each, "shape", ())) for each in (pair if isinstance(pair, tuple | list) else [pair])]
        if len(shapes) != 2 or {len(shape) for shape in shapes} != {4} or shapes[0][:3] != shapes[1][:3]:
            raise InvalidRequestError(
                "A cache layer needs both keys and values.",
                where=f"layer {index}",
                expected="two tensors (batch, heads, past, head_dim) with equal batch, heads and past",
                got=shapes,
            )
    return pairs


def _fill(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    layer.dtype, layer.device = keys.dtype, keys.device
    layer.keys, layer.values, layer.is_initialized = keys, values, True
