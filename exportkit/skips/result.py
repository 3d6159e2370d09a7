"""What a scan finds, as a value: in come a row for each test and the tests, out go JSON, text and a page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exportkit.errors import DestinationError, InvalidRequestError
from exportkit.skips.collection import Test
from exportkit.skips.merging import Difference

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


def read_scan(file: Path) -> SkipScan:
    """Returns the rows of a scan from the file that `SkipScan.save` wrote; tests and differences are not in it.

    Args:
        file: ``all_tests_scan_result.json``.

    Raises:
        DestinationError: It cannot be read, or holds something else.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        rows = [_row_of(test, entry) for test, entry in data.items()]
    except OSError as error:
        raise DestinationError("The scan cannot be read.", where=str(file), got=error.strerror) from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DestinationError(
            "This is no result of a skip scan.",
            where=str(file),
            expected="what exportkit scan-skips wrote",
            got=f"{type(error).__name__}: {error}",
        ) from error
    return SkipScan(file.parent.resolve().name, in_order(rows), ())


def in_order(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Returns rows in the order in which they are shown: most skipped first."""
    return tuple(sorted(rows, key=lambda row: (-row.proportion, -len(row.skipped), row.test)))


def _row_of(test: str, entry: Mapping[str, Any]) -> Row:
    names = ("ran", "skipped", "reasons", "partly", "conditional", "without")
    keys = ("models_ran", "models_skipped", "reasons_skipped", "models_partly_skipped", "reasons_conditional")
    lists = {name: tuple(map(str, entry[key])) for name, key in zip(names, (*keys, "models_without_test"), strict=True)}
    return Row(test, str(entry["origin"]), **lists)


def _ratio(found: int, others: int) -> float:
    return found / (found + others) if found + others else 1.0
