"""Runs on the user's own data: what each kind of file becomes, and the errors for other files."""

import json

import pytest
import torch
from safetensors.torch import save_file

from exportkit.errors import DestinationError, InvalidRequestError
from exportkit.examples.checkpoint import load_checkpoint
from tests import models
from tests.examples.test_checkpoint import save_tokenizer, saved

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

    def test_a_text_is_never_a_path(self, bert, tmp_path):
        calls = observed_calls(bert, write(tmp_path / "data.jsonl", json.dumps({"text": "quick cat.png"})))
        assert calls[0]["input_ids"].tolist()[0][0] == 3

    def test_tensors_are_the_arguments_of_a_call(self, bert, tmp_path):
        for number, shape in enumerate([(2, 5), (3, 4)]):
            save_file({"input_ids": torch.full(shape, 3)}, tmp_path / f"{number}.safetensors")
        calls = observed_calls(bert, tmp_path / "0.safetensors", tmp_path / "1.safetensors")
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
        with pytest.raises(InvalidRequestError, match=r"does not return this(.|\n)*hidden_states(.|\n)*got: dreams"):
            load_checkpoint(llama, outputs=["dreams"])


class TestErrors:
    def test_no_file(self, bert, tmp_path):
        with pytest.raises(DestinationError, match="data file does not exist"):
            load_checkpoint(bert, data=[tmp_path / "none.txt"])

    def test_another_kind_of_file(self, bert, tmp_path):
        with pytest.raises(InvalidRequestError, match=r"hold no data(.|\n)*expected: .txt"):
            load_checkpoint(bert, data=[write(tmp_path / "song.mp3", "")])

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
        with pytest.raises(InvalidRequestError, match=r"does not take the data(.|\n)*got: images"):
            load_checkpoint(bert, data=[image])

    def test_a_checkpoint_without_a_processor(self, tmp_path):
        saved(models.tiny_bert(), tmp_path / "bare")
        with pytest.raises(DestinationError, match="no tokenizer and no processor"):
            load_checkpoint(tmp_path / "bare", data=[write(tmp_path / "texts.txt", PROMPTS)])
