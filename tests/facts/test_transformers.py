"""What transformers does, as far as exportkit is built on it. A failure here means: think again."""

import functools
import subprocess
import sys

import pytest
import torch
from transformers import DynamicCache, cache_utils, monkey_patching
from transformers.modeling_outputs import BaseModelOutput, ModelOutput

from exportkit._torch_compat.pytree import deregister_node
from tests.models import IMAGE_TOKEN, random_ids, tiny_llama, tiny_llava, tiny_mamba, tiny_mistral, tiny_t5


def _seen_by_forward(model, **inputs):
    """Returns the named arguments of each call of ``forward`` while the model generates three tokens."""
    calls = []
    original = model.forward

    @functools.wraps(original)
    def forward(*args, **kwargs):
        assert not args
        cache = kwargs.get("past_key_values")
        calls.append({**kwargs, "stored": None if cache is None else _stored(cache)})
        return original(**kwargs)

    model.forward = forward
    model.generate(**inputs, max_new_tokens=3, do_sample=False)
    return calls


def _stored(cache):
    """Whether the cache is true, how many layers it has, and how many tensors they hold."""
    caches = [cache.self_attention_cache, cache.cross_attention_cache] if hasattr(cache, "is_updated") else [cache]
    layers = [layer for each in caches for layer in each.layers]
    return bool(cache), len(layers), sum(layer.keys is not None for layer in layers) * 2


# Registration


def test_caches_are_not_registered_but_model_outputs_are():
    assert cache_utils.DynamicCache not in torch.utils._pytree.SUPPORTED_NODES
    assert BaseModelOutput in torch.utils._pytree.SUPPORTED_NODES
    assert issubclass(BaseModelOutput, ModelOutput)


def test_class_can_be_registered_once_only():
    class Twice:
        pass

    def register():
        torch.utils._pytree.register_pytree_node(Twice, lambda value: ([], None), lambda leaves, _: Twice())

    register()
    try:
        with pytest.raises(ValueError, match="already registered as pytree node"):
            register()
    finally:
        deregister_node(Twice)


def test_optree_sees_registrations_of_torch_only_once_its_bridge_is_imported():
    code = """
        import torch, optree
        class Before: pass
        class After: pass
        flatten, unflatten = lambda value: ([], None), lambda leaves, _: None
        torch.utils._pytree.register_pytree_node(Before, flatten, unflatten)
        known = lambda cls: cls in optree.register_pytree_node.get(namespace="torch")
        print(known(Before))
        import torch.utils._cxx_pytree
        torch.utils._pytree.register_pytree_node(After, flatten, unflatten)
        print(known(Before), known(After), After in optree.register_pytree_node.get())
    """
    script = "\n".join(line[8:] for line in code.splitlines())
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert result.stdout.split() == ["False", "True", "True", "False"]


@pytest.mark.parametrize(
    "name",
    [
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "DynamicIndexedLayer",
        "StaticLayer",
        "StaticSlidingWindowLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
        "LinearAttentionAndStaticFullAttentionLayer",
        "LinearAttentionAndStaticSlidingWindowAttentionLayer",
        "DummyLayer",
        "QuantizedLayer",
        "EncoderDecoderCache",
    ],
)
def test_kind_of_cache_exists(name):
    assert isinstance(getattr(cache_utils, name), type)


def test_every_kind_of_layer_is_known():
    """A new kind must be looked at: does it hold tensors under names that `exportkit.trees` sees?"""
    kinds = {cls.__name__ for cls in cache_utils.DYNAMIC_LAYER_TYPE_MAPPING.values() if "cache_utils" in cls.__module__}
    kinds |= {cls.__name__ for cls in cache_utils.STATIC_LAYER_TYPE_MAPPING.values() if "cache_utils" in cls.__module__}

    assert kinds == {
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "DynamicIndexedLayer",
        "StaticLayer",
        "StaticSlidingWindowLayer",
        "StaticIndexedLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
        "LinearAttentionAndStaticFullAttentionLayer",
        "LinearAttentionAndStaticSlidingWindowAttentionLayer",
        "DummyLayer",
    }


# What generate() passes to forward


def test_prefill_gets_a_cache_that_is_true_and_holds_nothing():
    first, second, _ = _seen_by_forward(tiny_llama(), input_ids=random_ids(1, 5))

    assert first["stored"] == (True, 2, 0)
    assert second["stored"] == (True, 2, 4)


def test_prefill_of_an_encoder_decoder_gets_two_such_caches():
    first, second, _ = _seen_by_forward(tiny_t5(), input_ids=random_ids(1, 5))

    assert first["stored"][2] == 0
    assert second["stored"][2] == 8
    assert isinstance(first["encoder_outputs"], ModelOutput)
    assert "input_ids" not in first


@pytest.mark.parametrize(("padded", "given"), [(False, False), (True, True)])
def test_attention_mask_of_ones_is_dropped(padded, given):
    ids = random_ids(2, 5)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0 if padded else 1
    calls = _seen_by_forward(tiny_llama(), input_ids=ids, attention_mask=mask)

    assert [call.get("attention_mask") is not None for call in calls] == [given] * 3


def test_python_constants_are_passed_by_name():
    for call in _seen_by_forward(tiny_llama(), input_ids=random_ids(1, 5)):
        assert (call["logits_to_keep"], call["use_cache"], call["return_dict"]) == (1, True, True)


def test_model_of_states_gets_its_cache_under_another_name():
    calls = _seen_by_forward(tiny_mamba(), input_ids=random_ids(1, 5))

    assert all(isinstance(call["cache_params"], DynamicCache) for call in calls)


def test_images_reach_forward_as_features_of_the_prompt_only():
    ids = torch.tensor([[1, *[IMAGE_TOKEN] * 4, 5, 6]])
    first, *others = _seen_by_forward(tiny_llava(), input_ids=ids, pixel_values=torch.randn(1, 3, 28, 28))

    assert "pixel_values" not in first
    features = first["mm_encoder_outputs"]["image"]
    assert [tuple(tensor.shape) for tensor in features.pooler_output] == [(4, 16)]
    assert all(call.get("mm_encoder_outputs") is None for call in others)


def test_forward_is_asked_for_its_signature():
    model = tiny_llama()
    model.forward = lambda **kwargs: None

    assert not model._supports_logits_to_keep()


# Caches


def test_sliding_layers_stop_growing_one_token_before_the_window():
    model = tiny_mistral(sliding_window=6)
    cache = DynamicCache(config=model.config)
    lengths = []
    with torch.no_grad():
        for _ in range(8):
            model(random_ids(1, 1), past_key_values=cache)
            lengths.append(cache.layers[0].keys.shape[2])

    assert lengths == [1, 2, 3, 4, 5, 5, 5, 5]
    assert cache.get_seq_length() == 8


def test_cache_without_layers_is_false_and_one_of_a_config_is_true():
    assert not DynamicCache()
    assert DynamicCache(config=tiny_llama().config)


# Patches


def test_patches_of_transformers_stay_on_after_an_error():
    from transformers.models.llama import modeling_llama

    class Replacement(modeling_llama.LlamaMLP):
        pass

    original = modeling_llama.LlamaMLP
    monkey_patching.register_patch_mapping({"LlamaMLP": Replacement})
    try:
        with pytest.raises(ZeroDivisionError), monkey_patching.apply_patches():
            raise ZeroDivisionError
        assert modeling_llama.LlamaMLP is Replacement
    finally:
        monkey_patching.unregister_patch_mapping(["LlamaMLP"])
        modeling_llama.LlamaMLP = original
