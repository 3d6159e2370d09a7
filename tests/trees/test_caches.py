"""A cache that is flattened and built again behaves the same, and so does a cache that is made of given tensors."""

import copy

import optree
import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from exportkit import (
    make_dynamic_cache,
    make_encoder_decoder_cache,
    make_static_cache,
    register_flattening_functions,
)
from exportkit.errors import InvalidRequestError
from exportkit.trees import Growth, flatten, set_stored_length, stored_length
from tests.models import random_cache, tiny_llama, tiny_mistral, tiny_t5
from tests.trees.caches import WINDOW, advance, assert_same, filled, kinds

KINDS = sorted(kinds())

PATHS = {
    "DynamicLayer": ["layers[0].keys", "layers[0].values"],
    "DynamicSlidingWindowLayer": ["layers[0].keys", "layers[0].values"],
    "DynamicIndexedLayer": ["layers[0].keys", "layers[0].values", "layers[0].indexer_keys"],
    "StaticLayer": ["layers[0].keys", "layers[0].values", "layers[0].cumulative_length"],
    "StaticSlidingWindowLayer": [
        "layers[0].keys",
        "layers[0].values",
        "layers[0].cumulative_length",
        "cumulative_length_int",
    ],
    "LinearAttentionLayer": [
        "layers[0].conv_states[0]",
        "layers[0].conv_states[1]",
        "layers[0].recurrent_states[0]",
        "layers[0].recurrent_states[1]",
    ],
    "LinearAttentionAndFullAttentionLayer": [
        "layers[0].keys",
        "layers[0].values",
        "layers[0].conv_states[0]",
        "layers[0].conv_states[1]",
        "layers[0].recurrent_states[0]",
        "layers[0].recurrent_states[1]",
    ],
    "EncoderDecoderCache": [
        "self_attention_cache.layers[0].keys",
        "self_attention_cache.layers[0].values",
        "cross_attention_cache.layers[0].keys",
        "cross_attention_cache.layers[0].values",
    ],
}


def _clone(leaf):
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _through_trees(cache):
    return flatten(cache).map(_clone).build()


def _through_torch(cache):
    with register_flattening_functions():
        return torch.utils._pytree.tree_map(_clone, cache)


def _through_optree(cache):
    with register_flattening_functions():
        return optree.tree_map(_clone, cache, namespace="torch")


@pytest.mark.parametrize("through", [_through_trees, _through_torch, _through_optree])
@pytest.mark.parametrize("kind", KINDS)
def test_rebuilt_cache_is_the_same_and_goes_on_the_same_way(kind, through):
    cache = filled(kind)
    rebuilt = through(cache)

    assert_same(cache, rebuilt)
    if kind != "LinearAttentionLayer":
        assert rebuilt.get_seq_length() == cache.get_seq_length()
        assert rebuilt.get_mask_sizes(2, 0) == cache.get_mask_sizes(2, 0)
    for step, tokens in enumerate((1, 3)):
        for expected, got in zip(advance(cache, tokens, 10 + step), advance(rebuilt, tokens, 10 + step), strict=True):
            assert torch.equal(expected, got)
    assert_same(cache, rebuilt)


@pytest.mark.parametrize("kind", KINDS)
def test_cache_that_was_never_used_is_rebuilt_unused(kind):
    cache = kinds()[kind]()
    rebuilt = _through_trees(cache)

    assert_same(cache, rebuilt)
    assert_same(advance(cache, 3, 1), advance(rebuilt, 3, 1))
    assert_same(cache, rebuilt)


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_is_copied(kind):
    tree = flatten(filled(kind))
    again = flatten(tree.build())

    assert tree.leaves
    assert all(before is after for before, after in zip(tree.leaves, again.leaves, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_rebuilt_cache_shares_no_container_with_the_old_one(kind):
    cache = filled(kind)
    before = copy.deepcopy(cache)
    rebuilt = _through_trees(cache)

    advance(rebuilt, 2, 5)

    assert_same(before, cache)


@pytest.mark.parametrize("kind", sorted(PATHS))
def test_paths_name_attribute_and_layer(kind):
    assert list(flatten(filled(kind)).paths) == PATHS[kind]


def test_paths_do_not_depend_on_which_layers_are_filled():
    cache = DynamicCache()
    keys = torch.ones(1, 2, 3, 4)
    cache.update(keys, keys, 1)

    assert flatten(cache).paths == ("layers[1].keys", "layers[1].values")


def test_sliding_layer_keeps_window_and_counter_past_the_window():
    cache = filled("DynamicSlidingWindowLayer", tokens=3 * WINDOW)
    layer = _through_trees(cache).layers[0]

    assert layer.keys.shape[-2] == WINDOW - 1
    assert layer.sliding_window == WINDOW
    assert layer.get_seq_length() == 3 * WINDOW + 1


def test_length_axis_of_growing_layers_is_known():
    assert flatten(filled("DynamicLayer")).growing == {"layers[0].keys": Growth(2), "layers[0].values": Growth(2)}
    assert flatten(filled("DynamicIndexedLayer")).growing["layers[0].indexer_keys"] == Growth(1)


def test_what_a_window_stores_at_most_is_known():
    growing = flatten(make_dynamic_cache([(torch.ones(1, 2, 3, 4),) * 2], sliding_window=6)).growing
    assert growing["layers[0].keys"] == Growth(2, limit=5)


def test_counters_can_be_set_to_another_number_of_stored_tokens():
    window = make_dynamic_cache([(torch.ones(1, 2, 3, 4),) * 2], sliding_window=6)
    cross = make_dynamic_cache([(torch.ones(1, 2, 4, 4),) * 2], sliding_window=6)
    both = make_encoder_decoder_cache(window, cross)
    set_stored_length([both, "anything else"], 9)
    assert (window.get_seq_length(), cross.get_seq_length()) == (9, 4)
    assert stored_length([both, "anything else"]) == 9


def test_what_has_no_counter_says_nothing_of_stored_tokens():
    cache = make_dynamic_cache([(torch.ones(1, 2, 3, 4),) * 2])
    assert [stored_length(value) for value in (cache, None, [], torch.ones(2))] == [0, 0, 0, 0]


@pytest.mark.parametrize("kind", ["StaticLayer", "StaticSlidingWindowLayer", "LinearAttentionLayer"])
def test_layers_of_fixed_size_do_not_grow(kind):
    assert flatten(filled(kind)).growing == {}


def test_layers_without_a_state_have_no_leaves():
    from transformers import cache_utils

    cache = cache_utils.Cache(layers=[cache_utils.DynamicLayer(), cache_utils.DummyLayer()])
    keys = torch.ones(1, 2, 3, 4)
    cache.update(keys, keys, 0)
    tree = flatten(cache)

    assert tree.paths == ("layers[0].keys", "layers[0].values")
    assert_same(cache, tree.build())


def test_layers_of_different_kinds_stay_in_their_places():
    from transformers import cache_utils

    cache = cache_utils.Cache(
        layers=[
            cache_utils.DynamicSlidingWindowLayer(WINDOW),
            cache_utils.LinearAttentionLayer(1),
            cache_utils.DynamicLayer(),
        ]
    )
    keys = torch.ones(1, 2, 3, 4)
    cache.update(keys, keys, 0)
    cache.update_conv_state(torch.ones(1, 6, 4), 1)
    cache.update(keys, keys, 2)

    assert [type(layer) for layer in _through_trees(cache).layers] == [type(layer) for layer in cache.layers]
    assert_same(cache, _through_trees(cache))


def test_cache_inside_other_values_is_found():
    cache = random_cache(3, layers=1)
    tree = flatten({"inputs": (torch.ones(1), cache)})

    assert tree.paths == ("inputs[0]", "inputs[1].layers[0].keys", "inputs[1].layers[0].values")
    assert {path: growth.axis for path, growth in tree.growing.items()} == {
        "inputs[1].layers[0].keys": 2,
        "inputs[1].layers[0].values": 2,
    }
    assert tree.build()["inputs"][1].layers[0].keys is cache.layers[0].keys


def test_cross_attention_flags_are_kept():
    pair = (torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    used = make_encoder_decoder_cache([pair], [pair])
    fresh = make_encoder_decoder_cache([], [])

    assert _through_trees(used).is_updated == {0: True}
    assert _through_trees(fresh).is_updated == {}


def test_cache_class_of_a_model_is_opened():
    from transformers.models.xlstm.modeling_xlstm import xLSTMCache, xLSTMConfig

    config = xLSTMConfig(num_hidden_layers=2, hidden_size=8, num_heads=2, vocab_size=16)
    cache = xLSTMCache(config, max_batch_size=1)
    cache.rnn_state[1][0].normal_()
    tree = flatten(cache)

    assert tree.tensor_paths[:4] == ("seqlen_offset", "rnn_state[0][0]", "rnn_state[0][1]", "rnn_state[0][2]")
    rebuilt = tree.build()
    assert type(rebuilt) is xLSTMCache
    assert rebuilt.config is config
    assert rebuilt.rnn_state[1][0] is cache.rnn_state[1][0]


def test_padding_cache_of_a_convolution_goes_on_the_same_way():
    from transformers.models.mimi.modeling_mimi import MimiConv1dPaddingCache

    def advanced(cache):
        return cache.update(torch.ones(1, 2, 4), 0)

    cache = MimiConv1dPaddingCache(1, [torch.tensor(2)], ["constant"], [2])
    advanced(cache)
    rebuilt = _through_trees(cache)

    assert_same(cache, rebuilt)
    assert_same(advanced(cache), advanced(rebuilt))


def test_methods_that_a_cache_bound_to_itself_belong_to_the_rebuilt_one():
    cache = random_cache(3, layers=1)
    cache.length = cache.get_seq_length
    rebuilt = _through_trees(cache)

    assert rebuilt.length.__self__ is rebuilt


def test_cache_of_no_layers_is_rebuilt():
    assert len(flatten(make_dynamic_cache([])).build().layers) == 0


def test_quantised_states_are_tensors_of_their_own():
    paths = flatten(filled("Fp8QuantizedLayer")).paths

    assert "layers[0]._quantized_keys[0]" in paths
    assert "layers[0]._quantized_keys[1]" in paths


# Caches made of given tensors


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
        torch.ones(1, 2, 3, 4),
        1,
    ],
)
def test_layer_that_is_no_pair_of_keys_and_values_is_refused(pair):
    good = (torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    with pytest.raises(InvalidRequestError, match="needs both keys and values") as raised:
        make_dynamic_cache([good, pair])
    assert "where: layer 1" in str(raised.value)


def test_keys_and_values_may_have_heads_of_different_size():
    keys, values = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 6)

    assert make_static_cache([(keys, values)], max_cache_len=5).layers[0].values.shape == (1, 2, 5, 6)


def test_a_static_layer_that_is_built_around_other_tensors_notes_their_sizes():
    cache = make_static_cache([(torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8))])
    tree = flatten(cache)
    larger = {path: torch.zeros(3, 4, 9, 8) for path, tensor in tree.tensors().items() if tensor.dim() == 4}
    layer = tree.with_leaves(larger).build().layers[0]
    assert (layer.max_cache_len, layer.batch_size, layer.num_heads, layer.k_head_dim) == (9, 3, 4, 8)
