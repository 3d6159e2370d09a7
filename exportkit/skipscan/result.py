"""Holds the result of a scan, saves and reads it, and shows it as text and as an HTML page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from exportkit.errors import DestinationError, InvalidRequestError, described
from exportkit.skipscan.values import Skip

ALL_TESTS_FILE = "all_tests_scan_result.json"

_PAGE = Path(__file__).with_name("page.html.j2")
_MOST = 20  # rows of a table

# The fields of a row that hold texts, by their keys in the file.
_LISTS = {
    "models_ran": "ran",
    "models_skipped": "skipped",
    "reasons_skipped": "reasons",
    "models_partly_skipped": "partly",
    "reasons_conditional": "conditional",
    "models_without_test": "without",
}


@dataclass(frozen=True)
class Test:
    """One test of the suite.

    Attributes:
        file: The file it is collected from, relative to the root.
        classes: Its class, with nested classes separated by ``::``; empty for a function.
        name: The name of the method or function.
        parameters: The identifier of its parameters; None if it has none or they are unknown.
        group: The group of the result that it belongs to.
        defined_in: The file that defines it, which is the base class's file for an inherited test.
        lines: Its first and last line in that file, including decorators.
        status: ``"ran"``, ``"skipped"`` if the skip is certain, or ``"conditional"`` if it depends on something only
            known at run time.
        skips: The reasons: a single skip if it is certain, otherwise every conditional one.
        source: Where the status comes from: the ``"static"`` scan, or the ``"truth"`` of a pytest run.
    """

    __test__ = False  # pytest would collect the class for its name

    file: str
    classes: str
    name: str
    parameters: str | None
    group: str
    defined_in: str
    lines: tuple[int, int]
    status: Literal["ran", "skipped", "conditional"]
    skips: tuple[Skip, ...] = ()
    source: Literal["static", "truth"] = "static"

    @property
    def id(self) -> str:
        """The node id that pytest gives the test."""
        parameters = "" if self.parameters is None else f"[{self.parameters}]"
        return "::".join(filter(None, (self.file, self.classes, self.name + parameters)))

    @property
    def reason(self) -> str:
        """The first reason; empty if nothing skips the test."""
        return self.skips[0].reason if self.skips else ""

    @property
    def verdict(self) -> str:
        """The status and reason in words."""
        if self.status == "conditional":
            return "; ".join(f"skipped if {skip.condition}" for skip in self.skips)
        return f"skipped: {self.reason}" if self.status == "skipped" else "ran"


@dataclass(frozen=True)
class Difference:
    """A test on which the static scan and a pytest run disagree.

    Attributes:
        test: The node id of the test.
        kind: ``"missed"``: skipped, but the scan says it runs. ``"wrong"``: it ran, but the scan says it is skipped.
            ``"decided"``: the scan only knew the condition. ``"reason"``: skipped for a different reason.
        scan: What the scan says.
        run: What the run says.
    """

    test: str
    kind: Literal["missed", "wrong", "decided", "reason"]
    scan: str
    run: str


@dataclass(frozen=True)
class Row:
    """One test name across all groups.

    Attributes:
        test: The name of the test.
        origin: The origin of its base file, or the file that defines it.
        ran: The groups that run it. If the layout has base files, this includes groups that do not override it.
        skipped: The groups that skip it, at least in one class or for some parameters.
        reasons: ``"group: reason"`` for each of these.
        partly: The groups in ``skipped`` that also run it, in another class or for other parameters.
        conditional: ``"group: reason [if condition]"`` for the groups in ``ran`` that may skip it at run time.
        without: The groups in ``ran`` where no class defines or inherits the test.
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
    def total(self) -> int:
        """The number of groups."""
        return len(self.ran) + len(self.skipped)

    @property
    def proportion(self) -> float:
        """The proportion of groups that skip the test, to 4 digits."""
        return round(len(self.skipped) / self.total, 4) if self.total else 0.0

    def to_json(self) -> dict[str, Any]:
        """Returns the row in the format of ``all_tests_scan_result.json``."""
        ran, skipped, *others = [(key, list(getattr(self, name))) for key, name in _LISTS.items()]
        return {"origin": self.origin, **dict([ran, skipped, ("skipped_proportion", self.proportion), *others])}

    def __str__(self) -> str:
        lines = [f"{self.test} ({self.origin})", f"Ran: {len(self.ran)}/{self.total}"]
        lines += [f"Skipped: {len(self.skipped)}/{self.total} ({self.proportion:.1%})"]
        lines += [f"  {text}" for text in self.reasons]
        if self.conditional:
            lines += [f"Under a condition: {len(self.conditional)}/{self.total}"]
            lines += [f"  {text}" for text in self.conditional]
        return "\n".join(lines)


@dataclass(frozen=True)
class SkipScan:
    """Which tests of a suite run and which are skipped.

    Attributes:
        root: The root of the suite.
        rows: One row per test name, most skipped first.
        tests: Each test of each class and file, with its skips and their locations.
        differences: Where a pytest run disagrees with the static scan; empty without a run.
        problems: Files that could not be read or parsed.
    """

    root: str
    rows: tuple[Row, ...]
    tests: tuple[Test, ...]
    differences: tuple[Difference, ...] = ()
    problems: tuple[str, ...] = ()

    def row(self, test: str) -> Row:
        """Returns the row of one test name.

        Raises:
            InvalidRequestError: The suite has no test with this name.
        """
        found = next((row for row in self.rows if row.test == test), None)
        if found is None:
            near = sorted(row.test for row in self.rows if test.removeprefix("test_") in row.test)[:5]
            hint = f"similar names: {', '.join(near)}." if near else "give the name of a method, without its class."
            raise InvalidRequestError("No such test in the suite.", where=self.root, got=test, hint=hint)
        return found

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Returns the rows by test name, in the format of ``all_tests_scan_result.json``."""
        return {row.test: row.to_json() for row in sorted(self.rows, key=lambda row: row.test)}

    def agreement(self) -> tuple[float, float]:
        """Returns the precision and recall of the static scan against the run that was merged into it.

        Only certain skips count as found. Both are 1 if there is nothing to find.
        """
        kinds = Counter(difference.kind for difference in self.differences)
        not_found = {d.test for d in self.differences if d.kind in ("missed", "decided")}
        skipped = [test.id for test in self.tests if test.source == "truth" and test.status == "skipped"]
        found = sum(test not in not_found for test in skipped)
        return _ratio(found, found + kinds["wrong"]), _ratio(found, len(skipped))

    @property
    def has_truth(self) -> bool:
        """Whether a pytest run was merged into the scan."""
        return any(test.source == "truth" for test in self.tests)

    def to_html(self) -> str:
        """Returns a self-contained page: a table to sort and filter, most skipped first."""
        from jinja2 import Environment, StrictUndefined

        environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
        return environment.from_string(_PAGE.read_text(encoding="utf-8")).render(scan=self)

    def save(self, folder: str | Path = ".", test: str | None = None, html: bool = False) -> list[Path]:
        """Writes ``all_tests_scan_result.json``, or ``scan_<name>.json`` for one test, and returns the paths.

        Args:
            folder: The destination; created if missing.
            test: Write only the row of this test.
            html: Also write ``skip_scan.html``.

        Raises:
            InvalidRequestError: The suite has no such test.
            DestinationError: A file cannot be written.
        """
        name, content = (ALL_TESTS_FILE, self.to_json())
        if test is not None:
            name, content = f"scan_{test}.json", self.row(test).to_json()
        texts = {name: json.dumps(content, indent=2, ensure_ascii=False)}
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

    @property
    def summary(self) -> str:
        """The totals in one sentence."""
        groups = {group for row in self.rows for group in (*row.ran, *row.skipped)}
        skipped, total = sum(len(row.skipped) for row in self.rows), sum(row.total for row in self.rows)
        text = f"{len(self.rows)} tests in {len(groups)} groups: {skipped} of {total} are skipped, "
        text += f"{sum(len(row.conditional) for row in self.rows)} more under a condition. "
        return f"{text}Tests never skipped: {sum(not row.skipped for row in self.rows)}."

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """Yields the most skipped tests, totals, and the differences from a run."""
        rows: list[tuple[str, ...]] = []
        for row in self.rows:
            reasons = [text.partition(": ")[2] for text in row.reasons]
            if reasons:
                numbers = (str(len(row.ran)), str(len(row.skipped)), f"{row.proportion:.1%}")
                rows.append((row.test, row.origin, *numbers, max(reasons, key=reasons.count)))
        yield from _table(("test", "origin", "ran", "skipped", "", "most frequent reason"), rows)
        yield self.summary
        rows = [(d.test, d.kind, d.scan, d.run) for d in self.differences]
        yield from _table(("Where the run disagrees", "", "scan", "run"), rows)
        if self.has_truth:
            yield "The static scan against the run: precision {:.1%}, recall {:.1%}.".format(*self.agreement())
        for problem in self.problems:
            yield f"could not be read: {problem}"


def read_scan(file: Path) -> SkipScan:
    """Returns the rows that `SkipScan.save` wrote; the file has neither the tests nor the differences.

    Args:
        file: ``all_tests_scan_result.json``.

    Raises:
        DestinationError: The file cannot be read, or is not a scan result.
    """
    try:
        data: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        lists = {test: {f: tuple(map(str, entry[key])) for key, f in _LISTS.items()} for test, entry in data.items()}
        rows = [Row(test, str(entry["origin"]), **lists[test]) for test, entry in data.items()]
    except OSError as error:
        raise DestinationError("The scan cannot be read.", where=str(file), got=error.strerror) from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DestinationError(
            "Not the result of a skip scan.",
            where=str(file),
            expected="a file written by exportkit scan-skips",
            got=described(error),
        ) from error
    return SkipScan(file.parent.resolve().name, most_skipped_first(rows), ())


def most_skipped_first(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Returns rows in the order in which they are shown."""
    return tuple(sorted(rows, key=lambda row: (-row.proportion, -len(row.skipped), row.test)))


def _ratio(part: int, total: int) -> float:
    return part / total if total else 1.0


def _table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yields the lines of a table; one without rows has none."""
    shown = [titles, *(tuple(" ".join(cell.split()) for cell in row) for row in rows[:_MOST])]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for number, row in enumerate(shown if rows else ()):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        if number == 0:
            yield "-" * sum(widths, 2 * len(widths) - 2)
    if len(rows) > _MOST:
        yield f"... and {len(rows) - _MOST} more"
