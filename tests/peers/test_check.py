"""`check_discrepancies` says for each recorded call how far an ONNX model is from what the model returned then."""

import math

import onnx
import pytest
import torch

from exportkit.errors import InvalidTypeError
from tests.models import Add, OptionalAdd
from tests.peers.test_dynamic_shapes import calls, ones

pytestmark = pytest.mark.runtime

COLUMNS = {
    "SUCCESS", "abs", "rel", "error", "index", "duration_torch", "ort_duration", "n_inputs", "n_none", "n_empty",
}  # fmt: skip


def graph(text):
    """Returns an ONNX model; ``text`` is a graph in the notation of onnx.parser."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> g {text}')
    onnx.checker.check_model(model)
    return model


ADD = graph("(float[N, M] x, float[K, M] y) => (float[N, M] z) { z = Add(x, y) }")


class Function(torch.nn.Module):
    """Returns what a function returns."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def _observed_add():
    return calls(Add(), ((ones(2, 3), ones(1, 3)), {}), ((ones(4, 5), ones(1, 5)), {}))


def _check(function, model, x=None, **options):
    """Returns the row of one call of a function of x."""
    if isinstance(model, str):
        model = graph(f"(float[N] x) => {model}")
    (row,) = calls(Function(function), ((ones(3) if x is None else x,), {})).check_discrepancies(model, **options)
    return row


def test_one_row_for_each_call():
    rows = _observed_add().check_discrepancies(ADD)

    assert [row["index"] for row in rows] == [0, 1]
    for row in rows:
        assert row.keys() == COLUMNS
        assert (row["SUCCESS"], row["error"], row["abs"], row["rel"]) == (True, "", 0, 0)
        assert (row["n_inputs"], row["n_none"], row["n_empty"]) == (2, 0, 0)
        assert row["duration_torch"] > 0
        assert row["ort_duration"] > 0


def test_onnx_model_may_be_given_in_several_forms(tmp_path):
    path = tmp_path / "add.onnx"
    onnx.save(ADD, path)
    observer = _observed_add()

    for form in (path, str(path), ADD, ADD.SerializeToString()):
        assert all(row["SUCCESS"] for row in observer.check_discrepancies(form))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_onnx_program_of_torch_is_taken():
    observer = _observed_add()
    arguments, shapes = observer.infer_arguments(), observer.infer_dynamic_shapes()
    program = torch.onnx.export(Add().eval(), arguments, dynamic_shapes=shapes, verbose=False)

    assert [row["SUCCESS"] for row in observer.check_discrepancies(program)] == [True, True]


@pytest.mark.parametrize("model", [None, 3, torch.nn.Linear(1, 1)])
def test_what_is_no_onnx_model_is_refused(model):
    with pytest.raises(InvalidTypeError, match="Not an ONNX model"):
        _observed_add().check_discrepancies(model)


def test_inputs_are_matched_by_name():
    swapped = graph("(float[N] y, float[N] x) => (float[N] z) { z = Sub(x, y) }")
    observer = calls(_Subtract(), ((ones(2) * 5, ones(2)), {}))

    assert observer.check_discrepancies(swapped)[0]["SUCCESS"]


def test_inputs_of_other_names_are_matched_by_order():
    other = graph("(float[N] first, float[N] second) => (float[N] z) { z = Sub(first, second) }")
    observer = calls(_Subtract(), ((ones(2) * 5, ones(2)), {}))

    assert observer.check_discrepancies(other)[0]["SUCCESS"]


class _Subtract(torch.nn.Module):
    def forward(self, x, y):
        return x - y


def test_other_number_of_inputs_is_refused():
    with pytest.raises(RuntimeError, match=r"have 2 tensors but the model expects 1\.") as raised:
        _observed_add().check_discrepancies(graph("(float[N] a) => (float[N] z) { z = Neg(a) }"))
    assert "remove_inputs" in str(raised.value)


# Verdicts


def test_exactly_equal_outputs_succeed_without_any_tolerance():
    row = _check(lambda x: x * 2, "(float[N] z) { z = Add(x, x) }", atol=0, rtol=0)

    assert (row["SUCCESS"], row["abs"], row["rel"]) == (True, 0, 0)


def test_zeros_on_both_sides_succeed_without_any_tolerance():
    assert _check(lambda x: x * 0, "(float[N] z) { z = Sub(x, x) }", atol=0, rtol=0)["SUCCESS"]


def test_difference_is_measured():
    row = _check(lambda x: x + 3, "(float[N] z) { z = Add(x, x) }", rtol=1)

    assert not row["SUCCESS"]
    assert row["abs"] == 2
    assert row["rel"] == pytest.approx(2 / (4 + 1))


@pytest.mark.parametrize(
    ("atol", "rtol", "success"), [(2, 1, True), (1.9, 1, False), (2, 0.1, False), (100, 0.6, True)]
)
def test_both_tolerances_count(atol, rtol, success):
    row = _check(lambda x: x + 3, "(float[N] z) { z = Add(x, x) }", atol=atol, rtol=rtol)

    assert row["SUCCESS"] is success


def test_nan_is_not_zero():
    row = _check(lambda x: x * math.nan, "(float[N] z) { z = Sub(x, x) }", atol=1e9, rtol=1e9)

    assert not row["SUCCESS"]
    assert row["abs"] == math.inf


def test_zero_is_not_nan():
    divided = "(float[N] z) { y = Sub(x, x) z = Div(y, y) }"
    assert not _check(lambda x: x * 0, divided, atol=1e9, rtol=1e9)["SUCCESS"]


def test_nan_equals_nan():
    divided = "(float[N] z) { y = Sub(x, x) z = Div(y, y) }"
    assert _check(lambda x: x * math.nan, divided, atol=0, rtol=0)["SUCCESS"]


def test_infinity_equals_the_same_infinity_only():
    divided = "(float[N] z) { y = Sub(x, x) z = Div(x, y) }"

    assert _check(lambda x: x * math.inf, divided, atol=0, rtol=0)["SUCCESS"]
    assert not _check(lambda x: x * -math.inf, divided, atol=1e9, rtol=1e9)["SUCCESS"]
    assert not _check(lambda x: x, divided, atol=1e9, rtol=1e9)["SUCCESS"]


@pytest.mark.parametrize("limit", [0.0, 2.0])
def test_boolean_outputs_are_compared(limit):
    compared = "(bool[N] z) { y = Sub(x, x) z = Greater(x, y) }"

    assert _check(lambda x: x > limit, compared)["SUCCESS"] is (limit == 0)


def test_integer_outputs_are_compared():
    rounded = "(int64[N] z) { z = Cast <to = 7> (x) }"

    assert _check(lambda x: x.long(), rounded)["SUCCESS"]
    assert not _check(lambda x: x.long() + 1, rounded)["SUCCESS"]


def test_empty_outputs_are_equal():
    row = _check(lambda x: x * 2, "(float[N] z) { z = Add(x, x) }", x=torch.empty(0))

    assert (row["SUCCESS"], row["abs"], row["n_empty"]) == (True, 0, 1)


def test_scalar_outputs_are_compared():
    summed = "(float z) { z = ReduceSum <keepdims = 0> (x) }"

    assert _check(lambda x: x.sum(), summed)["SUCCESS"]


def test_other_shape_is_an_error():
    row = _check(lambda x: x[:2], "(float[N] z) { z = Identity(x) }")

    assert not row["SUCCESS"]
    assert row["error"] == "not the same shape: (2,) and (3,)"


def test_other_element_type_is_an_error():
    row = _check(lambda x: x.double(), "(float[N] z) { z = Identity(x) }")

    assert not row["SUCCESS"]
    assert row["error"].startswith("not the same type")


def test_other_number_of_outputs_is_an_error():
    row = _check(lambda x: (x, x), "(float[N] z) { z = Identity(x) }")

    assert (row["SUCCESS"], row["error"]) == (False, "not the same number of outputs")


def test_output_that_is_none_is_skipped_on_request():
    assert _check(lambda x: (x, None), "(float[N] z) { z = Identity(x) }")["SUCCESS"]
    row = _check(lambda x: (x, None), "(float[N] z) { z = Identity(x) }", skip_none=False)
    assert (row["SUCCESS"], row["error"]) == (False, "not the same number of outputs")


def test_refusal_of_onnxruntime_is_an_error_in_the_row():
    fixed = graph("(float[2, 3] x, float[1, 3] y) => (float[2, 3] z) { z = Add(x, y) }")
    first, second = _observed_add().check_discrepancies(fixed)

    assert first["SUCCESS"]
    assert not second["SUCCESS"]
    assert "onnxruntime refused the call" in second["error"]


# Inputs that some calls lack


def test_missing_inputs_are_filled_in_and_counted():
    every = ((ones(1, 3), ones(2, 3)), {}), ((ones(1, 3), ones(4, 3)), {}), ((ones(1, 3),), {})
    with_y = graph(
        "(float[N, M] x, float[K, M] y) => (float[N, M] z) { a = ReduceSum <keepdims = 0> (y) z = Add(x, a) }"
    )

    class AddsTotal(torch.nn.Module):
        def forward(self, x, y=None):
            return x if y is None else x + y.sum()

    rows = calls(AddsTotal(), *every).check_discrepancies(with_y)

    assert [row["SUCCESS"] for row in rows] == [True, True, True]
    assert [(row["n_none"], row["n_empty"]) for row in rows] == [(0, 0), (0, 0), (1, 1)]


def test_missing_input_that_must_be_ones_is_found():
    class Multiplies(torch.nn.Module):
        def forward(self, x, scale=None):
            return x if scale is None else x * scale

    product = graph("(float[N] x, float[N] scale) => (float[N] z) { z = Mul(x, scale) }")
    rows = calls(Multiplies(), ((ones(3), ones(3) * 2), {}), ((ones(3),), {})).check_discrepancies(product)

    assert [row["SUCCESS"] for row in rows] == [True, True]


def test_wrong_result_without_an_input_is_found():
    product = graph("(float[N] x, float[N] y) => (float[N] z) { a = Sub(y, y) z = Add(x, a) }")
    rows = calls(OptionalAdd(), ((ones(3), ones(3)), {}), ((ones(3),), {})).check_discrepancies(product)

    assert [row["SUCCESS"] for row in rows] == [False, True]


# What padding computes


def test_positions_that_the_mask_hides_do_not_count():
    class Masked(torch.nn.Module):
        def forward(self, x, attention_mask):
            return x * attention_mask + 7 * (1 - attention_mask)

    product = graph("(float[B, L] x, int64[B, L] attention_mask) => (float[B, L] z) { z = Identity(x) }")
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])

    (row,) = calls(Masked(), ((torch.rand(2, 3), mask), {})).check_discrepancies(product)
    assert row["SUCCESS"]
    (row,) = calls(Masked(), ((torch.rand(2, 3), 0 * mask + 2), {})).check_discrepancies(product)
    assert not row["SUCCESS"]


# Options


def test_inputs_and_outputs_can_be_had():
    row = _check(lambda x: x * 2, "(float[N] z) { z = Add(x, x) }", include_io=True)

    assert row.keys() == COLUMNS | {"inputs", "outputs_torch", "outputs_onnx"}
    assert row["inputs"]["x"].tolist() == [1, 1, 1]
    assert row["outputs_torch"][0].tolist() == row["outputs_onnx"][0].tolist() == [2, 2, 2]


def test_progress_bar_changes_nothing(capsys):
    rows = _observed_add().check_discrepancies(ADD, progress_bar=True)

    assert len(rows) == 2
    assert "checking recorded calls" in capsys.readouterr().out
