"""When two tensors count as equal, and what is said where they do not."""

import pytest
import torch

from exportkit.running.bounds import fixed_bound
from exportkit.running.compare import compare_outputs, compare_tensors, outputs_close
from exportkit.running.masks import Padding, find_mask, visible_positions

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (torch.tensor([1.0, NAN, INF]), torch.tensor([1.0, NAN, INF])),
        (torch.tensor([1.0]), torch.tensor([1.00001])),
        (torch.tensor([1000.0]), torch.tensor([1000.5])),
        (torch.tensor([1.0]).half(), torch.tensor([1.005]).half()),
        (torch.tensor([True, False]), torch.tensor([True, False])),
        (torch.empty(0, 3), torch.empty(0, 3)),
        (torch.tensor(2.0), torch.tensor(2.0)),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j])),
    ],
)
def test_equal_enough(expected, got):
    assert compare_tensors("x", expected, got).reason is None


@pytest.mark.parametrize(
    ("expected", "got", "reason"),
    [
        (torch.tensor([NAN]), torch.tensor([0.0]), "nan became 0 at [0]"),
        (torch.tensor([0.0]), torch.tensor([NAN]), "0 became nan at [0]"),
        (torch.tensor([INF]), torch.tensor([-INF]), "inf became -inf at [0]"),
        (torch.tensor([[1.0, 1.0], [1.0, 1.0]]), torch.tensor([[1.0, 1.0], [1.5, 1.0]]), "1 became 1.5 at [1, 0]"),
        (torch.tensor([3]), torch.tensor([4]), "3 became 4 at [0]"),
        (torch.tensor([2**60, 2**60]), torch.tensor([2**60, 2**60 + 1]), "1.15292e+18 became 1.15292e+18 at [1]"),
        (torch.tensor([True]), torch.tensor([False]), "1 became 0 at [0]"),
        (torch.zeros(2, 3), torch.zeros(2, 4), "shape (2, 4) instead of (2, 3)"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "dtype float64 instead of float32"),
    ],
)
def test_different_and_where(expected, got, reason):
    assert compare_tensors("x", expected, got).reason == reason


def test_a_tolerance_can_be_given():
    a, b = torch.tensor([2.0]), torch.tensor([3.0])

    assert compare_tensors("x", a, b, bound=fixed_bound(0.0, 1.0)).reason is None
    assert compare_tensors("x", a, b, bound=fixed_bound(0.5, 0.0)).reason is None
    assert compare_tensors("x", a, b, bound=fixed_bound(0.4, 0.0)).reason == "2 became 3 at [0]"


def test_the_largest_differences_are_measured():
    found = compare_tensors("x", torch.tensor([1.0, 100.0, 0.0]), torch.tensor([2.0, 102.0, 0.0]))

    assert (found.absolute, found.relative) == (2.0, 1.0)
    assert compare_tensors("x", torch.ones(1), torch.ones(1) * 2, offset=1.0).relative == 0.5
    assert compare_tensors("x", torch.zeros(1), torch.ones(1)).relative == INF


def test_outputs_are_compared_by_path():
    expected, got = {"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.ones(1), "c": torch.ones(1)}

    assert not outputs_close(expected, got)
    assert outputs_close({"a": torch.ones(1)}, got)
    assert [(d.path, d.reason) for d in compare_outputs(expected, got, exactly=True)] == [
        ("a", None),
        ("b", "only the model returns it"),
        ("c", "only the graph returns it"),
    ]


def test_hidden_positions_are_not_compared():
    expected, got = torch.zeros(2, 3), torch.tensor([[9.0, 0, 0], [0, 0, 0]])
    visible = torch.tensor([[False, True, True], [True, True, True]])
    assert compare_tensors("x", expected, got, visible).reason is None
    assert compare_tensors("x", expected, got, ~visible).reason is not None


MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])


def test_the_mask_hides_its_own_length_and_the_new_tokens_at_its_end():
    axes = ("batch", "past + seq")
    cache = visible_positions(MASK, axes, ("batch", 2, "past + seq", 8), (2, 2, 4, 8))
    assert cache.shape == (2, 1, 4, 1)
    assert cache[0, 0].flatten().tolist() == [False, True, True, True]
    new = visible_positions(MASK, axes, ("batch", "seq", 99), (2, 2, 99))
    assert new.shape == (2, 2, 1)
    assert bool(new.all())


@pytest.mark.parametrize(
    ("mask", "axes", "shape"),
    [
        (None, ("batch", "seq"), (2, 4)),
        (torch.ones(2, 4), ("batch", "seq"), (2, 4)),
        (MASK, ("batch", "frames"), (2, 4)),
        (MASK, ("images", "seq"), (2, 4)),
        (MASK, ("batch", 1, 99), (2, 1, 99)),
    ],
)
def test_everything_is_visible_where_the_mask_has_no_say(mask, axes, shape):
    assert visible_positions(mask, ("batch", "seq"), axes, shape) is None


def test_without_names_the_length_is_looked_for_by_size():
    assert Padding(MASK)(torch.zeros(2, 4, 99)).shape == (2, 4, 1)
    assert Padding(MASK)(torch.zeros(2, 2, 4, 8)).shape == (2, 1, 4, 1)
    assert Padding(MASK)(torch.zeros(2, 1, 99)) is None
    assert Padding(MASK)(torch.zeros(3, 4)) is None


def test_the_mask_is_found_by_its_name():
    path, kept = find_mask({"x": torch.ones(2, 3), "attention_mask": MASK})
    assert (path, kept.tolist()) == ("attention_mask", MASK.bool().tolist())
    assert find_mask({"attention_mask": torch.ones(2, 1, 3, 3)}) is None
