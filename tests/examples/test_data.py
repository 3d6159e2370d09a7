"""Runs on the user's own data: what each kind of file becomes, and the errors for other files."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from exportkit.errors import DestinationError, InvalidRequestError
from exportkit.examples.checkpoint import data_run, load_checkpoint
from tests import models
from tests.examples.test_checkpoint import save_tokenizer, saved

_SPEECH_LAYERS = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}
PROMPTS = "The quick brown\n\nquick\nThe quick quick brown\n"


def observed_calls(folder, *files, **options):
    return [call.tensors() for call in load_checkpoint(folder, data=files, **options).observe().observation.calls]


def write(file, text):
    file.write_text(text)
    return file


@pytest.fixture
def llama(tmp_path):
    save_tokenizer(saved(models.tiny_llama(), tmp_path / "llama"))
    return tmp_path / "llama"


@pytest.fixture
def bert(tmp_path):
    save_tokenizer(saved(models.tiny_bert(), tmp_path / "bert"))
    return tmp_path / "bert"


@pytest.fixture
def vit(tmp_path):
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    saved(ViTForImageClassification(ViTConfig(**sizes, image_size=24, patch_size=8)), tmp_path / "vit")
    ViTImageProcessorPil(size={"height": 24, "width": 24}).save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


@pytest.fixture
def wav2vec2(tmp_path):
    from transformers import Wav2Vec2Config, Wav2Vec2FeatureExtractor, Wav2Vec2Model

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    convolutions = {"conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2)}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    saved(Wav2Vec2Model(Wav2Vec2Config(**sizes, **convolutions, **positions)), tmp_path / "wav2vec2")
    Wav2Vec2FeatureExtractor(do_normalize=False).save_pretrained(tmp_path / "wav2vec2")
    return tmp_path / "wav2vec2"


@pytest.fixture
def whisper(tmp_path):
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    sizes = {"d_model": 16, "vocab_size": 32, "num_mel_bins": 8, "max_source_positions": 50, "pad_token_id": 0}
    layers = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in _SPEECH_LAYERS.items()}
    tokens = {"decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2}
    saved(WhisperForConditionalGeneration(WhisperConfig(**sizes, **layers, **tokens)), tmp_path / "whisper")
    WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(tmp_path / "whisper")
    return tmp_path / "whisper"


def sound(file, seconds, rate=16000, channels=1):
    import soundfile

    soundfile.write(file, np.full((int(seconds * rate), channels), 0.25, dtype=np.float32), rate)
    return file


@pytest.fixture
def image(tmp_path):
    from PIL import Image

    Image.new("L", (50, 40), 7).save(tmp_path / "cat.PNG")
    return tmp_path / "cat.PNG"


class TestTexts:
    def test_a_decoder_generates_from_a_batch_padded_on_the_left_and_from_single_prompts(self, llama, tmp_path):
        calls = observed_calls(llama, write(tmp_path / "prompts.txt", PROMPTS))
        prefills = [call for call in calls if call["input_ids"].shape[1] > 1 or "past_key_values" not in str([*call])]
        assert [call["input_ids"].tolist() for call in prefills] == [
            [[0, 2, 3, 4], [0, 0, 0, 3], [2, 3, 3, 4]],
            [[2, 3, 4]],
            [[3]],
        ]
        assert prefills[0]["attention_mask"].tolist() == [[0, 1, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1]]
        assert len(calls) == 3 * 4

    def test_an_encoder_reads_the_texts(self, bert, tmp_path):
        calls = observed_calls(bert, write(tmp_path / "texts.txt", PROMPTS))
        assert [tuple(call["input_ids"].shape) for call in calls] == [(3, 4), (1, 3), (1, 1)]

    def test_texts_that_cannot_be_padded_are_read_one_by_one(self, bert, tmp_path):
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if (bert / name).exists():
                config = json.loads((bert / name).read_text())
                config.pop("pad_token")
                (bert / name).write_text(json.dumps(config))
        calls = observed_calls(bert, write(tmp_path / "texts.txt", PROMPTS))
        assert [tuple(call["input_ids"].shape) for call in calls] == [(1, 3), (1, 1), (1, 4)]

    def test_a_single_text_is_also_given_twice(self, bert, tmp_path):
        calls = observed_calls(bert, write(tmp_path / "text.txt", "The quick brown"))
        assert [tuple(call["input_ids"].shape) for call in calls] == [(2, 3), (1, 3)]


class TestOtherKinds:
    def test_images_go_through_the_processor(self, vit, image):
        calls = observed_calls(vit, image)
        assert [tuple(call["pixel_values"].shape) for call in calls] == [(2, 3, 24, 24), (1, 3, 24, 24)]
        assert calls[0]["pixel_values"].unique().numel() == 1  # the image, not noise

    def test_arguments_of_the_processor_with_images_beside_the_file(self, vit, image, tmp_path):
        lines = "\n".join(json.dumps({"images": image.name}) for _ in range(3))
        calls = observed_calls(vit, write(tmp_path / "data.jsonl", lines))
        assert [len(call["pixel_values"]) for call in calls] == [3, 1, 1]

    def test_audio_is_converted_to_the_rate_of_the_processor_and_padded(self, wav2vec2, tmp_path):
        files = sound(tmp_path / "speech.wav", 0.01), sound(tmp_path / "music.FLAC", 0.02, rate=48000, channels=2)
        calls = observed_calls(wav2vec2, *files)
        assert [tuple(call["input_values"].shape) for call in calls] == [(2, 320), (1, 160)]
        assert calls[1]["input_values"].allclose(torch.tensor(0.25), atol=1e-3)
        assert calls[0]["input_values"][0, 160:].eq(0).all()

    def test_a_model_generates_from_audio_that_its_processor_pads_to_a_fixed_length(self, whisper, tmp_path):
        sound(tmp_path / "speech.wav", 0.4)
        calls = observed_calls(whisper, write(tmp_path / "data.jsonl", json.dumps({"audio": "speech.wav"})))
        states = [value for call in calls for path, value in call.items() if path.startswith("encoder_outputs")]
        assert {tuple(value.shape) for value in states} == {(2, 50, 16), (1, 50, 16)}

    def test_a_text_is_never_a_path(self, bert, tmp_path):
        calls = observed_calls(bert, write(tmp_path / "data.jsonl", json.dumps({"text": "quick cat.png"})))
        assert calls[0]["input_ids"].tolist()[0][0] == 3

    def test_tensors_are_the_arguments_of_a_call(self, bert, tmp_path):
        for number, shape in enumerate([(2, 5), (3, 4)]):
            save_file({"input_ids": torch.full(shape, 3)}, tmp_path / f"{number}.SafeTensors")
        calls = observed_calls(bert, tmp_path / "0.SafeTensors", tmp_path / "1.SafeTensors")
        assert [tuple(call["input_ids"].shape) for call in calls] == [(2, 5), (3, 4)]


class TestTasksAndOutputs:
    def test_a_task_chooses_the_class(self, llama):
        assert load_checkpoint(llama, task="feature-extraction").name == "LlamaModel"
        assert load_checkpoint(llama, task="text-generation").name == "LlamaForCausalLM"

    def test_a_task_whose_head_the_checkpoint_lacks(self, llama):
        with pytest.raises(DestinationError, match=r"lacks 1 weights(.|\n)*score.weight: nothing"):
            load_checkpoint(llama, task="text-classification")

    def test_a_task_of_other_models(self, llama):
        with pytest.raises(DestinationError, match="cannot be loaded as AutoModelForImageClassification"):
            load_checkpoint(llama, task="image-classification")

    def test_an_unknown_task(self, llama):
        with pytest.raises(InvalidRequestError, match=r"no pipeline for this task(.|\n)*expected: (.|\n)*fill-mask"):
            load_checkpoint(llama, task="cooking")

    def test_further_outputs(self, llama):
        observer = load_checkpoint(llama, outputs=["hidden_states", "attentions"]).observe()
        paths = {path.partition("[")[0] for path in observer.observation.calls[0].outputs.tensors()}
        assert {"hidden_states", "attentions"} <= paths

    def test_an_unknown_output(self, llama):
        with pytest.raises(InvalidRequestError, match=r"has no such output(.|\n)*hidden_states(.|\n)*got: dreams"):
            load_checkpoint(llama, outputs=["dreams"])


class Plain(torch.nn.Module):
    """A model with one input, and no others."""

    main_input_name = "x"

    def can_generate(self):
        return False

    def forward(self, x, mask=None):
        return x


class Open(Plain):
    """A model that takes inputs of any name."""

    def forward(self, x, **others):
        return x


class TestErrors:
    @pytest.mark.parametrize(("names", "got"), [(["x", "maks"], "maks"), (["y"], "y"), ([], "no tensors")])
    def test_tensors_that_the_model_does_not_take(self, tmp_path, names, got):
        save_file({name: torch.ones(2) for name in names}, tmp_path / "call.safetensors")
        with pytest.raises(InvalidRequestError, match=rf"does not accept(.|\n)*expected: x, mask\n  got: {got}"):
            data_run(Plain(), tmp_path, [tmp_path / "call.safetensors"])

    def test_tensors_of_any_name_for_a_model_that_takes_them(self, tmp_path):
        save_file({"x": torch.ones(2), "other": torch.ones(3)}, tmp_path / "call.safetensors")
        (call,) = data_run(Open(), tmp_path, [tmp_path / "call.safetensors"]).observe().observation.calls
        assert call.tensors().keys() == {"x", "others.other"}

    def test_no_file(self, bert, tmp_path):
        with pytest.raises(DestinationError, match="data file does not exist"):
            load_checkpoint(bert, data=[tmp_path / "none.txt"])

    def test_another_kind_of_file(self, bert, tmp_path):
        with pytest.raises(InvalidRequestError, match=r"Unsupported kind of data file(.|\n)*expected: .txt"):
            load_checkpoint(bert, data=[write(tmp_path / "table.csv", "")])

    def test_audio_for_a_model_of_texts(self, bert, tmp_path):
        with pytest.raises(InvalidRequestError, match=r"does not accept audio(.|\n)*expected: text"):
            load_checkpoint(bert, data=[sound(tmp_path / "speech.wav", 0.1)])

    def test_audio_that_is_damaged(self, wav2vec2, tmp_path):
        with pytest.raises(DestinationError, match="data cannot be read"):
            load_checkpoint(wav2vec2, data=[write(tmp_path / "speech.wav", "RIFF")])

    def test_a_file_that_holds_nothing(self, bert, tmp_path):
        with pytest.raises(InvalidRequestError, match="nothing to run the model on"):
            load_checkpoint(bert, data=[write(tmp_path / "texts.txt", "\n")])

    @pytest.mark.parametrize(
        ("name", "text"), [("a.jsonl", "{"), ("a.jsonl", "[1]"), ("a.safetensors", ""), ("a.png", "")]
    )
    def test_damaged_files(self, bert, tmp_path, name, text):
        with pytest.raises(DestinationError, match="data cannot be read"):
            load_checkpoint(bert, data=[write(tmp_path / name, text)])

    def test_data_that_the_processor_does_not_take(self, bert, image):
        with pytest.raises(InvalidRequestError, match=r"does not accept the data(.|\n)*got: images"):
            load_checkpoint(bert, data=[image])

    def test_a_checkpoint_without_a_processor(self, tmp_path):
        saved(models.tiny_bert(), tmp_path / "bare")
        with pytest.raises(DestinationError, match="no tokenizer and no processor"):
            load_checkpoint(tmp_path / "bare", data=[write(tmp_path / "texts.txt", PROMPTS)])
