"""How far tensors are apart: every kind of element, and relative to what."""

import math

import pytest
import torch

from exportkit import trace_model
from exportkit.running.compare import distance, position_of_largest, unit_of
from tests.module_traces.models import KINDS, MORE_KINDS, Wraps, made


def test_it_is_relative_to_the_scale_of_the_first():
    a = torch.tensor([3.0, -4.0])

    found = distance(a, a * 1.5)

    assert found.rms == pytest.approx(0.5)
    assert found.largest == 2.0
    assert position_of_largest(a, a * 1.5) == (1,)


def test_equal_tensors_are_exact_and_rounded_ones_are_not():
    a = torch.randn(5, 7)

    assert distance(a, a.clone()).exact
    assert not distance(a, a.to(torch.bfloat16)).exact
    assert distance(a, a.to(torch.bfloat16)).rms < unit_of("bfloat16")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinities_equal_themselves_alone(value):
    a = torch.tensor([1.0, value])

    assert distance(a, a.clone()).rms == 0.0
    assert distance(a, torch.tensor([1.0, 2.0])).rms == math.inf
    assert distance(torch.tensor([1.0, 2.0]), a).rms == math.inf
    assert distance(a, torch.tensor([2.0, value])).rms == pytest.approx(1.0)


def test_the_lowest_value_of_a_type_means_hidden():
    masks = [torch.tensor([0.0, torch.finfo(dtype).min], dtype=dtype) for dtype in (torch.float32, torch.float16)]

    assert distance(*masks).rms == 0.0


def test_large_values_have_no_infinite_square():
    a = torch.tensor([1e25, 2e25])

    assert distance(a, a * 1.5).rms == pytest.approx(0.5)


def test_integers_and_booleans_differ_by_their_share():
    a = torch.arange(10)

    assert distance(a, a.clone().index_fill(0, torch.tensor([3]), 99)).rms == 0.1
    assert distance(a > 3, a > 4).rms == 0.1


def test_other_shapes_have_no_distance():
    found = distance(torch.ones(2), torch.ones(3))

    assert (found.rms, found.problem) == (math.inf, "shape (3,) instead of (2,)")


def test_hidden_elements_do_not_count():
    a, b = torch.ones(2, 3), torch.ones(2, 3)
    b[0, 0] = 9

    assert distance(a, b, torch.tensor([[False, True, True], [True, True, True]])).rms == 0.0
    assert distance(a, b, torch.zeros(2, 3, dtype=torch.bool)).exact


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("values", ["all", None])
@pytest.mark.parametrize("kind", [*KINDS, *MORE_KINDS])
def test_runs_with_every_kind_of_tensor_are_compared(kind, values):
    tensor, model = made(kind), Wraps()
    traces = []
    for _ in range(2):
        with trace_model(model, values=values) as trace:
            model(tensor)
        traces.append(trace)

    found = traces[0].compare(traces[1])

    assert found.verdict() == "The runs are equal."


def test_units_are_those_of_rounding():
    assert unit_of("float32") == unit_of("torch.float32") == 2.0**-24
    assert unit_of("bfloat16") == 2.0**-8
    assert unit_of("int64") == unit_of("no type") == 0.0
