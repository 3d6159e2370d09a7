"""Caches in a trace: uncached encoder states with masks over audio frames, and token types of the first call."""

import dataclasses

import pytest
import torch
import transformers

import exportkit
from exportkit import make_encoder_decoder_cache
from exportkit.rewrites.caches import masks_over_states, with_uncached_states
from exportkit.rewrites.table import applied, matching_rewrites
from tests.arguments.generative import TEXT, speech_to_text, t5


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


def test_encoder_outputs_without_a_mask_get_one_that_hides_nothing():
    @dataclasses.dataclass
    class States(transformers.utils.ModelOutput):
        last_hidden_state: torch.Tensor | None = None
        attention_mask: torch.Tensor | None = None

    given = call(None)
    given["encoder_outputs"] = States(last_hidden_state=given["encoder_outputs"][0])
    adapted, _ = with_uncached_states(t5()[0], given, [])
    assert adapted["encoder_outputs"][0].shape == (1, 2, 32)
    assert adapted["encoder_outputs"]["attention_mask"].tolist() == [[1] * 7]
    assert given["encoder_outputs"].attention_mask is None


def test_a_mask_over_tokens_stays_as_it_is():
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0]])
    adapted, _ = with_uncached_states(t5()[0], call(mask), ["attention_mask"])
    assert adapted["attention_mask"] is mask


def test_encoders_make_masks_of_their_own_again_afterwards():
    model, inputs = speech_to_text()
    mask = inputs["attention_mask"]
    expected = model.model._get_feature_vector_attention_mask(7, mask)
    with pytest.raises(KeyError), masks_over_states(model):  # noqa: PT012 - the exception leaves the context
        assert model.model._get_feature_vector_attention_mask(2, mask) is mask
        adapted, _ = with_uncached_states(model, call(mask), ["attention_mask"])
        assert torch.equal(adapted["attention_mask"], expected)
        raise KeyError
    assert torch.equal(model.model._get_feature_vector_attention_mask(7, mask), expected)


@pytest.mark.runtime
def test_a_decoder_that_makes_a_mask_over_the_states_of_images_is_one_graph(tmp_path):
    small = {"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}
    images = transformers.ViTConfig(**small, image_size=16, patch_size=4)
    tokens = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=64, is_decoder=True)
    tokens.add_cross_attention = True
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(images, tokens)
    torch.manual_seed(0)
    model = transformers.VisionEncoderDecoderModel(config=config).eval()
    options = {"decoder_start_token_id": 1, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}

    def generate(batch, count):
        pixels = torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(batch))
        return model.generate(pixels, max_new_tokens=count, min_new_tokens=count, **options)

    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        generate(2, 3)
        generate(3, 3)
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    expected = generate(4, 6)
    with onnx_model.in_place_of(model):
        assert torch.equal(generate(4, 6), expected)


IMAGE_TOKEN = 98


def paligemma():
    from transformers import GemmaConfig, PaliGemmaConfig, PaliGemmaForConditionalGeneration, SiglipVisionConfig

    vision = SiglipVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8,
        vision_use_head=False,
    )  # fmt: skip
    text = GemmaConfig(**TEXT, head_dim=8)
    config = PaliGemmaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN, projection_dim=32)
    torch.manual_seed(0)
    return PaliGemmaForConditionalGeneration(config).eval()


def inputs(batch):
    ids = torch.randint(3, 90, (batch, 9), generator=torch.Generator().manual_seed(batch))
    ids[:, :4] = IMAGE_TOKEN
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": torch.zeros_like(ids),
        "pixel_values": torch.randn(batch, 3, 16, 16),
    }


@pytest.fixture(scope="module")
def observed():
    model, observer = paligemma(), exportkit.InputObserver()
    model.generation_config.eos_token_id = None
    with observer(model), torch.no_grad():
        model.generate(**inputs(2), max_new_tokens=3, do_sample=False)
    return model, observer


def test_the_rewrite_of_token_types_is_chosen_by_what_the_model_asks_and_undone(observed):
    from transformers import Cache

    model, observer = observed
    names = [rewrite.name for rewrite in matching_rewrites(model, observer.observation.calls[1].values())]
    assert names == ["token types read while the cache is empty"]
    before = vars(Cache)["is_initialized"]
    with applied(matching_rewrites(model, observer.observation.calls[1].values()), model):
        assert vars(Cache)["is_initialized"] is not before
    assert vars(Cache)["is_initialized"] is before


def test_models_that_do_not_ask_for_the_first_call_do_not_get_it():
    class Plain(torch.nn.Module):
        def forward(self, x, token_type_ids):
            return x + token_type_ids

    assert matching_rewrites(Plain(), {"x": torch.ones(1), "token_type_ids": torch.ones(1)}) == []


@pytest.mark.runtime
def test_one_graph_serves_the_first_call_and_those_after_it(observed, tmp_path):
    model, observer = observed
    report = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx").verify()
    assert report.verdict() == "proven"
    assert any("token types read while the cache is empty" in finding for finding in report.findings)
