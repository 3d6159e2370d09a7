"""``exportkit scan-skips``: what it prints and writes, and what it says of wrong input."""

import json

import pytest
from typer.testing import CliRunner

from exportkit import cli


def run(*arguments):
    return CliRunner().invoke(cli.app, ["scan-skips", *map(str, arguments)])


def test_all_tests(suite, tmp_path):
    result = run(suite, "--output_dir", tmp_path)
    assert result.exit_code == 0, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["all_tests_scan_result.json"]
    assert "test_everywhere" in result.stdout
    assert result.stdout.rstrip().replace("\n", "").endswith("all_tests_scan_result.json")
    assert result.stderr == ""


def test_one_test(suite, tmp_path):
    result = run(suite, "--output_dir", tmp_path, "--test_method_name", "test_stream")
    assert result.stdout.startswith(
        "test_stream (GenerationMixin)\nRan: 4/5\nSkipped: 1/5 (20.0%)\n  alpha: Alpha does"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["scan_test_stream.json"]


def test_json_on_stdout_is_that_of_the_file(suite, tmp_path):
    result = run(suite, "--output_dir", tmp_path, "--json", "--html")
    assert json.loads(result.stdout) == json.loads(
        (tmp_path / "all_tests_scan_result.json").read_text(encoding="utf-8")
    )
    assert (tmp_path / "skip_scan.html").exists()


def test_a_layout_by_options(suite, tmp_path):
    base, mark = "tests/test_modeling_common.py=shared", "require_accelerator=no accelerator at all"
    options = ["--folder", "tests/models", "--pattern", "test_*.py", "--base", base, "--group", "file", "--mark", mark]
    result = run(suite, "--output_dir", tmp_path, "--json", "--layout", "pytest", *options)
    found = json.loads(result.stdout)["test_on_accelerator"]
    assert found["origin"] == "shared"
    assert found["reasons_skipped"][0] == "alpha/test_modeling_alpha: no accelerator at all"


def test_the_difference_to_a_run(suite, truth, tmp_path):
    options = ["--layout", "pytest", "--mark", "nightly=runs at night", "--truth", truth[0]]
    result = run(suite, "--output_dir", tmp_path, *options)
    assert "set later" in result.stdout
    assert "precision 100.0%, recall 98.7%" in result.stdout


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["none"], "No such folder."),
        (["--layout", "nose"], "No such layout."),
        (["--layout", "nose", "--folder", "tests"], "No such layout."),
        (["--group", "class"], "No such grouping."),
        (["--base", "common"], "Malformed option --base.\n  expected: FILE=ORIGIN\n  got: common"),
        (["--test_method_name", "test_nothing"], "No such test in the suite."),
        (["--truth", "none.txt"], "The pytest result cannot be read."),
        (["--output_dir", "pytest.ini"], "The result cannot be written."),
    ],
)
def test_wrong_input_exits_with_2_and_writes_nothing(suite, monkeypatch, options, text):
    monkeypatch.chdir(suite)
    before = sorted(suite.iterdir())
    result = run(*options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert text in result.stderr
    assert sorted(suite.iterdir()) == before
