"""The fixture suite: what the scan says against what a run of pytest says, and the result in its formats."""

import dataclasses
import json

import pytest

from exportkit.errors import DestinationError, InvalidRequestError
from exportkit.skipscan import Layout, scan_skipped_tests

MARKS = {"nightly": "runs at night"}


def skipped(scan):
    return {test.id for test in scan.tests if test.status == "skipped"}


@pytest.fixture(scope="module")
def static(suite):
    return scan_skipped_tests(suite, "pytest", marks=MARKS)


@pytest.fixture(scope="module")
def merged(suite, truth):
    return scan_skipped_tests(suite, "pytest", marks=MARKS, truth=truth[0])


class TestAgainstPytest:
    def test_the_suite_is_large_enough(self, static):
        assert len({(test.defined_in, test.lines) for test in static.tests}) >= 60

    def test_no_test_is_taken_for_skipped_that_runs(self, merged):
        assert merged.agreement()[0] == 1
        assert not [difference for difference in merged.differences if difference.kind == "wrong"]

    def test_few_skips_are_missed(self, merged):
        assert merged.agreement()[1] >= 0.95

    def test_the_tests_are_those_that_pytest_collects(self, static, truth):
        lines = truth[0].read_text(encoding="utf-8").splitlines()
        collected = {
            line.split(" PASSED")[0].split(" SKIPPED")[0].split(" XFAIL")[0] for line in lines if ".py::" in line
        }
        whole_modules = {
            test.id for test in static.tests if test.file.startswith("forms/test_module_") and "mark" not in test.file
        }
        assert {test.id for test in static.tests} == {name.strip() for name in collected} | whole_modules

    def test_reasons_are_those_of_pytest(self, merged):
        other = {d.test: (d.scan, d.run) for d in merged.differences if d.kind == "reason"}
        assert other == {
            "forms/test_pytest_forms.py::test_either_way": ("skipped: one way or other way", "skipped: other way")
        }

    def test_with_the_run_all_skips_are_those_of_pytest(self, merged, truth):
        text = truth[0].read_text(encoding="utf-8")
        passed = {line.split(" PASSED")[0] for line in text.splitlines() if " PASSED" in line}
        named = {line.split(" SKIPPED")[0] for line in text.splitlines() if ".py::" in line and " SKIPPED" in line}
        whole_modules = {
            test.id for test in merged.tests if test.file.startswith("forms/test_module_") and "mark" not in test.file
        }
        assert skipped(merged) == named - passed | whole_modules
        assert all(test.source == "truth" for test in merged.tests)

    @pytest.mark.parametrize(
        "options", [["-rs"], ["-rs", "--no-fold-skipped"], ["-rsx", "-v", "-n", "2"], ["-rA", "-q"]]
    )
    def test_other_forms_of_output_say_the_same(self, suite, run, merged, options, tmp_path):
        path = tmp_path / "result.txt"
        path.write_text(run(*options), encoding="utf-8")
        scan = scan_skipped_tests(suite, "pytest", marks=MARKS, truth=path)
        # A test that passes and skips in its teardown counts as skipped where only the skips are listed.
        assert skipped(scan) - {"forms/test_fixtures.py::test_after"} == skipped(merged)

    def test_junit_xml_says_the_same(self, suite, truth, merged):
        scan = scan_skipped_tests(suite, "pytest", marks=MARKS, truth=truth[1])
        assert skipped(scan) - {"forms/test_fixtures.py::test_after"} == skipped(merged)


@pytest.fixture(scope="module")
def scan(suite):
    return scan_skipped_tests(suite)


class TestLayoutOfTransformers:
    def test_the_result_of_a_test(self, scan):
        assert scan.row("test_forward").to_json() == {
            "origin": "common",
            "models_ran": ["alpha", "bravo", "echo"],
            "models_skipped": ["charlie", "delta"],
            "skipped_proportion": 0.4,
            "reasons_skipped": [
                "charlie: Charlie goes backward; The vision part is tested elsewhere",
                "delta: Delta needs a file that is not there",
            ],
            "models_partly_skipped": ["delta"],
            "reasons_conditional": [],
            "models_without_test": [],
        }

    def test_rows_are_the_tests_of_the_base_files(self, scan):
        assert {row.origin for row in scan.rows} == {"common", "GenerationMixin"}
        assert "test_of_delta" not in scan.to_json()
        assert "test_head_masking" not in scan.to_json()

    def test_a_model_without_the_test_counts_as_ran_and_is_named(self, scan):
        row = scan.row("test_greedy_generate")
        assert row.ran == ("alpha", "charlie", "delta", "echo")
        assert row.without == ("delta", "echo")

    def test_rows_come_most_skipped_first(self, scan):
        proportions = [row.proportion for row in scan.rows]
        assert proportions == sorted(proportions, reverse=True)

    def test_the_text_of_a_test(self, scan):
        assert str(scan.row("test_stream")) == (
            "test_stream (GenerationMixin)\nRan: 4/5\nSkipped: 1/5 (20.0%)\n  alpha: Alpha does not stream"
        )

    def test_the_table(self, scan):
        lines = str(scan).splitlines()
        assert lines[2].split() == ["test_everywhere", "common", "0", "5", "100.0%", "Skipped", "for", "everyone"]
        assert (
            lines[-1] == "16 tests in 5 groups: 46 of 80 are skipped, 0 more under a condition. Tests never skipped: 1."
        )

    def test_the_files(self, scan, tmp_path):
        paths = [*scan.save(tmp_path / "new", html=True), *scan.save(tmp_path / "new", test="test_forward")]
        assert [path.name for path in paths] == [
            "all_tests_scan_result.json",
            "skip_scan.html",
            "scan_test_forward.json",
        ]
        assert json.loads(paths[0].read_text(encoding="utf-8")) == scan.to_json()
        assert json.loads(paths[2].read_text(encoding="utf-8")) == scan.to_json()["test_forward"]

    def test_another_layout(self, suite):
        layout = Layout("tests/models", ("test_*.py",), "file", {"tests/generation/test_utils.py": "generation"})
        scan = scan_skipped_tests(suite, layout)
        assert scan.row("test_stream").skipped == ("alpha/test_modeling_alpha",)
        assert {row.origin for row in scan.rows} == {"generation"}


def test_the_result_is_frozen(static):
    with pytest.raises(dataclasses.FrozenInstanceError):
        static.rows = ()


def test_progress_is_told_file_by_file(suite):
    told = []
    scan_skipped_tests(suite, progress=lambda done, total: told.append((done, total)))
    assert told == [(done, 5) for done in range(1, 6)]


class TestWrongInput:
    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"root": "none"}, "No such folder.\n  where: none"),
            ({"layout": "nose"}, "No such layout.\n  expected: pytest or transformers\n  got: nose"),
            ({"layout": Layout("docs")}, "No test files found."),
        ],
    )
    def test_of_a_scan(self, suite, change, text):
        with pytest.raises(InvalidRequestError, match=text):
            scan_skipped_tests(**{"root": suite, **change})

    def test_a_grouping_that_is_none(self):
        with pytest.raises(InvalidRequestError, match="expected: 'file' or 'folder'\n  got: 'class'"):
            Layout(group="class")

    def test_an_unknown_test(self, suite):
        message = "No such test in the suite.\n  where: .*\n  got: forward\n  hint: similar names: test_forward."
        with pytest.raises(InvalidRequestError, match=message):
            scan_skipped_tests(suite).row("forward")

    def test_a_truth_that_is_none(self, suite, tmp_path):
        (tmp_path / "x.txt").write_text("nothing\n")
        (tmp_path / "x.xml").write_text("<testsuite>")
        with pytest.raises(InvalidRequestError, match="Not a pytest result"):
            scan_skipped_tests(suite, truth=tmp_path / "x.txt")
        with pytest.raises(InvalidRequestError, match="cannot be parsed"):
            scan_skipped_tests(suite, truth=tmp_path / "x.xml")
        with pytest.raises(DestinationError, match="cannot be read"):
            scan_skipped_tests(suite, truth=tmp_path / "y.txt")

    def test_a_folder_that_cannot_be_written(self, static, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(DestinationError, match="cannot be written"):
            static.save(tmp_path / "file")
