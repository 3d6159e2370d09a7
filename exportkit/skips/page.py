"""Takes a `SkipScan`, or the rows of one, and gives the page that shows them.

Out comes HTML that needs no other file and no network: tests to sort and filter, most skipped first.
"""

from __future__ import annotations

from exportkit.report import render
from exportkit.skips.scan import SkipScan
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
