"""Stage 2, reason: which axes vary, which belong together, and which are sums of others. Imports no torch."""

from exportkit.axes.expression import Expression
from exportkit.axes.infer import infer_plan, with_rows
from exportkit.axes.placeholder import Placeholder, needed_tokens, tokens_fit
from exportkit.axes.plan import Constant, Finding, Plan, PlannedLeaf, Variable
from exportkit.axes.table import CallTable, Leaf

__all__ = [
    "CallTable",
    "Constant",
    "Expression",
    "Finding",
    "Leaf",
    "Placeholder",
    "Plan",
    "PlannedLeaf",
    "Variable",
    "infer_plan",
    "needed_tokens",
    "tokens_fit",
    "with_rows",
]
