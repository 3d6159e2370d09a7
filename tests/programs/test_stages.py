"""The stages of an export while they run, as `show_progress` shows them."""

import io

import pytest
import torch
from rich.console import Console

import exportkit
from exportkit.errors import ExportError
from exportkit.programs.stages import stage, watched_by
from tests.programs.failing import Positive


def observed():
    model, observer = torch.nn.Linear(4, 2), exportkit.InputObserver()
    with observer(model):
        for batch in (2, 3):
            model(torch.ones(batch, 4))
    return model, observer


def test_each_stage_is_a_line_in_a_file(tmp_path):
    model, observer = observed()
    text = io.StringIO()
    with exportkit.show_progress("linear", Console(file=text)):
        exportkit.export(model, observer).save(tmp_path / "folder")
    lines = text.getvalue().splitlines()
    names = [line.partition(" (about")[0] for line in lines]
    assert names == [
        "linear",
        *(f"linear: {name}" for name in ("plan", "arguments", "export", "domain", "onnx", "verify")),
    ]
    assert all(
        line.endswith(" s)") for line, name in zip(lines, names, strict=True) if name.endswith(("export", "onnx"))
    )


def test_terminal_shows_one_line_with_details_and_removes_it(tmp_path):
    model, observer = observed()
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100, _environ={"TERM": "xterm"})
    with exportkit.show_progress(console=console):
        exportkit.export(model, observer).save(tmp_path / "folder")
    assert text.getvalue().endswith("\x1b[2K")


def test_details_and_durations_reach_only_watchers_of_this_block():
    told = []

    class Watcher:
        def __init__(self, name, about):
            told.append((name, about))

        def __enter__(self):
            return told.append

        def __exit__(self, *_):
            told.append("end")

    seconds = {"slow": 1.0}
    with watched_by(Watcher), stage("slow", seconds, 2.0) as tell:
        tell("half")
    with stage("slow") as tell:
        tell("no watcher is left")
    assert told == [("slow", 2.0), "half", "end"]
    assert seconds["slow"] > 1.0


def test_failing_stage_ends():
    model, observer = Positive().eval(), exportkit.InputObserver()
    with observer(model):
        for batch in (2, 3):
            model(torch.ones(batch, 4))
    text = io.StringIO()
    with pytest.raises(ExportError), exportkit.show_progress(console=Console(file=text)):
        exportkit.export(model, observer)
    assert "export" in text.getvalue()
