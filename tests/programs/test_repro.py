"""A failure is shown again by a script, in a fresh process, with torch alone."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import exportkit
from exportkit.errors import DestinationError, ExportError, InvalidRequestError
from tests.models import tiny_llama, tiny_mistral
from tests.programs import failing

HERE = Path(__file__).parent


def run(script, *folders):
    """Returns the finished process of a script that can import from these folders, and from nowhere else."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(script)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=script.parent, check=False)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The failing models as a module of their own, outside of any package."""
    folder = tmp_path / "models"
    folder.mkdir()
    shutil.copy(failing.__file__, folder / "failing_models.py")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "failing_models", raising=False)
    return __import__("failing_models"), folder


def failed(model, *calls, onnx=None):
    observer = exportkit.InputObserver()
    with observer(model.eval(), store_n_calls=len(calls)):
        for call in calls:
            model(**call)
    with pytest.raises(ExportError) as caught:
        exportkit.export(model, observer).to_onnx(onnx)
    return caught.value


def rows(*shapes):
    return [{"x": torch.randn(*shape)} for shape in shapes]


def spec_of(script):
    return json.loads(script.read_text().partition('SPEC = r"""')[2].partition('"""')[0])


def test_a_failing_trace_fails_again(module, tmp_path):
    models, folder = module
    script = failed(models.Loop(), *rows((2, 5, 6), (3, 7, 6))).repro(tmp_path / "loop")
    process = run(script, folder)
    assert process.returncode == 1
    assert "specialized it to be a constant (7)" in process.stderr
    assert "L['tensors']['x'].size()[1]" in process.stderr
    assert "exportkit" not in process.stderr


def test_a_failing_translation_fails_again(module, tmp_path):
    models, folder = module
    error = failed(models.Untranslated(), *rows((2, 5, 6), (3, 7, 6)), onnx=tmp_path / "model.onnx")
    process = run(error.repro(tmp_path / "bessel"), folder)
    assert process.returncode == 1
    assert "No ONNX function found for <OpOverload(op='prims.bessel_j0'" in process.stderr


def test_nested_inputs_and_a_method_are_called_as_they_were(module, tmp_path):
    models, folder = module
    calls = [{"data": {"x": torch.randn(n, length, 6)}} for n, length in ((2, 5), (3, 7))]
    process = run(failed(models.Fixed(), *calls).repro(tmp_path / "fixed"), folder)
    assert "L['tensors']['data.x'].size()[1]" in process.stderr


def test_a_model_of_transformers_is_built_from_its_configuration(tmp_path):
    torch.manual_seed(0)
    model, observer = tiny_llama(), exportkit.InputObserver()
    with observer(model):
        model.generate(torch.randint(3, 50, (2, 5)), max_new_tokens=4, do_sample=False)
    process = run(exportkit.export(model, observer).repro(tmp_path))
    assert process.returncode == 0, process.stderr[-2000:]
    lines = process.stdout.splitlines()
    assert [line.partition(" ")[0] for line in lines[:4]] == [
        "input_ids",
        "attention_mask",
        "position_ids",
        "past_key_values.layers[0].keys",
    ]
    assert lines[-1].startswith("ranges: {")


def test_rewrites_that_were_in_force_are_in_force_again(tmp_path):
    model, observer = tiny_mistral(), exportkit.InputObserver()
    with observer(model):
        model.generate(torch.randint(3, 50, (2, 4)), max_new_tokens=4, do_sample=False)
    exported = exportkit.export(model, observer)
    script = exported.repro(tmp_path)
    assert spec_of(script)["rules"] == ["sliding windows of symbolic length"]
    process = run(script, HERE.parents[1])
    assert process.returncode == 0, process.stderr[-2000:]


def test_dataclasses_and_model_outputs_among_the_inputs_are_built_again(module, tmp_path):
    from transformers.modeling_outputs import BaseModelOutput

    models, folder = module
    torch.export.register_dataclass(models.Pair)
    calls = [
        {"pair": models.Pair(torch.randn(n, 6)), "states": BaseModelOutput(last_hidden_state=torch.randn(n, 6))}
        for n in (2, 3)
    ]
    process = run(failed(models.TakesBoth(), *calls).repro(tmp_path / "both"), folder)
    assert "L['tensors']['pair.first'].size()[0]" in process.stderr, process.stderr[-2000:]


class Local(torch.nn.Module):
    """Takes a text and a mode beside its tensor."""

    def __init__(self, size):
        super().__init__()
        self.linear = torch.nn.Linear(size, 2)

    def forward(self, ids, mode="fast", text=""):
        return self.linear(ids.float()) if mode == "fast" else ids


@pytest.fixture
def local(tmp_path):
    model, observer = Local(3), exportkit.InputObserver()
    with observer(model):
        for count in (2, 4):
            model(torch.full((count, 3), 77), mode="fast", text="My name is nobody.")
    return exportkit.export(model, observer)


def test_no_values_no_weights_and_no_text_are_written(local, tmp_path):
    script = local.repro(tmp_path)
    spec = spec_of(script)
    assert spec["tensors"] == {"ids": {"shape": [4, 3], "dtype": "int64", "low": 77, "high": 77}}
    assert "nobody" not in script.read_text()
    assert spec["arguments"]["mode"]["layout"] == "fast"
    assert spec["arguments"]["text"]["layout"] == "text"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["repro.py"]


def test_a_model_that_nothing_says_how_to_build_is_left_to_the_reader(local, tmp_path):
    process = run(local.repro(tmp_path), HERE.parents[1])
    assert process.returncode == 1
    assert "It is not known how tests.programs.test_repro.Local is built: build it in build_model()." in process.stderr


def test_a_directory_that_cannot_be_written_is_an_error(local, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DestinationError, match=r"repro\.py"):
        local.repro(tmp_path / "file")


def test_an_error_before_any_trace_has_nothing_to_show(tmp_path):
    with pytest.raises(InvalidRequestError, match="Nothing was traced"):
        ExportError("It broke.").repro(tmp_path)
