"""Finds the skipped tests of a pytest or unittest suite from its source, for which groups or models, and why.

`scan_skipped_tests` returns a `SkipScan`. Nothing of the suite is run, and torch is not needed.
"""

from exportkit.skipscan.layout import LAYOUTS, TRANSFORMERS, Layout
from exportkit.skipscan.result import Difference, Row, SkipScan, Test
from exportkit.skipscan.scan import scan_skipped_tests
from exportkit.skipscan.values import Skip

__all__ = [
    "scan_skipped_tests",
    "SkipScan",
    "Row",
    "Test",
    "Skip",
    "Difference",
    "Layout",
    "TRANSFORMERS",
    "LAYOUTS",
]
