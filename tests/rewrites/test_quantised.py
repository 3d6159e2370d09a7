"""Layers that are quantised dynamically are exported as the arithmetic that they stand for."""

import warnings

import pytest
import torch

import exportkit

nn = torch.nn


@pytest.mark.runtime
def test_dynamically_quantised_layers_are_proven(tmp_path):
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 4, bias=False)))
    observer = exportkit.InputObserver()
    with warnings.catch_warnings(action="ignore"):  # deprecated, and in use
        model = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear})
    with observer(model):
        for batch in (2, 3):
            model(torch.randn(batch, 8))
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    report = graph.verify()
    assert report.ok, str(report)
    for x in (torch.randn(5, 8) * 100, torch.zeros(2, 8), torch.randn(4, 8).abs(), torch.randn(4, 8) * 1e-4):
        torch.testing.assert_close(graph(x), model(x), rtol=1e-4, atol=1e-6)
    assert type(model[0]).__module__.startswith("torch.ao")
