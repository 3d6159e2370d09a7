"""Token types that only the first call of a generation looks at: one graph for all calls."""

import pytest
import torch

import exportkit
from exportkit.rewrites.rules import applied, matching_rules
from tests.arguments.generative import TEXT

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


def test_the_rule_is_chosen_by_what_the_model_asks_and_undone(observed):
    from transformers import Cache

    model, observer = observed
    names = [rule.name for rule in matching_rules(model, observer.observation.calls[1].values())]
    assert names == ["token types read while the cache is empty"]
    before = vars(Cache)["is_initialized"]
    with applied(matching_rules(model, observer.observation.calls[1].values()), model):
        assert vars(Cache)["is_initialized"] is not before
    assert vars(Cache)["is_initialized"] is before


def test_models_that_do_not_ask_do_not_get_it():
    class Plain(torch.nn.Module):
        def forward(self, x, token_type_ids):
            return x + token_type_ids

    assert matching_rules(Plain(), {"x": torch.ones(1), "token_type_ids": torch.ones(1)}) == []


@pytest.mark.runtime
@pytest.mark.slow
def test_one_graph_serves_the_first_call_and_those_after_it(observed, tmp_path):
    model, observer = observed
    report = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx").verify()
    assert report.verdict() == "proven"
    assert any("token types read while the cache is empty" in finding for finding in report.findings)
