"""Local checkpoints: what is loaded, the default run, and the errors for folders that are not checkpoints."""

import json

import pytest
import torch

from exportkit.errors import DestinationError, InvalidRequestError, ObservationError
from exportkit.examples.checkpoint import load_checkpoint
from tests import models

_SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


def observed_calls(folder):
    return [call.tensors() for call in load_checkpoint(folder).observe().observation.calls]


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def save_tokenizer(folder):
    """A tokenizer with a token for each word."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({"<pad>": 0, "<unk>": 1, "The": 2, "quick": 3, "brown": 4}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")
    fast.save_pretrained(folder)


class TestDefaultRun:
    def test_a_decoder_generates_from_one_padded_prompt(self, tmp_path):
        prefill, *decodes = observed_calls(saved(models.tiny_llama(), tmp_path))
        assert prefill["input_ids"].shape == (1, 8)
        assert prefill["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1, 1, 1]]
        assert [call["input_ids"].shape for call in decodes] == [(1, 1)] * 3

    def test_a_decoder_with_a_tokenizer_generates_from_text(self, tmp_path):
        save_tokenizer(saved(models.tiny_llama(), tmp_path))
        prefill, *_ = observed_calls(tmp_path)
        assert prefill["input_ids"][0, :5].tolist() == [0, 2, 3, 4, 1]

    def test_an_encoder_decoder_generates_from_a_prompt_padded_on_the_right(self, tmp_path):
        first, *_ = observed_calls(saved(models.tiny_t5(), tmp_path))
        assert first["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 1, 1, 0]]

    def test_an_encoder_reads_padded_batches_of_different_lengths(self, tmp_path):
        calls = observed_calls(saved(models.tiny_bert(), tmp_path))
        assert [tuple(call["input_ids"].shape) for call in calls] == [(2, 7), (3, 9), (1, 5)]
        assert all(call["attention_mask"][-1, -1] == 0 for call in calls)

    def test_an_encoder_with_a_tokenizer_reads_texts_of_different_lengths(self, tmp_path):
        save_tokenizer(saved(models.tiny_bert(), tmp_path))
        calls = observed_calls(tmp_path)
        assert len({call["input_ids"].shape[1] for call in calls}) == len(calls) == 3
        assert all("attention_mask" in call for call in calls)

    def test_an_image_model_gets_its_image_size_in_two_batches(self, tmp_path):
        from transformers import ViTConfig, ViTForImageClassification

        model = ViTForImageClassification(ViTConfig(**_SIZES, image_size=24, patch_size=8))
        calls = observed_calls(saved(model, tmp_path))
        assert [tuple(call["pixel_values"].shape) for call in calls] == [(1, 3, 24, 24), (2, 3, 24, 24)]

    def test_an_image_model_of_any_size_gets_images_of_a_common_size(self, tmp_path):
        from transformers import ResNetConfig, ResNetModel

        model = ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic"))
        calls = observed_calls(saved(model, tmp_path))
        assert [tuple(call["pixel_values"].shape) for call in calls] == [(1, 3, 224, 224), (2, 3, 224, 224)]

    def test_an_audio_model_of_samples_gets_two_lengths(self, tmp_path):
        from transformers import Wav2Vec2Config, Wav2Vec2Model

        positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
        model = Wav2Vec2Model(Wav2Vec2Config(**_SIZES, conv_dim=[8] * 7, **positions))
        calls = observed_calls(saved(model, tmp_path))
        assert [tuple(call["input_values"].shape) for call in calls] == [(1, 8000), (2, 6401)]

    def test_an_audio_model_of_spectrograms_gets_the_configured_size(self, tmp_path):
        from transformers import ASTConfig, ASTModel

        patches = {"patch_size": 4, "frequency_stride": 4, "time_stride": 4}
        model = ASTModel(ASTConfig(**_SIZES, **patches, max_length=16, num_mel_bins=8))
        calls = observed_calls(saved(model, tmp_path))
        assert [tuple(call["input_values"].shape) for call in calls] == [(1, 16, 8), (2, 16, 8)]

    def test_a_model_of_text_and_images_has_no_default_run(self, tmp_path):
        saved(models.tiny_llava(), tmp_path)
        with pytest.raises(InvalidRequestError, match="one that takes input_ids and pixel_values") as error:
            load_checkpoint(tmp_path)
        assert "observer = exportkit.InputObserver()" in str(error.value)

    def test_a_model_that_raises_says_why(self, tmp_path):
        from transformers import T5Model

        example = load_checkpoint(saved(T5Model(models.tiny_t5().config), tmp_path))
        with pytest.raises(ObservationError, match="raises in the run that is observed") as error:
            example.observe()
        assert "input_ids or inputs_embeds" in str(error.value)


class TestLoading:
    def test_the_model_is_the_class_in_the_configuration_in_evaluation_mode_and_float32(self, tmp_path):
        saved(models.tiny_llama().bfloat16().train(), tmp_path)
        example = load_checkpoint(tmp_path)
        assert example.name == type(example.model).__name__ == "LlamaForCausalLM"
        assert not example.model.training
        assert {parameter.dtype for parameter in example.model.parameters()} == {torch.float32}

    def test_weights_in_several_files(self, tmp_path):
        models.tiny_llama().save_pretrained(tmp_path, max_shard_size="5KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
        assert load_checkpoint(tmp_path).name == "LlamaForCausalLM"

    @pytest.mark.parametrize("kind", ["nothing", "a file"])
    def test_no_folder(self, tmp_path, kind):
        path = tmp_path / "model"
        if kind == "a file":
            path.touch()
        with pytest.raises(DestinationError, match="checkpoint folder does not exist") as error:
            load_checkpoint(path)
        assert f"got: {kind}" in str(error.value)
        assert "hint: model.save_pretrained" in str(error.value)

    def test_a_folder_without_a_configuration(self, tmp_path):
        (tmp_path / "model.bin").touch()
        with pytest.raises(DestinationError, match=r"no config.json(.|\n)*got: model.bin"):
            load_checkpoint(tmp_path)

    def test_a_configuration_that_is_not_json(self, tmp_path):
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(DestinationError, match="configuration cannot be read"):
            load_checkpoint(tmp_path)

    @pytest.mark.parametrize(
        ("config", "got"),
        [
            ({"architectures": ["FancyForCausalLM"]}, "FancyForCausalLM"),
            ({"architectures": ["AutoConfig"]}, "AutoConfig"),
            ({}, "no class"),
            ([], "no class"),
        ],
    )
    def test_an_unknown_architecture(self, tmp_path, config, got):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(InvalidRequestError, match="architecture is unknown") as error:
            load_checkpoint(tmp_path)
        assert f"got: {got}" in str(error.value)

    def test_no_weights(self, tmp_path):
        (saved(models.tiny_llama(), tmp_path) / "model.safetensors").unlink()
        with pytest.raises(DestinationError, match="has no weights"):
            load_checkpoint(tmp_path)

    def test_a_pickle_is_never_read(self, tmp_path, monkeypatch):
        model = models.tiny_llama()
        (saved(model, tmp_path) / "model.safetensors").rename(tmp_path / "adapter.safetensors")
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
        monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was read"))
        with pytest.raises(DestinationError, match="cannot be loaded as LlamaForCausalLM"):
            load_checkpoint(tmp_path)

    def test_truncated_weights(self, tmp_path):
        file = saved(models.tiny_llama(), tmp_path) / "model.safetensors"
        file.write_bytes(file.read_bytes()[:1000])
        with pytest.raises(DestinationError, match="cannot be loaded as LlamaForCausalLM"):
            load_checkpoint(tmp_path)

    def test_missing_weights_are_an_error(self, tmp_path):
        edit_config(saved(models.tiny_llama(), tmp_path), num_hidden_layers=3)
        with pytest.raises(
            DestinationError, match=r"lacks 9 weights(.|\n)*model.layers.2.input_layernorm.weight: nothing"
        ):
            load_checkpoint(tmp_path)

    def test_weights_of_a_different_size_are_an_error(self, tmp_path):
        edit_config(saved(models.tiny_llama(), tmp_path), intermediate_size=48)
        with pytest.raises(DestinationError, match=r"\(32, 16\) instead of \(48, 16\)"):
            load_checkpoint(tmp_path)
