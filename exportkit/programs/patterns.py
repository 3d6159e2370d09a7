"""Finds sizes of 0 and 1 that belong to the domain of a program, by running it in torch beside the model."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace

from exportkit.calls.call import Call
from exportkit.errors import ExportError
from exportkit.plan.conditions import SizeCondition
from exportkit.plan.leaves import Finding
from exportkit.plan.plan import Plan
from exportkit.plan.sizes import settled, solve_sizes, unseen_sizes
from exportkit.plan.small_sizes import (
    Pattern,
    at_pattern,
    larger_sizes,
    sizes_beside,
    small,
    small_patterns,
    smallest_sizes,
    varied_sizes,
)
from exportkit.probing.missing import beyond_rounding, completed_call
from exportkit.probing.simplify import as_simplified
from exportkit.probing.size_reads import SizeReads, size_reads
from exportkit.probing.sized_calls import calls_with_values, run_sized, scaled, sized_call, stepwise_outputs
from exportkit.programs.call_check import SmallSizes
from exportkit.programs.domain import Domain
from exportkit.programs.guards import TracedSizes
from exportkit.programs.program import TracedProgram
from exportkit.programs.turns import Affordable, Turn, Turns, fulfils
from exportkit.rewrites.table import DECIDES
from exportkit.running.compare import Difference, Tensors, compare_tensors
from exportkit.running.eager import EagerRunner
from exportkit.running.masks import find_mask, visible_by_shape
from exportkit.running.program import OtherWay, ProgramRunner
from exportkit.running.runner import compare_calls, recorded

_LARGEST_TRIED = 512
_SCALES = (0.03, 0.3, 4.0, -0.3, -1.0)  # of floating-point values


class ProgramProbe:
    """A program, run in torch, and the model that it was traced from.

    Args:
        traced: The program.
    """

    def __init__(self, traced: TracedProgram) -> None:
        self._traced = traced
        self._program = ProgramRunner(traced.program, traced.input_paths, traced.output_paths)
        self._eager = EagerRunner(traced.model, traced.method)
        self._known: dict[tuple[int, ...], str | None] = {}
        self._read: dict[tuple[int, ...], SizeReads | None] = {}
        self._settled: list[SizeReads] = []  # runs whose own decisions make no difference

    def difference(self, sizes: Mapping[str, int]) -> str | None:
        """Returns how the program departs from the model at these sizes: an empty string if it does not.

        Args:
            sizes: Sizes of all variables.

        Returns:
            The difference, or None if the model itself does not run, or goes a way that no recorded call went.
        """
        key = tuple(sizes.values())
        if key not in self._known:
            with warnings.catch_warnings(action="ignore"):  # at sizes that the user did not run
                self._known[key] = self._traced.sampled_answer(
                    lambda: self._difference(sizes), is_sure=lambda difference: difference == ""
                )
        return self._known[key]

    def _difference(self, sizes: Mapping[str, int]) -> str | None:
        traced = self._traced
        try:
            call = sized_call(traced.plan, traced.observation, traced.defaults, sizes)
        except Exception:  # there is no such call
            return None
        answered = self._answered(call)
        try:
            return None if answered is None else self._difference_in(answered)
        except OtherWay:
            return None

    def _answered(self, call: Call) -> Call | None:
        """The call with what the model returns; None if it raises, as for sizes that it does not accept."""
        try:
            made = run_sized(self._traced.plan, self._traced.model, self._traced.method, call)
        except Exception:
            return None
        return replace(call.with_tensors(made.tensors()), outputs=made.outputs, latency=made.latency)

    def _difference_in(self, full: Call) -> str:
        traced, difference = self._traced, self._outcome(full)
        if difference:  # the model may go on from a state only with one token at a time
            try:
                stepwise = stepwise_outputs(traced.plan, traced.model, traced.method, full)
            except Exception:
                return difference
            difference = difference if stepwise is None else self._outcome(full, stepwise)
        return difference

    def is_right_at_other_scales(self, sizes: Mapping[str, int]) -> bool:
        """Returns whether the program does what the model does for values of other scales, too.

        A few runs do not show that for a program that decides by values, or asserts how: it is False for these.

        Args:
            sizes: Sizes at which it does for usual values.
        """
        if any(name.startswith(DECIDES) for name in self._traced.rules):
            return False
        return self._agrees_at_other_scales(sizes)

    def is_right_on_other_ways(self, sizes: Mapping[str, int]) -> bool:
        """Returns whether a program does what the model does for values of other scales, if values may decide in it.

        What the model does at sizes of 0 and 1 is then not all run with usual values, and is in no condition.

        Args:
            sizes: Sizes at which it does for usual values.
        """
        return not self._traced.may_decide_by_values or self._agrees_at_other_scales(sizes)

    def _agrees_at_other_scales(self, sizes: Mapping[str, int]) -> bool:
        traced = self._traced

        def is_right(scale: float) -> bool:
            with warnings.catch_warnings(action="ignore"), contextlib.suppress(Exception):
                answered = self._answered(
                    scaled(sized_call(traced.plan, traced.observation, traced.defaults, sizes), scale)
                )
                return answered is None or not self._difference_in(answered)
            return True

        return traced.sampled_answer(lambda: all(map(is_right, _SCALES)), is_sure=lambda right: right)

    def by_values(self, sizes: Mapping[str, int]) -> Call | None:
        """Returns a call at sizes of 2 and more in which the program departs from the model, too, if there is one.

        Args:
            sizes: Sizes, some of which are 0 or 1, at which it departs.
        """
        return self._traced.sampled_answer(lambda: self._by_values(sizes), is_sure=lambda call: call is None)

    def _by_values(self, sizes: Mapping[str, int]) -> Call | None:
        traced = self._traced
        plan, observation, defaults = traced.plan, traced.observation, traced.defaults
        with warnings.catch_warnings(action="ignore"), contextlib.suppress(Exception):
            call = self._answered(sized_call(plan, observation, defaults, sizes))
            tried = [found for found in sizes_beside(plan, sizes, traced.sizes) if fulfils(traced.domain, (), found)]
            for other in calls_with_values(plan, observation, defaults, call, tried) if call is not None else ():
                answered = self._answered(other)
                if answered is not None and self._difference_in(answered):
                    return replace(answered, label=f"values of {SmallSizes(small(sizes))}")
        return None

    def limits(self, sizes: Mapping[str, int], domain: Domain) -> list[SizeCondition]:
        """Returns conditions for sizes like these, beyond which the program departs from the model, or may.

        The caller compares the model at these sizes. Code that also runs at the sizes of the trace is skipped, because
        the trace knows how it decides, unless it makes text of sizes.

        Args:
            sizes: Sizes of all variables, such as some that are 0 or 1.
            domain: The domain of the program.
        """
        start, of_trace = self._reads(sizes), self._reads(self._traced.sizes)
        if start is None:
            return []
        others = [f"{name} != {size}" for name, size in small(sizes).items()]
        found: list[SizeCondition] = []
        turns = Turns(replace(self._traced, domain=domain), self._reads, of_trace, self._settled)
        for turn in turns.of(start, sizes):
            if turn.sizes is not None:
                is_excluded = not all(condition.holds(turn.sizes) for condition in found)
                if is_excluded or not self.difference(turn.sizes):
                    continue
            limit = turn.limit(turn.kept if turn.is_near else self._last_right(turn, sizes))
            found.append(SizeCondition(" or ".join([*others, limit]), turn.place, own=True))
        self._settled += [] if found else [start]
        return found

    def _last_right(self, turn: Turn, sizes: Mapping[str, int]) -> int:
        """The last size of a variable before a turn at which the program does what the model does, by bisection."""
        right, wrong = turn.kept, turn.sizes[turn.name] if turn.sizes else turn.kept
        while abs(wrong - right) > 1:
            middle = (wrong + right) // 2
            other = settled(self._traced.plan, {**sizes, turn.name: middle})
            right, wrong = (right, middle) if self.difference(other) else (middle, wrong)
        return right

    def _reads(self, sizes: Mapping[str, int]) -> SizeReads | None:
        """What a run of its own reads: torch leaves out fast paths while sizes are noted."""
        traced, key = self._traced, tuple(sizes.values())

        def run() -> Call:
            call = sized_call(traced.plan, traced.observation, traced.defaults, sizes)
            return run_sized(traced.plan, traced.model, traced.method, call)

        if key not in self._read:
            with warnings.catch_warnings(action="ignore"):  # from sizes that the user did not run
                self._read[key] = traced.sampled_answer(lambda: size_reads(run))
        return self._read[key]

    def difference_in(self, call: Call) -> str:
        """Returns how the program departs from what a recorded call returned: an empty string if it does not.

        If the call leaves out inputs, the model may have taken a branch that it does not take if they are given, so a
        call of these sizes that gives all of them is compared as well.
        """
        traced, given = self._traced, call.tensors()
        found = self._outcome(completed_call(traced.plan, traced.observation, call, traced.defaults.values))
        if not found and any(leaf.path not in given for leaf in traced.plan.leaves):
            found = self.difference(solve_sizes(traced.plan, call.shapes())) or ""
        return found

    def _outcome(self, call: Call, returned: Tensors | None = None) -> str:
        joined, mask, run = self._traced.joined_outputs, find_mask(call.tensors()), self._eager
        beyond = beyond_rounding(lambda call: as_simplified(run(call), joined, ()), run.model)

        def compare(call: Call, expected: Tensors, got: Tensors) -> Iterator[Difference]:
            expected, got = as_simplified(expected, joined, ()), as_simplified(got, joined, ())
            for difference in beyond(call, expected, got):
                path = difference.path
                if difference.reason is None or mask is None or path not in got:
                    yield difference
                else:
                    visible = visible_by_shape(mask[1], tuple(expected[path].shape))
                    yield compare_tensors(path, expected[path], got[path], visible)

        expected = recorded(call) if returned is None else returned
        (outcome,) = compare_calls(lambda _: expected, self._program, [call], compare)
        if isinstance(outcome.error, OtherWay):
            raise outcome.error
        if outcome.error is not None:
            return f"the program raises {type(outcome.error).__name__}: {' '.join(str(outcome.error).split())[:160]}"
        return next((f"{wrong.path or 'output'}: {wrong.reason}" for wrong in outcome.wrong), "")


def sizes_of_calls(traced: TracedProgram) -> list[dict[str, int]]:
    """Returns the sizes of the variables in each recorded call."""
    return [solve_sizes(traced.plan, call.shapes()) for call in traced.observation.calls]


def with_recorded_patterns(traced: TracedProgram, domain: Domain, probe: ProgramProbe) -> Domain:
    """Returns the domain with the patterns of 0 and 1 in recorded calls, which belong to it in any case.

    Args:
        traced: The program.
        domain: Its domain.
        probe: The program and the model.

    Raises:
        ExportError: if the program decides by values, and does something else there than the model.
    """
    patterns: list[dict[str, int]] = []
    for sizes in sizes_of_calls(traced):
        pattern = small(sizes)
        if pattern and pattern not in patterns:
            patterns.append(pattern)
    found, limits = [], list[SizeCondition]()
    for pattern in patterns:
        at = at_pattern(traced.plan, traced.sizes, pattern)
        is_right = probe.difference(at) == ""
        if is_right and not probe.is_right_on_other_ways(at):
            raise ExportError(
                f"The exported graph serves less than the plan promises: {SmallSizes(pattern)} is left out.",
                got="another result for values of another scale",
                hint="observe and export calls of these sizes alone.",
            )
        found.append(SmallSizes(pattern, _waived(domain, at, probe) if is_right else ()))
        limits += probe.limits(at, domain) if is_right else []
    return replace(domain, patterns=tuple(found), conditions=(*domain.conditions, *limits))


def without_harmless(
    traced: TracedProgram, domain: Domain, probe: ProgramProbe, traced_sizes: TracedSizes
) -> tuple[Domain, list[dict[str, int]]]:
    """Returns the domain in which conditions that change nothing are waived, and sizes that break them.

    torch asks about sizes to choose between ways of computing the same, such as whether a tensor is contiguous. Such a
    condition is waived if the program returns what the model returns at sizes that break it. One that a line of the
    model asked for stays, because its other branch may compute anything, unless recorded calls took that branch too. If
    no branch changes a value, it is waived as well.

    Args:
        traced: The program.
        domain: The domain, with the patterns of recorded calls.
        probe: The program and the model.
        traced_sizes: The sizes as they were traced.
    """
    stated, implied = domain.conditions, traced_sizes.unstated()  # by what may be waived
    known = {condition.text for condition in stated}
    domain = replace(domain, conditions=(*stated, *(c for c in implied if c.text not in known)))
    recorded_wrong, recorded_right = set[str](), set[str]()
    for call, sizes in zip(traced.observation.calls, sizes_of_calls(traced), strict=True):
        broken = {*_broken(domain, sizes)}.difference(*(p.waived for p in domain.patterns if p.sizes == small(sizes)))
        if broken:
            (recorded_wrong if probe.difference_in(call) else recorded_right).update(broken)
    numbers_given = {condition.text for condition in domain.conditions if condition.gives_number}
    may_change, idle = {*traced_sizes.fixed(), *numbers_given, *recorded_wrong}, traced_sizes.idle()
    own = {condition.text for condition in stated if condition.own}
    asked = {
        condition.text: condition.numbers()
        for condition in stated
        if condition.text not in may_change and (not condition.own or condition.text in recorded_right - idle)
    }
    numbers = {n for found in asked.values() for n in found if 0 < n <= _LARGEST_TRIED}
    near = {size for n in numbers for size in (n, n + 1, n + 3, 2 * n)}
    crossing: dict[str, list[tuple[int, dict[str, int]]]] = {}
    affordable = Affordable(traced)
    for pattern in ({}, *(pattern.sizes for pattern in domain.patterns)) if asked else ():
        start = at_pattern(traced.plan, traced.sizes, pattern)
        small_alone = {*_broken(domain, start)} if pattern else set()
        for sizes in varied_sizes(traced.plan, start, sorted(near)):
            broken = {*_broken(domain, sizes)} - small_alone
            if broken <= asked.keys() and sizes in affordable:
                for text in broken:
                    crossing.setdefault(text, []).append((len(broken), sizes))
    harmless: dict[str, dict[str, int]] = {}  # with sizes that break it
    for text, found in crossing.items():
        fewest = min(count for count, _ in found)
        tried = [sizes for count, sizes in found if count == fewest]
        outcomes = [probe.difference(tried[position]) for position in (0, len(tried) // 2, -1)]
        is_right = "" in outcomes and not any(outcomes)
        if is_right:  # what it decides may matter for some values only
            at = tried[-1]
            is_right = probe.is_right_at_other_scales(at) if text in own else probe.is_right_on_other_ways(at)
        if is_right and not probe.limits(tried[-1], domain):
            harmless[text] = tried[-1]
    texts = {*harmless, *(idle - may_change)}
    waived = tuple([condition for condition in stated if condition.text in texts])
    kept = [condition for condition in domain.conditions if condition.text not in texts] if waived else stated
    return replace(domain, conditions=traced_sizes.tightest(kept), waived=waived), list(harmless.values())


def add_patterns(traced: TracedProgram) -> TracedProgram:
    """Returns the program with the patterns of 0 and 1 in its domain for which it returns what the model returns."""
    probe, plan, domain = ProgramProbe(traced), traced.plan, traced.domain
    found, limits = list[SmallSizes](), probe.limits(traced.sizes, domain)
    samples, suspects = list[Mapping[str, int]](), list[Call]()
    known = [dict(pattern.sizes) for pattern in domain.patterns]
    unseen = [dict(item.sizes) for item in unseen_sizes(plan, traced.sizes)]
    findings, failed, affordable = [], list[Pattern](), Affordable(traced)
    for pattern in small_patterns(plan):
        if pattern in known or any(_fails_with(plan, part, pattern) for part in failed):
            continue
        at = at_pattern(plan, traced.sizes, pattern)
        reason, waived = probe.difference(at), _waived(domain, at, probe)
        if reason is None:  # one row may have no room for the images of three
            others = [sizes for sizes in unseen if small(sizes) == pattern]
            others += [sizes for sizes in larger_sizes(plan, traced.sizes, pattern) if sizes in affordable]
            for at in others:
                reason = probe.difference(at) if fulfils(domain, waived, at) else None
                if reason is not None:
                    break
        if reason == "":
            larger = affordable.largest(domain, pattern, waived)
            smallest = smallest_sizes(plan, traced.sizes, pattern)
            others = [sizes for sizes in (smallest, larger) if sizes is not None and fulfils(domain, waived, sizes)]
            reason = next((text for sizes in others if (text := probe.difference(sizes))), "")
        if reason == "" and not probe.is_right_on_other_ways(at):
            reason = "values of another scale have another result"
        if reason == "":
            limits += probe.limits(at, domain)
            found.append(SmallSizes(pattern, waived))
            samples.append(at)
        elif reason is not None:
            failed.append(pattern)
            findings.append(_left_out(SmallSizes(pattern), reason))
            suspect = probe.by_values(at)
            suspects += [] if suspect is None else [suspect]
    extended = replace(domain, patterns=(*domain.patterns, *found), conditions=(*domain.conditions, *limits))
    plan = plan.with_findings(findings)
    return replace(traced, domain=extended, plan=plan, samples=tuple(samples), suspects=tuple(suspects))


def _fails_with(plan: Plan, part: Pattern, pattern: Pattern) -> bool:
    """Whether a pattern need not be tried, as a part of it failed: one variable of several that were always equal may.

    A mask of one row beside images of several is an example, where one row of each is right.
    """
    if not part.items() <= pattern.items():
        return False
    seen = {plan.variable(name).seen for name in part}
    return not any(plan.variable(name).seen in seen for name in pattern.keys() - part.keys())


def _left_out(pattern: SmallSizes, reason: str) -> Finding:
    text = f"the graph does not serve {pattern}: {reason}."
    return Finding("limit", str(pattern), text)


def _waived(domain: Domain, at: Mapping[str, int], probe: ProgramProbe) -> tuple[str, ...]:
    """The conditions that sizes of 0 and 1 may break if the program is right there.

    A number that code gets from other sizes, too, is not the same at all of these sizes, and may decide anything.
    """
    small_ones = small(at).keys()
    broken = [c for c in domain.broken(at) if not c.gives_number or c.variables() <= small_ones]
    if any(condition.own for condition in broken) and not probe.is_right_at_other_scales(at):
        broken = [condition for condition in broken if not condition.own]
    return tuple([condition.text for condition in broken])


def _broken(domain: Domain, sizes: Mapping[str, int]) -> tuple[str, ...]:
    return tuple([condition.text for condition in domain.broken(sizes)])
