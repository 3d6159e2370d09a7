"""The commands that record a checkpoint, compare two traces, and locate where a folder goes wrong."""

import json

import pytest
import torch
from typer.testing import CliRunner

import exportkit
from exportkit.cli import app
from tests.models import Classifier, tiny_llama

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """Traces of a checkpoint, of the same checkpoint in bfloat16, and of one with a changed weight."""
    folder = tmp_path_factory.mktemp("traces")
    torch.manual_seed(0)
    model = tiny_llama()
    model.save_pretrained(folder / "right")
    model.model.layers[1].mlp.up_proj.weight.data *= 1.5
    model.save_pretrained(folder / "wrong")
    for checkpoint, name, options in (
        ("right", "a", ["--values", "all"]),
        ("right", "b", ["--values", "all", "--dtype", "bfloat16"]),
        ("wrong", "c", ["--values", "all"]),
    ):
        result = RUNNER.invoke(app, ["trace", str(folder / checkpoint), "--out", str(folder / name), *options])
        assert result.exit_code == 0, result.output
        assert "module calls in" in result.output
    return folder


def test_a_changed_checkpoint_is_found_and_shown(traces, tmp_path):
    page = tmp_path / "page.html"

    result = RUNNER.invoke(app, ["compare", str(traces / "a"), str(traces / "c"), "--html", str(page)])

    assert result.exit_code == 1
    assert "The runs differ in model.layers.1.mlp.up_proj (Linear)." in result.output
    assert "<svg" in page.read_text()


def test_another_dtype_is_not_a_difference(traces):
    result = RUNNER.invoke(app, ["compare", str(traces / "a"), str(traces / "b")])

    assert result.exit_code == 0
    assert "The runs agree, up to rounding." in result.output


def test_json_is_the_only_output(traces):
    result = RUNNER.invoke(app, ["compare", str(traces / "a"), str(traces / "c"), "--json"])

    assert json.loads(result.stdout)["first"]["path"] == "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "{0}/a", "{0}/missing"], "No trace was found."),
        (["compare", "{0}/a", "{0}/a", "--names", "x"], "Malformed option --names."),
        (["trace", "{0}/right", "--out", "{0}/d", "--dtype", "int8"], "A model cannot run in this dtype."),
    ],
)
def test_invalid_input_is_explained(traces, arguments, message):
    result = RUNNER.invoke(app, [argument.format(traces) for argument in arguments])

    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.runtime
def test_a_folder_that_is_not_proven_says_where(tmp_path):
    torch.manual_seed(0)
    model, observer = Classifier().eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        model(torch.randn(3, 6))
        model(torch.randn(4, 6))
    exported = exportkit.export(model, observer)
    with torch.no_grad():  # the program keeps the weight that it was traced with
        model.linear.weight = torch.nn.Parameter(model.linear.weight * 1.1)
    with pytest.warns(RuntimeWarning, match="NOT PROVEN"):
        exported.save(tmp_path / "folder")

    result = RUNNER.invoke(app, ["verify", str(tmp_path / "folder"), "--locate"])

    assert result.exit_code == 1
    assert "ONNX or onnxruntime diverges in linear" in result.output
    assert result.output.splitlines()[-1].startswith("NOT PROVEN")
