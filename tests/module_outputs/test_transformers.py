"""Models of transformers: attention weights whatever attention they compute, generation, and their own capturing."""

import concurrent.futures
import inspect
import re

import pytest
import torch

from exportkit import OutputRecorder, capture, capture_outputs, merge_with_config_defaults
from exportkit.module_outputs.context import with_captured
from tests import models
from tests.module_outputs.models import assert_same, traces


def modules_by_hand(model, matches, call, pick=lambda output: output):
    seen = []
    handles = [
        module.register_forward_hook(lambda _m, _a, output: seen.append(pick(output)))
        for name, module in model.named_modules()
        if matches(name, module)
    ]
    with torch.no_grad():
        result = call()
    for handle in handles:
        handle.remove()
    return result, seen


def eager(model):
    model.set_attn_implementation("eager")
    return model


def llama_specs():
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    return {
        "hidden_states": LlamaDecoderLayer,
        "attentions": "self_attn",
        "mlp": re.compile(r"layers\.\d+\.mlp$"),
    }


def attention_of(config):
    return type(config)._attn_implementation, config._attn_implementation


def test_llama_is_captured_as_by_hooks_and_with_its_attentions():
    model, ids = models.tiny_llama(), models.random_ids(2, 5)
    before, attention = traces(model), attention_of(model.config)
    with torch.no_grad(), capture(model, llama_specs()) as captured:
        result = model(ids)
    assert traces(model) == before
    assert attention_of(model.config) == attention
    assert attention[1] == "sdpa"
    eager(model)
    expected, layers = modules_by_hand(model, lambda n, m: type(m).__name__ == "LlamaDecoderLayer", lambda: model(ids))
    _, weights = modules_by_hand(model, lambda n, m: n.endswith("self_attn"), lambda: model(ids), lambda o: o[1])
    _, mlps = modules_by_hand(model, lambda n, m: n.endswith("mlp"), lambda: model(ids))
    assert_same(captured["hidden_states"], [model.model.embed_tokens(ids), *layers])
    assert_same(captured["attentions"], weights)
    assert_same(captured["mlp"], mlps)
    assert torch.equal(result.logits, expected.logits)


def test_llama_is_captured_as_it_captures_itself():
    model, ids = eager(models.tiny_llama()), models.random_ids(2, 5)
    with torch.no_grad(), capture(model) as captured:
        own = model(ids, output_hidden_states=True, output_attentions=True)
    assert_same(captured["hidden_states"][:-1], own.hidden_states[:-1])
    assert_same(captured["attentions"], own.attentions)


def test_both_kinds_of_capturing_work_in_any_order():
    model, ids = eager(models.tiny_llama()), models.random_ids(2, 5)
    expected = [len(model(ids, output_hidden_states=True).hidden_states)]
    with capture(model, llama_specs()) as captured:
        expected.append(len(model(ids, output_hidden_states=True).hidden_states))
    expected.append(len(model(ids, output_hidden_states=True).hidden_states))
    assert expected == [3, 3, 3]
    assert len(captured["hidden_states"]) == 3


def test_checkpointed_layers_are_captured_once():
    model, ids = eager(models.tiny_llama()).train(), models.random_ids(2, 5)
    expected = model(ids, use_cache=False, output_hidden_states=True, output_attentions=True)
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with capture(model, llama_specs()) as captured:
            model(ids, labels=ids, use_cache=False).loss.backward()
        assert len(captured.calls) == 1
        assert_same(captured["hidden_states"][:-1], expected.hidden_states[:-1])
        assert_same(captured["attentions"], expected.attentions)


def test_generation_is_captured_step_by_step():
    model, ids = models.tiny_llama(), models.random_ids(2, 5)
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    with capture(model, llama_specs()) as captured:
        model.generate(ids, **options)
    own = eager(model).generate(ids, output_attentions=True, **options)
    assert len(captured.calls) == 4
    for call, attentions in zip(captured.calls, own.attentions, strict=True):
        assert_same(call["attentions"], attentions)
    assert captured["attentions"][0].shape == (2, 4, 1, 8)


def test_t5_is_captured_with_self_and_cross_attentions():
    from transformers.models.t5.modeling_t5 import T5Attention, T5Block

    model = models.tiny_t5()
    inputs = {"input_ids": models.random_ids(2, 6), "decoder_input_ids": models.random_ids(2, 3)}
    own_cross = [OutputRecorder(T5Attention, index=2, layer_name=name) for name in ("SelfAttention", "EncDecAttention")]
    specs = {"hidden_states": T5Block, "attentions": own_cross, "projections": re.compile(r"decoder\..*\.wo$")}
    with torch.no_grad(), capture(model, specs) as captured:
        model(**inputs)
    eager(model)
    _, blocks = modules_by_hand(model, lambda n, m: isinstance(m, T5Block), lambda: model(**inputs), lambda o: o[0])
    weights = [
        modules_by_hand(model, lambda n, m, name=name: n.endswith(name), lambda: model(**inputs), lambda o: o[2])[1]
        for name in ("SelfAttention", "EncDecAttention")
    ]
    assert_same(captured["hidden_states"][1:], blocks)
    assert_same(captured["attentions"], weights[0])
    assert_same(captured["cross_attentions"], weights[1])
    assert captured["cross_attentions"][0].shape == (2, 4, 3, 6)
    assert len(captured["projections"]) == 2


def test_llava_is_captured_in_vision_and_text():
    model = models.tiny_llava()
    ids = models.random_ids(1, 9)
    ids[ids == models.IMAGE_TOKEN] = 3
    ids[0, 1:5] = models.IMAGE_TOKEN
    inputs = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 28, 28)}
    specs = {
        "vision": re.compile(r"vision.*encoder\.layers\.\d+$"),
        "text": re.compile(r"language_model\.layers\.\d+$"),
        "attentions": [OutputRecorder(class_name="self_attn", index=1, layer_name="language_model")],
    }
    with torch.no_grad(), capture(model, specs) as captured:
        result = model(**inputs)
    eager(model)
    expected, vision = modules_by_hand(model, lambda n, m: specs["vision"].search(n), lambda: model(**inputs))
    _, text = modules_by_hand(model, lambda n, m: specs["text"].search(n), lambda: model(**inputs))
    _, weights = modules_by_hand(
        model, lambda n, m: "language_model" in n and n.endswith("self_attn"), lambda: model(**inputs), lambda o: o[1]
    )
    for key, values in (("vision", vision), ("text", text), ("attentions", weights)):
        assert len(captured[key]) == len(values) == 2
        for got, want in zip(captured[key], values, strict=True):
            torch.testing.assert_close(got, want)
    torch.testing.assert_close(result.logits, expected.logits)
    with torch.no_grad(), capture(model, specs) as captured:
        model(input_ids=models.random_ids(1, 4))
    assert captured["vision"] == ()
    assert len(captured["text"]) == 2


def test_other_threads_keep_their_attention_while_one_captures_weights():
    """A mask made for one kind of attention is wrong for another: nobody else may see the switch."""
    model = models.tiny_llama()
    inputs = [models.random_ids(2, n) for n in (3, 4, 5, 6)]
    with torch.no_grad():
        plain = [model(ids).logits for ids in inputs]

    def serve(seed):
        with torch.no_grad():
            for i in range(60):
                at = (seed + i) % len(inputs)
                if seed % 2:
                    assert torch.equal(model(inputs[at]).logits, plain[at])
                else:
                    with capture(model, {"attentions": "self_attn"}) as captured:
                        result = model(inputs[at]).logits
                    torch.testing.assert_close(result, plain[at])
                    sums = torch.stack(captured["attentions"]).sum(-1)
                    torch.testing.assert_close(sums, torch.ones_like(sums))
                    assert all(value.triu(1).abs().max() == 0 for value in captured["attentions"])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(serve, seed) for seed in range(4)]:
            done.result()
    assert model.config._attn_implementation == "sdpa"


def test_attention_outputs_other_than_the_weights_leave_the_attention_as_it_is():
    model, ids = models.tiny_llama(), models.random_ids(2, 5)
    seen = []
    model.model.layers[0].register_forward_hook(lambda *_: seen.append(model.config._attn_implementation))
    with capture(model, {"attention_outputs": OutputRecorder(class_name="self_attn", index=0)}):
        model(ids)
    with capture(model, {"attentions": "self_attn"}):
        model(ids)
    assert seen == ["sdpa", "eager"]


def test_a_config_of_ones_own_is_switched_and_put_back():
    from types import SimpleNamespace

    class Attention(torch.nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.config = SimpleNamespace(_attn_implementation="sdpa")

        def forward(self, x):
            y = super().forward(x)
            return y, (y.softmax(-1) if self.config._attn_implementation == "eager" else None)

    model = Attention()
    with capture(model, {"attentions": Attention}) as captured:
        model(torch.ones(1, 4))
    assert captured["attentions"][0].shape == (1, 4)
    assert model.config._attn_implementation == "sdpa"


class Capturing(torch.nn.Module):
    def __init__(self, model, specs):
        super().__init__()
        self.model = model
        self.run = with_captured(model, specs)

    def forward(self, input_ids):
        return self.run(input_ids=input_ids, use_cache=False)


@pytest.mark.parametrize("strict", [False, True])
def test_llama_is_exported_with_states_and_attentions_as_outputs(strict):
    model = models.tiny_llama().requires_grad_(False)
    dims = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(
        Capturing(model, llama_specs()), (models.random_ids(3, 5),), dynamic_shapes=dims, strict=strict
    )
    assert model.config._attn_implementation == "sdpa"
    eager(model)
    for batch, length in ((1, 4), (2, 9)):
        ids = models.random_ids(batch, length)
        result, values = program.module()(ids)
        expected = model(ids, output_hidden_states=True, output_attentions=True)
        torch.testing.assert_close(result.logits, expected.logits)
        for got, want in zip(values["attentions"], expected.attentions, strict=True):
            torch.testing.assert_close(got, want)
        for got, want in zip(values["hidden_states"][:-1], expected.hidden_states[:-1], strict=True):
            torch.testing.assert_close(got, want)


def test_llama_compiled_inside_a_capture_returns_weights():
    torch.compiler.reset()
    model, ids = models.tiny_llama().requires_grad_(False), models.random_ids(2, 5)
    with capture(model, llama_specs()) as captured:
        torch.compile(model, fullgraph=True, backend="eager")(ids, use_cache=False)
    torch.compiler.reset()
    expected = eager(model)(ids, output_attentions=True)
    assert_same(captured["attentions"], expected.attentions)


def test_a_model_of_transformers_with_our_decorators_returns_what_it_returns_with_theirs():
    from transformers.models.llama.modeling_llama import LlamaModel

    class Ours(LlamaModel):
        forward = merge_with_config_defaults(capture_outputs(inspect.unwrap(LlamaModel.forward)))

    theirs, ids = eager(models.tiny_llama().model), models.random_ids(2, 5)
    ours = Ours(models.tiny_llama().config).eval()
    ours.load_state_dict(theirs.state_dict())
    assert ours.config._attn_implementation == "sdpa"
    with torch.no_grad():
        for options in (
            {},
            {"output_hidden_states": True},
            {"output_attentions": True, "output_hidden_states": [0, -1]},
        ):
            got, want = ours(ids, **options), theirs(ids, **options)
            assert list(got) == list(want)
            torch.testing.assert_close(got.last_hidden_state, want.last_hidden_state)
            for key in ("hidden_states", "attentions"):
                for a, b in zip(got.get(key) or (), want.get(key) or (), strict=True):
                    assert (a is None) == (b is None)
                    assert a is None or torch.equal(a, b) or torch.allclose(a, b, atol=1e-6)
        assert len(ours(ids, output_attentions=True, return_dict=False)) == len(
            theirs(ids, output_attentions=True, return_dict=False)
        )
    assert ours.config._attn_implementation == "sdpa"
