"""Tensors of wanted shapes from recorded ones."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exportkit.arguments.build import resize

dims = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(dims, st.data(), st.sampled_from([torch.float32, torch.int64, torch.bool, torch.float16]))
def test_shape_type_and_values_are_as_wanted(have, data, dtype):
    want = data.draw(st.lists(st.integers(0, 7), min_size=len(have), max_size=len(have)))
    tensor = torch.arange(torch.Size(have).numel()).reshape(have).to(dtype)
    made = resize(tensor, want, dynamic=range(len(have)))
    assert tuple(made.shape) == tuple(want)
    assert made.dtype == dtype
    assert set(made.flatten().tolist()) <= set(tensor.flatten().tolist())


def test_the_recorded_shape_gives_the_recorded_values_in_a_copy():
    tensor = torch.ones(2, 3)
    made = resize(tensor, (2, 3))
    made.zero_()
    assert bool(tensor.all())


@pytest.mark.parametrize(("mask", "padded"), [([0, 1, 1, 1], "left"), ([1, 1, 1, 0], "right")])
def test_padding_stays_on_its_side_when_a_mask_is_stretched(mask, padded):
    made = resize(torch.tensor([mask, [1, 1, 1, 1]]), (2, 11))[0].tolist()
    assert made == sorted(made, reverse=padded == "right")
    assert 0 in made
    assert 1 in made


def test_a_mask_of_one_position_hides_no_row_if_it_can():
    mask = torch.tensor([[0, 1, 1], [1, 1, 1], [1, 1, 0]])
    assert resize(mask, (3, 1)).tolist() == [[1], [1], [1]]


def test_repeated_rows_differ():
    made = resize(torch.arange(6.0).reshape(1, 6), (3, 6))
    assert not torch.equal(made[0], made[1])
    assert not torch.equal(made[1], made[2])


def test_integers_are_rolled_along_axes_that_vary_only():
    grid = torch.tensor([[1, 4, 6]])
    assert resize(grid, (2, 3), dynamic=(0,)).tolist() == [[1, 4, 6], [1, 4, 6]]
    assert resize(grid, (2, 3), dynamic=(0, 1)).tolist() == [[1, 4, 6], [6, 1, 4]]


def test_a_tensor_only_seen_empty_is_invented():
    made = resize(torch.empty(0, 3), (4, 3))
    assert made.shape == (4, 3)
    assert bool(made.isfinite().all())
    assert len(made.unique()) == 12
    assert resize(torch.empty(0, 3, dtype=torch.int64), (2, 3)).tolist() == [[0] * 3] * 2
