"""Loops over the experts that tokens were sent to: all of them in the graph, the same numbers."""

import pytest
import torch

import exportkit
from exportkit.api.onnx_model import OnnxModel
from exportkit.rewrites.lists import loops_over_all
from tests.arguments.generative import VOCABULARY, ids
from tests.rewrites.test_scans import SPECIAL, observed, with_larger_weights


class Loop(torch.nn.Module):
    """Sends each token to one of three experts; with ``spare``, a fourth place of the mask stands for none.

    With ``skips``, experts without tokens are skipped.
    """

    def __init__(self, spare=False, skips=False):
        super().__init__()
        self.spare, self.skips = spare, skips
        self.router = torch.nn.Linear(6, 3)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        chosen = self.router(x).argmax(-1)
        mask = torch.nn.functional.one_hot(chosen, 3 + self.spare).T
        result = torch.zeros_like(x)
        for row in (mask.sum(-1) > 0).nonzero():
            (tokens,) = torch.where(mask[row].squeeze(0))
            if self.skips and tokens.numel() == 0:
                continue
            result.index_add_(0, tokens, self.experts[row.item()](x[tokens]))
        return result


LOOPS = "loops over the chosen experts as loops over all"


def exported_of(model):
    observer = exportkit.InputObserver()
    with torch.no_grad(), observer(model.eval()):
        for length in (5, 7):
            model(torch.randn(length, 6))
    return exportkit.export(model, observer)


@pytest.mark.parametrize(("spare", "skips"), [(False, False), (True, False), (False, True)])
def test_every_expert_is_in_the_graph_whichever_were_chosen(spare, skips, tmp_path):
    torch.manual_seed(0)
    model = Loop(spare, skips)
    exported = exported_of(model)
    assert LOOPS in exported.rules
    onnx = exported.to_onnx(tmp_path / "model.onnx")
    assert isinstance(onnx, OnnxModel)
    assert onnx.verify().ok
    for length in (1, 2, 19):
        x = torch.randn(length, 6)
        torch.testing.assert_close(onnx(x), model(x), atol=1e-5, rtol=1e-4)


def test_other_loops_over_tensors_are_left_alone():
    mask = torch.tensor([True, False, True])
    rows, square = torch.arange(4).reshape(2, 2), torch.eye(2)
    with loops_over_all(torch.nn.Identity()):
        assert [row.item() for row in mask.nonzero()] == [0, 1, 2]
        assert [row.tolist() for row in rows] == [[0, 1], [2, 3]]
        assert [row.tolist() for row in square.nonzero()] == [[0, 0], [1, 1]]
        assert mask.nonzero(as_tuple=True)[0].tolist() == [0, 2]
    assert [row.item() for row in mask.nonzero()] == [0, 2]
    assert "nonzero" not in vars(torch.Tensor)


def test_a_model_with_a_loop_of_its_own_over_experts_generates(tmp_path):
    from transformers import DbrxConfig, DbrxForCausalLM

    config = DbrxConfig(
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        ffn_config={"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        **{**SPECIAL, "vocab_size": VOCABULARY},
    )
    torch.manual_seed(0)
    model = with_larger_weights(DbrxForCausalLM(config), 1.5)
    exported = exportkit.export(model, observed(model, {"input_ids": ids(7, 1)}, tokens=3))
    assert exported.to_onnx(tmp_path / "model.onnx").verify().ok


def switch(capacity=64):
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    config = SwitchTransformersConfig(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, num_experts=4,
        num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, expert_capacity=capacity,
        decoder_start_token_id=0,
    )  # fmt: skip
    return SwitchTransformersForConditionalGeneration(config).eval()


@pytest.mark.parametrize("capacity", [1, 64])
def test_experts_compute_the_same_under_their_rewrite(capacity):
    model, inputs = switch(capacity), {"input_ids": ids(9), "decoder_input_ids": ids(5)}
    with torch.no_grad():
        plain = model(**inputs).logits
        with loops_over_all(model):
            rewritten = model(**inputs).logits
    assert torch.allclose(plain, rewritten, atol=1e-6)


def test_casts_that_change_something_are_still_made():
    linear = torch.nn.Linear(2, 2)
    with loops_over_all(linear):
        assert linear.to(torch.float32) is linear
        assert linear.to(torch.float64).weight.dtype is torch.float64
        assert linear.to("cpu", torch.float32).weight.dtype is torch.float32


@pytest.mark.runtime
@pytest.mark.parametrize("capacity", [2, 64])
def test_one_graph_serves_any_choice_of_experts(capacity, tmp_path):
    model, observer = switch(capacity), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        model.generate(ids(7), max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    exported = exportkit.export(model, observer)
    assert LOOPS in exported.rules
    report = exported.to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)
