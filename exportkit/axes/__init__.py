"""Stage 2, reason: which axes vary, which belong together, and which are sums of others. Imports no torch."""

from exportkit.axes.expression import Expression
from exportkit.axes.infer import infer_plan
from exportkit.axes.plan import Constant, Finding, Plan, PlannedLeaf, Variable
from exportkit.axes.table import CallTable, Leaf

__all__ = [
    "CallTable",
    "Constant",
    "Expression",
    "Finding",
    "Leaf",
    "Plan",
    "PlannedLeaf",
    "Variable",
    "infer_plan",
]
