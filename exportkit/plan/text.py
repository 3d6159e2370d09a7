"""A plan as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from exportkit.plan.plan import Plan, PlannedLeaf


def plan_table(plan: Plan) -> str:
    """Returns the plan as text: a row for each input (equal ones together), the variables and why, the findings."""
    rows = [("input", "type", "shape", "seen")]
    rows += [(label, leaf.dtype, _shape(leaf), seen_shapes(leaf)) for label, leaf in alike_leaves(plan)]
    lines = _aligned(rows)
    if plan.variables:
        lines += ["", *_aligned([("variable", "evidence"), *((v.name, v.evidence) for v in plan.variables)])]
    if plan.findings:
        lines += ["", *(f"note: {finding.text}" for finding in plan.findings)]
    return "\n".join(lines)


def alike_leaves(plan: Plan) -> list[tuple[str, PlannedLeaf]]:
    """Returns one input for all that are alike, such as the layers of a cache, each with a label that says how many."""
    groups: dict[object, list[PlannedLeaf]] = {}
    for leaf in plan.leaves:
        groups.setdefault((leaf.argument, leaf.dtype, leaf.sizes, leaf.shapes), []).append(leaf)
    return [(f"{g[0].path} and {len(g) - 1} alike" if len(g) > 1 else g[0].path, g[0]) for g in groups.values()]


def _shape(leaf: PlannedLeaf) -> str:
    return f"({', '.join(map(str, leaf.sizes))})"


def seen_shapes(leaf: PlannedLeaf) -> str:
    """Returns the shapes that an input had in the recorded calls, each once."""
    shapes = ["absent" if shape is None else "x".join(map(str, shape)) or "scalar" for shape in leaf.shapes]
    return " ".join(dict.fromkeys(shapes))


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
