"""Attention that keeps the top k of its keys is one graph for fewer keys than k and for more."""

import pytest
import torch

import exportkit
from exportkit.rewrites.rules import applied, matching_rules
from tests.arguments.generative import TEXT, ids, padded_left

RULE = "strongest keys picked at any number of them"


def doge(kept):
    """A model that keeps so many keys, with scores that differ: as it is built, all keys are equally strong."""
    from transformers import DogeConfig, DogeForCausalLM

    model = DogeForCausalLM(DogeConfig(**TEXT, keep_window_size=kept)).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.A)
    return model


@pytest.mark.parametrize("length", [1, 5, 6, 7, 12])
def test_few_keys_and_many_are_computed_as_without_the_rule(length):
    model, tokens = doge(kept=6), ids(length)
    with torch.no_grad():
        plain = model(tokens).logits
        rules = matching_rules(model, {"input_ids": tokens})
        with applied(rules, model):
            under_rule = model(tokens).logits
    assert [rule.name for rule in rules] == [RULE]
    assert torch.equal(plain, under_rule)


@pytest.mark.runtime
@pytest.mark.slow
@pytest.mark.parametrize("kept", [6, 9, 64])
def test_one_graph_serves_fewer_keys_than_are_kept_and_more(kept, tmp_path):
    model, observer = doge(kept), exportkit.InputObserver()
    with observer(model, store_n_calls=4), torch.no_grad():
        model.generate(**padded_left(7), max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    exported = exportkit.export(model, observer)
    assert exported.captured.rules == (RULE,)
    report = exported.to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)
    lengths = {row.sizes["past_sequence"] + row.sizes["sequence"] for row in report.rows}
    assert kept == 64 or min(lengths) <= kept < max(lengths)
