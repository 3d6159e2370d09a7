"""Attention in a trace: rows that see nothing, the causal check is skipped, and top-k takes any k."""

import pytest
import torch

import exportkit
from exportkit.rewrites.attention import skipped_causal_check
from exportkit.rewrites.table import applied, matching_rewrites
from tests.arguments.generative import TEXT, ids, padded_left
from tests.models import tiny_llama


@pytest.mark.parametrize("batch", [1, 2])
def test_a_static_cache_is_one_graph_from_its_first_call_on(batch, tmp_path):
    torch.manual_seed(0)
    model, observer = tiny_llama(), exportkit.InputObserver()
    tokens, mask = torch.randint(3, 60, (batch, 6)), torch.ones(batch, 6, dtype=torch.int64)
    mask[0, 0] = 0
    with observer(model):
        model.generate(tokens, attention_mask=mask, max_new_tokens=3, do_sample=False, cache_implementation="static")
    exported = exportkit.export(model, observer)
    assert isinstance(exported, exportkit.Exported)
    assert exported.rules == ()
    report = exported.to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, report


class Translates(torch.nn.Module):
    """An encoder and a decoder; the mask of the decoder is causal, or not."""

    def __init__(self, diagonal):
        super().__init__()
        self.transformer = torch.nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
        self.diagonal = diagonal

    def forward(self, source, target):
        length = target.shape[1]
        mask = torch.full((length, length), -torch.inf).triu(self.diagonal)
        return self.transformer(source, target, tgt_mask=mask)


@pytest.mark.parametrize("diagonal", [1, 2])
def test_masks_are_applied_without_looking_for_causal_ones(diagonal, tmp_path):
    model, observer = Translates(diagonal).eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch, source, target in ((2, 5, 8), (3, 7, 11)):
            model(torch.randn(batch, source, 8), torch.randn(batch, target, 8))
    exported = exportkit.export(model, observer)
    assert "masks applied without a check for causal masks" in exported.rules
    report = exported.to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)


def test_skipping_the_causal_check_changes_no_result():
    model = Translates(1).eval()
    source, target = torch.randn(2, 5, 8), torch.randn(2, 8, 8)
    with torch.no_grad():
        expected = model(source, target)
        with skipped_causal_check(model):
            torch.testing.assert_close(model(source, target), expected)


TOP_K = "top-k attention over any number of keys"


def doge(kept):
    """A model that keeps so many keys, with scores that differ: as it is built, all keys are equally strong."""
    from transformers import DogeConfig, DogeForCausalLM

    model = DogeForCausalLM(DogeConfig(**TEXT, keep_window_size=kept)).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.A)
    return model


@pytest.mark.parametrize("length", [1, 5, 6, 7, 12])
def test_few_keys_and_many_are_computed_as_without_the_rewrite(length):
    model, tokens = doge(kept=6), ids(length)
    with torch.no_grad():
        plain = model(tokens).logits
        rewrites = matching_rewrites(model, {"input_ids": tokens})
        with applied(rewrites, model):
            rewritten = model(tokens).logits
    assert [rewrite.name for rewrite in rewrites] == [TOP_K]
    assert torch.equal(plain, rewritten)


@pytest.mark.runtime
@pytest.mark.parametrize("kept", [6, 9, 64])
def test_one_graph_serves_fewer_keys_than_are_kept_and_more(kept, tmp_path):
    model, observer = doge(kept), exportkit.InputObserver()
    with observer(model, store_n_calls=4), torch.no_grad():
        model.generate(**padded_left(7), max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    exported = exportkit.export(model, observer)
    assert exported.rules == (TOP_K,)
    report = exported.to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)
    lengths = {row.sizes["past_sequence"] + row.sizes["sequence"] for row in report.rows}
    assert kept == 64 or min(lengths) <= kept < max(lengths)


@pytest.mark.parametrize("gradients", [False, True])
def test_padding_behind_the_sequences_is_what_it_was_in_recorded_calls(gradients, tmp_path):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 1, norm=torch.nn.LayerNorm(8)).eval()
    observer = exportkit.InputObserver()
    torch.nn.init.normal_(model.norm.bias)
    behind, before = ([torch.arange(n) >= n - 2, torch.arange(n) >= n - 1] for n in (5, 7)), torch.arange(6) < 2
    with observer(model), torch.set_grad_enabled(gradients):
        for rows in behind:
            padding = torch.stack(rows)
            model(torch.randn(*padding.shape, 8), src_key_padding_mask=padding)
    observer.observation.save(tmp_path / "calls")
    exported = exportkit.export(model, exportkit.Observation.load(tmp_path / "calls"))
    onnx_model = exported.to_onnx(tmp_path / "model.onnx")
    report = onnx_model.verify()
    assert report.ok
    assert ("under torch.no_grad(); the graph" in str(report)) is gradients
    for padding in (torch.arange(9).expand(3, 9) > 4, before.expand(2, 6)):
        x = torch.randn(*padding.shape, 8)
        with torch.set_grad_enabled(gradients):
            expected = model(x, src_key_padding_mask=padding).detach()
        torch.testing.assert_close(onnx_model(x, src_key_padding_mask=padding), expected)
    assert torch.backends.mha.get_fastpath_enabled()


class OwnAttention(torch.nn.MultiheadAttention):
    def forward(self, x, padding):
        return super().forward(x, x, x, key_padding_mask=padding, need_weights=False)[0]


class Layer(torch.nn.TransformerEncoderLayer):
    def forward(self, x, padding):
        return super().forward(x, src_key_padding_mask=padding)


class NumbersHide(torch.nn.TransformerEncoderLayer):
    def forward(self, x, padding):
        return super().forward(x, src_mask=torch.full(2 * x.shape[1:2], -4.0).triu(1), src_key_padding_mask=padding)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(
    "model",
    [OwnAttention(8, 2, batch_first=True), Layer(8, 2, 16, batch_first=True), NumbersHide(8, 2, 16, batch_first=True)],
    ids=lambda model: type(model).__name__,
)
def test_rows_that_are_padding_alone_are_what_they_were_in_recorded_calls(model, gradients, tmp_path):
    observer, model = exportkit.InputObserver(), model.eval()
    with observer(model), torch.set_grad_enabled(gradients):
        for length, lengths in ((5, (5, 3)), (7, (7, 4, 6))):
            model(torch.randn(len(lengths), length, 8), torch.arange(length) >= torch.tensor(lengths)[:, None])
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    x, padding = torch.randn(2, 6, 8), torch.arange(6) >= torch.tensor([[4], [0]])
    with torch.set_grad_enabled(gradients):
        expected = model(x, padding).detach()
    assert expected[1].isnan().all() == (not gradients)
    torch.testing.assert_close(onnx_model(x, padding), expected, equal_nan=True)
