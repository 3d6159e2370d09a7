"""Which positions attention masks hide, whatever form they have."""

import pytest
import torch

from exportkit.running.masks import Padding, find_mask, find_masks, kept_positions, visible_tail

LEFT = [[False, True, True], [True, True, True]]
LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor(LEFT),
        torch.tensor(LEFT).long(),
        torch.tensor(LEFT).float(),
        torch.tensor([[0, 1, 1], [2, 2, 3]]),  # segments, where 0 is padding
        torch.tensor([[-1e9, 0.0, 0.0], [0.0, 0.0, 0.0]]),
        torch.tensor([[-torch.inf, 0.0, 0.0], [0.0, 0.0, 0.0]]),
        torch.tensor([[LOWEST, 0.5, -2.0], [0.0, 0.0, 0.0]]),
        torch.tensor([[-65504.0, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float16),
    ],
)
def test_every_form_of_a_mask(mask):
    assert kept_positions(mask).tolist() == LEFT
    assert Padding(mask)(torch.zeros(2, 3, 5))[..., 0].tolist() == LEFT


@pytest.mark.parametrize("mask", [torch.zeros(2, 3), torch.zeros(2, 3).long(), torch.full((2, 3), 0.3)])
def test_what_keeps_nothing_or_is_not_a_mask_hides_nothing(mask):
    assert kept_positions(mask) is None
    assert find_mask({"attention_mask": mask}) is None
    assert Padding(mask)(torch.zeros(2, 3, 5)) is None


def test_masks_are_found_by_name_and_rank():
    mask = torch.tensor(LEFT)
    tensors = {"x": mask, "inputs.decoder_attention_mask": mask, "attention_mask": mask, "mask_4d": mask[None, None]}

    assert [path for path, _ in find_masks(tensors)] == ["inputs.decoder_attention_mask", "attention_mask"]
    assert find_mask(tensors)[0] == "attention_mask"


def test_a_mask_whose_end_hides_everything_hides_nothing():
    mask = torch.tensor([[True, False, False], [True, False, False]])

    assert visible_tail(mask, 1, (2, 2, 4)) is None
    assert visible_tail(mask, 1, (2, 3, 4)).flatten().tolist() == mask.flatten().tolist()
