"""What a person should know about the inputs before the model is exported, besides the sizes."""

from __future__ import annotations

from exportkit.calls.observation import Observation
from exportkit.plan.leaves import Finding
from exportkit.plan.plan import Plan

_SHOWN = 4  # inputs that one finding names


def audit(plan: Plan, observation: Observation) -> list[Finding]:
    """Returns findings: inputs that no call gave, or that are never read, and axes that were seen with one size only.

    Args:
        plan: The plan, to which the findings belong.
        observation: The calls.
    """
    return [*_never_given(observation), *_simplified(plan), *one_size(plan)]


def _never_given(observation: Observation) -> list[Finding]:
    given = {name for call in observation.calls for name in call.arguments if call.has(name)}
    missing = [name for name in observation.signature.plain() if name not in given | observation.removed]
    if not missing:
        return []
    names = ", ".join(missing)
    return [Finding("never given", names, f"given in no call, so no input of the graph: {names}.")]


def _simplified(plan: Plan) -> list[Finding]:
    lists = [Finding("joined", path, f"{path} is one input: its tensors, as many as are given, one after the other.")
             for path in plan.joined]  # fmt: skip
    if not plan.unused:
        return lists
    names = ", ".join(plan.unused)
    return [*lists, Finding("never read", names, f"given, but never read, so no input of the graph: {names}.")]


def one_size(plan: Plan) -> list[Finding]:
    """Returns what is static of inputs, but for caches and sizes of 1: heads, states and broadcasts are meant to be."""
    caches = {leaf.argument for leaf in plan.leaves if leaf.growing is not None}
    axes = [
        (leaf.path, [axis for axis, size in enumerate(leaf.sizes) if size.is_static and size.constant != 1])
        for leaf in plan.leaves
        if leaf.argument not in caches
    ]
    texts = [f"{path} axis {', '.join(map(str, found))}" for path, found in axes if found]
    if not texts:
        return []
    more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    where = "; ".join(texts[:_SHOWN]) + more
    return [Finding("one size", where, f"seen with one size only, so static: {where}.")]
