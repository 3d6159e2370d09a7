"""Where a model turns: sizes at which it takes another decision than it takes on a path that was not traced.

A trace knows all decisions by sizes on its own path. A program may serve other paths, too: single rows, inputs that are
left out, the other side of a condition. There, the model is compared with the program at a few sizes, and may decide by
sizes in lines that the trace never saw. So these decisions are noted, and each is made to come out the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

from exportkit.plan.sizes import settled
from exportkit.plan.small_sizes import small
from exportkit.probing.size_reads import Comparison, SizeReads
from exportkit.programs.affordable import Affordable
from exportkit.programs.program import TracedProgram

UNTRIED = "it decides by sizes that take too long to be tried"
_MOST_COMPARISONS = 8  # that are turned; a path beside the trace rarely has more than one of its own
_MOST_COMPARED = 2**24  # a limit beyond this is none for the size of a tensor


class Turn(NamedTuple):
    """Sizes at which the model decides otherwise.

    Attributes:
        sizes: The sizes; None if they could not be tried.
        kept: The condition on the variable that was changed under which it decides as before.
        place: File and line of the comparison.
    """

    sizes: dict[str, int] | None
    kept: str
    place: str


class Turns:
    """Finds the turns of a model on paths that were not traced.

    Args:
        traced: The program; all sizes that are tried are in its domain, apart from those of 0 and 1.
        reads: Runs the model at given sizes; None if it raises.
        known: The comparisons of the traced path.
        at_small_sizes: Whether sizes of 0 and 1 are tried that the run did not have.
    """

    def __init__(
        self,
        traced: TracedProgram,
        reads: Callable[[Mapping[str, int]], SizeReads | None],
        known: Collection[Comparison],
        at_small_sizes: bool = False,
    ) -> None:
        self._traced, self._reads, self._known = traced, reads, known
        self._at_small_sizes = at_small_sizes
        self._affordable: Affordable | None = None

    def of(self, start: SizeReads, sizes: Mapping[str, int]) -> Iterator[Turn]:
        """Yields the turns beside a run, each by a change of one variable.

        Args:
            start: What the run read.
            sizes: Its sizes.
        """
        seen = {tuple(sizes.items()): start.decisions()}
        own = [
            (comparison, sides) for comparison, sides in start.comparisons().items() if comparison not in self._known
        ]
        for comparison, (left, right) in own[:_MOST_COMPARISONS]:
            place, found, untried = f"{comparison.place[0]}:{comparison.place[1]}", False, ""
            for name in sizes if abs(right) < _MOST_COMPARED else ():
                last = {True: sizes[name], False: sizes[name]}  # the largest and the smallest size without a turn
                for size in _beside(sizes[name], left, int(right)):
                    larger = size > sizes[name]
                    kept = f"{name} {'<=' if larger else '>='} {last[larger]}"
                    other = settled(self._traced.plan, {**sizes, name: size})
                    if tuple(other.items()) in seen or not self._is_beside(sizes, other, name):
                        continue
                    self._affordable = self._affordable or Affordable(self._traced)
                    if other not in self._affordable:
                        untried = untried or kept
                        continue
                    reads = self._reads(other)
                    if reads is None:
                        continue
                    if reads.decisions() in seen.values():
                        last[larger] = size
                    else:
                        found = True
                        yield Turn(other, kept, place)
                    seen[tuple(other.items())] = reads.decisions()
            if untried and not found:
                yield Turn(None, untried, place)

    def _is_beside(self, sizes: Mapping[str, int], other: Mapping[str, int], name: str) -> bool:
        """Whether sizes are in the domain if others are, from which they differ in one variable."""
        variable, conditions = self._traced.plan.variable(name), self._traced.domain.conditions
        in_range = variable.minimum <= other[name] and (variable.maximum is None or other[name] <= variable.maximum)
        in_range &= self._at_small_sizes or small(other) == small(sizes)
        return in_range and all(c.holds(other) or not c.holds(sizes) for c in conditions)


def _beside(size: int, left: int, right: int) -> list[int]:
    """Sizes of a variable at which the left side of a comparison may be beside the right side, the nearest first."""
    apart, scaled = right - left, size * right // max(left, 1)
    others = {size + sign * apart + step for sign in (1, -1) for step in (-1, 0, 1)} | {scaled, scaled + 1}
    return sorted((other for other in others if other >= 0 and other != size), key=lambda other: abs(other - size))
