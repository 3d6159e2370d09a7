"""Attributes the error between two runs to the steps that introduce it.

Rounding makes some error at every step, and later steps carry it on, more or less amplified. So a step is judged by its
own error relative to the error of its inputs, and by the error that is usual for its dtype and for other steps of its
kind.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from exportkit.module_traces.error_steps import ComparedCall, ErrorStep, Step, TensorPair, Verdict, steps_of
from exportkit.plan.leaves import is_below

# The thresholds are measured on the four small models of tests/module_traces/faults.py: 93 pairs of runs without a
# fault (other dtypes, attention kernels, padding), and 50 faults. With each threshold, one at a time, anywhere in the
# range given below, every fault is attributed to its module, and nothing differs in the pairs without one. The values
# are near the middle of the ranges, as deeper models add up more rounding and amplify it more.

# How many times the error of its sources the error of a step may be (1.5 to 64). Without a fault, 90 % of the steps
# amplify it 1.2 times at most, 99.9 % 3.1 times.
JUMP = 8.0
# The rounding errors, in units of the dtype, that a step may make by itself (2 to 512). From exact sources, steps
# without a fault make 2 at most.
ROUNDING = 32.0
# The same where another step of its kind returned exactly the same for the same sources (1 to 64).
REPRODUCED = 16.0
# How many times the root mean square of rounding errors the largest one may be (1 to 256). Without a fault it is 4
# times as large in the median, 13 times at most in 99 % of the steps, and 24 times at most.
PEAK = 16.0
# A pair of dtypes is usual if this part of all calls introduce it (0.01 to 0.5), and at least so many (1 to 8): a port
# that computes its norms in float32 does so in each block, and a module that lost its dtype is alone. The median of
# what steps of a kind do needs as many.
_COMMON, _SEVERAL = 0.1, 3

GREW = "no single step adds more error than its kind may: here it approaches the error of the outputs"
CHOSE = "a different choice among values that are equal up to rounding"
_SEVERITY: tuple[Verdict, ...] = ("equal", "close", "carried", "unknown", "differs")


def attribute_error(calls: Sequence[ComparedCall], complete: Collection[int] = ()) -> tuple[ErrorStep, ...]:
    """Returns the steps in the order in which they happened, each with a verdict.

    Steps inside a module that returns the same for the same inputs are left out where they only take the same elements
    in another order, as experts do with their tokens: that is not a difference.

    Args:
        calls: The calls in the order in which they began.
        complete: ``index`` of each call whose outputs are all compared, so that it can be known to return the same.
    """
    by_index = {call.index: call for call in calls}
    while True:
        steps = list(steps_of(calls))
        dtypes, usual, inside = _UsualDtypes(steps), _UsualErrors(steps), _FaultsInside(calls)
        found = tuple(inside.looked_at(_attributed(step, dtypes, usual), step.exact_sources) for step in steps)
        around = (call for step in found if step.verdict == "differs" for call in _around(step, by_index))
        right = next((call for call in around if call.index in complete and _returns_the_same(call)), None)
        if right is None:
            return found
        calls = _without_inside(calls, right.index)


def first_step(steps: Sequence[ErrorStep], calls: Sequence[ComparedCall], wrong: Collection[str]) -> ErrorStep | None:
    """Returns the step where the first difference begins, or None if nothing differs.

    Outputs that differ always have a first step, even if no step adds more than its limit.

    Args:
        steps: The steps of the calls.
        calls: The calls.
        wrong: Paths of outputs of the model that are known to be wrong.
    """
    found = sorted((step for step in steps if step.verdict == "differs"), key=_is_reordered)
    if found:  # another order can be legitimate, so it comes last
        return found[0]
    outputs = [pair for call in calls if call.parent is None for pair in call.outputs]
    errors = [pair.distance.rms for pair in outputs if _is_wrong(pair, is_known(pair.path, wrong))]
    if not errors:
        return None
    by_index = {call.index: call for call in calls}
    for step in steps:
        for pair in by_index[step.call].side(step.side):
            # where the error approaches that of the outputs; integers only have to differ
            if not pair.distance.exact and (pair.distance.rms >= max(errors) / JUMP or not pair.unit):
                reason = GREW if pair.unit else CHOSE
                return replace(step, pair=pair, error=pair.distance.rms, verdict="differs", reason=reason)
    return None


def is_known(path: str, wrong: Collection[str]) -> bool:
    """Returns whether a tensor is known to be wrong, or part of a value that is."""
    return any(is_below(path, name) for name in wrong)


class _UsualErrors:
    """What steps of a kind usually do: what they make of exact values, and of values with an error."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._reproduced: dict[tuple[str, ...], set[int]] = defaultdict(set)
        self._jumps: dict[tuple[str, ...], dict[int, float]] = defaultdict(dict)
        for step in steps:
            if not any(pair.unit for pair in step.pairs):
                continue
            if step.exact_sources and step.sources:
                if all(pair.exact for pair in step.pairs):
                    self._reproduced[step.kind].add(step.call)
                continue
            error = max(pair.distance.rms for pair in step.pairs)
            if step.base and math.isfinite(error):
                self._jumps[step.kind][step.call] = error / step.base

    def is_reproduced(self, step: Step) -> bool:
        """Whether other steps of this kind returned the same for the same sources."""
        return bool(self._reproduced[step.kind] - {step.call})

    def jump(self, step: Step) -> float:
        """How many times steps of this kind usually amplify the error of their sources; 1 if that is not known."""
        others = [jump for call, jump in self._jumps[step.kind].items() if call != step.call]
        return max(median(others), 1.0) if len(others) >= _SEVERAL else 1.0


class _FaultsInside:
    """The largest error that was introduced inside each call so far: a cache can carry it out of the module."""

    def __init__(self, calls: Sequence[ComparedCall]) -> None:
        self._parents = {call.index: call.parent for call in calls}
        self._errors: dict[int | None, float] = {}

    def looked_at(self, step: ErrorStep, exact_sources: bool) -> ErrorStep:
        """Returns the step, as carried if its error is no larger than one that was introduced inside its module."""
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


class _UsualDtypes:
    """Pairs of dtypes that many modules of these runs return, and not a few only.

    Attributes:
        unit: The rounding error of the most frequent pair.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        outputs = [pair for step in steps if step.side == "outputs" for pair in step.pairs if pair.unit]
        counts = Counter(pair.dtypes for pair in outputs)
        self._most = counts.most_common(1)[0][0] if outputs else ("", "")
        self.unit = max((pair.unit for pair in outputs if pair.dtypes == self._most), default=0.0)
        new = Counter(pair.dtypes for step in steps for pair in step.pairs if self._is_new(pair, step))
        enough = max(_SEVERAL, _COMMON * len(steps) / 2)
        self._common = {dtypes for dtypes, count in new.items() if count >= enough} | {self._most}

    def are_wrong(self, pair: TensorPair, step: Step) -> bool:
        """Whether a step alone changes the dtype, or makes it coarser where the runs have different dtypes."""
        if pair.dtypes in self._common or not self._is_new(pair, step):
            return False
        return pair.dtypes[0] != pair.dtypes[1] if self._most[0] == self._most[1] else pair.unit > self.unit

    def _is_new(self, pair: TensorPair, step: Step) -> bool:
        return bool(pair.unit) and all(source.dtypes != pair.dtypes for source in step.sources)


@dataclass(frozen=True)
class _Finding:
    """The verdict on a tensor, and the error as a multiple of its limit."""

    pair: TensorPair
    verdict: Verdict
    excess: float
    reason: str = ""


def _attributed(step: Step, dtypes: _UsualDtypes, usual: _UsualErrors) -> ErrorStep:
    reproduced = step.exact_sources and usual.is_reproduced(step)
    own = max([pair.unit for pair in step.pairs] + [dtypes.unit])
    if reproduced and step.sources:
        rms = REPRODUCED * own
        peak = PEAK * rms
    else:
        factor = JUMP * usual.jump(step)
        rms = max(factor * step.base, ROUNDING * own)
        peak = max(factor * max((pair.distance.peak for pair in step.sources), default=0.0), PEAK * rms)

    def finding(pair: TensorPair) -> _Finding:
        far = pair.distance
        if dtypes.are_wrong(pair, step):
            return _Finding(pair, "differs", math.inf, f"dtype {pair.dtypes[1]} instead of {pair.dtypes[0]}")
        excess = _excess(pair, step, rms, peak)
        if excess > 1:
            reason = f"computed from {'exact' if step.exact_sources else 'close'} values"
            if math.isinf(far.rms):
                reason = "NaN or infinite in only one of the runs"
            return _Finding(pair, "differs", excess, far.problem or reason)
        if far.exact:
            return _Finding(pair, "equal", 0.0)
        if not far.values and reproduced:
            return _Finding(pair, "differs", math.inf, "different values, by their hash")
        if not far.values and (far.rms == 0.0 or far.reordered):
            return _Finding(pair, "unknown", 0.0, "different values, or the same ones in a different order")
        return _Finding(pair, "carried" if step.base >= far.rms / JUMP else "close", excess)

    findings = [finding(pair) for pair in step.pairs]
    worst = max(findings, key=lambda found: (_SEVERITY.index(found.verdict), found.excess), default=None)
    if worst is None:
        return ErrorStep(step.owner, step.call, step.side, None, 0.0, step.base, "equal")
    verdicts = {found.pair.path: found.verdict for found in findings}
    error = worst.pair.distance.rms
    return ErrorStep(
        step.owner, step.call, step.side, worst.pair, error, step.base, worst.verdict, worst.reason, verdicts
    )


def _excess(pair: TensorPair, step: Step, rms: float, peak: float) -> float:
    """The error of a tensor as a multiple of its limits."""
    far = pair.distance
    if far.problem is not None:
        return 0.5 if any(source.distance.problem for source in step.sources) else math.inf
    if far.exact:
        return 0.0
    if math.isinf(far.rms):
        return 0.5 if any(math.isinf(source.distance.rms) for source in step.sources) else math.inf
    if not pair.unit:  # a decision, such as a token, can turn on the smallest difference
        return math.inf if step.exact_sources else 0.5
    return max(
        value / limit if limit else (math.inf if value else 0.0) for value, limit in ((far.rms, rms), (far.peak, peak))
    )


def _is_reordered(step: ErrorStep) -> bool:
    return step.pair is not None and step.pair.distance.reordered


def _around(step: ErrorStep, by_index: Mapping[int, ComparedCall]) -> Iterator[ComparedCall]:
    """The calls inside which a step computes the same elements in another order, except the outermost."""
    index = step.owner
    while index is not None and _is_reordered(step) and (call := by_index[index]).parent is not None:
        if index != step.call:
            yield call
        index = call.parent


def _is_wrong(pair: TensorPair, known: bool) -> bool:
    """Whether an output is off by more than rounding if it is known to be wrong, else by half of its digits."""
    far = pair.distance
    if not pair.unit:
        return not far.exact
    limit = ROUNDING * pair.unit
    return far.rms > math.sqrt(pair.unit) or (known and (far.rms > limit or far.peak > PEAK * limit))


def _returns_the_same(call: ComparedCall) -> bool:
    """Whether the outputs of a call are as close as its inputs are, or as rounding allows."""
    own = max((pair.unit for pair in call.outputs), default=0.0)
    limit = max([ROUNDING * own, *(JUMP * pair.distance.rms for pair in call.inputs if pair.unit)])
    far = [pair.distance for pair in call.outputs]
    return bool(far) and all(d.problem is None and d.rms <= limit and d.peak <= PEAK * limit for d in far)


def _without_inside(calls: Sequence[ComparedCall], index: int) -> tuple[ComparedCall, ...]:
    inside = {index}
    for call in calls:
        if call.parent in inside:
            inside.add(call.index)
    return tuple(call for call in calls if call.index == index or call.index not in inside)
