"""Takes a `SkipScan`, or the rows of one, and gives the page that shows them.

Out comes HTML that needs no other file and no network: tests to sort and filter, most skipped first.
"""

from __future__ import annotations

from pathlib import Path

from exportkit.report.render import render
from exportkit.skips.result import ALL_TESTS_FILE, SkipScan, read_scan
from exportkit.skips.table import summary


def page(scan: SkipScan) -> str:
    """Returns the page of a scan: a table with the reasons of each test, and where a run says something else."""
    has_truth = any(test.source == "truth" for test in scan.tests)
    return render(
        "skips.html.j2",
        title=f"Skipped tests of {scan.root}",
        root=scan.root,
        summary=summary(scan.rows),
        rows=scan.rows,
        agreement=scan.agreement() if has_truth else None,
        differences=scan.differences,
        problems=scan.problems,
    )


def folder_page(folder: Path) -> str:
    """Returns the page of a scan that was saved to a folder; it has the rows and not the differences to a run.

    Raises:
        DestinationError: if the file of the scan cannot be read.
    """
    return page(read_scan(folder / ALL_TESTS_FILE))
