"""Models in half precision: most elements are compared, and a wrong graph shows in how far it is from float32."""

import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import exportkit


def proof(model, calls, path, spoil=None):
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for call in calls:
            model(**call)
    onnx_model = exportkit.export(model, observer).to_onnx(path)
    if spoil is not None:
        with torch.no_grad():
            spoil(model)
    return onnx_model.verify()


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16], ids=str)
def llama(request):
    config = LlamaConfig(
        vocab_size=500, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=256,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval().to(request.param)


def prompts():
    generator = torch.Generator().manual_seed(0)
    return [
        {"input_ids": torch.randint(3, 400, sizes, generator=generator), "use_cache": False}
        for sizes in ((2, 17), (3, 29))
    ]


def test_elements_of_a_decoder_are_compared(llama, tmp_path):
    report = proof(llama, prompts(), tmp_path / "model.onnx")
    assert report.ok, str(report)
    left_out = [int(found[1]) for row in report.rows if (found := re.search(r"(\d+) elements are arb", row.where))]
    assert sum(left_out) < 0.1 * sum(500 * row.sizes["batch"] * row.sizes["sequence"] for row in report.rows)


def scaled(model):
    model.model.layers[1].mlp.down_proj.weight.mul_(1.2)


def other_epsilon(model):
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 3e-5


def one_token(model):
    model.lm_head.weight[7].mul_(1.1)


@pytest.mark.parametrize("spoil", [scaled, other_epsilon, one_token])
def test_a_graph_that_is_wrong_throughout_is_not_proven(llama, spoil, tmp_path):
    state, epsilon = {name: tensor.clone() for name, tensor in llama.state_dict().items()}, 1e-6
    try:
        report = proof(llama, prompts(), tmp_path / "model.onnx", spoil)
    finally:
        llama.load_state_dict(state)
        for layer in llama.model.layers:
            layer.input_layernorm.variance_epsilon = epsilon
    assert not report.ok, str(report)


def test_the_copy_in_float32_is_that_of_the_model_as_it_is(llama, tmp_path):
    observer = exportkit.InputObserver()
    with observer(llama), torch.no_grad():
        for call in prompts():
            llama(**call)
    onnx_model = exportkit.export(llama, observer).to_onnx(tmp_path / "model.onnx")
    state = {name: tensor.clone() for name, tensor in llama.state_dict().items()}
    try:
        assert onnx_model.verify().ok
        with torch.no_grad():
            scaled(llama)
        assert not onnx_model.verify().ok
    finally:
        llama.load_state_dict(state)
    assert onnx_model.verify().ok
    assert {parameter.dtype for parameter in llama.parameters()} <= {torch.bfloat16, torch.float16}
