"""Models that compute with numpy: from sizes and tensors in the graph, and with other arguments as always."""

import numpy as np
import pytest
import torch

import exportkit


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def mirrored(x):
    """Pads symmetrically, by places that numpy computes."""

    def folded(places, low, high):
        length = high - low
        rest = np.fmod(places - low, 2 * length)
        rest = np.where(rest < 0, rest + 2 * length, rest)
        return np.array(np.where(rest >= length, 2 * length - rest, rest) + low, dtype=places.dtype)

    height, width = x.shape[-2:]
    rows = folded(np.arange(-2, height + 2), -0.5, height - 0.5)
    columns = folded(np.arange(-2, width + 2), -0.5, width - 0.5)
    rows, columns = np.meshgrid(rows, columns, indexing="ij")
    return x[..., rows, columns]


def interpolated(x):
    """Weights by the interpolation of a table, and by a window of fixed size."""
    window = torch.from_numpy(np.hanning(5)[1:-1].astype(np.float32))
    places, values = [0, 4, 9], [1.0, 2.0, 0.5]
    weights = np.interp(np.arange(x.shape[-1]), places, values, right=np.float64(3.0)) * np.float64(0.5)
    assert isinstance(weights, np.ndarray)
    return x * torch.tensor(weights, dtype=x.dtype), x[..., :3] * window, len(weights)


def standardised(x):
    """Computes with the values of a tensor."""
    array = x.detach().cpu().numpy()
    apart = np.fmod(array - array.mean(-1, keepdims=True), np.array(1.5, dtype=array.dtype))
    apart = np.clip(apart, -1, 1) / np.linalg.norm(np.fmod(array, 9).reshape(-1, array.shape[-1]), axis=0)
    return torch.from_numpy(apart).float(), torch.tensor(np.argmax(array.reshape(len(array), -1), 1))


@pytest.mark.runtime
@pytest.mark.parametrize("function", [mirrored, interpolated, standardised])
def test_what_numpy_computes_is_in_the_graph(function, tmp_path):
    model, observer = Model(function).eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for shape in ((2, 3, 8, 12), (3, 3, 12, 10)):
            model(torch.randn(shape))
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    for shape in ((1, 3, 9, 7), (4, 3, 20, 33)):
        x = torch.randn(shape)
        torch.testing.assert_close(onnx_model(x), model(x))
    assert type(np.arange(3)) is np.ndarray
    assert type(torch.ones(2).numpy()) is np.ndarray


def test_the_report_says_so():
    model, observer = Model(mirrored).eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for shape in ((2, 3, 8, 12), (3, 3, 12, 10)):
            model(torch.randn(shape))
    attempts = exportkit.export(model, observer).attempts
    assert str(attempts[-1]) == "arrays of numpy as tensors: succeeded"
