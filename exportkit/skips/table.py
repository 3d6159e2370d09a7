"""Takes a `SkipScan` and shows it in a terminal: the most skipped tests, totals, and where a run says something else.

Out come tables of rich, or the same as plain text.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from exportkit.skips.result import Row, SkipScan

_WIDTH = 100  # of the plain text


def as_text(scan: SkipScan, most: int = 20) -> str:
    """Returns the tables as plain text."""
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None)
    console.print(table(scan, most))
    return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip().splitlines())  # type: ignore[attr-defined]


def table(scan: SkipScan, most: int = 20) -> RenderableType:
    """Returns the most skipped tests as a table, followed by totals and by differences to a run."""
    return Group(*_parts(scan, most))


def _parts(scan: SkipScan, most: int) -> Iterator[RenderableType]:
    skipped = [row for row in scan.rows if row.skipped]
    if skipped:
        yield _rows(skipped[:most])
    if len(skipped) > most:
        yield Text(f"... and {len(skipped) - most} more")
    yield Text(summary(scan.rows))
    if scan.differences:
        yield _differences(scan, most)
    if any(test.source == "truth" for test in scan.tests):
        precision, recall = scan.agreement()
        yield Text(f"The static scan against the run: precision {precision:.1%}, recall {recall:.1%}.")
    for problem in scan.problems:
        yield Text(f"could not be read: {problem}", style="yellow")


def summary(rows: Sequence[Row]) -> str:
    """Returns the totals in one sentence."""
    groups = {group for row in rows for group in (*row.ran, *row.skipped)}
    skipped = sum(len(row.skipped) for row in rows)
    conditional = sum(len(row.conditional) for row in rows)
    pairs = sum(len(row.ran) + len(row.skipped) for row in rows)
    never = sum(not row.skipped for row in rows)
    text = f"{len(rows)} tests in {len(groups)} groups: {skipped} of {pairs} are skipped"
    return f"{text}, {conditional} more under a condition. Tests that nothing skips: {never}."


def _rows(rows: list[Row]) -> Table:
    found = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for title in ("test", "origin"):
        found.add_column(title, overflow="fold")
    for title in ("ran", "skipped", ""):
        found.add_column(title, justify="right", no_wrap=True)
    found.add_column("most frequent reason", overflow="fold")
    for row in rows:
        cells = (
            row.test,
            row.origin,
            str(len(row.ran)),
            str(len(row.skipped)),
            f"{row.proportion:.1%}",
            _most_frequent(row),
        )
        found.add_row(*(Text(cell) for cell in cells))
    return found


def _most_frequent(row: Row) -> str:
    reasons = [text.partition(": ")[2] for text in row.reasons]
    return max(reasons, key=reasons.count)


def _differences(scan: SkipScan, most: int) -> Table:
    found = Table(box=box.SIMPLE_HEAD, show_edge=False, title="Where the run says something else", title_justify="left")
    for title in ("test", "", "scan", "run"):
        found.add_column(title, overflow="fold")
    for difference in scan.differences[:most]:
        cells = (difference.test, difference.kind, difference.scan, difference.run)
        found.add_row(*(Text(cell) for cell in cells))
    if len(scan.differences) > most:
        found.add_row(f"... and {len(scan.differences) - most} more", "", "", "")
    return found
