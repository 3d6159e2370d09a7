"""Language models from end to end: one graph for prompt, single token, and several tokens on a filled cache."""

import pytest
import torch

import exportkit


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=99, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


def prompt(batch, length, padded):
    ids = torch.randint(3, 99, (batch, length))
    mask = torch.ones_like(ids)
    if padded:
        ids[0, 0] = mask[0, 0] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """A Llama observed in generate, batch 1, and its ONNX model."""
    torch.manual_seed(0)
    model, observer = llama(), exportkit.InputObserver()
    with observer(model):
        model.generate(**prompt(1, 7, padded=True), max_new_tokens=4, do_sample=False)
    return model, observer, exportkit.export(model, observer).to_onnx(tmp_path_factory.mktemp("llama") / "model.onnx")


def test_one_graph_from_batch_one_is_proven_at_other_batches_and_lengths(generated):
    _, _, onnx_model = generated
    report = onnx_model.verify()
    assert report.ok, str(report)
    assert len([row for row in report.rows if row.kind == "unseen" and row.status == "proven"]) >= 5


def test_names_are_those_of_onnxruntime_genai_and_optimum(generated):
    _, _, onnx_model = generated
    cache = [f"past_key_values.{i}.{part}" for i in (0, 1) for part in ("key", "value")]
    assert list(onnx_model.session.inputs) == ["input_ids", "attention_mask", "position_ids", *cache]
    present = [name.replace("past_key_values", "present") for name in cache]
    assert onnx_model.session.outputs == ["logits", *present]
    assert onnx_model.session.shapes["attention_mask"] == ("batch", "past_sequence + sequence")
    assert onnx_model.session.shapes["past_key_values.0.key"] == ("batch", 2, "past_sequence", 8)


def test_generate_with_the_onnx_model_gives_the_same_tokens(generated):
    model, _, onnx_model = generated
    inputs = prompt(3, 9, padded=True)
    expected = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    forward = model.forward

    def run(**kwargs):
        return onnx_model(**{name: value for name, value in kwargs.items() if value is not None})

    run.__signature__ = __import__("inspect").signature(forward)
    model.forward = run
    try:
        got = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    finally:
        del model.forward
    assert torch.equal(expected, got)


def test_the_padded_prompt_is_no_false_alarm_for_the_recorded_calls(generated):
    _, observer, onnx_model = generated
    rows = observer.check_discrepancies(onnx_model.path)
    assert [row["SUCCESS"] for row in rows] == [True] * 3


def test_an_encoder_recorded_once_is_proven(tmp_path):
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
    model, observer = BertModel(config).eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch, length in ((1, 7), (1, 9)):
            model(**prompt(batch, length, padded=False))
    report = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)
