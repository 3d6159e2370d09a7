"""Takes the source of a pytest or unittest suite and says which tests are skipped, for which models, and why.

`scan_skipped_tests` gives a `SkipScan`; neither imports torch, and neither runs any code of the suite.
"""

from exportkit.skips.collection import Test
from exportkit.skips.layout import LAYOUTS, TRANSFORMERS, Layout
from exportkit.skips.merging import Difference
from exportkit.skips.result import Row, SkipScan
from exportkit.skips.scan import scan_skipped_tests
from exportkit.skips.values import Skip

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
