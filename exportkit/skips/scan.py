"""Takes the root of a test suite and says which tests run and which are skipped, and why; no test is imported.

Out comes a `SkipScan`: a row for each test with the groups (files, or models) that run or skip it.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from exportkit.errors import DestinationError, InvalidRequestError
from exportkit.skips.collection import Collector, Test
from exportkit.skips.layout import LAYOUTS, Layout, layout_of
from exportkit.skips.merging import Difference, Merger
from exportkit.skips.suite import Suite
from exportkit.skips.truth import read_truth
from exportkit.skips.values import Skip

ALL_TESTS_FILE = "all_tests_scan_result.json"


@dataclass(frozen=True)
class Row:
    """One test over all groups.

    Attributes:
        test: Name of the test.
        origin: Where it comes from: the origin of a base file, or the file that defines it.
        ran: Groups that run it. Where the layout has base files this includes groups that do not override it.
        skipped: Groups that skip it, in one of its classes or for some parameters at least.
        reasons: ``"group: reason"`` for each of them.
        partly: Those of ``skipped`` that also run it, in another class or for other parameters.
        conditional: ``"group: reason [condition]"`` for groups in ``ran`` where only a run tells whether it is skipped.
        without: Those of ``ran`` in which no class has or inherits the test.
    """

    test: str
    origin: str
    ran: tuple[str, ...]
    skipped: tuple[str, ...]
    reasons: tuple[str, ...]
    partly: tuple[str, ...] = ()
    conditional: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    @property
    def proportion(self) -> float:
        """The proportion of groups that skip the test, to 4 digits."""
        total = len(self.ran) + len(self.skipped)
        return round(len(self.skipped) / total, 4) if total else 0.0

    def to_json(self) -> dict[str, Any]:
        """Returns the row in the format of ``all_tests_scan_result.json``."""
        return {
            "origin": self.origin,
            "models_ran": list(self.ran),
            "models_skipped": list(self.skipped),
            "skipped_proportion": self.proportion,
            "reasons_skipped": list(self.reasons),
            "models_partly_skipped": list(self.partly),
            "reasons_conditional": list(self.conditional),
            "models_without_test": list(self.without),
        }

    def __str__(self) -> str:
        total = len(self.ran) + len(self.skipped)
        lines = [f"{self.test} ({self.origin})", f"Ran: {len(self.ran)}/{total}"]
        lines += [f"Skipped: {len(self.skipped)}/{total} ({self.proportion:.1%})", *(f"  {r}" for r in self.reasons)]
        if self.conditional:
            lines += [
                f"Under a condition: {len(self.conditional)}/{total}",
                *(f"  {text}" for text in self.conditional),
            ]
        return "\n".join(lines)


@dataclass(frozen=True)
class SkipScan:
    """Which tests of a suite run and which are skipped.

    Attributes:
        root: The root of the suite.
        rows: A row for each test, most skipped first.
        tests: Each test in each class and file, with the skip and its place.
        differences: Where a run of pytest says something else than the static scan; empty without one.
        problems: Files that could not be read or parsed.
    """

    root: str
    rows: tuple[Row, ...]
    tests: tuple[Test, ...]
    differences: tuple[Difference, ...] = ()
    problems: tuple[str, ...] = ()

    def row(self, test: str) -> Row:
        """Returns the row of one test.

        Raises:
            InvalidRequestError: The suite has no test of that name.
        """
        found = next((row for row in self.rows if row.test == test), None)
        if found is None:
            near = sorted(row.test for row in self.rows if test.removeprefix("test_") in row.test)[:5]
            hint = f"similar names: {', '.join(near)}." if near else "names are those of methods, without the class."
            raise InvalidRequestError("No such test in the suite.", where=self.root, got=test, hint=hint)
        return found

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Returns the rows by name of test, as ``all_tests_scan_result.json`` holds them."""
        return {row.test: row.to_json() for row in sorted(self.rows, key=lambda row: row.test)}

    def agreement(self) -> tuple[float, float]:
        """Returns precision and recall of the static scan against the run that was merged into it.

        Only skips that the scan is certain of count as found. Both are 1 if there is nothing to find.
        """
        run = [test for test in self.tests if test.source == "truth"]
        kinds = Counter(difference.kind for difference in self.differences)
        not_found = {d.test for d in self.differences if d.kind in ("missed", "decided")}
        found = sum(test.status == "skipped" and test.id not in not_found for test in run)
        missed = sum(test.status == "skipped" and test.id in not_found for test in run)
        return _ratio(found, kinds["wrong"]), _ratio(found, missed)

    def to_html(self) -> str:
        """Returns a page that needs nothing else: a table to sort and filter, most skipped first."""
        from exportkit.skips.page import page

        return page(self)

    def save(self, folder: str | Path = ".", test: str | None = None, html: bool = False) -> list[Path]:
        """Returns the files written: ``all_tests_scan_result.json``, or ``scan_<name>.json`` for one test.

        Args:
            folder: Where to; made if it is missing.
            test: Write the row of this test only.
            html: Write ``skip_scan.html`` as well.

        Raises:
            InvalidRequestError: The suite has no such test.
            DestinationError: A file cannot be written.
        """
        content = self.to_json() if test is None else self.row(test).to_json()
        texts = {
            ALL_TESTS_FILE if test is None else f"scan_{test}.json": json.dumps(content, indent=2, ensure_ascii=False)
        }
        if html:
            texts["skip_scan.html"] = self.to_html()
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                (folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise DestinationError("The result cannot be written.", where=str(folder), got=error.strerror) from error
        return [folder / name for name in texts]

    def __str__(self) -> str:
        from exportkit.skips.table import as_text

        return as_text(self)

    def __rich__(self) -> Any:
        from exportkit.skips.table import table

        return table(self)


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
        rows = sorted(
            _rows(tests, bases, groups, bool(chosen.bases)),
            key=lambda row: (-row.proportion, -len(row.skipped), row.test),
        )
        return SkipScan(str(root), tuple(rows), tuple(tests), tuple(differences), tuple(suite.problems))


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


def _ratio(found: int, others: int) -> float:
    return found / (found + others) if found + others else 1.0


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
