"""What a program takes for granted about sizes is read back: it limits the domain, and recorded calls are inside."""

import re
from dataclasses import replace

import pytest
import torch

import exportkit
from exportkit.errors import ArgumentError, ExportError
from exportkit.programs.audit import audit_sizes
from tests.models import tiny_llama
from tests.programs import failing

# What the audit finds; other findings are the plan's own.
KINDS = {"limit", "ignored input", "unchanged output", "lost output"}


def observed(model, *calls):
    observer = exportkit.InputObserver()
    with observer(model.eval(), store_n_calls=len(calls)):
        for call in calls:
            model(**call)
    return observer


def rows(*shapes):
    return [{"x": torch.randn(*shape)} for shape in shapes]


def findings(exported):
    return {finding.kind: finding.text for finding in exported.plan.findings if finding.kind in KINDS}


def golden(error):
    text = str(error)
    return re.sub(r"\S*failing\.py:\d+", "failing.py:N", text)


@pytest.fixture
def linear():
    """A linear layer with batch 2 and 3, and what was exported."""
    model = torch.nn.Linear(6, 2)
    return model, exportkit.export(model, observed(model, *({"input": call["x"]} for call in rows((2, 6), (3, 6)))))


def with_program(exported, program):
    return replace(exported.traced, program=program)


def test_a_limit_that_changes_nothing_is_dropped(linear):
    model, exported = linear
    batch = torch.export.Dim("batch", min=1, max=2)
    narrow = torch.export.export(model, (), kwargs={"input": torch.ones(2, 6)}, dynamic_shapes={"input": {0: batch}})
    assert not audit_sizes(with_program(exported, narrow)).domain.conditions


def test_an_axis_that_became_static_unseen_is_an_error(linear):
    model, exported = linear
    static = torch.export.export(model, (), kwargs={"input": torch.ones(3, 6)})
    with pytest.raises(ExportError) as caught:
        audit_sizes(with_program(exported, static))
    assert golden(caught.value) == (
        "The exported graph serves less than the plan promises: batch == 3 only.\n"
        "  expected: batch 2 too, as in recorded call 0\n"
        "  got: 2\n"
        "  hint: change this line so that it does not branch on these sizes."
    )


def test_recorded_sizes_that_the_trace_ties_otherwise_are_an_error():
    shapes = [((2, 4, 6), (2, 9, 6)), ((2, 5, 6), (2, 10, 6))]
    calls = [{"a": torch.randn(a), "b": torch.randn(b)} for a, b in shapes]
    model = failing.Doubled()
    observer = observed(model, *calls)
    assert len(exportkit.export(model, observer).programs) == 2  # but one program for a plan
    with pytest.raises(ExportError) as caught:
        exportkit.export(model, observer.plan())
    text = golden(caught.value)
    assert text.startswith(
        "The exported graph serves less than the plan promises: b_axis_1 == 2 * a_axis_1 only.\n"
        "  where: failing.py:N\n"
        "         if a.shape[1] * 2 == b.shape[1]:\n"
        "  expected: a_axis_1 4, b_axis_1 9 too, as in recorded call 0\n"
        "  got: 9 and 2 * 4 = 8"
    )
    assert text.endswith("  hint: change this line so that it does not branch on these sizes.")


def test_a_limit_that_the_model_does_not_have_is_in_the_domain_and_a_finding(tmp_path):
    model = failing.Short()
    exported = exportkit.export(model, observed(model, *rows((2, 5, 6), (3, 7, 6))))
    text = re.sub(r"[^( ]*failing\.py:\d+", "failing.py:N", findings(exported)["limit"])
    assert text == "the graph serves x_axis_1 <= 8 only (failing.py:N); the model accepts more (longer, batch 5)."
    onnx_model = exported.to_onnx(tmp_path / "model.onnx")
    report = onnx_model.verify()
    assert report.ok
    assert str(report).startswith("proven for batch >= 1, 1 <= x_axis_1 <= 8\n")
    with pytest.raises(ArgumentError, match="x_axis_1 <= 8, got 9"):
        onnx_model(torch.randn(2, 9, 6))


def test_a_limit_within_a_range_that_a_user_asked_for_is_an_error():
    model = failing.Short()
    plan = observed(model, *rows((2, 5, 6), (3, 7, 6))).plan().range("x_axis_1", 1, 12)
    with pytest.raises(ExportError, match="serves less than the plan promises: x_axis_1 <= 8 only"):
        exportkit.export(model, plan)


class Long(torch.nn.Module):
    """Does something else for few columns."""

    def forward(self, x):
        return x * 2 if x.shape[1] >= 4 else x + 1


def test_the_minimum_of_a_range_is_required_without_a_maximum_too():
    plan = observed(Long(), *rows((2, 5, 6), (3, 7, 6))).plan().range("x_axis_1", 3)
    with pytest.raises(ExportError, match="serves less than the plan promises: x_axis_1 >= 4 only"):
        exportkit.export(Long(), plan)


def test_a_limit_that_the_plan_has_too_is_fine(tmp_path):
    model = failing.Short()
    plan = observed(model, *rows((2, 5, 6), (3, 7, 6))).plan().range("x_axis_1", 1, 8)
    exported = exportkit.export(model, plan)
    assert not findings(exported)
    with pytest.raises(ArgumentError, match="x_axis_1 at least 1 and at most 8"):
        exported.to_onnx(tmp_path / "model.onnx")(torch.randn(2, 40, 6))


class Rest(torch.nn.Module):
    """Projects what is left of ten rows."""

    def __init__(self):
        super().__init__()
        self.rows = torch.nn.Parameter(torch.randn(2, 10, 6))
        self.linear = torch.nn.Linear(6, 4)

    def forward(self, x):
        used = x.shape[0]
        return self.linear(self.rows.narrow(1, used, 10 - used))


def test_a_limit_that_torch_has_since_it_takes_no_size_for_less_than_two_is_fine(tmp_path):
    model = Rest()
    exported = exportkit.export(model, observed(model, *rows((5, 9), (9, 9))))
    (limited,) = exported.program.range_constraints.values()
    assert limited.upper == 8
    x = torch.randn(9, 9)
    torch.testing.assert_close(exported.to_onnx(tmp_path / "model.onnx")(x), model(x))


def test_a_limit_of_the_model_itself_is_a_finding():
    model = failing.Table()
    exported = exportkit.export(model, observed(model, *rows((2, 5, 6), (3, 7, 6))))
    assert findings(exported) == {
        "limit": "the graph serves x_axis_1 <= 16 only; the model raises an error at other sizes (x_axis_1 19)."
    }


def test_a_table_that_the_model_makes_longer_is_a_finding_and_stays_as_it_was(tmp_path):
    model = failing.Grown()
    table = model.table
    exported = exportkit.export(model, observed(model, *rows((2, 5, 6), (3, 7, 6))))
    text = re.sub(r"[^( ]*failing\.py:\d+", "failing.py:N", findings(exported)["limit"])
    assert text == (
        "the graph serves x_axis_1 <= 16 only (failing.py:N); "
        "the model replaces its buffer table at other sizes (x_axis_1 19)."
    )
    assert model.table is table
    assert model.longest == 16
    assert exported.to_onnx(tmp_path / "model.onnx").verify().ok
    assert model.table is table


def test_a_decision_by_size_that_other_sizes_take_otherwise_is_a_condition():
    model = failing.Odd()
    exported = exportkit.export(model, observed(model, *rows((2, 5, 6), (3, 7, 6))))
    assert [condition.text for condition in exported.domain.conditions] == ["x_axis_1 % 2 != 0"]
    text = findings(exported)["limit"]
    assert text.startswith("the graph serves x_axis_1 % 2 != 0 only (")
    assert "the model accepts more" in text


def test_such_a_decision_is_a_condition_also_where_the_model_makes_another_table():
    model = failing.EvenTable()
    exported = exportkit.export(model, observed(model, *rows((2, 5, 6), (3, 7, 6))))
    assert findings(exported)["limit"].startswith("the graph serves x_axis_1 % 2 != 0 only (")
    assert model.table.tolist() == [1] * 6


class Passes(torch.nn.Module):
    """Ignores an input, and returns two others as they are."""

    def forward(self, x, y, z, unused):
        return {"sum": x + 1, "same": y, "part": z[:, :2], "clone": z * 1}


def test_ignored_inputs_and_unchanged_outputs_are_findings():
    calls = [{name: torch.randn(n, 6) for name in ("x", "y", "z", "unused")} for n in (2, 3)]
    model = Passes()
    assert findings(exportkit.export(model, observed(model, *calls))) == {
        "ignored input": "the model does not use these inputs, so the graph does not take them: unused.",
        "unchanged output": "output part is a view of input z; the graph returns a copy.",
    }
    texts = [finding.text for finding in exportkit.export(model, observed(model, *calls)).plan.findings]
    assert "output same is the same as input y; the graph returns a copy." in texts


class Box:
    def __init__(self, tensor):
        self.tensor = tensor

    def __del__(self):
        """Keeps objects from being opened."""


class Mixed(torch.nn.Module):
    def forward(self, x):
        return {"x": x + 1, "box": Box(x)}


def test_an_output_out_of_reach_among_others_is_a_finding():
    model = Mixed()
    exported = exportkit.export(model, observed(model, *rows((2, 6), (3, 6))))
    assert findings(exported) == {
        "lost output": "An object of class Box holds tensors that cannot be inputs or outputs of a graph. "
        "The graph returns the others."
    }


def test_a_decoder_gives_nothing_to_report():
    model, observer = tiny_llama(), exportkit.InputObserver()
    with observer(model):
        model.generate(torch.randint(3, 50, (2, 5)), max_new_tokens=4, do_sample=False)
    assert not findings(exportkit.export(model, observer))


class _Largest(torch.nn.Module):
    """Divides by the largest value of all calls, which it keeps in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.tensor(1.0))

    def forward(self, x):
        self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
        return x / self.largest


class _OwnLargest(_Largest):
    """Divides by the largest value of this call; what was in the buffer before does not matter."""

    def forward(self, x):
        self.largest.copy_(x.abs().max())
        return x / self.largest


def test_state_in_a_buffer_is_refused():
    model = _Largest()
    observer = observed(model, *rows((2, 5), (3, 5)))

    with pytest.raises(ExportError, match="keeps state in its buffers") as caught:
        exportkit.export(model, observer)

    assert "largest" in str(caught.value)


def test_buffer_that_every_call_overwrites_is_no_state():
    model = _OwnLargest()

    assert exportkit.export(model, observed(model, *rows((2, 5), (3, 5)))).program is not None


class _Copied(torch.nn.Module):
    """Writes to a copy of a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(2, 5))

    def forward(self, x):
        table = self.table.clone()
        table[:, 1] = x[:, 0].sum()
        return x.sum(0) + table


def test_copy_of_a_buffer_that_is_written_to_is_no_state():
    model = _Copied()
    exported = exportkit.export(model, observed(model, *rows((2, 5), (3, 5))))
    x = torch.ones(4, 5)
    torch.testing.assert_close(exported.program.module()(x=x), model(x))


class _Packed(torch.nn.Module):
    """Has two numbers of four bits in each byte of a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("packed", torch.tensor([18, 52], dtype=torch.uint8))

    def forward(self, x):
        return x + (self.packed & 15) + (self.packed >> 4)


def test_buffer_that_is_read_by_a_python_operator_is_no_state():
    model = _Packed()

    assert exportkit.export(model, observed(model, *rows((2, 2), (3, 2)))).program is not None
