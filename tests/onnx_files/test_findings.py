"""Operators that onnxruntime computes differently are named in the report of every export that contains them."""

import pytest
import torch

import exportkit


class Pooled(torch.nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.pool = pool

    def forward(self, x):
        return self.pool(x)


def findings(pool, tmp_path):
    model, observer = Pooled(pool).eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch in (2, 3):
            model(torch.randn(batch, 4, 12))
    report = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)
    return [text for text in report.findings if text.startswith("onnxruntime, ")]


def test_a_pool_that_ignores_nan_is_named(tmp_path):
    (finding,) = findings(torch.nn.MaxPool1d(2), tmp_path)

    assert finding.startswith("onnxruntime, max_pool")
    assert "NaN in the input is ignored" in finding


@pytest.mark.parametrize("windows", [1, 5])
def test_averages_have_no_finding(windows, tmp_path):
    assert findings(torch.nn.AdaptiveAvgPool1d(windows), tmp_path) == []
