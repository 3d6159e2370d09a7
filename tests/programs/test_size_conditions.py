"""Models that decide by sizes: a call is answered as the model answers it, or refused with the condition it breaks."""

import math

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv, Max, Min

import exportkit
from exportkit._torch_compat.symbolic_shapes import always_holds
from exportkit.errors import ArgumentError
from exportkit.programs.size_branches import Affordable
from tests.programs import failing


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Pair(torch.nn.Module):
    """Takes two inputs of one length."""

    def forward(self, x, y):
        return x * 2, y + 1


class Positions(torch.nn.Module):
    """Has eight positions, and no more."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return x + self.table[torch.arange(x.shape[1])]


def exported(model, *calls):
    torch.manual_seed(0)
    observer = exportkit.InputObserver()
    with torch.no_grad(), observer(model.eval()):
        for call in calls:
            model(*call)
    return exportkit.export(model, observer)


def outcomes(function, folder, *shapes, recorded=((2, 5), (3, 7))):
    """What becomes of calls: whether they are answered rightly, or the first line of the error."""
    model = Model(function)
    onnx_model = exported(model, *((torch.randn(*shape),) for shape in recorded)).to_onnx(folder / "model.onnx")
    assert onnx_model.verify().ok
    found = []
    for shape in shapes:
        x = torch.randn(*shape)
        try:
            torch.testing.assert_close(onnx_model(x), model(x), atol=1e-4, rtol=1e-4, equal_nan=True)
            found.append("right")
        except ArgumentError as error:
            found.append(str(error).partition("\n")[0].partition(": ")[2] or str(error).partition("\n")[0])
    return found


def test_what_a_window_always_keeps_is_no_condition():
    total, past = sympy.symbols("total past", integer=True, positive=True)
    values = {symbol: sympy.Symbol(f"more_{symbol}", integer=True, nonnegative=True) + 2 for symbol in (total, past)}
    kept = total + Min(past, 5) - Max(0, total - 5 + Min(past, 5))  # the last 5 of the new tokens and a window
    relations = sympy.Ge(kept, 4), sympy.Ne(kept, 1), sympy.Ge(kept, 5), sympy.Ne(kept, total)
    assert [always_holds(relation, values) for relation in relations] == [True, True, False, False]


terms = st.tuples(st.integers(-6, 6), st.sampled_from([1, -1]), st.integers(-3, 3), st.integers(1, 6))


@given(st.lists(terms, min_size=1, max_size=3), st.integers(-8, 8))
def test_what_always_holds_holds_for_every_size(quotients, rest):
    size = sympy.Symbol("size", integer=True)
    difference = rest + sum(f * FloorDiv(sign * size + start, divisor) for f, sign, start, divisor in quotients)
    for relation in (sympy.Ge(difference, 0), sympy.Le(difference, 0), sympy.Ne(difference, 0)):
        if always_holds(relation, {}):
            assert all(relation.subs(size, value) == True for value in range(40))  # noqa: E712


def test_what_a_padding_to_full_windows_adds_is_known():
    size = sympy.Symbol("size", integer=True)
    half = -FloorDiv(-size, 2)  # rounded up
    assert always_holds(sympy.Ge(2 * half - size, 0), {})
    assert always_holds(sympy.Ge(-2 * FloorDiv(-half, 2) - half, 0), {})
    assert not always_holds(sympy.Ge(2 * half - size, 1), {})


@pytest.mark.parametrize(
    ("function", "shape", "message"),
    [
        (lambda x: x * 2 if x.shape[1] > 5000 else x + 1, (2, 6000), "x_axis_1 <= 5000, got 6000."),
        (lambda x: x * 2 if x.shape[1] % 64 == 0 else x + 1, (2, 128), "x_axis_1 % 64 != 0, got 128 % 64 = 0."),
        (lambda x: x * 2 if x.numel() > 4096 else x + 1, (64, 80), "x_axis_1 * batch <= 4096, got 80 * 64 = 5120."),
        (lambda x: x * 2 if x.shape[0] >= 64 else x + 1, (70, 5), "batch <= 63, got 70."),
        (lambda x: x * 2 if (x.shape[1] - 1) // 32 > 3 else x + 1, (2, 140), "(x_axis_1 - 1) // 32 <= 3"),
    ],
)
def test_sizes_that_decide_otherwise_are_refused_with_numbers(function, shape, message, tmp_path):
    right, refused = outcomes(function, tmp_path, (4, 6), shape)
    assert right == "right"
    assert refused.startswith(message)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 5 if x.shape[1] == 1 else x - 1,
        lambda x: x * 5 if x.shape[1] == 1 and x.shape[0] > 50 else x - 1,
        lambda x: x * 5 if x.shape[1] == 1 or x.shape[0] + x.shape[1] == 4 else x - 1,
    ],
)
def test_a_size_of_one_that_decides_otherwise_is_refused(function, tmp_path):
    right, *refused = outcomes(function, tmp_path, (4, 6), (60, 1), (2, 1))
    assert right == "right"
    assert refused == ["The graph is not proven for x_axis_1 = 1."] * 2


def test_sizes_of_one_are_served_where_nothing_differs_and_none_only_if_recorded(tmp_path):
    found = outcomes(lambda x: x * 2, tmp_path, (1, 6), (4, 1), (1, 1), (4, 0))
    assert found == ["right"] * 3 + ["The graph is not proven for x_axis_1 = 0."]


def test_statistics_of_one_element_and_of_none_are_right_or_refused(tmp_path):
    found = outcomes(lambda x: torch.stack([x.std(1), x.mean(1)]), tmp_path, (4, 1), (4, 0), (1, 6))
    assert found == ["right", "The graph is not proven for x_axis_1 = 0.", "right"]


def in_windows(x):
    length = x.shape[1]
    padding = (4 - length % 4) % 4
    if padding > 0:
        x = torch.nn.functional.pad(x, (0, padding))
    x = x.unflatten(1, (-1, 4)).softmax(-1).flatten(1)
    if padding > 0:
        x = x[:, :length].contiguous()
    return x


def filled_up_to_ten(x):
    missing = 10 - x.shape[1]
    if missing > 0:
        x = torch.nn.functional.pad(x, (0, missing))
    return x * 2


def test_padding_and_cutting_that_may_do_nothing_is_no_condition(tmp_path):
    assert outcomes(in_windows, tmp_path, (2, 8), (2, 9), (2, 1)) == ["right"] * 3
    right, refused = outcomes(filled_up_to_ten, tmp_path, (2, 9), (2, 12))  # a negative padding would cut
    assert right == "right"
    assert refused.startswith("10 - x_axis_1 > 0, got")


def by_remainders(x):
    """Pads images to multiples of 8, and cuts what it made of them, as models that restore images do."""
    height, width = x.shape[-2:]
    below, right = (8 - height % 8) % 8, (8 - width % 8) % 8
    if below != 0 or right != 0:
        x = torch.nn.functional.pad(x, (0, right, 0, below), "reflect")
    padded_height, padded_width = x.shape[-2:]
    x = torch.nn.functional.avg_pool2d(x, 2).repeat_interleave(2, -1).repeat_interleave(2, -2)
    if height != padded_height or width != padded_width:
        x = x[:, 0:height, 0:width].contiguous()
    return x


def by_quotients(x):
    below, right = (int(math.ceil(size / 8) * 8 - size) for size in x.shape[-2:])
    return torch.nn.functional.avg_pool2d(torch.nn.functional.pad(x, (0, right, 0, below)), 2)


def by_quotients_where_needed(x):
    below, right = (int(math.ceil(size / 8) * 8 - size) for size in x.shape[-2:])
    if below > 0 or right > 0:
        x = torch.nn.functional.pad(x, (0, right, 0, below))
    return torch.nn.functional.avg_pool2d(x, 2)


def by_remainders_with_fixed_rows(x):
    """A plain trace fixes the number of rows."""
    return by_remainders(x).reshape(int(x.shape[0]), -1)


@pytest.mark.parametrize(
    "function", [by_remainders, by_remainders_with_fixed_rows, by_quotients, by_quotients_where_needed]
)
@pytest.mark.parametrize("recorded", [((2, 16, 24), (3, 24, 16)), ((2, 13, 18), (3, 18, 29))])
def test_images_that_are_padded_to_multiples_may_have_any_size(function, recorded, tmp_path):
    shapes = (1, 17, 12), (2, 16, 40), (4, 33, 9), (1, 24, 32)
    assert outcomes(function, tmp_path, *shapes, recorded=recorded) == ["right"] * 4


def test_sizes_with_slightly_other_results_are_refused(tmp_path):
    found = outcomes(
        lambda x: x * 1.0001 if x.shape[1] % 2 else x, tmp_path, (2, 40), (2, 9), recorded=((2, 16), (3, 24))
    )
    assert found == ["right", "x_axis_1 % 2 == 0, got 9 % 2 = 1."]


def test_inputs_that_share_a_length_may_not_have_different_ones(tmp_path):
    calls = [(torch.randn(2, n), torch.randn(2, n)) for n in (5, 7)]
    model = Pair()
    observer = exportkit.InputObserver()
    with observer(model):
        for call in calls:
            model(*call)
    plan = observer.plan()
    first, second = (plan.by_path[path].sizes[1].variable for path in ("x", "y"))
    tied = plan if first == second else plan.tie(first, second)
    onnx_model = exportkit.export(model, tied).to_onnx(tmp_path / "model.onnx")
    with pytest.raises(ArgumentError, match="The sizes of the inputs are inconsistent"):
        onnx_model(torch.randn(2, 5), torch.randn(2, 6))


def test_distances_are_served_at_any_number_of_rows_or_refused(tmp_path):
    assert outcomes(lambda x: torch.cdist(x, x + 9), tmp_path, (20, 6), (40, 6)) == ["right", "right"]


def test_a_model_with_no_more_positions_than_were_recorded_is_traced_at_fewer():
    model, observer = Positions().eval(), exportkit.InputObserver()
    with observer(model):
        model(torch.randn(2, 8, 8))
        model(torch.randn(3, 8, 8))
    found = exportkit.export(model, observer.plan().dynamic("x", 1))
    assert found.sizes["x_axis_1"] < 8


def test_why_a_call_is_outside_is_explained(tmp_path):
    model = failing.Short()
    onnx_model = exported(model, (torch.randn(2, 5, 6),), (torch.randn(3, 7, 6),)).to_onnx(tmp_path / "model.onnx")
    assert onnx_model.explain(torch.randn(2, 4, 6)).startswith("inside\n")
    text = onnx_model.explain(torch.randn(2, 9, 6))
    assert text.startswith("outside: The graph does not serve these sizes: x_axis_1 <= 8, got 9.")
    assert "\nNO   x_axis_1 <= 8: 9" in text


def test_the_domain_is_saved_with_the_graph(tmp_path):
    import json

    import onnx

    model = failing.Short()
    calls = (torch.randn(2, 5, 6),), (torch.randn(3, 7, 6),)
    saved = exported(model, *calls).save(tmp_path / "out")
    loaded = exportkit.load(tmp_path / "out")
    assert loaded.domain == saved.domain
    with pytest.raises(ArgumentError, match="x_axis_1 <= 8, got 9"):
        loaded(torch.randn(2, 9, 6))
    properties = {item.key: item.value for item in onnx.load(loaded.path, load_external_data=False).metadata_props}
    assert json.loads(properties["exportkit.domain"])["conditions"][0]["text"] == "x_axis_1 <= 8"
    assert (tmp_path / "out" / "report.txt").read_text().startswith("proven for ")


def test_what_convolutions_compute_bounds_the_sizes_that_are_tried():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 1), *[torch.nn.Conv2d(64, 64, 3, padding=1) for _ in range(20)])
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch, size in ((2, 16), (3, 24)):
            model(torch.randn(batch, 3, size, size))
    traced = exportkit.export(model, observer).traced
    affordable = Affordable(traced)
    height, width = (name for name in traced.sizes if name != "batch")
    products = 64 * 3 + 20 * 64 * 64 * 9  # for each pixel, all at one resolution
    side = math.isqrt(2**36 // products)
    assert {"batch": 1, height: side, width: side} in affordable
    assert {"batch": 1, height: side + 9, width: side + 9} not in affordable
