"""Finds sizes of 0 and 1 that belong to the domain of a program, by running it in torch beside the model."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from exportkit.errors import ExportError
from exportkit.plan.conditions import SizeCondition
from exportkit.plan.leaves import Finding
from exportkit.plan.plan import Plan
from exportkit.plan.sizes import unseen_sizes
from exportkit.plan.small_sizes import (
    Pattern,
    at_pattern,
    larger_sizes,
    small,
    small_patterns,
    smallest_sizes,
    varied_sizes,
)
from exportkit.plan.solved_sizes import solve_sizes
from exportkit.programs.call_check import SmallSizes
from exportkit.programs.domain import Domain
from exportkit.programs.guards import TracedSizes
from exportkit.programs.program import TracedProgram
from exportkit.programs.program_probe import ProgramProbe
from exportkit.programs.size_branches import Affordable, fulfils
from exportkit.rewrites.model_code import is_fitting, is_idle

_LARGEST_TRIED = 512


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
        reason = _decided_by_values(at, probe) if is_right else ""
        if reason:
            raise ExportError(
                f"The exported graph serves less than the plan promises: it does not cover {SmallSizes(pattern)}.",
                got=reason,
                hint="record calls with these sizes separately, and export them.",
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
    model asked for stays, because its other branch may compute anything, unless recorded calls took that branch too, or
    the line only cuts or pads tensors to sizes that they may have. If no branch changes a value, it is waived as well.

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
    may_change, idle = {*traced_sizes.fixed(), *numbers_given, *recorded_wrong}, traced_sizes.of_lines(is_idle)
    own = {condition.text for condition in domain.conditions if condition.own}
    may_be_waived = (recorded_right - idle) | traced_sizes.of_lines(is_fitting)
    asked = {
        condition.text: condition.numbers()
        for condition in domain.conditions
        if condition.text not in may_change and (not condition.own or condition.text in may_be_waived)
    }
    harmless: dict[str, dict[str, int]] = {}  # with sizes that break it
    for text, tried in _crossings(traced, domain, asked).items():
        places = sorted({place * (len(tried) - 1) // 3 for place in range(4)})
        outcomes = [probe.difference(tried[place]) for place in places]
        is_right = "" in outcomes and not any(outcomes)
        if is_right:  # what it decides may matter for some values only
            at = min(tried, key=lambda sizes: math.prod(sizes.values()))
            is_right = probe.is_right_at_other_scales(at) if text in own else probe.is_right_in_other_branches(at)
            if is_right and not probe.untraced_effect(at) and not probe.limits(at, domain):
                harmless[text] = at
    texts = {*harmless, *(idle - may_change)}
    waived = tuple([condition for condition in stated if condition.text in texts])
    kept = [condition for condition in domain.conditions if condition.text not in texts] if waived else stated
    return replace(domain, conditions=traced_sizes.tightest(kept), waived=waived), list(harmless.values())


def _crossings(
    traced: TracedProgram, domain: Domain, asked: Mapping[str, Collection[int]]
) -> dict[str, list[dict[str, int]]]:
    """Sizes that break each of some conditions, together with as few of the others as possible.

    Args:
        traced: The program.
        domain: Its domain.
        asked: The numbers in each condition, by its text.
    """
    numbers = {n for found in asked.values() for n in found if 0 < n <= _LARGEST_TRIED}
    near = sorted({size for n in numbers for size in (n, n + 1, n + 3, 2 * n)})
    crossing: dict[str, list[tuple[int, dict[str, int]]]] = {}
    affordable = Affordable(traced)
    for pattern in ({}, *(pattern.sizes for pattern in domain.patterns)) if asked else ():
        start = at_pattern(traced.plan, traced.sizes, pattern)
        least = smallest_sizes(traced.plan, traced.sizes, pattern)  # few tokens that fit beside few cached ones
        small_alone = {*_broken(domain, start)} if pattern else set()
        for sizes in (least, *varied_sizes(traced.plan, start, near), *varied_sizes(traced.plan, least, near)):
            broken = {*_broken(domain, sizes)} - small_alone
            if broken <= asked.keys() and sizes in affordable:
                for text in broken:
                    crossing.setdefault(text, []).append((len(broken), sizes))
    fewest = {text: min(count for count, _ in found) for text, found in crossing.items()}
    return {text: [sizes for count, sizes in found if count == fewest[text]] for text, found in crossing.items()}


def add_patterns(traced: TracedProgram) -> TracedProgram:
    """Returns the program with the patterns of 0 and 1 in its domain for which it returns what the model returns."""
    probe, plan, domain = ProgramProbe(traced), traced.plan, traced.domain
    found, limits = list[SmallSizes](), probe.limits(traced.sizes, domain)
    samples, suspects = list[Mapping[str, int]](), [call for call in [probe.by_untraced_branch()] if call is not None]
    known = [dict(pattern.sizes) for pattern in domain.patterns]
    unseen = [dict(item.sizes) for item in unseen_sizes(plan, traced.sizes)]
    findings, failed, affordable = [], list[Pattern](), Affordable(traced)
    for pattern in known:  # which were asked for when the program was made
        probe.settle_branches(at_pattern(plan, traced.sizes, pattern))
    for pattern in small_patterns(plan):
        if pattern in known or any(_fails_with(plan, part, pattern) for part in failed):
            continue
        at = at_pattern(plan, traced.sizes, pattern)
        if small(at) != pattern:  # no call has these sizes, such as one row for two images
            continue
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
        reason = _decided_by_values(at, probe) if reason == "" else reason
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


def _decided_by_values(at: Mapping[str, int], probe: ProgramProbe) -> str:
    """Why values may decide at sizes at which the program does what the model does, in words; empty if they do not."""
    if not probe.is_right_in_other_branches(at):
        return "the result differs for other values"
    return probe.untraced_effect(at)


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
