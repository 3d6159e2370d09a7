"""Takes the root of a test suite and says which tests run and which are skipped, and why; no test is imported.

Out comes a `SkipScan`: a row for each test with the groups (files, or models) that run or skip it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from exportkit.errors import InvalidRequestError
from exportkit.skips.collection import Collector, Test
from exportkit.skips.layout import LAYOUTS, Layout, layout_of
from exportkit.skips.merging import Difference, Merger
from exportkit.skips.result import Row, SkipScan, in_order
from exportkit.skips.suite import Suite
from exportkit.skips.truth import read_truth
from exportkit.skips.values import Skip


def scan_skipped_tests(
    root: str | Path = ".",
    layout: Layout | str | None = None,
    *,
    marks: Mapping[str, str | None] | None = None,
    truth: str | Path | Sequence[str | Path] = (),
    progress: Callable[[int, int], None] | None = None,
) -> SkipScan:
    """Returns which tests of a pytest or unittest suite run and which are skipped, and why, from the source alone.

    The suite is not imported. Decorators, marks, set-up methods, fixtures, helper functions and test bodies are
    followed as far as they can be without running them; conditions are answered for the interpreter, platform and
    packages that the scan itself runs with. What only a run would tell is reported as a condition, not as a skip.

    Args:
        root: The root of the suite, from which its absolute imports start.
        layout: How the suite is laid out: a `Layout`, ``"pytest"``, ``"transformers"``; None tells by the files.
        marks: Decorators that skip by a decision taken elsewhere, added to those of the layout:
            ``{"slow": "test is slow"}``.
        truth: Output of ``pytest -v -rs``, or JUnit XML of it: the result is that of the run, and ``differences``
            says where the scan differs.
        progress: Called with the number of files done and the number of files.

    Raises:
        InvalidRequestError: There is no such folder, or no test file in it.

    Example:
        >>> scan = scan_skipped_tests("tests")           # doctest: +SKIP
        >>> print(scan.row("test_forward"))              # doctest: +SKIP
    """
    folder = Path(root).resolve()
    if not folder.is_dir():
        raise InvalidRequestError("There is no such folder.", where=str(root), hint="give the root of the test suite.")
    chosen = _chosen(layout, folder)
    if marks:
        chosen = replace(chosen, marks={**marks, **{k: v for k, v in chosen.marks.items() if k not in marks}})
    files = chosen.test_files(folder)
    if not files:
        raise InvalidRequestError(
            "There is no test file.", where=str(folder / chosen.folder), expected=" or ".join(chosen.patterns)
        )
    runs = [read_truth(path) for path in ([truth] if isinstance(truth, str | Path) else truth)]
    suite = Suite(folder, chosen)
    with _no_garbage_collection():
        tests, bases = _collect(suite, files, progress)
        differences: list[Difference] = []
        for run in runs:
            tests, found = Merger(tests, run, folder, chosen.group_of).merged()
            differences += found
        groups = sorted({chosen.group_of(path.relative_to(folder).as_posix()) for path in files})
        rows = in_order(_rows(tests, bases, groups, bool(chosen.bases)))
        scan = SkipScan(str(root), rows, tuple(tests), tuple(differences), tuple(suite.problems))
        suite.forget()
    return scan


def _chosen(layout: Layout | str | None, root: Path) -> Layout:
    if isinstance(layout, Layout):
        return layout
    if layout is None:
        return layout_of(root)
    if layout not in LAYOUTS:
        raise InvalidRequestError("No such layout.", expected=" or ".join(LAYOUTS), got=layout)
    return LAYOUTS[layout]


def _collect(
    suite: Suite, files: Sequence[Path], progress: Callable[[int, int], None] | None
) -> tuple[Sequence[Test], dict[str, str]]:
    """Returns the tests of all files, and the names of the tests of the base files with their origins."""
    collector, tests, bases = Collector(suite), list[Test](), dict[str, str]()
    for file, origin in suite.layout.bases.items():
        module = suite.module(suite.root / file) if (suite.root / file).is_file() else None
        if module is not None:
            bases.update({name: origin for name, _ in collector.names_in(module) if name not in bases})
    for path in files:
        suite.module(path)
    suite.read_what_may_skip()
    suite.find_skipping_names()
    for done, path in enumerate(files, 1):
        module = suite.module(path)
        if module is not None:
            tests += collector.tests(module)
        if progress is not None:
            progress(done, len(files))
    return tests, bases


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Syntax trees are many small objects that all stay: looking for garbage among them takes most of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _rows(tests: Iterable[Test], bases: Mapping[str, str], groups: Sequence[str], has_bases: bool) -> Iterable[Row]:
    by_name: dict[str, dict[str, list[Test]]] = {name: {} for name in bases}
    for test in tests:
        if not has_bases or test.name in bases:
            by_name.setdefault(test.name, {}).setdefault(test.group, []).append(test)
    for name, by_group in by_name.items():
        yield _row(name, bases.get(name) or _origin(by_group), by_group, groups if has_bases else sorted(by_group))


def _row(name: str, origin: str, by_group: Mapping[str, Sequence[Test]], groups: Sequence[str]) -> Row:
    skipped = {g: [t for t in by_group.get(g, ()) if t.status == "skipped"] for g in groups}
    conditional = {g: [t for t in by_group.get(g, ()) if t.status == "conditional"] for g in groups}
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


def _reasons(tests: Iterable[Test]) -> str:
    return "; ".join(dict.fromkeys(_reason(skip) for test in tests for skip in test.skips))


def _reason(skip: Skip) -> str:
    return f"{skip.reason} [if {skip.condition}]".strip() if skip.condition else skip.reason


def _origin(by_group: Mapping[str, Sequence[Test]]) -> str:
    files = sorted({test.defined_in for tests in by_group.values() for test in tests})
    return files[0] if len(files) == 1 else f"{len(files)} files"
