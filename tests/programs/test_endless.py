"""Calls that nobody made may not end: a loop may wait for what only recorded values bring."""

import pytest
import torch

import exportkit
from exportkit.running import eager


class Components(torch.nn.Module):
    """Spreads labels over neighbours in a mask of zeros and ones until nothing changes."""

    def forward(self, mask):
        labels = torch.arange(1.0, mask.shape[-1] + 1) * mask
        while True:
            new = torch.nn.functional.max_pool1d(labels[:, None], 3, 1, 1)[:, 0] * mask
            if torch.equal(new, labels):
                return labels
            labels = new


def test_a_loop_that_ends_by_recorded_values_only_does_not_hang(monkeypatch, tmp_path):
    monkeypatch.setattr(eager, "_MOST_FUNCTIONS", 2_000)
    model, observer = Components(), exportkit.InputObserver()
    with observer(model):
        for shape in ((2, 9), (3, 14)):
            model((torch.rand(shape) > 0.3).float())
    call = observer.observation.calls[0]
    assert eager.run_eager(model, "forward", call).shape == (2, 9)
    with pytest.raises(eager.EndlessError, match="2000 functions of torch"):
        eager.run_eager(model, "forward", call.with_tensors({"mask": call.tensors()["mask"] * -1}))
    assert not exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx").verify().ok  # but it ends
