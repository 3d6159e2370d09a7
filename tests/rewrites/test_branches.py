"""Branches by ``tensor.any()`` are taken in every case where that changes nothing, and stay errors elsewhere."""

import pytest
import torch

import exportkit
from exportkit.errors import ExportError

CALLS = [torch.tensor([[1, 7, 3], [4, 1, 7]]), torch.tensor([[8, 1, 3, 5, 8], [1, 8, 4, 4, 2], [1, 2, 3, 4, 5]])]


class Marked(torch.nn.Module):
    """Gives some tokens a row of their own, if they occur."""

    def __init__(self, shift):
        super().__init__()
        self.embed, self.rows, self.shift = torch.nn.Embedding(10, 4), torch.nn.Parameter(torch.randn(2, 4)), shift

    def forward(self, tokens):
        result = self.embed(tokens)
        for number, value in enumerate((7, 8)):
            mask = tokens == value
            if mask.any():
                result[mask] = self.rows[number]
                result = result + self.shift
        return result


def observed(model):
    torch.manual_seed(0)
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for tokens in CALLS:
            model(tokens)
    return observer


def test_an_assignment_to_places_of_a_mask_needs_no_decision(tmp_path):
    model = Marked(0.0).eval()
    exported = exportkit.export(model, observed(model))
    onnx_model = exported.to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    for tokens in (torch.tensor([[1, 2, 3, 4]]), torch.tensor([[7, 8], [8, 1]])):
        torch.testing.assert_close(onnx_model(tokens), model(tokens).detach())
    assert type(model(CALLS[0]).any()) is torch.Tensor
    assert "__bool__" not in vars(torch.Tensor)


def test_a_branch_that_changes_the_result_stays_an_error():
    model = Marked(1.0).eval()
    with pytest.raises(ExportError, match="decides by the values of a tensor"):
        exportkit.export(model, observed(model))
