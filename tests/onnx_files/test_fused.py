"""Norms and rotary embeddings as one operator in graphs for onnxruntime, also where sizes are broadcast."""

import onnx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import exportkit
from exportkit.errors import InvalidRequestError, MissingPackageError
from tests.onnx_files.test_attention import assert_same, fused


class Rotary(torch.nn.Module):
    def forward(self, x, positions):
        angles = positions[:, :, None] * torch.linspace(1, 0.1, 4, dtype=x.dtype)
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
        return x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin


def turned(batch, tokens, rows, dtype=torch.float32):
    return torch.randn(batch, 2, tokens, 8, dtype=dtype), torch.arange(tokens, dtype=dtype)[None].expand(rows, -1)


AXES = {0: "b", 2: "s"}


@pytest.mark.parametrize("rows", [1, 3])
def test_the_same_positions_may_be_those_of_every_row(rows):
    nodes, run = fused(Rotary(), turned(3, 5, rows), (AXES, {1: "s"} if rows == 1 else {0: "b", 1: "s"}))
    assert len(nodes["RotaryEmbedding"]) == 1
    for batch, tokens in ((3, 5), (1, 7), (4, 1)):
        assert_same(Rotary(), run, turned(batch, tokens, min(rows, batch) if rows == 1 else batch))


@pytest.mark.parametrize(("batch", "dtype"), [(1, torch.float32), (2, torch.float64)])
def test_rotation_that_onnxruntime_has_no_operator_for_is_arithmetic(batch, dtype):
    args = turned(batch, 5, 3 if batch == 1 else 2, dtype)
    nodes, run = fused(Rotary(), args, ({2: "s"}, {1: "s"}))
    assert "RotaryEmbedding" not in nodes
    assert_same(Rotary(), run, args)


class Norm(torch.nn.Module):
    def forward(self, x, scale):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * scale


def test_a_norm_may_have_a_scale_with_more_rows_than_itself():
    nodes, run = fused(Norm(), (torch.randn(1, 3, 8), torch.randn(2, 3, 8)), ({1: "s"}, {0: "b", 1: "s"}))
    assert len(nodes["RMSNormalization"]) == 1
    assert_same(Norm(), run, (torch.randn(1, 4, 8), torch.randn(5, 4, 8)))


AXES_OF_TOKENS = {0: "b", 1: "s"}


class Residual(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer = torch.nn.RMSNorm(8, eps=0.1), torch.nn.Linear(8, 8)

    def forward(self, x, other):
        total = x + other
        return self.layer(self.norm(total)) + total


@pytest.mark.parametrize(("rows", "fuses"), [(2, True), (1, False)])
def test_a_norm_takes_the_sum_before_it(rows, fuses):
    args = torch.randn(2, 3, 8), torch.randn(rows, 3, 8)
    model = Residual()
    nodes, run = fused(model, args, ({0: "b", 1: "s"}, {0: "b", 1: "s"} if rows == 2 else {1: "s"}))
    assert ("SkipSimplifiedLayerNormalization" in nodes, "RMSNormalization" in nodes) == (fuses, not fuses)
    for batch, tokens in ((1, 1), (4, 2)):
        assert_same(model, run, (torch.randn(batch, tokens, 8), torch.randn(batch if rows == 2 else 1, tokens, 8)))


class WiderNorm(Residual):
    """Normalises in float32, with a scale that stays in float32."""

    def forward(self, x, other):
        total = x + other
        wide = total.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + self.norm.weight.float())
        return self.layer(wide.to(x.dtype)) + total


def test_a_norm_in_another_dtype_than_the_sum_before_it():
    model = WiderNorm().half()
    nodes, run = fused(model, (torch.randn(2, 3, 8).half(), torch.randn(2, 3, 8).half()), (AXES_OF_TOKENS,) * 2)
    assert "SkipSimplifiedLayerNormalization" not in nodes
    args = torch.randn(3, 5, 8).half(), torch.randn(3, 5, 8).half()
    torch.testing.assert_close(run(*args)[0], model(*args), rtol=1e-2, atol=1e-2)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer = torch.nn.RMSNorm(8), torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(self.norm(x))[:, None]
        return x + torch.nn.functional.scaled_dot_product_attention(y, y, y)[:, 0]


@pytest.fixture(scope="module")
def block():
    model, observer = Block().eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch, tokens in ((2, 5), (3, 7)):
            model(torch.randn(batch, tokens, 8))
    return exportkit.export(model, observer)


def test_the_report_and_the_folder_say_what_was_fused(block, tmp_path):
    note = "fused for onnxruntime: 1 attention, 1 norm."
    saved = block.save(tmp_path / "out", runtime="onnxruntime")
    assert saved.file.runtime == "onnxruntime"
    loaded = exportkit.load(tmp_path / "out")
    assert (loaded.file.runtime, loaded.file.opset) == ("onnxruntime", 23)
    report = loaded.verify()
    assert report.ok
    assert note in report.findings
    assert note in (tmp_path / "out" / "report.txt").read_text()


def test_a_graph_is_not_fused_unless_that_is_asked_for(block, tmp_path):
    plain = block.to_onnx(tmp_path / "model.onnx")
    assert plain.file.runtime is None
    assert not any("fused" in text for text in plain.verify().findings)


def test_requests_that_contradict_each_other_are_refused(block, tmp_path):
    with pytest.raises(InvalidRequestError, match="expected: 23"):
        block.to_onnx(tmp_path / "model.onnx", 20, runtime="onnxruntime")
    with pytest.raises(InvalidRequestError, match="expected: 'onnxruntime'"):
        block.to_onnx(tmp_path / "model.onnx", runtime="genai")


def test_an_onnxruntime_without_the_operators_is_refused(block, tmp_path, monkeypatch):
    from exportkit.errors import RuntimeFailure
    from exportkit.running import session

    def refuse(*_):
        raise RuntimeFailure("No such operator.")

    session.require_fused_operators.cache_clear()
    monkeypatch.setattr(session, "Session", refuse)
    with pytest.raises(MissingPackageError, match="does not have the operators"):
        block.to_onnx(tmp_path / "model.onnx", runtime="onnxruntime")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_of_every_layer_is_fused_whatever_the_width_of_a_head(dtype, tmp_path):
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, num_hidden_layers=3, num_attention_heads=2, head_dim=64, intermediate_size=32,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model, observer = LlamaForCausalLM(config).eval().to(dtype), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch, length in ((2, 7), (3, 9)):
            ids = torch.randint(3, 30, (batch, length))
            past = model(input_ids=ids, attention_mask=torch.ones_like(ids)).past_key_values
            mask = torch.ones(batch, length + 1, dtype=torch.int64)
            model(input_ids=ids[:, :1], attention_mask=mask, past_key_values=past)
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx", runtime="onnxruntime")
    report = onnx_model.verify()
    assert report.ok
    assert "fused for onnxruntime: 3 attentions, 7 norms, 6 rotary embeddings." in report.findings
    graph = onnx.load(onnx_model.path, load_external_data=False).graph
    branches = [attribute.g for node in graph.node if node.op_type == "If" for attribute in node.attribute]
    attentions = [node for part in branches for node in part.node if node.op_type == "Attention"]
    assert [len(node.input) for node in attentions] == [6, 6, 6]  # which append to the cache themselves
