"""Caches of every kind, filled the way a model fills them, for the tests of trees.

`kinds` names a function for each kind that returns an empty cache; `advance` runs one more step on any of them.
"""

from __future__ import annotations

import types

import torch

BATCH, NUM_HEADS, HEAD_SIZE, STATES = 2, 2, 3, 2
WINDOW, CAPACITY = 5, 12


def kinds():
    """Returns a function for each kind of cache, by name, that makes an empty one of a single layer."""
    from transformers import cache_utils as c

    def of(layer_class, **kwargs):
        return lambda: c.Cache(layers=[layer_class(**kwargs)])

    static, sliding, states = {"max_cache_len": CAPACITY}, {"sliding_window": WINDOW}, {"number_of_states": STATES}
    return {
        "DynamicCache": c.DynamicCache,
        "MtpCache": c.MtpCache,
        "DFlashCache": c.DFlashCache,
        "DynamicLayer": of(c.DynamicLayer),
        "DynamicSlidingWindowLayer": of(c.DynamicSlidingWindowLayer, **sliding),
        "DynamicIndexedLayer": of(c.DynamicIndexedLayer),
        "StaticLayer": of(c.StaticLayer, **static),
        "StaticSlidingWindowLayer": of(c.StaticSlidingWindowLayer, **static, **sliding),
        "StaticIndexedLayer": of(c.StaticIndexedLayer, **static),
        "Fp8QuantizedLayer": of(c.Fp8QuantizedLayer),
        "RoundingLayer": of(_rounding_layer()),
        "LinearAttentionLayer": of(c.LinearAttentionLayer, **states),
        "LinearAttentionAndFullAttentionLayer": of(c.LinearAttentionAndFullAttentionLayer, **states),
        "LinearAttentionAndSlidingWindowAttentionLayer": of(
            c.LinearAttentionAndSlidingWindowAttentionLayer, **sliding, **states
        ),
        "LinearAttentionAndStaticFullAttentionLayer": of(
            c.LinearAttentionAndStaticFullAttentionLayer, **static, **states
        ),
        "LinearAttentionAndStaticSlidingWindowAttentionLayer": of(
            c.LinearAttentionAndStaticSlidingWindowAttentionLayer, **static, **sliding, **states
        ),
        "EncoderDecoderCache": lambda: c.EncoderDecoderCache(c.DynamicCache(), c.DynamicCache()),
    }


def _rounding_layer():
    """A quantised layer that keeps whole numbers: the quantisers of transformers need packages of their own."""
    from transformers import cache_utils as c

    class RoundingLayer(c.QuantizedLayer):
        def __init__(self):
            super().__init__(residual_length=3)

        def _quantize(self, tensor, axis):
            return (tensor * 16).round().to(torch.int8), {"scale": 16, "axis": axis}

        def _dequantize(self, quantized):
            return quantized[0] / quantized[1]["scale"]

    return RoundingLayer


def advance(cache, tokens, seed):
    """Stores ``tokens`` more tokens, the same for the same seed; returns what the layers handed back."""
    from transformers import cache_utils as c

    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    if isinstance(cache, c.EncoderDecoderCache):
        cache.is_updated[0] = True
        return [*advance(cache.self_attention_cache, tokens, seed), *advance(cache.cross_attention_cache, 4, seed)]
    layer = cache.layers[0] if cache.layers else None
    returned = []
    if layer is None or isinstance(layer, c.CacheLayerMixin):
        keys_values = random(2, BATCH, NUM_HEADS, tokens, HEAD_SIZE)
        returned += cache.update(keys_values[0], keys_values[1], 0)
    if hasattr(layer, "update_indexer"):
        returned.append(cache.update_indexer(random(BATCH, tokens, HEAD_SIZE), 0))
    if isinstance(layer, c.LinearAttentionCacheLayerMixin):
        for state in range(STATES):
            returned.append(cache.update_conv_state(random(BATCH, 6, 4), 0, state))
            returned.append(cache.update_recurrent_state(random(BATCH, 6, 4), 0, state))
    return [tensor.clone() for tensor in returned]


def filled(kind, tokens=4):
    """Returns a cache of the kind that has seen ``tokens`` tokens and one more."""
    cache = kinds()[kind]()
    advance(cache, tokens, seed=1)
    advance(cache, 1, seed=2)
    return cache


def assert_same(expected, got, where="cache"):
    """Compares two caches attribute by attribute, without any help of the package."""
    assert type(got) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype, where
        assert torch.equal(got, expected), where
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), where
        for index, (a, b) in enumerate(zip(expected, got, strict=True)):
            assert_same(a, b, f"{where}[{index}]")
    elif isinstance(expected, dict):
        assert list(got) == list(expected), where
        for key, value in expected.items():
            assert_same(value, got[key], f"{where}[{key!r}]")
    elif isinstance(expected, types.MethodType):
        assert got.__func__ is expected.__func__, where
    elif hasattr(expected, "__dict__") and not isinstance(expected, type | types.FunctionType):
        assert vars(got).keys() == vars(expected).keys(), where
        for name, value in vars(expected).items():
            assert_same(value, vars(got)[name], f"{where}.{name}")
    else:
        assert got == expected, where
