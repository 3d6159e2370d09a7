"""Models in half precision: most elements are compared, and a wrong graph shows in how far it is from float32."""

import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import exportkit

EPSILON = 1e-6
CONFIG = {
    "vocab_size": 200, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "rms_norm_eps": EPSILON,
}  # fmt: skip


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16], ids=str)
def exported(request, tmp_path_factory):
    """A decoder and its graph; the tests change the decoder."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval().to(request.param)
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for sizes in ((2, 9), (3, 13)):
            model(input_ids=torch.randint(3, 200, sizes), use_cache=False)
    return model, exportkit.export(model, observer).to_onnx(tmp_path_factory.mktemp("half") / "model.onnx")


@pytest.fixture
def decoder(exported):
    model, onnx_model = exported
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    yield model, onnx_model
    model.load_state_dict(state)
    other_epsilon(model, EPSILON)


def test_elements_of_a_decoder_are_compared(decoder):
    report = decoder[1].verify()
    assert report.ok, str(report)
    left_out = [int(found[1]) for row in report.rows if (found := re.search(r"(\d+) elements are arb", row.where))]
    assert sum(left_out) < 0.1 * sum(200 * row.sizes["batch"] * row.sizes["sequence"] for row in report.rows)


def scaled(model):
    model.model.layers[1].mlp.down_proj.weight.mul_(1.2)


def other_epsilon(model, epsilon=3e-5):
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = epsilon


def one_token(model):
    model.lm_head.weight[7].mul_(1.1)


@pytest.mark.parametrize("spoil", [scaled, other_epsilon, one_token])
def test_a_graph_that_is_wrong_throughout_is_not_proven(decoder, spoil):
    model, onnx_model = decoder
    with torch.no_grad():
        spoil(model)
    assert not onnx_model.verify().ok


def test_the_copy_in_float32_is_that_of_the_model_as_it_is(decoder):
    model, onnx_model = decoder
    assert onnx_model.verify().ok
    with torch.no_grad():
        scaled(model)
    assert not onnx_model.verify().ok
    assert {parameter.dtype for parameter in model.parameters()} <= {torch.bfloat16, torch.float16}


class OnlyInHalf(torch.nn.Module):
    """A layer that cannot be converted to float32."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(6)])

    def forward(self, x):
        return self.layers(x.bfloat16())


def test_the_larger_bound_is_only_for_models_that_run_in_float32(tmp_path):
    torch.manual_seed(0)
    model, observer = OnlyInHalf().bfloat16(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for rows in (20, 30):
            model(torch.randn(rows, 32))
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    with torch.no_grad():
        model.layers[5].weight.mul_(1.15)
    assert not onnx_model.verify().ok
