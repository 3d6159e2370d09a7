"""The fixture suite is not a part of these tests: it is scanned, and a copy of it is run in a process of its own."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from exportkit.skipscan import scan_skipped_tests

collect_ignore = ["suite"]
SUITE = Path(__file__).parent / "suite"


@pytest.fixture(scope="session")
def suite(tmp_path_factory):
    """A copy of the fixture suite, in which a run may leave files."""
    return shutil.copytree(
        SUITE, tmp_path_factory.mktemp("copy") / "suite", ignore=shutil.ignore_patterns("__pycache__")
    )


@pytest.fixture(scope="session")
def run(suite):
    """Runs pytest on the copy; gives what it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}

    def run_pytest(*options):
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
        result = subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True, check=False)
        assert " passed" in result.stdout, result.stdout + result.stderr
        assert " failed" not in result.stdout
        return result.stdout

    return run_pytest


@pytest.fixture(scope="session")
def truth(run, suite):
    """Two results of one run: what it printed, and its JUnit XML."""
    printed = suite / "result.txt"
    printed.write_text(run("-v", "-rs", "--junitxml=result.xml"), encoding="utf-8")
    return printed, suite / "result.xml"


@pytest.fixture
def verdicts(tmp_path):
    """Scans the text of a test file; gives each test's reason if it is skipped, its conditions, or "ran"."""

    def scan(source, marks=None, **others):
        for name, text in {"test_it": source, **others}.items():
            path = tmp_path / f"{name}.py"
            path.write_text(textwrap.dedent(text), encoding="utf-8")
        found = scan_skipped_tests(tmp_path, layout="pytest", marks=marks)
        assert not found.problems
        return {test.id.partition("::")[2]: _verdict(test) for test in found.tests}

    return scan


def _verdict(test):
    if test.status == "conditional":
        return [(skip.reason, skip.condition) for skip in test.skips]
    return "ran" if test.status == "ran" else f"skipped: {test.skips[0].reason}"
