"""Takes a `SkipScan` and fills ``page.html.j2`` with it.

Out comes one HTML page that needs no other file and no network.
"""

from __future__ import annotations

from pathlib import Path

from exportkit.skips.scan import SkipScan
from exportkit.skips.table import summary

_TEMPLATE = Path(__file__).with_name("page.html.j2")


def page(scan: SkipScan) -> str:
    """Returns the page: a table to sort and filter, most skipped first, with the reasons of each test."""
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    precision, recall = scan.agreement()
    has_truth = any(test.source == "truth" for test in scan.tests)
    return template.render(scan=scan, summary=summary(scan), has_truth=has_truth, precision=precision, recall=recall)
