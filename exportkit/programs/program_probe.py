"""A program and the model that it was traced from, run in torch side by side to see where they agree.

At other sizes, and for other values of tensors, the model may also run code that was not traced.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from exportkit.calls.call import Call
from exportkit.errors import ArgumentError, described
from exportkit.plan.conditions import SizeCondition
from exportkit.plan.sizes import settled
from exportkit.plan.small_sizes import sizes_beside, small
from exportkit.plan.solved_sizes import solve_sizes
from exportkit.probing.effects import written_arguments
from exportkit.probing.missing import beyond_rounding
from exportkit.probing.other_values import scaled, with_other_values
from exportkit.probing.simplify import as_simplified
from exportkit.probing.size_reads import SizeReads, size_reads
from exportkit.probing.sized_calls import calls_with_values, stepwise_outputs
from exportkit.programs.call_check import SmallSizes
from exportkit.programs.domain import Domain
from exportkit.programs.program import TracedProgram
from exportkit.programs.size_branches import SizeBranch, SizeBranchSearch, fulfils
from exportkit.rewrites.model_code import Place, line_text
from exportkit.rewrites.table import ARRAYS, DECIDES
from exportkit.running.compare import Difference, Tensors
from exportkit.running.masks import Padding
from exportkit.running.program import UnrecordedPath
from exportkit.running.runner import compare_calls, recorded

_SCALES = (0.03, 0.3, 4.0, -0.3, -1.0)  # of floating-point values


class ProgramProbe:
    """A program, run in torch, and the model that it was traced from.

    Args:
        traced: The program.
    """

    def __init__(self, traced: TracedProgram) -> None:
        self._traced = traced
        self._program = traced.runner
        self._known: dict[tuple[int, ...], str | None] = {}
        self._read: dict[tuple[int, ...], SizeReads | None] = {}
        self._settled: list[SizeReads] = []  # runs whose own decisions make no difference
        self._branching: list[SizeReads] = []  # runs whose branches on values make no difference

    def difference(self, sizes: Mapping[str, int]) -> str | None:
        """Returns how the program departs from the model at these sizes: an empty string if it does not.

        Args:
            sizes: Sizes of all variables.

        Returns:
            The difference, or None if the model itself does not run, or takes a branch that no recorded call took.
        """
        key = tuple(sizes.values())
        if key not in self._known:
            with _quiet():
                self._known[key] = self._traced.sampled_answer(
                    lambda: self._difference(sizes), is_sure=lambda difference: difference == ""
                )
        return self._known[key]

    def _difference(self, sizes: Mapping[str, int]) -> str | None:
        traced = self._traced
        try:
            call = traced.sized_call(sizes)
        except Exception:  # no call has these sizes
            return None
        answered = self._answered(call)
        try:
            return None if answered is None else self._difference_in(answered)
        except UnrecordedPath:
            return None

    def _answered(self, call: Call) -> Call | None:
        """The call with what the model returns; None if it raises, as for sizes that it does not accept."""
        try:
            made = self._traced.answered(call)
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

    def is_right_in_other_branches(self, sizes: Mapping[str, int]) -> bool:
        """Returns whether a program does what the model does for values of other scales, if values may decide in it.

        What the model does at sizes of 0 and 1 is then not all run with usual values, and is in no condition.

        Args:
            sizes: Sizes at which it does for usual values.
        """
        return not self._traced.may_decide_by_values or self._agrees_at_other_scales(sizes)

    def _agrees_at_other_scales(self, sizes: Mapping[str, int]) -> bool:
        traced = self._traced

        def is_right(scale: float) -> bool:
            with _quiet(), contextlib.suppress(Exception):
                answered = self._answered(scaled(traced.sized_call(sizes), scale))
                return answered is None or not self._difference_in(answered)
            return True

        return traced.sampled_answer(lambda: all(map(is_right, _SCALES)), is_sure=lambda right: right)

    def untraced_effect(self, sizes: Mapping[str, int]) -> str:
        """Returns what untraced code at these sizes may do that the program does not, in words; empty if nothing.

        It may branch on values of which only some are known, or write to arguments.

        Args:
            sizes: Sizes at which the program does what the model does.
        """
        start, of_trace = self._reads(sizes), self._reads(self._traced.sizes)
        known = [reads for reads in (of_trace, *self._branching) if reads is not None]
        if start is None:
            return ""
        found = self._traced.sampled_answer(
            lambda: self._untraced_effect(sizes, start, known), is_sure=lambda reason: reason == ""
        )
        self._branching += [] if found else [start]
        return found

    def _untraced_effect(self, sizes: Mapping[str, int], start: SizeReads, known: Sequence[SizeReads]) -> str:
        traced = self._traced

        def compared(call: Call, forced: Mapping[Place, bool]) -> tuple[str, SizeReads | None]:
            def difference() -> str:
                answered = self._answered(call)
                return "" if answered is None else self._difference_in(answered)

            reads, found = size_reads(difference, forced)  # none if the program refuses the call
            return found or "", reads

        with _quiet(), contextlib.suppress(ArgumentError):
            call = traced.sized_call(sizes)
            return untraced_write(traced, call, start, known) or value_branch(call, start, known, compared)
        return ""

    def settle_branches(self, sizes: Mapping[str, int]) -> None:
        """Marks branches on values in the code that runs at these sizes as harmless."""
        reads = self._reads(sizes)
        self._branching += [] if reads is None else [reads]

    def by_untraced_branch(self) -> Call | None:
        """Returns a call at the sizes of the trace in which the program departs from the model, if there is one.

        It is asked for if code branches on values, or reads numbers, and the program does not: what code does while it
        is traced need not be what it does in eager mode.
        """
        traced, reads = self._traced, self._reads(self._traced.sizes)
        if reads is None or not (reads.branches or reads.numbers) or traced.may_decide_by_values:
            return None
        return traced.sampled_answer(self._by_untraced_branch, is_sure=lambda call: call is None)

    def _by_untraced_branch(self) -> Call | None:
        traced = self._traced
        is_exact = ARRAYS.name not in traced.rules  # nothing shows how numpy rounds
        for other in with_other_values(traced.sized_call(traced.sizes), of_all_magnitudes=is_exact):
            with _quiet(), contextlib.suppress(UnrecordedPath):
                answered = self._answered(other)
                if answered is not None and self._difference_in(answered):
                    return replace(answered, label="other values")
        return None

    def by_values(self, sizes: Mapping[str, int]) -> Call | None:
        """Returns a call at sizes of 2 and more in which the program departs from the model, too, if there is one.

        Args:
            sizes: Sizes, some of which are 0 or 1, at which it departs.
        """
        return self._traced.sampled_answer(lambda: self._by_values(sizes), is_sure=lambda call: call is None)

    def _by_values(self, sizes: Mapping[str, int]) -> Call | None:
        traced = self._traced
        plan, observation, defaults = traced.plan, traced.observation, traced.defaults
        with _quiet(), contextlib.suppress(Exception):
            call = self._answered(traced.sized_call(sizes))
            tried = [found for found in sizes_beside(plan, sizes, traced.sizes) if fulfils(traced.domain, (), found)]
            for other in calls_with_values(plan, observation, defaults, call, tried) if call is not None else ():
                answered = self._answered(other)
                if answered is not None and self._difference_in(answered):
                    return replace(answered, label=f"values of {SmallSizes.of(sizes)}")
        return None

    def limits(self, sizes: Mapping[str, int], domain: Domain) -> list[SizeCondition]:
        """Returns conditions for sizes like these, beyond which the program departs from the model, or may.

        The caller compares the model at these sizes. Code that also runs at the sizes of the trace is skipped, because
        the trace knows how it decides, unless it makes text of sizes, or the trace did not compare them.

        Args:
            sizes: Sizes of all variables, such as some that are 0 or 1.
            domain: The domain of the program.
        """
        start, of_trace = self._reads(sizes), self._reads(self._traced.sizes)
        if start is None:
            return []
        others = [f"{name} != {size}" for name, size in small(sizes).items()]
        found: list[SizeCondition] = []
        search = SizeBranchSearch(replace(self._traced, domain=domain), self._reads, of_trace, self._settled)
        for branch in search.of(start, sizes):
            if branch.sizes is not None:
                is_excluded = not all(condition.holds(branch.sizes) for condition in found)
                if is_excluded or not self.difference(branch.sizes):
                    continue
            is_kept = branch.is_near or branch.stated is not None
            limit = branch.limit(branch.kept if is_kept else self._last_right(branch, sizes))
            text = " or ".join([*others, limit])
            if text not in [condition.text for condition in found]:
                found.append(SizeCondition(text, branch.place, own=True))
        self._settled += [] if found else [start]
        return found

    def _last_right(self, branch: SizeBranch, sizes: Mapping[str, int]) -> int:
        """The last size of a variable before a branch at which the program does what the model does, by bisection."""
        right, wrong = branch.kept, branch.sizes[branch.name] if branch.sizes else branch.kept
        while abs(wrong - right) > 1:
            middle = (wrong + right) // 2
            other = settled(self._traced.plan, {**sizes, branch.name: middle})
            right, wrong = (right, middle) if self.difference(other) else (middle, wrong)
        return right

    def _reads(self, sizes: Mapping[str, int]) -> SizeReads | None:
        """What a run of its own reads: torch leaves out fast paths while sizes are noted."""
        traced, key = self._traced, tuple(sizes.values())

        def run() -> Call:
            return traced.answered(traced.sized_call(sizes))

        if key not in self._read:
            with _quiet():
                self._read[key] = traced.sampled_answer(lambda: size_reads(run)[0])
        return self._read[key]

    def difference_in(self, call: Call) -> str:
        """Returns how the program departs from what a recorded call returned: an empty string if it does not.

        If the call leaves out inputs, the model may have taken a branch that it does not take if they are given, so a
        call of these sizes that gives all of them is compared as well.
        """
        traced, given = self._traced, call.tensors()
        found = self._outcome(traced.completed(call))
        if not found and any(leaf.path not in given for leaf in traced.plan.leaves):
            found = self.difference(solve_sizes(traced.plan, call.shapes())) or ""
        return found

    def _outcome(self, call: Call, returned: Tensors | None = None) -> str:
        joined = self._traced.joined_outputs

        def run(call: Call) -> Tensors:
            answered = self._answered(call)  # with no images, the model may only run without them
            return {} if answered is None else as_simplified(recorded(answered), joined)

        beyond = beyond_rounding(run, self._traced.model, Padding.of_tensors(call.tensors()))

        def compare(call: Call, expected: Tensors, got: Tensors) -> Iterable[Difference]:
            return beyond(call, as_simplified(expected, joined), as_simplified(got, joined))

        expected = recorded(call) if returned is None else returned
        (outcome,) = compare_calls(lambda _: expected, self._program, [call], compare)
        if isinstance(outcome.error, UnrecordedPath):
            raise outcome.error
        if outcome.error is not None:
            return f"the program raises {described(outcome.error, 160)}"
        return next((f"{wrong.path or 'output'}: {wrong.reason}" for wrong in outcome.wrong), "")


def _quiet() -> warnings.catch_warnings[None]:
    """Silences warnings, as they come from calls that the user did not make."""
    return warnings.catch_warnings(action="ignore")


# Branches on the values of tensors in code that was not traced
#
# A program may serve calls for which the model runs code that the trace never reached: single rows, inputs that are
# left out, other constants. What such code decides by sizes is seen by running it at other sizes, see `size_branches`.
# If it branches on the values of tensors, other values are tried, and where these take one branch only, the other one
# is forced: it has to make no difference. Numbers that it reads from tensors may decide anything. Nor may it write to
# other arguments than the traced code does.


# Says how the program departs from the model for a call, and what the model read, given which branches it takes at some
# places; empty if it does not depart or the model raises.
Compared = Callable[[Call, Mapping[Place, bool]], tuple[str, SizeReads | None]]


def untraced_write(traced: TracedProgram, call: Call, start: SizeReads, known: Sequence[SizeReads]) -> str:
    """Returns which arguments code writes to that was not traced, in words; empty if it writes to no others.

    Args:
        traced: The program.
        call: A call for which the model runs such code.
        start: What the model reads for it.
        known: What it reads in runs of code that was traced.
    """
    places = start.writes.difference(*(other.writes for other in known))
    if not places:
        return ""
    observation = replace(traced.observation, calls=(call,))
    found = written_arguments(observation, traced.model, traced.method).keys() - traced.observation.written.keys()
    return f"it writes to {', '.join(sorted(found))} ({min(places)})" if found else ""


def value_branch(call: Call, start: SizeReads, known: Sequence[SizeReads], compared: Compared) -> str:
    """Returns why values may decide in code that was not traced, in words; empty if they do not.

    Args:
        call: A call for which the model runs such code, and the program does what the model does.
        start: What the model reads for it.
        known: What it reads in runs of code that was traced.
        compared: Compares the program with the model.
    """
    if not start.values_beyond(known):
        return ""
    numbers, taken = set[str](), defaultdict[Place, dict[bool, Call]](dict)
    for tried in (call, *with_other_values(call)):
        difference, found = ("", start) if tried is call else compared(tried, {})
        if difference:
            return "the result differs for other values"
        if found is None:
            continue
        for place in found.values_beyond(known):
            if isinstance(place, str):
                numbers.add(place)
            else:
                taken[place] |= dict.fromkeys(found.branches[place], tried)
    for place, outcomes in taken.items():
        if len(outcomes) == 1:
            ((outcome, tried),) = outcomes.items()
            difference, _ = compared(tried, {place: not outcome})
            if difference:
                return f"it branches on the values of a tensor, and only one branch is known ({line_text(place)})"
    return f"it reads numbers from tensors, with unknown effects ({min(numbers)})" if numbers else ""
