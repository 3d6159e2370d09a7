"""Branches on the values of tensors in code that was not traced.

A program may serve calls for which the model runs code that the trace never reached: single rows, inputs that are left
out, other constants. What such code decides by sizes is seen by running it at other sizes, see `turns`. If it branches
on the values of tensors, other values are tried, and where these take one branch only, the other one is forced: it has
to make no difference. Numbers that it reads from tensors may decide anything. Nor may it write to other arguments than
the traced code does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from exportkit.calls.call import Call
from exportkit.probing.effects import written_arguments
from exportkit.probing.other_values import with_other_values
from exportkit.probing.size_reads import SizeReads
from exportkit.programs.program import TracedProgram
from exportkit.rewrites.model_code import Place, line_text

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
    return f"it reads numbers from tensors, which may decide anything ({min(numbers)})" if numbers else ""
