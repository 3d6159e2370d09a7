"""Masks over frames of audio, while the states that an encoder made of them are cut to what is not cached yet."""

import pytest
import torch

from exportkit import make_encoder_decoder_cache
from exportkit.rewrites.encoder_decoder import masks_of_states, with_uncached_states
from tests.arguments.generative import speech_to_text, t5


def call(mask, cached=5, states=7):
    pair = torch.randn(1, 4, cached, 8), torch.randn(1, 4, cached, 8)
    return {
        "encoder_outputs": (torch.randn(1, states, 32),),
        "attention_mask": mask,
        "past_key_values": make_encoder_decoder_cache([pair], [pair]),
    }


def test_a_mask_over_frames_becomes_one_over_all_states():
    model, inputs = speech_to_text()
    adapted, _ = with_uncached_states(model, call(inputs["attention_mask"]), ["attention_mask"])
    assert adapted["encoder_outputs"][0].shape == (1, 2, 32)
    assert adapted["attention_mask"].tolist() == [[1] * 6 + [0]]


@pytest.mark.parametrize("build", [speech_to_text, t5])
def test_no_mask_becomes_one_that_hides_nothing(build):
    adapted, _ = with_uncached_states(build()[0], call(None), ["attention_mask"])
    assert adapted["attention_mask"].tolist() == [[1] * 7]


def test_a_mask_over_tokens_stays_as_it_is():
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0]])
    adapted, _ = with_uncached_states(t5()[0], call(mask), ["attention_mask"])
    assert adapted["attention_mask"] is mask


def test_encoders_make_masks_of_their_own_again_afterwards():
    model, inputs = speech_to_text()
    mask = inputs["attention_mask"]
    expected = model.model._get_feature_vector_attention_mask(7, mask)
    with pytest.raises(KeyError), masks_of_states(model):  # noqa: PT012 - the exception leaves the context
        assert model.model._get_feature_vector_attention_mask(2, mask) is mask
        adapted, _ = with_uncached_states(model, call(mask), ["attention_mask"])
        assert torch.equal(adapted["attention_mask"], expected)
        raise KeyError
    assert torch.equal(model.model._get_feature_vector_attention_mask(7, mask), expected)
