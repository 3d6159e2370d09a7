"""`exportkit run`: a script that knows nothing of exportkit runs as always, and again on the graphs of its models."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from exportkit import cli
from exportkit.calls.recorder import Recorder

CLASSIFIER = """
    import sys, torch
    class Classifier(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(4, 3)
        def forward(self, x):
            return self.inner(x).relu()
    def main(arguments):
        torch.manual_seed(1)
        model = Classifier().eval()
        with torch.no_grad():
            for rows in map(int, arguments):
                print("classes", model(torch.rand(rows, 4)).argmax(-1).tolist())
    if __name__ == "__main__":
        main(sys.argv[1:])
"""
PIPELINE = """
    import argparse, torch
    class Unet(torch.nn.Linear):
        pass
    class Vae(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder = torch.nn.Linear(3, 5)
        def decode(self, x):
            return self.decoder(x)
        def forward(self, x):
            return self.decode(x[..., :3])
    class Pipe:
        def __init__(self):
            self.unet, self.vae = Unet(3, 3), Vae()
        def __call__(self, x, steps):
            for _ in range(steps):
                x = self.unet(x)
            return self.vae.decode(x)
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    steps = parser.parse_args().steps
    class app:
        pass
    app.pipe = Pipe()
    with torch.no_grad():
        for rows in (1, 2):
            print(tuple(app.pipe(torch.randn(rows, 3), steps).shape))
"""


@pytest.fixture
def script(tmp_path):
    def write(text, name="script.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write


def run(*arguments):
    return CliRunner().invoke(cli.app, ["run", *map(str, arguments)])


def last_line(result):
    return result.stdout.rstrip().splitlines()[-1]


@pytest.mark.runtime
class TestProven:
    def test_a_model_inside_a_function_is_found(self, script, tmp_path):
        before = dict(vars(torch.nn.Module)), sys.argv, list(sys.path), sys.modules["__main__"]
        result = run(script(CLASSIFIER), "2", "3", "--out", tmp_path / "out")
        assert result.exit_code == 0, result.output
        lines = result.stdout.splitlines()
        assert lines[0].startswith("classes [")
        assert lines[-2].endswith("script.py on the graphs prints the same")
        assert lines[-1].startswith("proven; 2 calls: ")
        assert "s with the model" in lines[-1]
        assert lines[-1].endswith("s on the graphs, first calls left out")
        assert sum(line.startswith("classes") for line in lines) == 2  # of the first run only
        assert (tmp_path / "out" / "Classifier.onnx").exists()
        assert (dict(vars(torch.nn.Module)), sys.argv, list(sys.path), sys.modules["__main__"]) == before

    def test_a_pipeline_is_named_and_options_of_the_script_are_its_own(self, script, tmp_path):
        result = run(script(PIPELINE), "--steps", 3, "--observe", "app.pipe", "--out", tmp_path / "out")
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith("(1, 5)\n(2, 5)\n")
        assert last_line(result).startswith("proven; 8 calls: ")
        assert {file.name for file in (tmp_path / "out").glob("*.onnx")} == {"unet.onnx", "vae_decode.onnx"}

    def test_a_method_is_named_and_its_only_call_is_recorded(self, script, tmp_path):
        text = (
            PIPELINE.partition("    class Pipe")[0] + "    vae = Vae()\n    print(vae.decode(torch.ones(2, 3)).shape)\n"
        )
        result = run(script(text), "--observe", "vae.decode", "--out", tmp_path / "out")
        assert result.exit_code == 0, result.output
        assert last_line(result).startswith("proven; 1 call: ")
        assert last_line(result).endswith("s on the graphs")
        assert sys.gettrace() is None

    def test_a_variable_may_be_bound_anew_and_get_more_modules(self, script, tmp_path):
        text = """
            import torch
            from types import SimpleNamespace
            app = SimpleNamespace()
            app.pipe = SimpleNamespace(unet=torch.nn.Linear(3, 3))
            app.pipe = SimpleNamespace(unet=torch.nn.Linear(2, 3))
            app.pipe.vae = torch.nn.Linear(3, 2)
            app.pipe.note = "complete"
            for rows in (2, 3):
                print(app.pipe.vae(app.pipe.unet(torch.ones(rows, 2))).shape)
        """
        result = run(script(text), "--observe", "app.pipe", "--out", tmp_path / "out")
        assert result.exit_code == 0, result.output
        assert last_line(result).startswith("proven; 4 calls: ")

    def test_looking_for_a_variable_runs_no_code_of_the_script(self, script, tmp_path):
        text = """
            import functools, torch
            class App:
                @functools.cached_property
                def model(self):
                    print("loads")
                    return torch.nn.Linear(3, 3)
            app = App()
            print("begins")
            print(app.model(torch.ones(2, 3)).shape)
        """
        result = run(script(text), "--observe", "app.model", "--out", tmp_path / "out")
        assert result.exit_code == 0, result.output
        assert result.stdout.splitlines()[:2] == ["begins", "loads"]

    def test_a_script_may_write_bytes(self, script, tmp_path):
        text = CLASSIFIER.replace('print("classes"', 'sys.stdout.buffer.flush() or print("classes"')
        result = run(script(text), "2", "--out", tmp_path / "out")
        assert result.exit_code == 0, result.output

    def test_a_module_runs_as_with_python_m(self, script, tmp_path, monkeypatch):
        script("", "package/__init__.py")
        script(CLASSIFIER, "package/app.py")
        monkeypatch.chdir(tmp_path)
        result = run("-m", "package.app", "--out", "out", "--", "2", "4")
        assert result.exit_code == 0, result.output
        assert last_line(result).startswith("proven; 2 calls: ")

    def test_from_a_shell_the_output_of_the_script_comes_first(self, script, tmp_path):
        command = [sys.executable, "-m", "exportkit", "run", script(CLASSIFIER), "2", "3", "--out", tmp_path / "out"]
        path = os.pathsep.join([str(Path(cli.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        alone = subprocess.run([sys.executable, command[4], "2", "3"], capture_output=True, text=True, check=True)
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path}
        )
        assert result.returncode == 0, result.stderr
        assert len(alone.stdout.splitlines()) == 2
        assert [line.partition(" ")[0] for line in result.stdout.splitlines()[:2]] == ["classes"] * 2
        assert last_line(result).startswith("proven")


class TestTheRunOfTheUser:
    def test_an_exit_code_is_kept(self, script, tmp_path):
        text = CLASSIFIER + "\n        sys.exit(7)\n"
        result = run(script(text), "2", "--out", tmp_path / "out")
        assert result.exit_code == 7
        assert "the script failed, so nothing was exported" in result.stderr
        assert result.stdout.startswith("classes")
        assert not (tmp_path / "out").exists()

    def test_an_error_is_shown_from_the_first_line_of_the_script_on(self, script, tmp_path):
        result = run(script("def fail():\n    raise KeyError('mouse')\nfail()\n"), "--out", tmp_path / "out")
        assert result.exit_code == 1
        lines = result.stderr.splitlines()
        assert lines[:2] == [
            "Traceback (most recent call last):",
            f'  File "{tmp_path / "script.py"}", line 3, in <module>',
        ]
        assert "KeyError: 'mouse'" in lines
        assert "exportkit/" not in result.stderr

    def test_a_message_of_sys_exit_goes_to_stderr(self, script, tmp_path):
        result = run(script("import sys\nsys.exit('no data')\n"), "--out", tmp_path / "out")
        assert (result.exit_code, result.stderr.splitlines()[0]) == (1, "no data")

    @pytest.mark.parametrize("broken", ["call", "allow"])
    def test_it_goes_on_if_recording_fails(self, script, tmp_path, monkeypatch, broken):
        def fails(*_, **__):
            raise RuntimeError("disk on fire")

        if broken == "allow":
            monkeypatch.setattr(Recorder, "allow", fails)
        else:
            monkeypatch.setattr(Recorder, "_begun", fails)
        result = run(script(CLASSIFIER), "2", "3", "--out", tmp_path / "out")
        assert result.exit_code == 1
        assert [line.partition(" ")[0] for line in result.stdout.splitlines()[:2]] == ["classes"] * 2
        assert last_line(result).startswith("NOT PROVEN")
        assert "disk on fire" in result.stderr
        assert not (tmp_path / "out").exists()


class TestNotProven:
    def test_a_script_without_models(self, script, tmp_path):
        result = run(script("print('hello')\n"), "--out", tmp_path / "out")
        assert result.exit_code == 1
        assert result.stdout.splitlines()[0] == "hello"
        assert "The script calls no module with weights" in result.stderr
        assert last_line(result).startswith("NOT PROVEN")

    def test_a_name_that_is_never_bound(self, script, tmp_path):
        result = run(script(CLASSIFIER), "2", "--observe", "app.model", "--out", tmp_path / "out")
        assert result.exit_code == 1
        assert "where: --observe app.model" in result.stderr
        assert "leave out --observe to find models" in result.stderr

    def test_another_method_than_the_observed_one_is_named(self, script, tmp_path):
        text = PIPELINE.partition("    class Pipe")[0] + "    vae = Vae()\n    vae.decode(torch.ones(2, 3))\n"
        result = run(script(text), "--observe", "vae", "--out", tmp_path / "out")
        assert result.exit_code == 1
        assert "`decode` was called, `forward` was not" in result.stderr
        assert "--observe NAME.decode" in result.stderr

    @pytest.mark.runtime
    def test_a_script_that_is_different_the_second_time(self, script, tmp_path):
        text = (
            CLASSIFIER.replace("torch.manual_seed(1)", "import math; math.runs = getattr(math, 'runs', 0) + 1")
            .replace(".eval()", ".eval(); torch.nn.init.constant_(model.inner.weight, 1.0)")
            .replace("torch.rand(rows, 4)", "torch.rand(rows, 4) * math.runs")
        )
        text = text.replace("import sys, torch", "import math, sys, torch")
        try:
            result = run(script(text), "2", "3", "--out", tmp_path / "out")
        finally:
            import math

            del math.runs
        assert result.exit_code == 1, result.output
        assert last_line(result).startswith("NOT PROVEN: call 0 of Classifier returns a different result; 2 calls: ")


class TestUsage:
    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (["missing.py", "--out", "out"], "The script does not exist."),
            (["script.py", "--observe", "app.", "--out", "out"], "a name such as model, or app.model"),
            (["script.py", "--out", "full"], "full"),
            (["script.py"], "--out"),
        ],
    )
    def test_nothing_runs_after_a_wrong_option(self, script, tmp_path, monkeypatch, arguments, text):
        monkeypatch.chdir(tmp_path)
        script("print('it runs')\n")
        script("", "full/other.txt")
        result = run(*arguments)
        assert result.exit_code == 2
        assert text in result.stderr
        assert "it runs" not in result.stdout
