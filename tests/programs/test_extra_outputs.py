"""Values of modules inside a model as named outputs of its graph, proven like the others."""

import re

import pytest
import torch

import exportkit
from exportkit.errors import InvalidRequestError
from tests import models
from tests.arguments.generative import ids, llama, t5


class Cnn(torch.nn.Module):
    """Blocks of convolutions and a classifier, as in torchvision."""

    def __init__(self):
        super().__init__()
        block = [torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU()]
        self.stem = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.layers = torch.nn.ModuleList([torch.nn.Sequential(*block), torch.nn.Sequential(*block)])
        self.head = torch.nn.Linear(8, 5)

    def forward(self, images):
        hidden = self.stem(images)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden.mean((2, 3)))


def observed(model, *calls):
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for call in calls:
            model(call)
    return observer


def hooked(model, paths, call):
    """What modules return, by manual hooks."""
    values = []
    hooks = [
        model.get_submodule(path).register_forward_hook(lambda _module, _args, output: values.append(output))
        for path in paths
    ]
    with torch.no_grad():
        call()
    for hook in hooks:
        hook.remove()
    return values


@pytest.mark.runtime
def test_blocks_of_a_convolutional_model_are_outputs(tmp_path):
    torch.manual_seed(0)
    model = Cnn().eval()
    observer = observed(model, torch.randn(2, 3, 16, 16), torch.randn(3, 3, 24, 24))
    onnx_model = exportkit.export(model, observer, outputs={"blocks": ["layers.0", "layers.1"]}).to_onnx(
        tmp_path / "cnn.onnx"
    )
    assert list(onnx_model.outputs) == ["result", "blocks.0", "blocks.1"]
    images = torch.randn(5, 3, 32, 16)
    expected = hooked(model, ["layers.0", "layers.1"], lambda: model(images))
    got = onnx_model(images)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got["blocks"], expected, strict=True))
    assert torch.allclose(got["result"], model(images), atol=1e-5)
    assert onnx_model.verify().ok


@pytest.mark.runtime
def test_a_plain_sequential_has_its_layers_as_outputs(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
    exported = exportkit.export(model, observed(model, torch.ones(3, 4)), outputs={"hidden": torch.nn.Linear})
    onnx_model = exported.to_onnx(tmp_path / "model.onnx")
    x = torch.randn(7, 4)
    first, last = hooked(model, ["0", "2"], lambda: model(x))
    got = onnx_model(x)["hidden"]
    assert torch.allclose(got[0], first, atol=1e-6)
    assert torch.allclose(got[1], last, atol=1e-6)


def assert_close(got, expected):
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def eager(model):
    """Attention that returns its weights, to compare with."""
    model.set_attn_implementation("eager")
    return model


@pytest.mark.runtime
def test_hidden_states_and_attentions_of_a_decoder_are_named_outputs(tmp_path):
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    model, inputs = llama()
    model.eval().generation_config.eos_token_id = None
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0)
    before = model.config._attn_implementation
    outputs = {"hidden_states": LlamaDecoderLayer, "attentions": "self_attn"}
    onnx_model = exportkit.export(model, observer, outputs=outputs).to_onnx(tmp_path / "model.onnx")
    names = [name for name in onnx_model.outputs if not name.startswith("present")]
    assert names == ["logits", *(f"hidden_states.{i}" for i in range(3)), "attentions.0", "attentions.1"]
    assert onnx_model.verify().verdict() == "proven"
    assert model.config._attn_implementation == before
    tokens = ids(6, batch=3)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    layers = ["model.layers.0", "model.layers.1"]
    states = hooked(model, ["model.embed_tokens", *layers], lambda: model(**inputs))
    results = hooked(eager(model), [f"{layer}.self_attn" for layer in layers], lambda: model(**inputs))
    got = onnx_model(**inputs, position_ids=torch.arange(6).expand(3, 6), logits_to_keep=1)
    assert_close(got.hidden_states, states)
    assert_close(got.attentions, [weights for _, weights in results])


@pytest.mark.runtime
def test_hidden_states_of_an_encoder_decoder_model_are_proven(tmp_path):
    from transformers.models.t5.modeling_t5 import T5Block

    model, inputs = t5()
    model.eval().generation_config.eos_token_id = None
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        model.generate(**inputs, max_new_tokens=4, do_sample=False)
    report = exportkit.export(model, observer, outputs={"blocks": T5Block}).to_onnx(tmp_path / "t5.onnx").verify()
    assert report.verdict() == "proven"


@pytest.mark.runtime
def test_states_and_attentions_of_encoder_and_decoder_are_named_outputs(tmp_path):
    model, _ = t5()
    model.eval()
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch, source, target in ((2, 7, 4), (3, 9, 5)):
            model(input_ids=ids(source, batch), decoder_input_ids=ids(target, batch), use_cache=False)
    outputs = {
        "encoder": exportkit.OutputRecorder(class_name="T5Block", layer_name="encoder"),
        "decoder": exportkit.OutputRecorder(class_name="T5Block", layer_name="decoder"),
        "cross_attentions": exportkit.OutputRecorder(class_name="EncDecAttention", index=2),
    }
    onnx_model = exportkit.export(model, observer, outputs=outputs).to_onnx(tmp_path / "t5.onnx")
    added = [f"{key}.{i}" for key in outputs for i in range(2)]
    assert [name for name in onnx_model.outputs if name in added] == added
    assert onnx_model.verify().verdict() == "proven"
    inputs = {"input_ids": ids(11, batch=4), "decoder_input_ids": ids(3, batch=4), "use_cache": False}
    got = onnx_model(**inputs)
    for key in ("encoder", "decoder"):
        states = hooked(model, [f"{key}.block.0", f"{key}.block.1"], lambda: model(**inputs))
        assert_close(got[key], [state[0] if isinstance(state, tuple) else state for state in states])
    paths = [f"decoder.block.{i}.layer.1.EncDecAttention" for i in range(2)]
    results = hooked(eager(model), paths, lambda: model(**inputs))
    assert_close(got["cross_attentions"], [result[2] for result in results])


@pytest.mark.runtime
def test_states_of_a_multimodal_model_in_vision_and_text_are_named_outputs(tmp_path):
    model = models.tiny_llava()
    observer = exportkit.InputObserver()

    def inputs(batch, words):
        tokens = models.random_ids(batch, 5 + words)
        tokens[tokens == models.IMAGE_TOKEN] = 3
        tokens[:, 1:5] = models.IMAGE_TOKEN
        return {"input_ids": tokens, "pixel_values": torch.randn(batch, 3, 28, 28)}

    with observer(model), torch.no_grad():
        model(**inputs(2, 5))
        model(**inputs(3, 8))
    outputs = {
        "vision": re.compile(r"vision.*encoder\.layers\.\d+$"),
        "hidden_states": re.compile(r"language_model\.layers\.\d+$"),
        "attentions": exportkit.OutputRecorder(class_name="self_attn", index=1, layer_name="language_model"),
    }
    onnx_model = exportkit.export(model, observer, outputs=outputs).to_onnx(tmp_path / "llava.onnx")
    added = [f"vision.{i}" for i in range(2)] + [f"hidden_states.{i}" for i in range(3)]
    added += [f"attentions.{i}" for i in range(2)]
    assert set(added) <= set(onnx_model.outputs)
    assert onnx_model.verify().verdict() == "proven"
    call = inputs(1, 11)
    paths = [path for path, _ in model.named_modules()]
    vision, text = ([path for path in paths if outputs[key].search(path)] for key in ("vision", "hidden_states"))
    got = onnx_model(**call)
    assert_close(got["vision"], hooked(model, vision, lambda: model(**call)))
    assert_close(got["hidden_states"][1:], hooked(model, text, lambda: model(**call)))
    results = hooked(eager(model), [f"{path}.self_attn" for path in text], lambda: model(**call))
    assert_close(got["attentions"], [weights for _, weights in results])


def test_a_spec_that_matches_nothing_is_refused_before_anything_is_run():
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    observer = observed(model, torch.ones(3, 4))
    with pytest.raises(InvalidRequestError) as error:
        exportkit.export(model, observer, outputs={"hidden": "attention"})
    assert "hidden" in str(error.value)
    assert not set(vars(model)) & {"forward"}
