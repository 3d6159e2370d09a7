"""torch's own Transformer with masks: the trace looks at none of their values."""

import pytest
import torch

import exportkit
from exportkit.rewrites.causal_hint import masks_as_they_are


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
def test_masks_are_applied_as_they_are(diagonal, tmp_path):
    model, observer = Translates(diagonal).eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch, source, target in ((2, 5, 8), (3, 7, 11)):
            model(torch.randn(batch, source, 8), torch.randn(batch, target, 8))
    exported = exportkit.export(model, observer)
    assert exported.captured.rules == ("masks applied without looking for causal ones",)
    report = exported.to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)


def test_the_results_are_those_of_the_model():
    model = Translates(1).eval()
    source, target = torch.randn(2, 5, 8), torch.randn(2, 8, 8)
    with torch.no_grad():
        expected = model(source, target)
        with masks_as_they_are(model):
            torch.testing.assert_close(model(source, target), expected)
