"""Where error comes in. In come calls of modules in two runs, with distances; out go steps, each with a verdict.

Rounding makes some error at every step, and later steps carry it on, more or less amplified. So a step is judged by
its own error over that of all that it is computed from, and by what the element type and other steps of its kind make
usual.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from exportkit.module_traces.steps import Compared, Leaf, RawStep, Step, Verdict, raw_steps

# How many times the error of what it is computed from the error of a step may be.
JUMP = 8.0
# Rounding errors, in units of the element type, that a step may make by itself; and where another step of its kind made
# exactly the same of the same.
ROUNDING, REPRODUCED = 32.0, 16.0
# A largest difference may be this many times the root mean square of rounding errors.
PEAK = 16.0
# The part of all calls that must change their element type for it to be the way of the run, and at least how many.
_COMMON, _SEVERAL = 0.1, 3

_SEVERITY: tuple[Verdict, ...] = ("equal", "close", "carried", "unknown", "differs")


def judge(calls: Sequence[Compared]) -> tuple[Step, ...]:
    """Returns the steps in the order in which they happened, each judged.

    Args:
        calls: The calls in the order in which they started.
    """
    raw = list(raw_steps(calls))
    types, usual, inside = _Types(raw), _Usual(raw), _Inside(calls)
    return tuple(inside.looked_at(_judged(step, types, usual), step.exact_sources) for step in raw)


class _Usual:
    """What steps of a kind usually do: what they make of exact values, and of values with an error."""

    def __init__(self, steps: Sequence[RawStep]) -> None:
        self._reproduced: dict[tuple[str, ...], set[int]] = defaultdict(set)
        self._jumps: dict[tuple[str, ...], dict[int, float]] = defaultdict(dict)
        for step in steps:
            if not any(leaf.unit for leaf in step.leaves):
                continue
            if step.exact_sources and step.sources:
                if step.exact:
                    self._reproduced[step.kind].add(step.call)
                continue
            error = max(leaf.distance.rms for leaf in step.leaves)
            if step.base and math.isfinite(error):
                self._jumps[step.kind][step.call] = error / step.base

    def is_reproduced(self, step: RawStep) -> bool:
        """Whether other steps of this kind made the same of the same."""
        return bool(self._reproduced[step.kind] - {step.call})

    def jump(self, step: RawStep) -> float:
        """How much more than usual a step of this kind amplifies the errors of what it is computed from."""
        others = [jump for call, jump in self._jumps[step.kind].items() if call != step.call]
        return max(median(others), 1.0) if len(others) >= _SEVERAL else 1.0


class _Inside:
    """What is wrong inside of each call so far: a cache carries it out, which no call inside returns."""

    def __init__(self, calls: Sequence[Compared]) -> None:
        self._parents = {call.index: call.parent for call in calls}
        self._errors: dict[int | None, float] = {}

    def looked_at(self, step: Step, exact_sources: bool) -> Step:
        """Returns the step, as carried on if it is no worse than what is wrong inside of its module already."""
        if step.verdict != "differs":
            return step
        if not exact_sources and step.error <= JUMP * self._errors.get(step.owner, 0.0):
            verdicts: dict[str, Verdict] = {
                path: "carried" if verdict == "differs" else verdict for path, verdict in step.verdicts.items()
            }
            return replace(step, verdict="carried", reason="", verdicts=verdicts)
        owner: int | None = step.owner
        while owner is not None:
            self._errors[owner] = max(self._errors.get(owner, 0.0), step.error)
            owner = self._parents[owner]
        self._errors[None] = max(self._errors.get(None, 0.0), step.error)
        return step


class _Types:
    """Pairs of element types that are the way of these runs, and not that of a few modules."""

    def __init__(self, steps: Sequence[RawStep]) -> None:
        leaves = [leaf for step in steps if step.side == "outputs" for leaf in step.leaves if leaf.unit]
        self._counts = Counter(leaf.dtypes for leaf in leaves)
        self._most = self._counts.most_common(1)[0][0] if leaves else ("", "")
        self._unit = max((leaf.unit for leaf in leaves if leaf.dtypes == self._most), default=0.0)
        brought = Counter(leaf.dtypes for step in steps for leaf in step.leaves if self._is_new(leaf, step))
        enough = max(_SEVERAL, _COMMON * len(steps) / 2)
        self._common = {dtypes for dtypes, count in brought.items() if count >= enough} | {self._most}

    def are_wrong(self, leaf: Leaf, step: RawStep) -> bool:
        """Whether a step alone changes the element type, or makes it coarser where both runs have another one."""
        if leaf.dtypes in self._common or not self._is_new(leaf, step):
            return False
        return not leaf.same_type if self._most[0] == self._most[1] else leaf.unit > self._unit

    def _is_new(self, leaf: Leaf, step: RawStep) -> bool:
        return bool(leaf.unit) and all(source.dtypes != leaf.dtypes for source in step.sources)

    @property
    def unit(self) -> float:
        """The rounding error that is the way of these runs."""
        return self._unit


def _judged(step: RawStep, types: _Types, usual: _Usual) -> Step:
    limits = _limits(step, types.unit, usual)
    findings = [_finding(leaf, step, limits, types.are_wrong(leaf, step), usual) for leaf in step.leaves]
    worst = max(findings, key=lambda found: (_SEVERITY.index(found.verdict), found.excess), default=None)
    verdicts = {found.leaf.path: found.verdict for found in findings}
    if worst is None:
        return Step(step.owner, step.call, step.side, None, 0.0, step.base, "equal")
    error = worst.leaf.distance.rms
    return Step(
        step.owner, step.call, step.side, worst.leaf, error, step.base, worst.verdict, worst.reason, verdicts
    )  # fmt: skip


@dataclass(frozen=True)
class _Finding:
    """A judged tensor."""

    leaf: Leaf
    verdict: Verdict
    excess: float
    reason: str = ""


def _finding(leaf: Leaf, step: RawStep, limits: _Limits, retyped: bool, usual: _Usual) -> _Finding:
    far = leaf.distance
    if retyped:
        return _Finding(leaf, "differs", math.inf, f"element type {leaf.dtypes[1]} instead of {leaf.dtypes[0]}")
    excess = _excess(leaf, step, limits)
    if excess > 1:
        return _Finding(leaf, "differs", excess, far.problem or _reason(step, leaf))
    if far.exact:
        return _Finding(leaf, "equal", 0.0)
    if not far.values and step.exact_sources and usual.is_reproduced(step):
        return _Finding(leaf, "differs", math.inf, "other values, by their hash")
    if not far.values and (far.rms == 0.0 or far.reordered):
        return _Finding(leaf, "unknown", 0.0, "other values, or another order of them")
    return _Finding(leaf, "carried" if step.base >= far.rms / JUMP else "close", excess)


@dataclass(frozen=True)
class _Limits:
    """How large an error may be: in units of rounding, where nothing else had one, and absolute ones."""

    rms: float
    peak: float


def _limits(step: RawStep, unit: float, usual: _Usual) -> _Limits:
    own = max([leaf.unit for leaf in step.leaves] + [unit])
    if step.exact_sources and step.sources and usual.is_reproduced(step):
        return _Limits(REPRODUCED * own, PEAK * REPRODUCED * own)
    factor = JUMP * usual.jump(step)
    peak = max((leaf.distance.peak for leaf in step.sources), default=0.0)
    rms = max(factor * step.base, ROUNDING * own)
    return _Limits(rms, max(factor * peak, PEAK * rms))


def _excess(leaf: Leaf, step: RawStep, limits: _Limits) -> float:
    """How many times what it may be the error of a tensor is."""
    far = leaf.distance
    if far.problem is not None:
        return 0.5 if any(source.distance.problem for source in step.sources) else math.inf
    if far.exact:
        return 0.0
    if math.isinf(far.rms):
        return 0.5 if any(math.isinf(source.distance.rms) for source in step.sources) else math.inf
    if not leaf.unit:  # a decision, such as a token, can turn on the smallest difference
        return math.inf if step.exact_sources else 0.5
    return max(_part(far.rms, limits.rms), _part(far.peak, limits.peak))


def _reason(step: RawStep, leaf: Leaf) -> str:
    if math.isinf(leaf.distance.rms):
        return "NaN or infinite in one of the runs only"
    return f"computed from {'exact' if step.exact_sources else 'close'} values"


def _part(value: float, limit: float) -> float:
    return value / limit if limit else (math.inf if value else 0.0)
