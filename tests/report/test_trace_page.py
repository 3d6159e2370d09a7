"""Pages of traces, of comparisons, and of models with several programs."""

import pytest
import torch
from typer.testing import CliRunner

import exportkit
from exportkit import cli
from exportkit.errors import DestinationError, TraceError
from exportkit.report.export import export_page
from exportkit.report.traces import comparison_page, trace_page
from tests.programs.test_several import OtherStart
from tests.report.pages import check_page


class Failing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.log = torch.nn.Linear(4, 3), Log()

    def forward(self, x):
        return self.log(self.first(x))


class Log(torch.nn.Module):
    def forward(self, x):
        if x.shape[0] > 2:
            raise ValueError("no more than <2> rows")
        return x.abs().neg().log()


def test_a_row_for_each_module_call_with_nan_and_infinity_highlighted(tmp_path):
    model = Failing()
    with exportkit.trace_model(model, tmp_path / "trace", values="all"):
        model(torch.ones(2, 4))
    page = trace_page(tmp_path / "trace")
    text = check_page(page).text
    assert "complete 3 module calls; values stored: all." in text
    assert all(f"{name} " in text for name in ("(model)", "first", "log", "Failing", "Linear", "Log"))
    assert page.count('<tr class="bad">') == 2


def test_an_exception_of_a_module_is_shown(tmp_path):
    model = Failing()
    with pytest.raises(ValueError, match="rows"), exportkit.trace_model(model, tmp_path / "trace"):
        model(torch.ones(3, 4))
    assert "no more than <2> rows" in check_page(trace_page(tmp_path / "trace")).text


def test_command_writes_the_page_of_a_trace(tmp_path):
    model = Failing()
    with exportkit.trace_model(model, tmp_path / "trace"):
        model(torch.ones(2, 4))
    result = CliRunner().invoke(cli.app, ["report", str(tmp_path / "trace")])
    assert result.exit_code == 0, result.stderr
    check_page((tmp_path / "trace" / "report.html").read_text())


def test_damaged_trace_is_refused(tmp_path):
    (tmp_path / "calls.jsonl").write_text("nothing\n")
    with pytest.raises(TraceError):
        trace_page(tmp_path)


def test_folder_without_a_trace_is_refused(tmp_path):
    with pytest.raises(DestinationError, match="No trace was found"):
        trace_page(tmp_path)


def test_page_of_a_comparison_is_self_contained():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    with exportkit.trace_model(model, values="all") as right:
        model(torch.ones(2, 4))
    model[0].bias.data += 1
    with exportkit.trace_model(model, values="all") as wrong:
        model(torch.ones(2, 4))
    text = check_page(comparison_page(right.compare(wrong), "a & b")).text
    assert "The runs differ in 0 (Linear)." in text


def test_page_of_several_programs_gives_the_reason_and_shows_each(tmp_path):
    torch.manual_seed(0)
    model, observer = OtherStart().eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        past = model(torch.randn(2, 5, 8))["past"]
        past = model(torch.randn(2, 1, 8), past)["past"]
        model(torch.randn(2, 1, 8), past)
    exportkit.export(model, observer).save(tmp_path / "out")
    text = check_page(export_page(tmp_path / "out")).text
    assert "observe 3 calls" in text
    assert "2 programs" in text
    assert "one graph failed, so 2 programs: without_past, with_past" in text
    assert "Calls of without_past" in text
    assert "Verification of with_past" in text
