"""Names of the files and inputs in a folder, for the clients of encoder-decoder models."""

import json

import pytest
import torch

import exportkit
from tests import models

CACHE = [f"{i}.{half}.{state}" for i in (0, 1) for half in ("decoder", "encoder") for state in ("key", "value")]


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """A T5 and the folder that it was saved to, its encoder with it."""
    torch.manual_seed(0)
    model, observer = models.tiny_t5(), exportkit.InputObserver()
    inputs = {"input_ids": models.random_ids(2, 7), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    inputs["attention_mask"][0, -1] = 0
    with observer(model, parts="auto"):
        model.generate(**inputs, max_new_tokens=4, do_sample=False)
    exported = exportkit.export(model, observer)
    folder = tmp_path_factory.mktemp("t5") / "out"
    return model, exported.save(folder), folder


class TestEncoderDecoder:
    def test_inputs_have_the_names_that_optimum_knows_in_the_order_of_its_caches(self, t5):
        _, onnx_model, _ = t5
        assert onnx_model.path.name == "decoder_model_merged.onnx"
        plain = ["encoder_attention_mask", "input_ids", "encoder_hidden_states"]
        assert list(onnx_model.session.inputs) == [*plain, *(f"past_key_values.{name}" for name in CACHE)]
        assert set(onnx_model.session.outputs) >= {"logits", *(f"present.{name}" for name in CACHE)}

    def test_the_encoder_has_a_file_of_its_own(self, t5):
        _, onnx_model, _ = t5
        encoder = onnx_model.parts["encoder"]
        assert encoder.path.name == "encoder_model.onnx"
        assert list(encoder.session.inputs) == ["input_ids", "attention_mask"]
        assert encoder.session.outputs == ["last_hidden_state"]

    def test_the_configuration_of_the_model_is_beside_it(self, t5):
        *_, folder = t5
        assert json.loads((folder / "config.json").read_text())["model_type"] == "t5"
        assert json.loads((folder / "generation_config.json").read_text())["decoder_start_token_id"] == 0

    def test_it_is_loaded_with_its_encoder_and_called_like_the_model(self, t5):
        model, _, folder = t5
        inputs = {
            "input_ids": models.random_ids(3, 9),
            "attention_mask": torch.ones(3, 9, dtype=torch.long),
            "decoder_input_ids": models.random_ids(3, 2),
        }
        with torch.no_grad():
            expected = model(**inputs).logits
        torch.testing.assert_close(exportkit.load(folder)(**inputs).logits, expected, atol=1e-4, rtol=1e-4)

    def test_the_folder_proves_the_model_and_its_encoder(self, t5):
        *_, folder = t5
        report = exportkit.load(folder).verify()
        assert report.ok, str(report)
        assert [row.kind for row in report.rows].count("assembled") == 1
        assert list(report.parts) == ["encoder"]
