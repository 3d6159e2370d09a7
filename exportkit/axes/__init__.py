"""Stage 2, reason: which axes vary, which belong together, and which are sums of others. Imports no torch."""

from exportkit.axes.edit import with_sizes_of
from exportkit.axes.expression import Expression
from exportkit.axes.infer import infer_plan, with_grids, with_rows
from exportkit.axes.placeholder import Blocks, Grids, Marker, Placeholder, needed_tokens, place_blocks, tokens_fit
from exportkit.axes.plan import Constant, Finding, Plan, PlannedLeaf, Variable
from exportkit.axes.table import CallTable, Leaf

__all__ = [
    "Blocks",
    "CallTable",
    "Constant",
    "Expression",
    "Finding",
    "Grids",
    "Leaf",
    "Marker",
    "Placeholder",
    "Plan",
    "PlannedLeaf",
    "Variable",
    "infer_plan",
    "needed_tokens",
    "place_blocks",
    "tokens_fit",
    "with_grids",
    "with_rows",
    "with_sizes_of",
]
