"""Folders of causal language models, as onnxruntime-genai runs them: unmodified, with the tokens of generate."""

import json

import numpy as np
import pytest
import torch

import exportkit
from exportkit.errors import ExportError, InvalidRequestError
from exportkit.folder.clients import with_full_caches
from tests import models

WINDOW, NEW_TOKENS = 6, 20
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**TEXT))


def qwen3():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**TEXT, head_dim=8))


def gemma3():
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**TEXT, head_dim=8, sliding_window=WINDOW, layer_types=layers))


def mistral():
    """The window is in every layer, and shorter than the recorded prompt."""
    return models.tiny_mistral(sliding_window=WINDOW, tie_word_embeddings=False)


def observed(make):
    """A model and what was seen of a generate.

    Its weights are large enough that its tokens depend on its input, and it never ends a text by itself.
    """
    torch.manual_seed(0)
    model, observer = make().eval(), exportkit.InputObserver()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        model.lm_head.weight[model.config.eos_token_id] = 0
    with observer(model):
        model.generate(tokens(1, 7), max_new_tokens=4, do_sample=False)
    return model, observer


def tokens(batch, length):
    return torch.randint(3, 60, (batch, length))


def continued(folder, prompt):
    """The prompts and the tokens that onnxruntime-genai adds to them."""
    import onnxruntime_genai

    model = onnxruntime_genai.Model(str(folder))
    options = onnxruntime_genai.GeneratorParams(model)
    options.set_search_options(max_length=prompt.shape[1] + NEW_TOKENS, batch_size=len(prompt))
    generator = onnxruntime_genai.Generator(model, options)
    generator.append_tokens(prompt.numpy().astype(np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [[int(token) for token in generator.get_sequence(row)] for row in range(len(prompt))]


@pytest.mark.runtime
@pytest.mark.parametrize("make", [llama, qwen3, gemma3, mistral])
def test_greedy_tokens_are_those_of_generate(make, tmp_path):
    model, observer = observed(make)
    exportkit.export(model, observer).save(tmp_path / "out", runtime="genai")
    assert exportkit.load(tmp_path / "out").verify().ok
    seen = set()
    for batch, length in ((1, 3), (1, 5), (1, 9), (2, 7), (1, 14)):
        prompt = tokens(batch, length)
        expected = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert continued(tmp_path / "out", prompt) == expected.tolist()
        assert expected.shape[1] == length + NEW_TOKENS
        seen |= set(expected[:, length:].flatten().tolist())
    assert len(seen) > 10  # else a graph that ignores its input would do


@pytest.fixture(scope="module")
def exported():
    """A model with sliding windows."""
    return exportkit.export(*observed(gemma3))


class TestSlidingWindow:
    def test_the_caches_hold_a_window_and_the_report_says_what_to_do(self, exported, tmp_path):
        exported.save(tmp_path / "out")
        assert not (tmp_path / "out" / "genai_config.json").exists()
        note = (
            "note: no genai_config.json: onnxruntime-genai cannot run this model, because the caches hold a sliding "
            'window, but onnxruntime-genai keeps every token; save(folder, runtime="genai") exports it with full '
            "caches.\n"
        )
        assert note in (tmp_path / "out" / "report.txt").read_text()

    def test_full_caches_hold_every_token(self, exported):
        full = with_full_caches(exported.traced)[0]
        sizes = {path: [str(size) for size in leaf.sizes] for path, leaf in full.plan.by_path.items()}
        assert sizes["past_key_values.layers[0].keys"] == ["batch", "2", "past_sequence", "8"]
        assert full.observation.calls[-1].tensors()["past_key_values.layers[0].keys"].shape[2] == 8

    def test_a_model_that_reads_more_than_its_window_says_is_refused(self, exported):
        """Full caches show such a model what a window would have dropped."""
        model = exported.model
        model.config.sliding_window = 100  # of the masks alone: the recorded caches have a window of 6
        try:
            with pytest.raises(ExportError, match="does not return what it returns with sliding windows"):
                with_full_caches(exported.traced)
        finally:
            model.config.sliding_window = WINDOW


@pytest.fixture(scope="module")
def plain():
    """A model whose every layer keeps every token."""
    return exportkit.export(*observed(lambda: models.tiny_llama(num_hidden_layers=1)))


def test_a_model_without_an_end_is_saved_with_a_note(plain, tmp_path):
    plain.model.generation_config.eos_token_id = None
    try:
        plain.save(tmp_path / "out")
    finally:
        plain.model.generation_config.eos_token_id = 2
    note = "note: the model defines no end-of-sequence token; onnxruntime-genai stops at the padding token.\n"
    assert note in (tmp_path / "out" / "report.txt").read_text()


def test_a_plain_decoder_needs_no_runtime_to_be_named(plain, tmp_path):
    plain.save(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "genai_config.json").read_text())
    assert config["model"] == {
        "type": "decoder",
        "vocab_size": 64,
        "context_length": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "decoder": {
            "session_options": {"provider_options": []},
            "filename": "model.onnx",
            "head_size": 4,
            "hidden_size": 16,
            "num_attention_heads": 4,
            "num_hidden_layers": 1,
            "num_key_value_heads": 2,
            "inputs": {
                "input_ids": "input_ids",
                "attention_mask": "attention_mask",
                "position_ids": "position_ids",
                "past_key_names": "past_key_values.%d.key",
                "past_value_names": "past_key_values.%d.value",
            },
            "outputs": {
                "logits": "logits",
                "present_key_names": "present.%d.key",
                "present_value_names": "present.%d.value",
            },
        },
    }
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["pad_token_id"] == 0


def test_an_encoder_is_no_decoder(tmp_path):
    model, observer = models.tiny_bert(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch, length in ((2, 7), (3, 5)):
            model(models.random_ids(batch, length), attention_mask=torch.ones(batch, length, dtype=torch.long))
    exported = exportkit.export(model, observer)
    with pytest.raises(InvalidRequestError) as error:
        exported.save(tmp_path / "out", runtime="genai")
    assert "onnxruntime-genai cannot run this model." in str(error.value)
    assert "the graph does not return logits and the keys and values" in str(error.value)
    exported.save(tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()
    assert not (tmp_path / "out" / "genai_config.json").exists()
