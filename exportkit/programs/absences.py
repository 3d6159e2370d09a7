"""Which optional inputs may be left out together: what recorded calls left out, and what the model confirms.

A graph takes all inputs, so defaults stand for those that a call leaves out. Whether the defaults are right depends on
which inputs are left out together, on the other values and on the sizes: one recorded call shows little of that. So
each combination is tried at the sizes of the trace and at others that no recorded call has, with recorded values and
with values of all magnitudes. If the model compares sizes only where inputs are left out, it is tried on the other
side, too.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from exportkit.calls.call import Call
from exportkit.errors import ExportkitError
from exportkit.plan.sizes import unseen_sizes
from exportkit.plan.solved_sizes import solve_sizes
from exportkit.probing.missing import (
    Absences,
    absent_patterns,
    beyond_rounding,
    call_without,
)
from exportkit.probing.other_values import scaled, with_nothing_hidden, with_wide_values
from exportkit.probing.simplify import as_simplified
from exportkit.probing.size_reads import SizeReads, size_reads
from exportkit.programs.program import TracedProgram
from exportkit.programs.program_probe import untraced_write, value_branch
from exportkit.programs.size_branches import UNTRIED, SizeBranchSearch
from exportkit.rewrites.model_code import Place
from exportkit.running.compare import Tensors
from exportkit.running.eager import run_eager
from exportkit.running.runner import Runner, compare_calls

Pattern = frozenset[str]

_FEW_GROUPS = 4  # up to this many groups of inputs, all combinations are tried
_MOST_PATTERNS = 24


def find_absences(traced: TracedProgram) -> Absences:
    """Returns the sets of inputs that may be left out together.

    Args:
        traced: The program, which takes all inputs.
    """
    recorded = absent_patterns(traced.plan, traced.observation)
    wrong = {*traced.defaults.unproven}
    allowed: dict[Pattern, tuple[str, ...]] = {Pattern(): ()}
    refused: dict[Pattern, str] = {}
    never_missing = [leaf.path for leaf in traced.plan.leaves if leaf.ones_if_missing]
    for pattern in [*recorded, *_further(recorded, never_missing)]:
        if not pattern:
            continue
        if wrong & {*recorded.get(pattern, ())}:
            refused[pattern] = "no default gives the recorded result"
            continue
        outcomes, empty = _outcomes(traced, pattern), tuple[str, ...]()
        hidden = sorted({*traced.plan.names} - _shown(traced, pattern))
        if not outcomes and hidden:  # a cache without tensors has no length, whatever it counts
            empty = tuple(hidden)
            outcomes = _outcomes(traced, pattern, empty)
        if pattern in recorded and (any(outcomes) or not outcomes):  # sizes may have to be 0, as after a reset
            more = (*hidden, *_always_empty(traced, pattern, recorded[pattern]))
            if more != empty:
                empty, outcomes = more, _outcomes(traced, pattern, more)
        if any(outcomes):
            if pattern in recorded:
                refused[pattern] = next(filter(None, outcomes))
        elif outcomes or pattern in recorded:
            allowed[pattern] = empty
    return Absences(allowed, refused)


def _always_empty(traced: TracedProgram, pattern: Pattern, numbers: Collection[int]) -> tuple[str, ...]:
    """The variables that inputs show, and that are 0 in all recorded calls without these inputs.

    Args:
        traced: The program.
        pattern: Paths of the inputs.
        numbers: Numbers of the calls.
    """
    plan, observation = traced.plan, traced.observation
    shapes = [*map(Call.shapes, observation.calls), *(seen.inputs for seen in observation.further)]
    sizes = [solve_sizes(plan, shapes[number]) for number in numbers]
    return tuple(sorted(name for name in _shown(traced, pattern) if not any(solved[name] for solved in sizes)))


def _shown(traced: TracedProgram, pattern: Pattern) -> set[str]:
    """The variables that the inputs outside of a set show."""
    given = [leaf for leaf in traced.plan.leaves if leaf.path not in pattern]
    return {name for leaf in given for size in leaf.sizes for name in size.variables()}


def _further(recorded: Collection[Pattern], never_missing: Collection[str]) -> Iterator[Pattern]:
    """Yields combinations of inputs that were left out, but never together; inputs of one group always were.

    Args:
        recorded: What calls left out together.
        never_missing: Inputs that may be left out, although no call did.
    """
    groups: dict[tuple[bool, ...], set[str]] = {}
    for path in sorted(frozenset(never_missing).union(*recorded)):
        groups.setdefault(tuple(path in pattern for pattern in recorded), set()).add(path)
    members = [frozenset(group) for group in groups.values()]
    if len(members) <= _FEW_GROUPS:
        sets = [c for count in range(1, len(members) + 1) for c in itertools.combinations(members, count)]
    else:
        sets = [(member,) for member in members] + list(itertools.combinations(recorded, 2))
    found = dict.fromkeys(Pattern().union(*combination) for combination in sets)
    yield from itertools.islice((pattern for pattern in found if pattern not in recorded), _MOST_PATTERNS)


def _outcomes(traced: TracedProgram, pattern: Pattern, empty: Sequence[str] = ()) -> list[str]:
    tried = functools.partial(_tried, traced, pattern, dict.fromkeys(empty, 0))
    return traced.sampled_answer(lambda: list(tried()), is_sure=lambda outcomes: not any(outcomes))


def _tried(traced: TracedProgram, pattern: Pattern, empty: Mapping[str, int]) -> Iterator[str]:
    """Yields for each call without these inputs how the result with defaults differs; empty if it does not.

    In all calls, the sizes in ``empty`` are 0.

    The program is asked first, then the model itself with the defaults: at these sizes, a model may treat several
    tokens on a filled state in its own way, with and without the inputs.
    """
    sizes = {**traced.sizes, **empty}
    try:
        call = call_without(traced.plan, traced.observation, sizes, pattern)
    except ExportkitError:
        return
    outcomes = list(_compared(traced, call))
    yield from outcomes
    if any(outcomes):
        return
    for item in unseen_sizes(traced.plan, sizes)[:1] if outcomes else ():  # a trace may have recorded sizes
        with contextlib.suppress(ExportkitError):
            other = call_without(traced.plan, traced.observation, {**item.sizes, **empty}, pattern)
            yield from _compared(traced, other)

    def reads(made: Callable[[], Call]) -> SizeReads | None:
        return size_reads(lambda: run_eager(traced.model, traced.method, made()))[0]

    def compared(call: Call, forced: Mapping[Place, bool]) -> tuple[str, SizeReads | None]:
        noted = SizeReads(forced)
        return next(filter(None, _compared(traced, call, of_all_magnitudes=False, noted=noted)), ""), noted

    without = reads(lambda: call)
    completed = reads(lambda: traced.completed(call))
    if without is None or completed is None:  # the model does not run with the defaults, which says nothing
        return
    yield untraced_write(traced, call, without, [completed])
    yield value_branch(call, without, [completed], compared)
    others = functools.partial(call_without, traced.plan, traced.observation, absent=pattern)
    search = SizeBranchSearch(
        traced, lambda sizes: reads(functools.partial(others, sizes=sizes)), completed, at_small_sizes=True
    )
    for branch in search.of(without, sizes):
        if branch.sizes is None:
            yield UNTRIED
            continue
        if any(branch.sizes[name] for name in empty):
            continue
        try:
            call = others(sizes=branch.sizes)
        except ExportkitError:  # such as rows of features for which the tokens have no room
            continue
        yield from _compared(traced, call, of_all_magnitudes=False)


def _compared(
    traced: TracedProgram, call: Call, of_all_magnitudes: bool = True, noted: SizeReads | None = None
) -> Iterator[str]:
    """Yields how the result without some inputs differs with defaults, also with values of all magnitudes and signs.

    Args:
        traced: The program.
        call: The call.
        of_all_magnitudes: Whether other values are tried.
        noted: Notes what the model reads where it runs without the inputs.
    """

    def simplified(runner: Runner) -> Runner:
        return lambda call: as_simplified(runner(call), traced.joined_outputs)

    def completed(runner: Runner) -> Runner:
        return lambda call: runner(traced.completed(call))

    def without(call: Call) -> Tensors:
        with contextlib.nullcontext() if noted is None else noted:
            return model(call)

    model = simplified(traced.eager)
    program = simplified(traced.runner)
    call = with_nothing_hidden(call)
    tried = [call]
    if of_all_magnitudes:
        wide = with_wide_values(call)
        tried += [wide, scaled(wide, -1.0)]  # what decides by a sum takes the other branch for the opposite
    for given in tried:
        found = ""
        for runner in (program, model):
            outcome = next(
                iter(compare_calls(without, completed(runner), [given], beyond_rounding(without, traced.model))), None
            )
            if outcome is None:
                break
            if outcome.agrees:
                yield ""
                break
            reason = str(outcome.error) if outcome.error is not None else outcome.wrong[0].reason
            found = found or f"{outcome.wrong[0].path if outcome.wrong else 'error'}: {reason}"
        else:
            yield found
