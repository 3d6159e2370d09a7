"""Where a graph leaves its model: in come calls of modules with distances, and outputs known to be wrong; out go steps.

What is inside of a module that makes the same of the same is no difference: experts can take their tokens in another
order. And outputs that differ have a first step, also where each step adds no more than it may.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from exportkit.module_traces.judge import JUMP, PEAK, ROUNDING, judge
from exportkit.module_traces.steps import Compared, Leaf, Step

GREW = "no step adds more than steps of its kind may: here the error comes near that of the outputs"
CHOSE = "another choice, made of values that are the same up to rounding"


def judged(calls: Sequence[Compared], complete: Collection[int]) -> tuple[Step, ...]:
    """Returns the judged steps, without those inside of modules that make the same of the same.

    Args:
        calls: The calls in the order in which they started.
        complete: ``index`` of each call whose outputs are all there.
    """
    by_index = {call.index: call for call in calls}
    while True:
        steps = judge(calls)
        around = (call for step in steps if step.verdict == "differs" for call in _around(step, by_index))
        right = next((call for call in around if call.index in complete and _makes_the_same(call)), None)
        if right is None:
            return steps
        calls = _without_inside(calls, right.index)


def _around(step: Step, by_index: Mapping[int, Compared]) -> Iterator[Compared]:
    """The calls inside of which a step makes the same in another order, but the outermost."""
    index = step.owner
    while index is not None and _is_reordered(step) and (call := by_index[index]).parent is not None:
        if index != step.call:
            yield call
        index = call.parent


def _is_reordered(step: Step) -> bool:
    return step.leaf is not None and step.leaf.distance.reordered


def first_step(steps: Sequence[Step], calls: Sequence[Compared], wrong: Collection[str]) -> Step | None:
    """Returns the step where the first difference begins, or None if nothing differs.

    Args:
        steps: The judged steps.
        calls: The calls that they are about.
        wrong: Paths of outputs of the model that are known to be wrong.
    """
    found = sorted((step for step in steps if step.verdict == "differs"), key=_is_reordered)
    if found:  # what is in another order can be so by right
        return found[0]
    outputs = [leaf for call in calls if call.parent is None for leaf in call.outputs]
    errors = [leaf.distance.rms for leaf in outputs if _is_wrong(leaf, is_known(leaf.path, wrong))]
    return next(_reaching(steps, calls, max(errors) / JUMP), None) if errors else None


def is_known(path: str, wrong: Collection[str]) -> bool:
    """Returns whether a tensor is one of those that are known, or in one of them."""
    return any(path == name or path.startswith((f"{name}.", f"{name}[")) for name in wrong)


def _reaching(steps: Sequence[Step], calls: Sequence[Compared], floor: float) -> Iterator[Step]:
    """Steps whose error is not below that; of what is chosen, another choice is enough."""
    by_index = {call.index: call for call in calls}
    for step in steps:
        call = by_index[step.call]
        for leaf in call.inputs if step.side == "inputs" else call.outputs:
            if not leaf.distance.exact and (leaf.distance.rms >= floor or not leaf.unit):
                reason = GREW if leaf.unit else CHOSE
                yield replace(step, leaf=leaf, error=leaf.distance.rms, verdict="differs", reason=reason)


def _is_wrong(leaf: Leaf, known: bool) -> bool:
    """Whether an output is off by more than rounding where it is known to be wrong, else by half of its digits."""
    far = leaf.distance
    if not leaf.unit:
        return not far.exact
    limit = ROUNDING * leaf.unit
    return far.rms > math.sqrt(leaf.unit) or (known and (far.rms > limit or far.peak > PEAK * limit))


def _makes_the_same(call: Compared) -> bool:
    """Whether the outputs of a call are as close as its inputs are, or as rounding lets them be."""
    own = max((leaf.unit for leaf in call.outputs), default=0.0)
    limit = max([ROUNDING * own, *(JUMP * leaf.distance.rms for leaf in call.inputs if leaf.unit)])
    far = [leaf.distance for leaf in call.outputs]
    return bool(far) and all(d.problem is None and d.rms <= limit and d.peak <= PEAK * limit for d in far)


def _without_inside(calls: Sequence[Compared], index: int) -> tuple[Compared, ...]:
    inside = {index}
    for call in calls:
        if call.parent in inside:
            inside.add(call.index)
    return tuple(call for call in calls if call.index == index or call.index not in inside)
