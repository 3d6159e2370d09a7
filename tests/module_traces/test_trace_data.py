"""Crashes, full disks and damaged files: what can be read is read, and says what is missing."""

import errno
import json
import pickle
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors import safe_open

from exportkit import Trace, trace_model
from exportkit.errors import DestinationError, TraceError
from exportkit.module_traces.files import TraceFiles
from tests.module_traces.models import Stack


@pytest.fixture
def folder(tmp_path):
    """A whole trace."""
    model = Stack(2)
    with trace_model(model, tmp_path / "trace", values="all"):
        model(torch.ones(3, 4))
    return tmp_path / "trace"


def test_a_process_that_dies_leaves_the_call_it_was_in(tmp_path):
    code = f"""
    import os, signal, torch
    from exportkit import trace_model
    class Dies(torch.nn.Module):
        def forward(self, x):
            os.kill(os.getpid(), signal.SIGKILL)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), Dies())
    with trace_model(model, {str(tmp_path / "trace")!r}, values="all"):
        model(torch.ones(3, 4))
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert result.returncode == -signal.SIGKILL

    trace = Trace.load(tmp_path / "trace")
    assert not trace.complete
    assert trace.problems == ("The recording did not end: calls, or parts of the last one, are missing.",)
    assert [(call.path, call.error) for call in trace.calls] == [
        ("", "the recording ended inside this call"),
        ("0", None),
        ("1", None),
        ("2", "the recording ended inside this call"),
    ]
    failing = trace.calls[-1]
    assert failing.class_name == "Dies"
    assert torch.equal(trace.tensor(failing.inputs[0]), trace.tensor(trace.calls[2].outputs[0]))
    assert trace.tensor(trace.calls[0].inputs[0]).sum() == 12


@pytest.mark.parametrize("method", ["write_data", "write_lines"])
def test_a_full_disk_ends_the_trace_and_not_the_run(method, tmp_path, monkeypatch):
    original, count = getattr(TraceFiles, method), 0

    def full(self, data):
        nonlocal count
        count += 1
        if count > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, data)

    model = Stack(2)
    expected = model(torch.ones(3, 4))
    monkeypatch.setattr(TraceFiles, method, full)
    said = pytest.warns(RuntimeWarning, match=r"incomplete; the model was not affected. .*No space left")
    with said, trace_model(model, tmp_path, values="all") as trace:
        found = model(torch.ones(3, 4))
    monkeypatch.undo()

    assert torch.equal(found, expected)
    assert not trace.complete
    assert "No space left" in trace.problems[0]
    for found in (trace, Trace.load(tmp_path)):
        assert not found.complete
        assert 0 < len(found.calls) < 7
        for call in found.calls:
            assert all(found.tensor(record).shape == record.shape for record in call.inputs)
    with safe_open(tmp_path / "tensors.safetensors", "pt") as file:
        assert file.keys()


def test_files_that_must_not_grow(tmp_path):
    code = f"""
    import resource, signal, torch, warnings
    from exportkit import trace_model
    from tests.module_traces.models import Stack
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    model, x = Stack(4), torch.ones(3, 4)
    expected = model(x)
    for limit in range(7_700, 40_000, 1_700):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        with trace_model(model, {str(tmp_path)!r} + f"/{{limit}}", values="all") as trace:
            assert torch.equal(model(x), expected)
            assert torch.equal(model(x), expected)
        print(limit, trace.complete)
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True)
    complete = {line.split()[0]: line.split()[1] == "True" for line in result.stdout.splitlines()}

    assert set(complete.values()) == {True, False}
    for limit, is_complete in complete.items():
        trace = Trace.load(tmp_path / limit)
        assert trace.complete is is_complete
        assert is_complete or "File too large" in trace.problems[0] or "did not end" in trace.problems[0]
        for call in trace.calls:
            assert all(trace.tensor(record).shape == record.shape for record in (*call.inputs, *call.outputs))


def test_an_index_that_was_cut_short_is_read_as_far_as_it_goes(folder):
    index = folder / "calls.jsonl"
    data = index.read_bytes()
    whole = Trace.load(folder).calls
    for length in range(data.index(b"\n") + 1, len(data), 97):
        index.write_bytes(data[:length])
        trace = Trace.load(folder)
        assert not trace.complete
        assert all(found.path == call.path for found, call in zip(trace.calls, whole, strict=False))


def test_data_that_were_cut_short(folder):
    data = folder / "tensors.safetensors"
    data.write_bytes(data.read_bytes()[:-20])
    trace = Trace.load(folder)
    assert trace.tensor(trace.calls[0].inputs[0]).shape == (3, 4)
    with pytest.raises(TraceError, match=r"cannot be read from this trace.\n  where: .*\n  got: expected 48 bytes"):
        trace.tensor(trace.calls[-1].outputs[0])


def test_a_data_file_that_is_gone(folder):
    (folder / "tensors.safetensors").unlink()
    trace = Trace.load(folder)
    with pytest.raises(DestinationError, match="values of a trace cannot be read"):
        trace.tensor(trace.calls[0].inputs[0])


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[1]",
        "[" * 100_000,
        '{"begin": 1}',
        '{"end": 0, "layout": 99, "tensors": [], "others": [], "error": null}',
    ],
)
def test_a_damaged_line_is_an_error_of_ours(folder, line):
    index = folder / "calls.jsonl"
    lines = index.read_text().splitlines()
    index.write_text("\n".join([*lines[:-1], line, lines[-1]]) + "\n")
    with pytest.raises(TraceError, match=r"This trace is damaged.\n  where: .*calls.jsonl"):
        Trace.load(folder).calls  # noqa: B018


@pytest.mark.parametrize("text", ["", "{}\n", '{"format": "exportkit-trace", "version": 99}\n', '"text"\n'])
def test_another_file_is_an_error_of_ours(tmp_path, text):
    (tmp_path / "calls.jsonl").write_text(text)
    with pytest.raises(TraceError):
        Trace.load(tmp_path)


def test_no_file_at_all(tmp_path):
    with pytest.raises(DestinationError, match="No trace was found"):
        Trace.load(tmp_path)


class Bomb:
    def __reduce__(self):
        return print, ("executed",)


def test_nothing_is_unpickled_or_evaluated(folder, capsys):
    data = folder / "tensors.safetensors"
    raw = data.read_bytes()
    bomb = pickle.dumps(Bomb())
    data.write_bytes(raw[: -len(bomb)] + bomb)
    index = folder / "calls.jsonl"
    lines = index.read_text().splitlines()
    stored = next(i for i, line in enumerate(lines) if '"key"' in line)
    changed = json.loads(lines[stored])
    changed["parts"][""]["dtype"] = "__import__('os')"
    lines[stored] = json.dumps(changed)
    index.write_text("\n".join(lines) + "\n")

    trace = Trace.load(folder)
    for call in trace.calls:
        for record in (*call.inputs, *call.outputs):
            if record.key == changed["key"]:
                with pytest.raises(TraceError, match="not a dtype of torch"):
                    trace.tensor(record)
            else:
                trace.tensor(record)
    assert capsys.readouterr().out == ""


def test_a_value_that_cannot_be_taken_apart_is_a_problem_and_no_error():
    class Odd(dict):
        pass

    class Angry:
        @property
        def __dict__(self):
            raise ValueError("keep out")

    class Takes(torch.nn.Module):
        def forward(self, x):
            return torch.ones(2)

    model = Takes()
    with pytest.warns(RuntimeWarning, match="keep out"), trace_model(model) as trace:
        assert model(Angry()).shape == (2,)
    assert trace.calls[0].inputs == ()
    assert trace.calls[0].outputs[0].shape == (2,)
    assert "keep out" in trace.problems[0]
