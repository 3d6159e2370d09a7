"""What the plan learns from calls whose values were not stored."""

from typing import NamedTuple

import pytest
import torch

import exportkit
from exportkit import Observation
from exportkit.arguments.table import call_table
from exportkit.errors import ExportError


class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x, mask=None):
        y = self.linear(x)
        return y if mask is None else y * mask[..., None]


def observed(*sizes, stored=1, **options):
    model, observer = Linear(), exportkit.InputObserver()
    with observer(model, store_n_calls=stored, **options):
        for batch, length in sizes:
            model(torch.randn(batch, length, 4))
    return model, observer


def sizes_of(plan):
    return {leaf.path: tuple(map(str, leaf.sizes)) for leaf in plan.leaves}


def test_shapes_of_calls_beyond_the_budget_are_part_of_the_plan():
    _, observer = observed((2, 5), (2, 7), (3, 7), (2, 7))
    assert observer.num_obs() == 1
    assert sizes_of(observer.plan(probe=False)) == {"x": ("batch", "x_axis_1", "4")}
    assert [seen.count for seen in observer.observation.seen] == [1, 2, 1]


def test_what_the_peers_infer_rests_on_stored_calls_alone():
    _, observer = observed((2, 5), (3, 7))
    assert observer.infer_dynamic_shapes() == ({},)


def test_an_export_is_right_for_all_of_them(tmp_path):
    model, observer = observed((2, 5), (2, 7), (3, 9))
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    x = torch.randn(3, 9, 4)
    torch.testing.assert_close(onnx_model(x), model(x))
    assert onnx_model.verify().ok


def test_stored_shapes_alone_can_be_asked_for():
    _, observer = observed((2, 5), (2, 7), shapes="stored")
    assert sizes_of(observer.plan(probe=False)) == {"x": ("batch", "5", "4")}


def test_an_export_from_shapes_alone_is_proven(tmp_path):
    model, observer = observed((2, 5), (3, 7), stored=2)
    observer.observation.save(tmp_path / "calls", values=False)
    loaded = Observation.load(tmp_path / "calls")
    assert not loaded.has_values
    exported = exportkit.export(model, loaded)
    assert sizes_of(exported.plan) == sizes_of(observer.plan())
    assert exported.to_onnx(tmp_path / "model.onnx").verify().ok


def test_an_input_that_only_a_call_beyond_the_budget_left_out_is_optional(tmp_path):
    model, observer = Linear(), exportkit.InputObserver()
    with observer(model, store_n_calls=3):
        for length in (4, 5, 6):
            model(torch.randn(2, length, 4), torch.ones(2, length))
        without = torch.randn(2, 5, 4)
        model(without)
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    torch.testing.assert_close(onnx_model(without), model(without))
    assert onnx_model.verify().ok


class Counting(torch.nn.Module):
    def forward(self, x, step=0):
        return x * 2


def test_calls_that_differ_in_constants_alone_count_once():
    model, observer = Counting(), exportkit.InputObserver()
    with observer(model, store_n_calls=1):
        for step in range(30):
            model(torch.randn(2, 4 + step % 2), step)
    assert len(call_table(observer.observation).leaves[0].shapes) == 2


class Segments(NamedTuple):
    values: torch.Tensor
    lengths: torch.Tensor


class CheckedSegments(Segments):
    """Checks its tensors as it is made, as PackedSequence does."""

    def __new__(cls, values, lengths):
        assert values.device == lengths.device
        return super().__new__(cls, values, lengths)


class OfSegments(torch.nn.Module):
    def forward(self, segments):
        return segments.values * segments.lengths[:, None]


def test_a_named_tuple_that_checks_its_tensors_has_a_plan_and_a_clear_error():
    model, observer = OfSegments(), exportkit.InputObserver()
    with observer(model):
        for rows, length in ((2, 5), (3, 7)):
            model(CheckedSegments(torch.randn(rows, length), torch.arange(rows)))
    assert sizes_of(observer.plan()) == {"segments[0]": ("batch", "segments_0_axis_1"), "segments[1]": ("batch",)}
    with pytest.raises(ExportError, match="could not trace the model"):
        exportkit.export(model, observer)
