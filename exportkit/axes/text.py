"""A plan as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from exportkit.axes.plan import Plan, PlannedLeaf


def plan_table(plan: Plan) -> str:
    """Returns the plan as text: a row for each input (equal ones together), the variables and why, the findings."""
    rows = [("input", "type", "shape", "seen")]
    for leaves in _alike(plan.leaves):
        more = f" and {len(leaves) - 1} alike" if len(leaves) > 1 else ""
        rows.append((leaves[0].path + more, leaves[0].dtype, _shape(leaves[0]), _seen(leaves[0])))
    lines = _aligned(rows)
    if plan.variables:
        lines += ["", *_aligned([("variable", "evidence"), *((v.name, v.evidence) for v in plan.variables)])]
    if plan.findings:
        lines += ["", *(f"note: {finding.text}" for finding in plan.findings)]
    return "\n".join(lines)


def _alike(leaves: Sequence[PlannedLeaf]) -> list[list[PlannedLeaf]]:
    """Leaves of one argument with equal types, sizes and shapes, such as the layers of a cache, together."""
    groups: dict[object, list[PlannedLeaf]] = {}
    for leaf in leaves:
        groups.setdefault((leaf.argument, leaf.dtype, leaf.sizes, leaf.shapes), []).append(leaf)
    return list(groups.values())


def _shape(leaf: PlannedLeaf) -> str:
    return f"({', '.join(map(str, leaf.sizes))})"


def _seen(leaf: PlannedLeaf) -> str:
    shapes = ["absent" if shape is None else "x".join(map(str, shape)) or "scalar" for shape in leaf.shapes]
    return " ".join(dict.fromkeys(shapes))


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
