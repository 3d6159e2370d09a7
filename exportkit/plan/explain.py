"""Why an axis has the size that a plan gives it, in sentences."""

from __future__ import annotations

from exportkit.plan.edit import leaves_of, seen_sizes
from exportkit.plan.plan import Plan, PlannedLeaf
from exportkit.plan.table import Sizes


def explain_axis(plan: Plan, target: str, axis: int) -> str:
    """Returns what the plan knows of one axis of an input.

    Args:
        plan: The plan.
        target: Path of an input, or the root of several leaves, of which the first is explained.
        axis: The axis.
    """
    leaf = leaves_of(plan, target, axis)[0]
    size, seen = leaf.sizes[axis], seen_sizes(leaf, axis)
    where = f"Axis {axis} of {leaf.path}"
    if size.is_static:
        return f"{where} is static, {size}. It was {size} in every call that had it ({_calls(seen)})."
    if size.variable is None:
        parts = [f"{name} was {_listed(plan.variable(name).seen)}" for name, _ in size.terms]
        return f"{where} is {size}. It was {_listed(seen)} in the calls, where {' and '.join(parts)}."
    variable = plan.variable(size.variable)
    sentences = [f"{where} is the variable {variable.name}.", f"It was {_listed(seen)} in the calls."]
    sentences.append(f"Evidence: {variable.evidence}.")
    others = [f"axis {i} of {path}" for path, i in plan.axes_of(variable.name) if (path, i) != (leaf.path, axis)]
    if others:
        sentences.append(f"Shared with {_shortened(others)}.")
    used = [f"axis {i} of {other.path}" for other, i in _uses(plan, variable.name)]
    if used:
        sentences.append(f"Part of the size of {_shortened(used)}.")
    if variable.minimum or variable.maximum is not None:
        most = "any" if variable.maximum is None else variable.maximum
        sentences.append(f"Allowed are {variable.minimum} to {most}.")
    return " ".join(sentences)


def _uses(plan: Plan, name: str) -> list[tuple[PlannedLeaf, int]]:
    return [
        (leaf, i)
        for leaf in plan.leaves
        for i, size in enumerate(leaf.sizes)
        if name in size.variables() and size.variable is None
    ]


def _listed(seen: Sizes) -> str:
    return ", ".join("absent" if size is None else str(size) for size in seen)


def _calls(seen: Sizes) -> str:
    count = sum(size is not None for size in seen)
    return f"{count} of {len(seen)}"


def _shortened(items: list[str]) -> str:
    return ", ".join(items) if len(items) <= 3 else f"{', '.join(items[:2])} and {len(items) - 2} more"
