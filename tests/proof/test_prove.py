"""The proof: what it finds, and what it says."""

import json
from dataclasses import replace

import onnx_ir
import pytest
import torch

import exportkit
from exportkit.errors import ArgumentError
from exportkit.proof.report import Report, Row
from exportkit.running.session import SessionRunner


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 4)

    def forward(self, x, bias=None):
        y = self.linear(x)
        return y if bias is None else y + bias


class Memorising(torch.nn.Module):
    """A Python branch on a size, which a trace freezes: right at some sizes, wrong at others."""

    def forward(self, x):
        return x * 2 if x.shape[1] >= 5 else x * 3


def exported(model, calls, path):
    observer = exportkit.InputObserver()
    with observer(model, store_n_calls=len(calls)):
        for call in calls:
            model(*call)
    return exportkit.export(model, observer).to_onnx(path)


@pytest.fixture
def onnx_model(tmp_path):
    return exported(Net(), [(torch.randn(2, 6),), (torch.randn(3, 6),)], tmp_path / "model.onnx")


def test_recorded_calls_and_unseen_sizes_are_proven(onnx_model):
    report = onnx_model.verify()
    assert report.ok
    assert {row.status for row in report.rows} == {"proven"}
    assert {row.sizes["batch"] for row in report.rows if row.kind == "unseen"} >= {1, 67}
    assert max(row.absolute for row in report.rows) < 1e-5


@pytest.mark.parametrize("fused", [False, True])
def test_large_sizes_leave_room_for_attention_over_all_pixels(fused, tmp_path):
    class OverPixels(torch.nn.Module):
        def forward(self, image):
            pixels = image.flatten(2).transpose(1, 2)
            if fused:
                return torch.nn.functional.scaled_dot_product_attention(pixels, pixels, pixels)
            return (pixels @ pixels.transpose(1, 2)).softmax(-1) @ pixels

    report = exported(
        OverPixels(), [(torch.randn(2, 4, 6, 5),), (torch.randn(3, 4, 8, 9),)], tmp_path / "m.onnx"
    ).verify()
    assert report.ok
    asked = [rows * (height * width) ** 2 for rows, height, width in map(_sizes, report.rows)]
    assert 10**6 < max(asked) < 2**28


def _sizes(row):
    return [row.sizes[name] for name in ("batch", "height", "width")]


def test_recorded_calls_alone_can_be_checked(onnx_model):
    report = onnx_model.verify(unseen=False)
    assert report.ok
    assert {row.kind for row in report.rows} == {"recorded"}


def test_weights_that_changed_are_found_and_located(onnx_model):
    with torch.no_grad():
        onnx_model.exported.model.linear.weight[2] += 1
    report = onnx_model.verify()
    assert not report.ok
    unseen = [row for row in report.rows if row.kind == "unseen" and row.sizes["batch"]]
    assert {row.status for row in unseen} == {"differs"}
    assert all(row.where.startswith("output: ") and row.where.endswith(", 2]") for row in unseen)
    assert "NOT PROVEN" in str(report)


def test_sizes_that_a_branch_frozen_by_the_trace_does_not_serve_are_outside(tmp_path):
    onnx_model = exported(Memorising(), [(torch.randn(2, 6),), (torch.randn(3, 9),)], tmp_path / "model.onnx")
    report = onnx_model.verify()
    assert report.ok
    assert str(report).startswith("proven for batch >= 1, x_axis_1 >= 5\n")
    outside = [row for row in report.rows if row.status == "outside"]
    assert [row.sizes["x_axis_1"] < 5 for row in outside] == [True] * len(outside) != []
    with pytest.raises(ArgumentError, match="x_axis_1 >= 5, got 4"):
        onnx_model(torch.randn(2, 4))


class Doubled(torch.nn.Module):
    def forward(self, x):
        return x * 2


def test_small_sizes_that_differ_in_onnxruntime_alone_leave_the_domain(tmp_path, monkeypatch):
    def one_off(self, tensors):
        results = right(self, tensors)
        return {path: tensor + (tensor.shape[1] == 1) for path, tensor in results.items()}

    right = SessionRunner.run
    monkeypatch.setattr(SessionRunner, "run", one_off)
    onnx_model = exported(Doubled(), [(torch.randn(2, 5),), (torch.randn(3, 7),)], tmp_path / "model.onnx")
    assert {"x_axis_1": 1} in [pattern.sizes for pattern in onnx_model.domain.patterns]
    report = onnx_model.verify()
    assert report.ok
    assert any(text.startswith("onnxruntime does not serve x_axis_1 = 1: ") for text in report.findings)
    assert {"x_axis_1": 1} not in [pattern.sizes for pattern in onnx_model.domain.patterns]
    written = onnx_ir.load(onnx_model.path).metadata_props["exportkit.domain"]
    assert json.loads(written) == json.loads(json.dumps(onnx_model.domain.to_json()))
    assert onnx_model.verify().findings == report.findings
    with pytest.raises(ArgumentError, match="is not proven for x_axis_1 = 1"):
        onnx_model(torch.randn(2, 1))


def test_a_graph_that_refuses_a_size_is_no_proof(onnx_model, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise exportkit.ExportkitError("refused")

    monkeypatch.setattr(onnx_model.session, "run", refuse)
    report = onnx_model.verify()
    assert not report.ok
    assert {row.status for row in report.rows} == {"refused"}


def test_sizes_that_the_model_itself_refuses_are_no_proof_and_no_failure(onnx_model):
    def small_only(x, bias=None):
        if len(x) > 3:
            raise ValueError("too many rows")
        return torch.nn.functional.linear(x, weight, offset)

    model = onnx_model.exported.model
    weight, offset = model.linear.weight, model.linear.bias
    model.forward = small_only
    report = onnx_model.verify()
    assert "no call" in {row.status for row in report.rows}
    assert any("too many rows" in row.where for row in report.rows)


class Masked(torch.nn.Module):
    """Computes something of its own at hidden positions, from what is there or not."""

    def __init__(self, from_padding):
        super().__init__()
        self.noise, self.from_padding = torch.tensor(1.0), from_padding

    def forward(self, x, attention_mask):
        hidden = x * self.noise if self.from_padding else torch.zeros_like(x) + self.noise
        return torch.where(attention_mask[..., None] == 1, x * 2, hidden)


@pytest.mark.parametrize("from_padding", [True, False])
def test_padding_is_no_difference_where_it_depends_on_what_the_mask_hides(from_padding, tmp_path):
    model = Masked(from_padding)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    calls = [(torch.randn(2, 5, 6), mask), (torch.randn(2, 4, 6), mask[:, :4])]
    onnx_model = exported(model, calls, tmp_path / "model.onnx")
    model.noise = torch.tensor(5.0)
    report = onnx_model.verify()
    assert report.ok is from_padding, str(report)
    assert any("elements are arbitrary in the model" in row.where for row in report.rows) is from_padding


def row(kind="recorded", status="proven", **changes):
    return replace(Row(kind, "0", {"batch": 2}, status, 1e-7), **changes)


def test_a_report_prints_as_a_table():
    report = Report(
        (row(), row("unseen", "differs", label="longer", absolute=0.5, where="logits: 1 became 2")), 1, ("n",)
    )
    assert str(report) == (
        "call           sizes    result   max difference  where\n"
        "-------------  -------  -------  --------------  ------------------\n"
        "recorded 0     batch 2  proven   1.0e-07\n"
        "unseen longer  batch 2  differs  5.0e-01         logits: 1 became 2\n"
        "note: n\n"
        "NOT PROVEN: unseen call longer: differs, logits: 1 became 2; "
        "only 0 of 1 unseen combinations of sizes could be proven"
    )


@pytest.mark.parametrize(
    ("rows", "expected_unseen", "ok"),
    [
        ((row(),), 0, True),
        ((), 0, False),
        ((row(), row("unseen")), 1, True),
        ((row(), row("unseen", "no call")), 1, False),
        ((row(), row("unseen"), row("unseen", "no call")), 1, True),
        ((row(), row("unseen"), row("unseen", "differs")), 1, False),
        ((row(status="refused"), row("unseen")), 1, False),
    ],
)
def test_ok_means_every_call_is_proven_and_enough_unseen_ones(rows, expected_unseen, ok):
    assert Report(rows, expected_unseen).ok is ok


class Gather(torch.nn.Module):
    """Takes rows by their index, as graph networks do."""

    def forward(self, rows, index):
        return rows[index] * 2


def test_recorded_indices_are_made_smaller_where_rows_are_fewer(tmp_path):
    calls = [(torch.randn(n, 3), torch.full((m,), n - 1)) for n, m in ((9, 4), (12, 6), (10, 3))]
    report = exported(Gather(), calls, tmp_path / "model.onnx").verify()
    assert report.ok, str(report)
    assert min(row.sizes[row_variable(report)] for row in report.rows if row.kind == "unseen") < 9


def row_variable(report):
    """The variable that was 9 in the first call."""
    return next(name for name, size in report.rows[0].sizes.items() if size == 9)


class KeepsByShape(torch.nn.Module):
    """Keeps the first values of each shape; raises for some of the lengths that a proof tries."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def forward(self, x):
        if x.shape[1] > 100:
            raise ValueError("too long")
        key = tuple(x.shape)
        if key not in self.kept:
            self.kept[key] = x.detach().clone()
        return x + self.kept[key]


def test_results_kept_by_shape_are_found_although_the_domain_leaves_out_the_first_unseen_sizes(tmp_path):
    calls = [(torch.rand(2, length),) for length in (5, 6, 7)]
    report = exported(KeepsByShape(), calls, tmp_path / "model.onnx").verify()
    assert not report.ok
    assert "the model keeps state" in "".join(report.problems())
