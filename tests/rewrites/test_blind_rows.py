"""Tokens that a mask lets see nothing: zeros in the graph as in torch, and so a static cache from its first call on."""

import pytest
import torch

import exportkit
from exportkit.rewrites.blind_rows import has_square_mask, zeros_for_blind_rows
from tests.models import tiny_llama

MASK = torch.tensor([[[[False, False, False], [True, True, False]]]])


def test_eager_mode_returns_the_same_with_the_rule():
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 2, 2, 4), torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    attention = torch.nn.functional.scaled_dot_product_attention
    expected = attention(query, key, value, MASK)
    with zeros_for_blind_rows(torch.nn.Identity()):
        assert torch.equal(torch.nn.functional.scaled_dot_product_attention(query, key, value, MASK), expected)
        unmasked = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    assert torch.equal(unmasked, attention(query, key, value))
    assert torch.nn.functional.scaled_dot_product_attention is attention
    assert not expected[0, :, 0].any()


@pytest.mark.parametrize(
    ("mask", "matches"),
    [(MASK, True), ({"full_attention": MASK}, True), (MASK[0, 0], False), (MASK.float(), False), (None, False)],
)
def test_the_rule_is_for_masks_of_booleans_for_each_pair_of_tokens(mask, matches):
    assert has_square_mask(torch.nn.Identity(), {"attention_mask": mask}) is matches


@pytest.mark.parametrize("batch", [1, 2])
def test_a_static_cache_is_one_graph_from_its_first_call_on(batch, tmp_path):
    torch.manual_seed(0)
    model, observer = tiny_llama(), exportkit.InputObserver()
    ids, mask = torch.randint(3, 60, (batch, 6)), torch.ones(batch, 6, dtype=torch.int64)
    mask[0, 0] = 0
    with observer(model):
        model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, cache_implementation="static")
    exported = exportkit.export(model, observer)
    assert isinstance(exported, exportkit.Exported)
    report = exported.to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, report
