"""The command line: what it prints and writes, its exit codes, and its messages about invalid input."""

import json
import logging
import re
import subprocess
import sys
import warnings

import pytest
import torch
from safetensors.torch import save_file
from transformers.utils import logging as transformers_logging
from typer.testing import CliRunner

import exportkit
from exportkit import cli
from exportkit.commands.shared import print_json
from exportkit.errors import ExportError
from exportkit.examples.run import ExampleRun
from exportkit.proof.report import Row
from tests import models

COMMANDS = ["demo", "export", "run", "verify", "report", "trace", "compare", "scan-skips"]


SENDS_CTRL_C = """
import importlib.abc, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
class Sender(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Sender())
from exportkit import __main__ as started
if len(sys.argv) > 2:
    started.main()
"""
WRITES = """
from pathlib import Path
from exportkit.files import replacing
signal.signal(signal.SIGINT, started._interrupt)
folder = Path(sys.argv[1])
(folder / "old").mkdir()
with replacing(folder / "new", "a thing") as new, replacing(folder / "old", "a thing") as old:
    (new / "file").write_text("half")
    (old / "file").write_text("half")
    os.kill(os.getpid(), signal.SIGINT)
"""


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def last_line(result):
    return result.stdout.rstrip().splitlines()[-1]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    models.tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    models.tiny_bert().save_pretrained(folder)
    return folder


@pytest.fixture
def differs(monkeypatch):
    """Makes every proof report a difference."""
    row = Row("recorded", "0", {}, "differs", 0.5, "logits: 0.5 off")
    monkeypatch.setattr(exportkit.OnnxModel, "verify", lambda self, **_: exportkit.Report((row,), 0))
    monkeypatch.setattr("exportkit.folder.folder.prove", lambda runner, **_: exportkit.Report((row,), 0))


class TestHelp:
    def test_the_version(self):
        result = run("--version")
        assert (result.exit_code, result.stdout) == (0, f"exportkit {exportkit.__version__}\n")

    def test_the_help_names_the_commands_and_fits_one_screen(self):
        result = run("--help")
        assert result.exit_code == 0
        lines = result.stdout.splitlines()
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 80
        assert all(f"\n  {command} " in result.stdout for command in COMMANDS)
        assert "Exit codes: 0 success, 1 not proven, 2 invalid usage." in result.stdout

    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_shells_complete_commands(self, shell):
        script = CliRunner().invoke(cli.app, [], env={"_EXPORTKIT_COMPLETE": f"source_{shell}"}, prog_name="exportkit")
        assert script.exit_code == 0
        assert "_EXPORTKIT_COMPLETE" in script.stdout

    def test_completion_names_the_commands(self):
        given = {"_EXPORTKIT_COMPLETE": "complete_bash", "COMP_WORDS": "exportkit ", "COMP_CWORD": "1"}
        found = CliRunner().invoke(cli.app, [], env=given, prog_name="exportkit")
        assert set(found.stdout.split()) >= set(COMMANDS)

    @pytest.mark.parametrize("command", COMMANDS)
    def test_the_help_of_a_command_has_an_example(self, command):
        result = run(command, "--help")
        assert result.exit_code == 0
        assert re.search(rf"Example: +exportkit {command} ", result.stdout)


class TestInterrupt:
    """Ctrl-C, sent when a module is about to be imported."""

    @pytest.mark.parametrize("module", ["typer", "exportkit.commands.export", "torch", "torch.nn", "transformers"])
    def test_it_exits_with_130_and_says_nothing(self, module, tmp_path):
        script = SENDS_CTRL_C.replace("MODULE", repr(module))
        command = [sys.executable, "-c", script, "verify", str(tmp_path / "nowhere")]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stdout, result.stderr) == (130, "", "")

    def test_nothing_unfinished_is_left(self, tmp_path):
        script = SENDS_CTRL_C.replace("MODULE", "'never'") + WRITES
        command = [sys.executable, "-c", script, str(tmp_path)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stderr) == (130, "")
        assert [path.name for path in tmp_path.rglob("*")] == ["old"]


@pytest.mark.runtime
class TestExport:
    def test_a_proven_model(self, llama, tmp_path):
        out = tmp_path / "new" / "folder"
        result = run("export", llama, "--out", out)
        assert result.exit_code == 0, result.output
        assert last_line(result) == "proven"
        assert "past_sequence + sequence" in result.stdout  # the plan
        assert (out / "report.txt").read_text().rstrip() in result.stdout
        assert {"manifest.json", "model.onnx", "model.onnx.data", "report.txt", "calls"} <= {
            f.name for f in out.iterdir()
        }

    def test_verify_and_report_read_what_it_writes(self, bert, tmp_path):
        run("export", bert, "--out", tmp_path / "out")
        assert last_line(run("verify", tmp_path / "out")) == "proven"
        assert run("report", tmp_path / "out").stdout == f"{tmp_path / 'out' / 'report.html'}\n"
        page = (tmp_path / "out" / "report.html").read_text()
        assert "BertForSequenceClassification" in page

    def test_a_single_file(self, bert, tmp_path):
        result = run("export", bert, "--out", tmp_path / "new" / "bert.onnx")
        assert (result.exit_code, last_line(result)) == (0, "proven"), result.output
        assert {file.name for file in (tmp_path / "new").iterdir()} == {"bert.onnx", "bert.onnx.data"}

    def test_data_of_the_user_a_task_and_further_outputs(self, bert, tmp_path):
        for number, shape in enumerate([(2, 5), (3, 7)]):
            save_file({"input_ids": torch.full(shape, 3)}, tmp_path / f"{number}.safetensors")
        data = [option for number in (0, 1) for option in ("--data", tmp_path / f"{number}.safetensors")]
        asked = ("--task", "feature-extraction", "--outputs", "hidden_states", *data)
        result = run("export", bert, "--out", tmp_path / "out", *asked)
        assert (result.exit_code, last_line(result)) == (0, "proven"), result.output
        assert result.stdout.startswith("BertModel, forward with input_ids 2x5, 3x7\n")
        outputs = exportkit.load(tmp_path / "out").outputs.values()
        assert {"last_hidden_state", "hidden_states[0]"} <= {*outputs}

    def test_parts_become_graphs_of_their_own(self, tmp_path):
        models.tiny_t5().save_pretrained(tmp_path / "t5")
        result = run("export", tmp_path / "t5", "--out", tmp_path / "out", "--parts", "encoder")
        assert (result.exit_code, last_line(result)) == (0, "proven"), result.output
        assert [*exportkit.load(tmp_path / "out").parts] == ["encoder"]

    def test_json_is_one_document(self, bert, tmp_path):
        result = run("export", bert, "--out", tmp_path / "out", "--json")
        found = json.loads(result.stdout)
        assert (result.exit_code, found["ok"], found["report"]["ok"]) == (0, True, True)
        assert found["out"] == str(tmp_path / "out")
        assert [variable["name"] for variable in found["plan"]["variables"]] == ["batch", "sequence"]
        assert list(found["seconds"]) == ["observe", "export", "save"]

    def test_progress_goes_to_stderr_and_libraries_are_silent(self, bert, tmp_path):
        result = run("export", bert, "--out", tmp_path)
        told = [re.sub(r" \(about \d+ s\)$", "", line) for line in result.stderr.splitlines()[1:]]
        exporting = ("export", "export: plan", "export: arguments", "export: export", "export: domain")
        stages = ("observe", *exporting, "save", "save: onnx", "save: verify")
        assert told == [f"BertForSequenceClassification: {stage}" for stage in stages]

    def test_silenced_libraries_are_restored(self, bert, tmp_path):
        filters = list(warnings.filters)
        run("export", bert, "--out", tmp_path, "--no-verify")
        assert transformers_logging.is_progress_bar_enabled()
        assert logging.root.manager.disable == logging.NOTSET
        assert warnings.filters == filters

    def test_no_verify_says_so_and_removes_an_older_proof(self, bert, tmp_path):
        run("export", bert, "--out", tmp_path)
        run("report", tmp_path)
        result = run("export", bert, "--out", tmp_path, "--no-verify", "--opset", 21)
        assert (result.exit_code, last_line(result)) == (0, "not verified")
        assert (tmp_path / "manifest.json").exists()
        assert not list(tmp_path.glob("report.*"))

    def test_the_opset_is_the_one_asked_for(self, bert, tmp_path):
        import onnx

        run("export", bert, "--out", tmp_path, "--no-verify", "--opset", 21)
        model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
        assert {opset.domain: opset.version for opset in model.opset_import}[""] == 21

    def test_a_graph_is_fused_for_the_runtime_asked_for(self, bert, tmp_path):
        result = run("export", bert, "--out", tmp_path / "bert.onnx", "--runtime", "onnxruntime")
        assert (result.exit_code, last_line(result)) == (0, "proven")
        assert "note: fused for onnxruntime: " in result.stdout

    def test_weights_in_fewer_bits_are_measured(self, bert, tmp_path):
        options = ("--weights", "int8", "--activations", "dynamic", "--accuracy", 0.5)
        result = run("export", bert, "--out", tmp_path / "bert.onnx", *options)
        assert result.exit_code == 0
        assert last_line(result).startswith("measured: ")
        assert "with dynamic activations" in result.stdout
        result = run("export", bert, "--out", tmp_path / "bert.onnx", "--accuracy", 0.5)
        assert result.exit_code == 2
        assert "add --weights" in result.stderr

    def test_a_file_alone_is_nothing_for_genai(self, bert, tmp_path):
        result = run("export", bert, "--out", tmp_path / "bert.onnx", "--runtime", "genai")
        assert result.exit_code == 2
        assert "needs a folder" in result.stderr

    @pytest.mark.usefixtures("differs")
    def test_a_difference_exits_with_1_and_is_reported(self, bert, tmp_path):
        result = run("export", bert, "--out", tmp_path)
        assert result.exit_code == 1
        assert last_line(result).startswith("NOT PROVEN: recorded call 0: differs, logits: 0.5 off")
        assert "logits: 0.5 off" in (tmp_path / "report.txt").read_text()

    def test_a_model_that_cannot_be_exported_exits_with_1(self, bert, tmp_path, monkeypatch):
        def refuse(*_):
            raise ExportError("torch.export could not trace the model.", hint="mend it.")

        monkeypatch.setattr(exportkit, "export", refuse)
        result = run("export", bert, "--out", tmp_path)
        assert (result.exit_code, last_line(result)) == (1, "NOT PROVEN: the export failed")
        assert "could not trace the model.\n  hint: mend it." in result.stderr
        assert not list(tmp_path.iterdir())

    def test_a_failed_export_as_json(self, bert, tmp_path, monkeypatch):
        def refuse(*_):
            raise ExportError("torch.export could not trace the model.")

        monkeypatch.setattr(exportkit, "export", refuse)
        result = run("export", bert, "--out", tmp_path, "--json")
        assert result.exit_code == 1
        assert json.loads(result.stdout) == {"ok": False, "error": "torch.export could not trace the model."}

    def test_the_exit_code_of_an_encoder_decoder_is_its_verdict(self, tmp_path):
        models.tiny_t5().save_pretrained(tmp_path / "t5")
        result = run("export", tmp_path / "t5", "--out", tmp_path / "out")
        assert last_line(result).startswith("proven" if result.exit_code == 0 else "NOT PROVEN")
        assert result.exit_code in (0, 1)


@pytest.fixture
def folder(tmp_path):
    """A saved export."""
    model, observer = models.Classifier().eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch in (2, 4):
            model(torch.ones(batch, 6))
    exportkit.export(model, observer).save(tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.runtime
class TestVerify:
    def test_a_proven_folder_prints_its_report(self, folder):
        result = run("verify", folder)
        assert (result.exit_code, last_line(result)) == (0, "proven"), result.output
        assert "recorded 1" in result.stdout
        assert result.stderr == f"verifying {folder}\nverifying {folder}: verify\n"

    def test_json_is_one_document(self, folder):
        report = json.loads(run("verify", folder, "--json").stdout)
        assert report["ok"] is True
        assert {row["status"] for row in report["rows"]} == {"proven"}

    def test_a_difference_exits_with_1(self, folder, differs):
        result = run("verify", folder)
        assert result.exit_code == 1
        assert last_line(result).startswith("NOT PROVEN: recorded call 0: differs")

    def test_another_runtime(self, folder):
        result = run("verify", folder, "--runtime", "openvino")
        assert (result.exit_code, last_line(result)) == (0, "proven"), result.output
        assert "OpenVINO" in result.stdout

    def test_a_device_that_is_not_there_is_invalid(self, folder):
        assert run("verify", folder, "--device", "cpu").exit_code == 0
        for options in (("--device", "gpu"), ("--device", "cuda", "--runtime", "openvino")):
            result = run("verify", folder, *options)
            assert (result.exit_code, result.stdout) == (2, "")
            assert "device" in result.stderr

    def test_differences_are_located_in_onnxruntime_only(self, folder):
        result = run("verify", folder, "--runtime", "openvino", "--locate")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "--runtime onnxruntime" in result.stderr

    def test_a_changed_file_exits_with_2(self, folder):
        (folder / "plan.json").write_text((folder / "plan.json").read_text() + "\n")
        result = run("verify", folder)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "has changed since it was saved" in result.stderr

    def test_another_folder_exits_with_2(self, tmp_path):
        result = run("verify", tmp_path)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "No exported model can be read here." in result.stderr


@pytest.mark.runtime
class TestReport:
    def test_the_page_of_an_export(self, folder):
        result = run("report", folder)
        assert (result.exit_code, result.stdout) == (0, f"{folder / 'report.html'}\n"), result.output
        assert "Classifier" in (folder / "report.html").read_text()
        assert last_line(run("verify", folder)) == "proven"  # the page is not part of the proof

    def test_another_file_and_json(self, folder, tmp_path):
        result = run("report", folder, "--out", tmp_path / "pages" / "a.html", "--json")
        assert json.loads(result.stdout) == {"page": str(tmp_path / "pages" / "a.html")}
        assert (tmp_path / "pages" / "a.html").exists()
        assert not (folder / "report.html").exists()

    def test_the_page_of_a_skip_scan(self, tmp_path):
        (tmp_path / "test_a.py").write_text("import pytest\n@pytest.mark.skip('later')\ndef test_a(): ...")
        run("scan-skips", tmp_path, "--output_dir", tmp_path / "scan")
        assert run("report", tmp_path / "scan").exit_code == 0
        assert "later" in (tmp_path / "scan" / "report.html").read_text()


class TestWrongInput:
    def check(self, result, *texts):
        assert result.exit_code == 2
        assert "Traceback" not in result.stderr
        assert all(text in result.stderr for text in texts), result.stderr
        assert not result.stdout

    def test_a_missing_folder(self, tmp_path):
        self.check(run("export", tmp_path / "none", "--out", tmp_path), "checkpoint folder does not exist", "hint:")

    def test_a_folder_without_configuration(self, tmp_path):
        (tmp_path / "empty").mkdir()
        self.check(
            run("export", tmp_path / "empty", "--out", tmp_path / "out"), "no config.json", "got: an empty folder"
        )

    def test_an_unknown_architecture(self, tmp_path):
        (tmp_path / "config.json").write_text('{"architectures": ["FancyForCausalLM"]}')
        self.check(
            run("export", tmp_path, "--out", tmp_path / "out"), "architecture is unknown", "got: FancyForCausalLM"
        )

    def test_a_model_without_a_default_run(self, tmp_path):
        models.tiny_llava().save_pretrained(tmp_path)
        self.check(run("export", tmp_path, "--out", tmp_path / "out"), "no default run", "in Python")

    @pytest.mark.parametrize("below", ["", "deeper"])
    def test_an_output_folder_that_is_a_file(self, bert, tmp_path, below):
        (tmp_path / "file").touch()
        self.check(run("export", bert, "--out", tmp_path / "file" / below), str(tmp_path / "file"))

    def test_an_output_folder_that_cannot_be_created(self, bert):
        self.check(run("export", bert, "--out", "/proc/exportkit"), "/proc/exportkit")

    def test_the_output_folder_of_the_demo(self, tmp_path):
        (tmp_path / "file").touch()
        self.check(run("demo", "--out", tmp_path / "file"), "output folder cannot be created")

    def test_an_output_folder_with_other_files(self, bert, tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
        self.check(run("export", bert, "--out", tmp_path), "cannot be written over other files", "got: notes.txt")

    def test_a_folder_without_anything_to_report_on(self, tmp_path):
        self.check(run("report", tmp_path), "The folder contains nothing to report on.", "got: an empty folder")
        self.check(run("report", tmp_path / "none"), "got: nothing")

    def test_a_damaged_folder(self, tmp_path):
        (tmp_path / "manifest.json").write_text("{}")
        self.check(run("report", tmp_path), "This version cannot read an exported model of this format")
        (tmp_path / "manifest.json").write_text("{")
        self.check(run("report", tmp_path), "is damaged")

    def test_a_damaged_scan(self, tmp_path):
        (tmp_path / "all_tests_scan_result.json").write_text('{"test_a": {"origin": "common"}}')
        self.check(run("report", tmp_path), "Not the result of a skip scan", "KeyError: 'models_ran'")

    def test_a_page_that_cannot_be_written(self, tmp_path):
        (tmp_path / "all_tests_scan_result.json").write_text("{}")
        self.check(run("report", tmp_path, "--out", tmp_path), "The page cannot be written.")

    @pytest.mark.parametrize("arguments", [["export"], ["export", "model"], ["deploy"], ["demo", "--fast"]])
    def test_wrong_usage(self, arguments):
        self.check(run(*arguments), "Usage: ")

    def test_parts_need_a_folder(self, bert, tmp_path):
        self.check(
            run("export", bert, "--out", tmp_path / "bert.onnx", "--parts", "bert"), "--parts makes several graphs"
        )

    def test_an_opset_that_torch_does_not_write(self, bert, tmp_path):
        self.check(run("export", bert, "--out", tmp_path, "--opset", 7), "--opset")

    def test_debug_shows_the_traceback(self, tmp_path):
        result = run("export", tmp_path / "none", "--out", tmp_path, "--debug")
        assert result.exit_code == 2
        assert "Traceback" in result.stderr
        assert "checkpoint folder does not exist" in result.stderr

    def test_ctrl_c_is_quiet(self, tmp_path, monkeypatch):
        def interrupted(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr("exportkit.examples.checkpoint.load_checkpoint", interrupted)
        result = run("export", "model", "--out", tmp_path)
        assert result.exit_code == 130
        assert result.stdout == ""
        assert result.stderr.splitlines() == ["loading model"]


@pytest.mark.runtime
class TestDemo:
    def test_three_models_are_proven_and_shown_in_one_table(self, tmp_path):
        result = run("demo", "--out", tmp_path)
        assert (result.exit_code, last_line(result)) == (0, "all proven"), result.output
        assert "past_sequence + sequence" in result.stdout  # the plan of the Llama
        table, *lines = re.split(r"(?m)^(?=.*\): proven$)", result.stdout[result.stdout.index("observed graph") :])
        assert max(map(len, table.splitlines())) <= 80
        assert len(lines) == len(list(tmp_path.glob("*.onnx"))) == 3

    def test_the_other_models_run_when_one_fails(self, monkeypatch):
        def examples():
            model = models.Classifier().eval()
            yield ExampleRun("idle", "never called", model, lambda: None)
            yield ExampleRun("busy", "two batches", model, lambda: [model(torch.ones(n, 6)) for n in (2, 4)])

        monkeypatch.setattr("exportkit.examples.demo.demo_runs", examples)
        result = run("demo")
        assert (result.exit_code, last_line(result)) == (1, "not proven: idle")
        assert "idle (never called): No inputs were captured." in result.stdout
        assert "busy (two batches): proven" in result.stdout

    def test_json_is_one_document(self, monkeypatch):
        model = models.Classifier().eval()
        example = ExampleRun("busy", "one batch", model, lambda: model(torch.ones(2, 6)))
        monkeypatch.setattr("exportkit.examples.demo.demo_runs", lambda: [example])
        result = run("demo", "--json")
        found = json.loads(result.stdout)
        assert (result.exit_code, found["ok"]) == (0, True)
        assert [(m["model"], m["ok"], m["report"]["ok"]) for m in found["models"]] == [("busy", True, True)]

    @pytest.mark.usefixtures("differs")
    def test_a_difference_exits_with_1(self, monkeypatch):
        model = models.Classifier().eval()
        example = ExampleRun("busy", "one batch", model, lambda: model(torch.ones(2, 6)))
        monkeypatch.setattr("exportkit.examples.demo.demo_runs", lambda: [example])
        result = run("demo")
        assert (result.exit_code, last_line(result)) == (1, "not proven: busy")
        assert "busy (one batch): recorded call 0: differs, logits: 0.5 off" in result.stdout


def test_json_has_strings_for_infinity_and_nan(capsys):
    print_json({"mask": float("-inf"), "nested": [float("nan"), 1.5, "é"]})
    assert json.loads(capsys.readouterr().out) == {"mask": "-Infinity", "nested": ["NaN", 1.5, "é"]}
