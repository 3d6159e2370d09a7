"""Code written for the capturing and patching of transformers runs after its imports are changed.

What it may rely on is in transformers' documentation: declarations, recorders, flags, keys of the patch mapping.
"""

import sys
import types

import pytest
import torch
from torch import nn

from exportkit import (
    OutputRecorder,
    apply_patches,
    capture_outputs,
    clear_patch_mapping,
    get_patch_mapping,
    merge_with_config_defaults,
    patch_output_recorders,
    register_patch_mapping,
    unregister_patch_mapping,
)


@pytest.fixture(autouse=True)
def _empty():
    clear_patch_mapping()
    yield
    clear_patch_mapping()


class MyAttention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.query = nn.Linear(size, size)

    def forward(self, hidden_states, states=None):
        states = hidden_states if states is None else states
        weights = (self.query(hidden_states) @ states.transpose(-1, -2)).softmax(-1)
        return weights @ states, weights


class MyDecoderBlock(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.attention = MyAttention(size)
        self.crossattention = MyAttention(size)

    def forward(self, hidden_states, encoder_states=None, **kwargs):
        hidden_states = hidden_states + self.attention(hidden_states)[0]
        return hidden_states + self.crossattention(hidden_states, encoder_states)[0]


def declared():
    return {
        "hidden_states": MyDecoderBlock,
        "attentions": OutputRecorder(MyAttention, layer_name="attention", index=1),
        "cross_attentions": OutputRecorder(MyAttention, layer_name="crossattention", index=1),
    }


@pytest.fixture(scope="module")
def model_class():
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

    class MyConfig(PretrainedConfig):
        model_type = "mine"

        def __init__(self, size=4, num_hidden_layers=3, use_cache=True, **kwargs):
            self.size, self.num_hidden_layers, self.use_cache = size, num_hidden_layers, use_cache
            super().__init__(**kwargs)

    class MyModel(PreTrainedModel):
        config_class = MyConfig
        _can_record_outputs = declared()

        def __init__(self, config):
            super().__init__(config)
            self.layers = nn.ModuleList(MyDecoderBlock(config.size) for _ in range(config.num_hidden_layers))
            self.norm = nn.LayerNorm(config.size)
            self.post_init()

        @merge_with_config_defaults
        @capture_outputs
        def forward(self, inputs_embeds, encoder_states, use_cache=None, **kwargs):
            hidden_states = inputs_embeds
            for layer in self.layers:
                hidden_states = layer(hidden_states, encoder_states, **kwargs)
            past = torch.zeros(1) if use_cache else None
            return BaseModelOutputWithPastAndCrossAttentions(self.norm(hidden_states), past)

    return MyModel


def call(model_class, **options):
    model = model_class(model_class.config_class())
    return model(torch.randn(2, 5, 4), encoder_states=torch.randn(2, 3, 4), **options)


def test_flags_select_what_is_returned(model_class):
    result = call(model_class, output_hidden_states=True)
    assert len(result.hidden_states) == 4
    assert result.hidden_states[-1] is result.last_hidden_state
    assert result.attentions is None
    result = call(model_class, output_attentions=True)
    assert result.hidden_states is None
    assert [tuple(weights.shape) for weights in result.attentions] == [(2, 5, 5)] * 3
    assert [tuple(weights.shape) for weights in result.cross_attentions] == [(2, 5, 3)] * 3


def test_return_dict_false_gives_a_tuple(model_class):
    result = call(model_class, output_hidden_states=True, output_attentions=True, return_dict=False)
    assert type(result) is tuple
    assert [type(value) for value in result] == [torch.Tensor, torch.Tensor, tuple, tuple, tuple]


def test_the_config_says_whether_there_is_a_cache(model_class):
    assert call(model_class).past_key_values is not None
    assert call(model_class, use_cache=False).past_key_values is None


def test_hidden_states_by_position_have_none_elsewhere(model_class):
    states = call(model_class, output_hidden_states=[0, -1]).hidden_states
    assert [state is None for state in states] == [False, True, True, False]


class SequentialExperts(nn.Module):
    pass


class FusedAttention(nn.Module):
    pass


class CustomLlamaAttention(nn.Module):
    pass


@pytest.fixture
def namespace():
    """A module in the namespace of transformers, as its own tests make one."""
    module = types.ModuleType("transformers.some_models")
    for name in ("Qwen2MoeExperts", "BertAttention", "Llama2Attention", "LlamaXAttention", "AttentionPool"):
        setattr(module, name, nn.Module)
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_keys_are_exact_names_and_expressions(namespace):
    register_patch_mapping(
        {
            ".*Attention$": FusedAttention,
            "Qwen2MoeExperts": SequentialExperts,
            "^Llama\\d+Attention$": CustomLlamaAttention,
        }
    )
    with apply_patches():
        assert namespace.Qwen2MoeExperts is SequentialExperts
        assert namespace.BertAttention is FusedAttention
        assert namespace.Llama2Attention is FusedAttention
        assert namespace.LlamaXAttention is FusedAttention
        assert namespace.AttentionPool is nn.Module
    assert namespace.BertAttention is namespace.Qwen2MoeExperts is nn.Module
    unregister_patch_mapping(["Qwen2MoeExperts", ".*Attention$"])
    with apply_patches():
        assert namespace.Llama2Attention is CustomLlamaAttention
        assert namespace.BertAttention is namespace.LlamaXAttention is nn.Module


def test_an_exact_name_comes_before_an_expression(namespace):
    register_patch_mapping(mapping={".*Attention": FusedAttention})
    register_patch_mapping(mapping={"BertAttention": CustomLlamaAttention})
    with apply_patches():
        assert namespace.BertAttention is CustomLlamaAttention
        assert namespace.Llama2Attention is FusedAttention


def test_registering_twice_needs_overwrite_and_only_modules_are_taken():
    register_patch_mapping({"Qwen2MoeExperts": SequentialExperts})
    with pytest.raises(ValueError):  # noqa: PT011
        register_patch_mapping({"Qwen2MoeExperts": FusedAttention})
    register_patch_mapping({"Qwen2MoeExperts": FusedAttention}, overwrite=True)
    assert get_patch_mapping() == {"Qwen2MoeExperts": FusedAttention}
    with pytest.raises(TypeError, match=r"must be a subclass of nn\.Module"):
        register_patch_mapping({"Other": int})
    with pytest.raises(ValueError, match="Cannot unregister"):
        unregister_patch_mapping(["Other"])


def test_recorders_follow_replacements():
    class Fused(MyAttention):
        pass

    class Model(nn.Module):
        _can_record_outputs = declared()

    model = Model()
    register_patch_mapping({"MyAttention": Fused, ".*Block$": SequentialExperts})
    patch_output_recorders(model)
    assert model._can_record_outputs["attentions"].target_class is Fused
    assert model._can_record_outputs["cross_attentions"].layer_name == "crossattention"
    assert model._can_record_outputs["hidden_states"] is SequentialExperts
    assert Model._can_record_outputs["hidden_states"] is MyDecoderBlock
