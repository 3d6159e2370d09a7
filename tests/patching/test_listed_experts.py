"""Experts that are modules of their own are run in one graph, whichever of them the tokens choose."""

import pytest
import torch

import exportkit
from exportkit.patching import applied, matching_rules
from tests.arguments.generative import TEXT, ids

RULE = "each expert run on the tokens that chose it"


def switch(capacity=64):
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    config = SwitchTransformersConfig(
        vocab_size=TEXT["vocab_size"], d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, num_experts=4,
        num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, expert_capacity=capacity,
        decoder_start_token_id=0,
    )  # fmt: skip
    return SwitchTransformersForConditionalGeneration(config).eval()


@pytest.mark.parametrize("capacity", [1, 64])
def test_experts_compute_the_same_under_their_rule(capacity):
    model, inputs = switch(capacity), {"input_ids": ids(9), "decoder_input_ids": ids(5)}
    rules = [rule for rule in matching_rules(model, inputs) if rule.name == RULE]
    with torch.no_grad():
        plain = model(**inputs).logits
        with applied(rules, model):
            under_rule = model(**inputs).logits
    assert rules
    assert torch.allclose(plain, under_rule, atol=1e-6)


def test_casts_that_change_something_are_still_made():
    model, linear = switch(), torch.nn.Linear(2, 2)
    with applied(matching_rules(model, {}), model):
        assert linear.to(torch.float32) is linear
        assert linear.to(torch.float64).weight.dtype is torch.float64
        assert linear.to("cpu", torch.float32).weight.dtype is torch.float32


@pytest.mark.slow
@pytest.mark.runtime
@pytest.mark.parametrize("capacity", [2, 64])
def test_one_graph_serves_any_choice_of_experts(capacity, tmp_path):
    model, observer = switch(capacity), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        model.generate(ids(7), max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    exported = exportkit.export(model, observer)
    assert RULE in exported.captured.rules
    report = exported.to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)
