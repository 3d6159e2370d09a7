"""Scattered features: as torch does it where there are enough, and the own values where there are not."""

import pytest
import torch

import exportkit
from exportkit.rewrites.images import check_unless_of_values, guarded_scatter, scatter_rows
from tests.arguments.generative import IMAGE_TOKEN, TEXT


@pytest.mark.parametrize("rows", [0, 2, 3])
def test_whole_rows_go_where_the_mask_stands(rows):
    embeddings, source = torch.randn(2, 4, 3), torch.randn(rows, 3)
    mask = torch.zeros(2, 4, dtype=torch.bool)
    mask.view(-1)[:rows] = True
    wide = mask.unsqueeze(-1).expand(2, 4, 3)
    assert torch.equal(scatter_rows(embeddings, wide, source), embeddings.masked_scatter(wide, source))


def test_single_elements_are_scattered_in_order():
    target, source = torch.randn(3, 5), torch.randn(8)
    mask = torch.rand(3, 5) > 0.5
    assert torch.equal(scatter_rows(target, mask, source[: mask.sum()]), target.masked_scatter(mask, source))


def test_where_the_source_has_ended_the_own_values_stay():
    embeddings, source = torch.randn(1, 4, 3), torch.randn(1, 3)
    mask = torch.tensor([[True, False, True, True]]).unsqueeze(-1).expand(1, 4, 3)
    result = scatter_rows(embeddings, mask, source)
    assert torch.equal(result[0, 0], source[0])
    assert torch.equal(result[0, 1:], embeddings[0, 1:])


def test_the_method_of_tensors_is_put_back():
    before = torch.Tensor.masked_scatter
    with guarded_scatter(torch.nn.Identity()):
        assert torch.Tensor.masked_scatter is not before
    assert torch.Tensor.masked_scatter is before
    assert "masked_scatter" not in vars(torch.Tensor)


def voxtral():
    """It compares the number of elements that a mask selects, which is unknown in a trace, with those of the audio."""
    from transformers import VoxtralConfig, VoxtralForConditionalGeneration

    encoder = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1}
    encoder |= {"num_attention_heads": 4, "num_mel_bins": 8, "max_source_positions": 16}
    config = VoxtralConfig(
        audio_config=encoder, text_config={**TEXT, "model_type": "llama"}, audio_token_id=IMAGE_TOKEN
    )
    return VoxtralForConditionalGeneration(config).eval()


def clips(rows, count, length=11):
    """A call with clips of audio, four tokens for each."""
    tokens = torch.randint(3, 90, (rows, length))
    tokens.view(-1)[: 4 * count] = IMAGE_TOKEN
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "input_features": torch.randn(count, 8, 32),
    }


def test_any_number_of_clips_of_audio_is_one_graph(tmp_path):
    torch.manual_seed(0)
    model, observer = voxtral(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for rows, count in ((2, 2), (3, 3)):
            model(**clips(rows, count), use_cache=False)
    exported = exportkit.export(model, observer)
    assert exported.plan.by_path["input_features"].sizes[0].variable is not None
    report = exported.to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)
    call = clips(2, 1)
    with torch.no_grad():
        expected = model(**call, use_cache=False).logits
    program = exported.program.module()
    torch.testing.assert_close(program(**call).logits, expected, rtol=1e-4, atol=1e-5)
    call["input_ids"][1, -1] = IMAGE_TOKEN  # one that the model generated, with no features for it
    with pytest.raises(ValueError, match="do not match"):
        model(**call)
    torch.testing.assert_close(program(**call).logits[0], expected[0], rtol=1e-4, atol=1e-5)


class Checked(torch.nn.Module):
    """Checks two sizes, and the values of a mask."""

    def forward(self, x, mask):
        check_unless_of_values(x.shape[0] == mask.shape[0], "lengths differ")
        check_unless_of_values(mask.any(), "nothing is chosen")
        check_unless_of_values(x[mask].shape[0] == 2, lambda: "not two are chosen")
        return x * 2


def test_checks_of_values_are_no_part_of_a_program():
    x, mask = torch.randn(4), torch.tensor([True, False, True, False])
    assert torch.equal(Checked()(x, mask), x * 2)
    with pytest.raises(ValueError, match="not two are chosen"):
        Checked()(x, torch.ones(4, dtype=torch.bool))
    with pytest.raises(ValueError, match="lengths differ"):
        Checked()(x, torch.ones(3, dtype=torch.bool))
    length = torch.export.Dim("length")
    shapes = {"x": {0: length}, "mask": {0: length}}
    program = torch.export.export(Checked(), (x, mask), dynamic_shapes=shapes).module()
    assert torch.equal(program(x, torch.zeros(4, dtype=torch.bool)), x * 2)
    with pytest.raises(Exception, match="mask"):
        program(x, torch.ones(3, dtype=torch.bool))
