"""Scattered features: as torch does it where there are enough, and the own values where there are not."""

import pytest
import torch

from exportkit.patching.feature_rows import guarded_scatter, scatter_rows


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
