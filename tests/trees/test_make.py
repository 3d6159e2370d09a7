"""Caches made of given tensors behave like caches that a model filled."""

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from exportkit import make_dynamic_cache, make_encoder_decoder_cache, make_static_cache
from exportkit.errors import InvalidRequestError
from tests.models import tiny_llama, tiny_mistral, tiny_t5
from tests.trees.caches import assert_same


def _pairs(length, layers=2):
    return [(torch.randn(1, 2, length, 4), torch.randn(1, 2, length, 4)) for _ in range(layers)]


def _updated(cache, pairs):
    for index, (keys, values) in enumerate(pairs):
        cache.update(keys, values, index)
    return cache


def _logits(model, **inputs):
    with torch.no_grad():
        return model(**inputs).logits


def test_dynamic_cache_equals_one_that_was_updated():
    pairs = _pairs(5)

    assert_same(_updated(DynamicCache(), pairs).layers, make_dynamic_cache(pairs).layers)


def test_dynamic_cache_holds_the_given_tensors():
    pairs = _pairs(5)
    cache = make_dynamic_cache(pairs)

    assert [(layer.keys, layer.values) for layer in cache.layers] == pairs
    assert all(layer.keys is keys for layer, (keys, _) in zip(cache.layers, pairs, strict=True))


def test_dynamic_cache_goes_on_growing():
    cache = make_dynamic_cache(_pairs(5))
    keys, _ = cache.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), 1)

    assert keys.shape == (1, 2, 6, 4)
    assert cache.layers[0].get_seq_length() == 5


def test_dynamic_cache_without_layers_is_an_unused_one():
    cache = make_dynamic_cache([])
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)

    assert type(cache.layers[0]) is DynamicLayer
    assert cache.get_seq_length() == 3


def test_model_gives_the_same_result_for_a_made_cache():
    model = tiny_llama()
    ids = torch.tensor([[5, 6, 7, 8]])
    whole = _logits(model, input_ids=ids)
    past = DynamicCache()
    _logits(model, input_ids=ids[:, :3], past_key_values=past)

    made = make_dynamic_cache([(layer.keys, layer.values) for layer in past.layers])

    torch.testing.assert_close(_logits(model, input_ids=ids[:, 3:], past_key_values=made), whole[:, 3:])


def test_sliding_cache_equals_one_that_was_updated():
    pairs = _pairs(5)
    updated = DynamicCache()
    updated.layers = [DynamicSlidingWindowLayer(8), DynamicSlidingWindowLayer(8)]

    assert_same(_updated(updated, pairs).layers, make_dynamic_cache(pairs, sliding_window=8).layers)


def test_model_gives_the_same_result_for_a_made_sliding_cache():
    model = tiny_mistral(sliding_window=6)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
    whole = _logits(model, input_ids=ids)
    past = DynamicCache(config=model.config)
    _logits(model, input_ids=ids[:, :4], past_key_values=past)

    made = make_dynamic_cache([(layer.keys, layer.values) for layer in past.layers], sliding_window=6)

    torch.testing.assert_close(_logits(model, input_ids=ids[:, 4:], past_key_values=made), whole[:, 4:])


def test_sliding_cache_refuses_more_tokens_than_it_can_hold():
    assert make_dynamic_cache(_pairs(4), sliding_window=5).get_seq_length() == 4
    with pytest.raises(InvalidRequestError, match="at most window - 1 tokens") as raised:
        make_dynamic_cache(_pairs(5), sliding_window=5)
    assert "expected: length <= 4" in str(raised.value)
    assert "got: 5" in str(raised.value)


def test_static_cache_equals_one_that_was_updated():
    model, pairs = tiny_llama(), _pairs(5)
    updated = _updated(StaticCache(config=model.config, max_cache_len=9), pairs)

    assert_same(updated.layers, make_static_cache(pairs, max_cache_len=9).layers)


def test_static_cache_goes_on_after_the_given_tokens():
    cache = make_static_cache(_pairs(3, layers=1), max_cache_len=6)
    keys, _ = cache.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), 0)

    assert keys[0, 0].sum(-1).ne(0).tolist() == [True] * 4 + [False] * 2
    assert int(cache.get_seq_length()) == 4


def test_full_static_cache_holds_the_given_tensors():
    pairs = _pairs(5)

    assert make_static_cache(pairs).layers[1].keys is pairs[1][0]


def test_static_cache_refuses_to_be_shorter_than_its_tensors():
    with pytest.raises(InvalidRequestError, match="shorter than the tensors"):
        make_static_cache(_pairs(5), max_cache_len=4)


def test_encoder_decoder_cache_of_pairs_equals_one_of_caches():
    own, cross = _pairs(2), _pairs(7)
    made = make_encoder_decoder_cache(own, cross)

    assert type(made) is EncoderDecoderCache
    assert_same(make_encoder_decoder_cache(make_dynamic_cache(own), make_dynamic_cache(cross)), made)
    assert made.is_updated == {0: True, 1: True}


def test_model_gives_the_same_result_for_a_made_encoder_decoder_cache():
    model = tiny_t5()
    encoder_outputs = model.encoder(torch.tensor([[5, 6, 7]]))
    ids = torch.tensor([[0, 8, 9]])
    whole = _logits(model, encoder_outputs=encoder_outputs, decoder_input_ids=ids)
    past = EncoderDecoderCache(DynamicCache(), DynamicCache())
    _logits(model, encoder_outputs=encoder_outputs, decoder_input_ids=ids[:, :2], past_key_values=past)
    halves = [
        [(layer.keys, layer.values) for layer in half.layers]
        for half in (past.self_attention_cache, past.cross_attention_cache)
    ]

    made = make_encoder_decoder_cache(*halves)

    last = _logits(model, encoder_outputs=encoder_outputs, decoder_input_ids=ids[:, 2:], past_key_values=made)
    torch.testing.assert_close(last, whole[:, 2:])


@pytest.mark.parametrize(
    "pair",
    [
        (torch.ones(1, 2, 3, 4),),
        (torch.ones(2, 3, 4), torch.ones(2, 3, 4)),
        (torch.ones(1, 2, 3, 4), torch.ones(1, 2, 5, 4)),
        (torch.ones(1, 2, 3, 4), None),
    ],
)
def test_layer_that_is_no_pair_of_keys_and_values_is_refused(pair):
    good = (torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    with pytest.raises(InvalidRequestError, match="needs its keys and its values") as raised:
        make_dynamic_cache([good, pair])
    assert "where: layer 1" in str(raised.value)


def test_keys_and_values_may_have_heads_of_different_size():
    keys, values = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 6)

    assert make_static_cache([(keys, values)], max_cache_len=5).layers[0].values.shape == (1, 2, 5, 6)
