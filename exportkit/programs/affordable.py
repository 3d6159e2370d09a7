"""Which sizes of a model can be tried in about two seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from exportkit.plan.conditions import SizeCondition
from exportkit.plan.small_sizes import Pattern, larger_sizes
from exportkit.programs.domain import Domain
from exportkit.programs.guards import TracedSizes
from exportkit.programs.program import TracedProgram

# A call at other, larger sizes is run if parameters times rows and tokens stay below this: about two seconds.
_MOST_WORK = 2**36
_MOST_ELEMENTS = 2**22  # of all inputs together
# Elements of one tensor: 512 MiB of float32, of which onnxruntime may hold a few. The logits of 5 rows of 71 tokens
# have less than half as many for the largest vocabularies; attention over all pixels of 67 images has far more.
_LARGEST_TENSOR = 2**27


class Affordable:
    """Which sizes a model runs at in about two seconds, with tensors that are not too large for its graph.

    Args:
        traced: The program.
        most_work: The most parameters times rows and tokens.
    """

    def __init__(self, traced: TracedProgram, most_work: int = _MOST_WORK) -> None:
        self._traced, self._most_work = traced, most_work
        self._parameters = sum(parameter.numel() for parameter in traced.model.parameters())
        counts = TracedSizes(traced).element_counts()
        self._small_enough = [SizeCondition(f"{count} <= {_LARGEST_TENSOR}") for count in counts]

    def __contains__(self, sizes: Mapping[str, int]) -> bool:
        shapes = self._traced.plan.shapes(sizes).values()
        tokens = max((math.prod(shape[:2]) for shape in shapes), default=1)
        if sum(map(math.prod, shapes)) > _MOST_ELEMENTS or tokens * self._parameters > self._most_work:
            return False
        return all(condition.holds(sizes) for condition in self._small_enough)

    def largest(self, domain: Domain, pattern: Pattern, waived: Sequence[str] = ()) -> dict[str, int] | None:
        """Returns the largest of other sizes with the same pattern that fulfil the conditions and are affordable.

        Args:
            domain: The domain of the program.
            pattern: Variables that are 0 or 1.
            waived: Texts of conditions that need not hold.
        """
        for sizes in larger_sizes(self._traced.plan, self._traced.sizes, pattern):
            if sizes in self and fulfils(domain, waived, sizes):
                return sizes
        return None


def fulfils(domain: Domain, waived: Sequence[str], sizes: Mapping[str, int]) -> bool:
    """Returns whether sizes fulfil the conditions of a domain, apart from some that are waived."""
    return all(condition.text in waived or condition.holds(sizes) for condition in domain.conditions)
