"""Scans a test suite: which tests run, which are skipped, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from exportkit.errors import InvalidRequestError
from exportkit.skipscan.collection import Collector
from exportkit.skipscan.layout import LAYOUTS, Layout, layout_of
from exportkit.skipscan.pytest_run import Merger, read_run
from exportkit.skipscan.result import Difference, Row, SkipScan, Test, most_skipped_first
from exportkit.skipscan.suite import Suite


def scan_skipped_tests(
    root: str | Path = ".",
    layout: Layout | str | None = None,
    *,
    marks: Mapping[str, str | None] | None = None,
    truth: str | Path | Sequence[str | Path] = (),
    progress: Callable[[int, int], None] | None = None,
) -> SkipScan:
    """Finds the tests of a pytest or unittest suite that are skipped, and why, from the source alone.

    The suite is not imported. Decorators, marks, set-up methods, fixtures, helper functions and test bodies are
    followed as far as possible without running them. Conditions are evaluated for the interpreter, platform and
    packages of the scan itself; one that is only known at run time is reported as a condition, not as a skip.

    Args:
        root: The root of the suite, where its absolute imports start.
        layout: How the suite is laid out: a `Layout`, ``"pytest"`` or ``"transformers"``; detected if None.
        marks: Decorators known by name, such as ``{"slow": "test is slow"}``, in addition to those of the layout.
        truth: The output of ``pytest -v -rs``, or its JUnit XML: the result is then that of the run, and
            ``differences`` lists where the scan disagrees.
        progress: Called with the number of scanned files and the total.

    Returns:
        The scan, with a row for each test and its groups, which are files or models.

    Raises:
        InvalidRequestError: The folder does not exist, or has no test files.

    Example:
        >>> scan = scan_skipped_tests("tests")           # doctest: +SKIP
        >>> print(scan.row("test_forward"))              # doctest: +SKIP
    """
    folder = Path(root).resolve()
    if not folder.is_dir():
        raise InvalidRequestError("No such folder.", where=str(root), hint="give the root of the test suite.")
    if isinstance(layout, str) and layout not in LAYOUTS:
        raise InvalidRequestError("No such layout.", expected=" or ".join(LAYOUTS), got=layout)
    chosen = LAYOUTS[layout] if isinstance(layout, str) else layout or layout_of(folder)
    if marks:
        chosen = replace(chosen, marks={**marks, **{k: v for k, v in chosen.marks.items() if k not in marks}})
    files = chosen.test_files(folder)
    if not files:
        expected = " or ".join(chosen.patterns)
        raise InvalidRequestError("No test files found.", where=str(folder / chosen.folder), expected=expected)
    runs = [read_run(path) for path in ([truth] if isinstance(truth, str | Path) else truth)]
    suite = Suite(folder, chosen)
    tests, bases = _collect(suite, files, progress)
    differences: list[Difference] = []
    for run in runs:
        tests, found = Merger(tests, run, folder, chosen.group_of).merged()
        differences += found
    groups = sorted({chosen.group_of(path.relative_to(folder).as_posix()) for path in files})
    rows = most_skipped_first(_rows(tests, bases, groups, bool(chosen.bases)))
    return SkipScan(str(root), rows, tuple(tests), tuple(differences), tuple(suite.problems))


def _collect(
    suite: Suite, files: Sequence[Path], progress: Callable[[int, int], None] | None
) -> tuple[Sequence[Test], dict[str, str]]:
    """Returns the tests of all files, and the origins of the tests in the base files."""
    collector, tests, bases = Collector(suite), list[Test](), dict[str, str]()
    for file, origin in suite.layout.bases.items():
        module = suite.module(suite.root / file) if (suite.root / file).is_file() else None
        if module is not None:
            bases = dict.fromkeys(collector.names_in(module), origin) | bases
    for path in files:
        suite.module(path)
    suite.read_what_may_skip()
    for done, path in enumerate(files, 1):
        module = suite.module(path)
        if module is not None:
            tests += collector.tests(module)
        if progress is not None:
            progress(done, len(files))
    return tests, bases


def _rows(tests: Sequence[Test], bases: Mapping[str, str], groups: Sequence[str], has_bases: bool) -> Iterator[Row]:
    by_name: dict[str, dict[str, list[Test]]] = {name: {} for name in bases}
    for test in tests:
        if not has_bases or test.name in bases:
            by_name.setdefault(test.name, {}).setdefault(test.group, []).append(test)
    for name, by_group in by_name.items():
        files = sorted({test.defined_in for found in by_group.values() for test in found})
        origin = bases.get(name) or (files[0] if len(files) == 1 else f"{len(files)} files")
        yield _row(name, origin, by_group, groups if has_bases else sorted(by_group))


def _row(name: str, origin: str, by_group: Mapping[str, Sequence[Test]], groups: Sequence[str]) -> Row:
    skipped = {g: [test for test in by_group.get(g, ()) if test.status == "skipped"] for g in groups}
    conditional = {g: [test for test in by_group.get(g, ()) if test.status == "conditional"] for g in groups}
    return Row(
        test=name,
        origin=origin,
        ran=tuple(g for g in groups if not skipped[g]),
        skipped=tuple(g for g in groups if skipped[g]),
        reasons=tuple(f"{g}: {_reasons(skipped[g])}" for g in groups if skipped[g]),
        partly=tuple(g for g in groups if 0 < len(skipped[g]) < len(by_group.get(g, ()))),
        conditional=tuple(f"{g}: {_reasons(conditional[g])}" for g in groups if conditional[g] and not skipped[g]),
        without=tuple(g for g in groups if g not in by_group),
    )


def _reasons(tests: Sequence[Test]) -> str:
    skips = [skip for test in tests for skip in test.skips]
    texts = [f"{skip.reason} [if {skip.condition}]".strip() if skip.condition else skip.reason for skip in skips]
    return "; ".join(dict.fromkeys(texts))
