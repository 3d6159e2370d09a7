"""What is read from the output and the JUnit XML of pytest, and how it is merged into the tests of a scan."""

import pytest

from exportkit.skipscan import scan_skipped_tests
from exportkit.skipscan.pytest_run import Location, read_run

OUTPUT = """\
tests/test_a.py::test_one PASSED                                         [  5%]
tests/test_a.py::A::test_two[a b] SKIPPED (a reason that is cut to t...) [ 10%]
\x1b[32mtests/test_a.py::test_three\x1b[0m XFAIL (why)                   [ 15%]
[gw1] [ 20%] SKIPPED tests/test_a.py::test_four
=========================== short test summary info ============================
SKIPPED [2] tests/test_a.py:12: two
lines
SKIPPED [1] tests/test_a.py: of a class
SKIPPED tests/test_b.py - Skipped: whole file
FAILED tests/test_a.py::test_five - SKIPPED [1] tests/test_a.py:1: no
===================== 1 passed, 4 skipped, 1 xfailed in 0.05s ==================
"""


@pytest.fixture
def read(tmp_path):
    def read_text(text):
        (tmp_path / "result").write_text(text, encoding="utf-8")
        return read_run(tmp_path / "result")

    return read_text


def test_the_output_of_pytest(read):
    truth = read(OUTPUT)
    assert truth.ran == {"tests/test_a.py::test_one", "tests/test_a.py::test_three"}
    assert truth.skipped == {
        "tests/test_a.py::A::test_two[a b]": "a reason that is cut to t...",
        "tests/test_a.py::test_four": "",
    }
    assert truth.locations == [
        Location("tests/test_a.py", 12, 2, "two\nlines"),
        Location("tests/test_a.py", 0, 1, "of a class"),
    ]
    assert truth.modules == {"tests/test_b.py": "whole file"}


def test_a_test_that_passes_with_a_skipped_subtest_ran(read):
    truth = read("test_a.py::test_one SKIPPED (x)  [ 5%]\ntest_a.py::test_one PASSED  [ 5%]\n")
    assert (truth.ran, truth.skipped) == ({"test_a.py::test_one"}, {})


def test_junit_xml(read):
    text = """<testsuites><testsuite>
        <testcase classname="tests.test_a.A" name="test_one"><skipped type="pytest.skip" message="it's"/></testcase>
        <testcase classname="tests.test_a" name="test_two"><skipped type="pytest.xfail" message="x"/></testcase>
        <testcase classname="" name="tests.test_b">
            <skipped message="collection skipped">('/x/test_b.py', 2, 'Skipped: all')</skipped></testcase>
    </testsuite></testsuites>"""
    truth = read(text)
    assert truth.skipped == {"tests.test_a.A::test_one": "it's"}
    assert truth.ran == {"tests.test_a::test_two"}
    assert truth.modules == {"tests.test_b": "all"}


def test_a_run_without_skips_is_a_run(read):
    assert read("..\n2 passed in 0.01s\n").skipped == {}


class TestMerging:
    @pytest.fixture
    def scan(self, tmp_path):
        source = """
            import pytest
            def test_open():
                if ready(): pytest.skip("was ready")
            @pytest.mark.skip("static")
            def test_skipped(): ...
            def test_ran(): ...
            @pytest.mark.parametrize("x", values())
            def test_made(x): ...
        """
        (tmp_path / "test_a.py").write_text("\n".join(line[12:] for line in source.splitlines()))

        def scan_with(text):
            (tmp_path / "result.txt").write_text(text)
            found = scan_skipped_tests(tmp_path, truth=tmp_path / "result.txt")
            return found, {d.test.partition("::")[2]: (d.kind, d.scan, d.run) for d in found.differences}

        return scan_with

    def test_each_kind_of_difference(self, scan):
        lines = [
            "test_open SKIPPED (was ready)",
            "test_skipped PASSED",
            "test_ran SKIPPED (late)",
            "test_made[1] PASSED",
        ]
        found, differences = scan("\n".join(f"test_a.py::{line} [ 9%]" for line in lines))
        assert differences == {
            "test_open": ("decided", "skipped if ready()", "skipped: was ready"),
            "test_skipped": ("wrong", "skipped: static", "ran"),
            "test_ran": ("missed", "ran", "skipped: late"),
        }
        assert found.agreement() == (0, 0)

    def test_parameters_that_only_the_run_knows(self, scan):
        found, _ = scan("test_a.py::test_made[1] PASSED [ 9%]\ntest_a.py::test_made[2] SKIPPED (two) [ 9%]\n")
        made = {test.parameters: test.status for test in found.tests if test.name == "test_made"}
        assert made == {"1": "ran", "2": "skipped"}
        assert found.row("test_made").partly == ("test_a",)

    def test_what_was_not_run_keeps_the_verdict_of_the_scan(self, scan):
        found, differences = scan("test_a.py::test_ran PASSED [ 9%]\n")
        assert differences == {}
        assert found.row("test_skipped").skipped == ("test_a",)

    def test_a_run_in_which_all_tests_are_skipped_says_nothing_of_others(self, scan):
        found, differences = scan("test_a.py::test_skipped SKIPPED (static) [ 9%]\n")
        assert differences == {}
        assert found.row("test_open").conditional == ("test_a: was ready [if ready()]",)

    def test_names_made_by_parameterized_expand(self, scan):
        found, _ = scan("test_a.py::test_ran_0_small PASSED [ 9%]\ntest_a.py::test_ran_1_large SKIPPED (x) [ 9%]\n")
        assert {test.name: test.status for test in found.tests if "ran_" in test.name} == {
            "test_ran_0_small": "ran",
            "test_ran_1_large": "skipped",
        }
