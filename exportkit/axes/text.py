"""A plan as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from exportkit.axes.plan import Plan, PlannedLeaf


def plan_table(plan: Plan) -> str:
    """Returns the plan as text: a row for each input, then the variables with their evidence, then the findings."""
    rows = [("input", "type", "shape", "seen")]
    rows += [(leaf.path, leaf.dtype, _shape(leaf), _seen(leaf)) for leaf in plan.leaves]
    lines = _aligned(rows)
    if plan.variables:
        lines += ["", *_aligned([("variable", "evidence"), *((v.name, v.evidence) for v in plan.variables)])]
    if plan.findings:
        lines += ["", *(f"note: {finding.text}" for finding in plan.findings)]
    return "\n".join(lines)


def _shape(leaf: PlannedLeaf) -> str:
    return f"({', '.join(map(str, leaf.sizes))})"


def _seen(leaf: PlannedLeaf) -> str:
    shapes = ["absent" if shape is None else "x".join(map(str, shape)) or "scalar" for shape in leaf.shapes]
    return " ".join(dict.fromkeys(shapes))


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
