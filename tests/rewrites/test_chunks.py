"""Loops over the chunks of a length, the last of which may be shorter, are one operator and serve any length."""

import pytest
import torch

import exportkit


def of_a_split(self, x):
    outputs, state = [], torch.zeros(x.shape[0], 1, 4)
    for chunk in torch.split(x, 4, dim=1):
        total = self.layer(chunk).cumsum(1) + state
        state = total[:, -1:]
        outputs.append(total)
    return torch.cat(outputs, 1), torch.cat([chunk.softmax(1) for chunk in x.split(3, 1)], dim=1)


def of_slices(self, x):
    keys, outputs, length = self.layer(x), [], x.shape[1]
    for start in range(0, length, 4):
        queries = x[:, start : start + 4]
        outputs.append((queries @ keys.transpose(1, 2)).softmax(-1) @ keys)
    start, written = 0, torch.zeros_like(x)
    while start < length:
        written[:, start : start + 4] = x[:, start : start + 4].softmax(1)
        start += 4
    means = torch.stack([x[:, i : i + 3].mean(1) for i in range(0, length, 3)], 1)
    return torch.cat(outputs, 1), written, means


def that_overlap(self, x):
    outputs, length = [], x.shape[1]
    for start in range(0, length, 6):
        first, last = max(0, start - 2), min(length, start + 8)
        chunk = self.convolution(x[:, first:last].mT).mT
        outputs.append(chunk[:, start - first : start - first + 6])
    return torch.cat(outputs, 1)


class Chunked(torch.nn.Module):
    """Computes something in chunks."""

    def __init__(self, function):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.convolution = torch.nn.Conv1d(4, 4, 3, padding=1)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


@pytest.mark.runtime
@pytest.mark.parametrize("function", [of_a_split, of_slices, that_overlap])
def test_chunks_may_be_any_number_and_the_last_one_shorter(function, tmp_path):
    model, observer = Chunked(function).eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for shape in ((1, 6, 4), (2, 12, 4), (2, 9, 4)):
            model(torch.randn(shape))
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    for length in (1, 2, 3, 4, 5, 8, 13, 33):
        x = torch.randn(3, length, 4)
        torch.testing.assert_close(onnx_model(x), model(x))
