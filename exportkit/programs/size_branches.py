"""Finds sizes at which a model decides differently on paths that were not traced.

A trace knows all decisions by sizes on its own path. A program may serve other paths, too: single rows, inputs that are
left out, the other side of a condition. There, the model is compared with the program at a few sizes only, and its code
may compare sizes in lines that the trace never reached. These comparisons are recorded, and the model is run at sizes
for which each of them has the opposite result.

Other code that the trace never reached may branch on sizes in ways that are not recorded, and so may any code that
turns a size into text. There, the model is run at much larger sizes, and at the numbers in the code.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from exportkit.plan.conditions import SizeCondition
from exportkit.plan.sizes import settled
from exportkit.plan.small_sizes import Pattern, larger_sizes, small
from exportkit.probing.noted_sizes import SizeComparison
from exportkit.probing.size_reads import SizeReads
from exportkit.programs.domain import Domain
from exportkit.programs.guards import TracedSizes
from exportkit.programs.program import TracedProgram
from exportkit.rewrites.model_code import is_check, is_idle, is_model_code, line_text

# A call at other, larger sizes is run if parameters times rows and tokens stay below this, and so do the products of
# convolutions: about two seconds.
_MOST_WORK = 2**36
_MOST_ELEMENTS = 2**22  # of all inputs together
# Elements of one tensor: 512 MiB of float32, of which onnxruntime may hold a few. The logits of 5 rows of 71 tokens
# have less than half as many for the largest vocabularies; attention over all pixels of 67 images has far more.
_LARGEST_TENSOR = 2**27

UNTRIED = "it branches on sizes that would take too long to try"
_MOST_LEVELS = 4  # of resolution that are taken to compute equally much; a few of them do most of the work
_MOST_COMPARISONS = 64  # whose other result is looked for; a path beside the trace rarely has more than one of its own
_MOST_NEAR = 17  # sizes below this are tried where code turns sizes into plain numbers, whose comparisons are not seen
_STEPS = (16, 64)  # at which sides are looked at that do not follow a variable in steps of one
_FACTORS = (2, 4, 8, 16, 32, 64)  # by which all sizes are enlarged at once
_MOST_COMPARED = 2**24  # a limit beyond this does not limit the size of a tensor
# Sizes at which code is tried whose decisions are not seen: beyond 1024, and beyond 64. The first one that fulfils the
# conditions is taken, which may ask for a multiple.
_FAR = ((1088, 1120, 1033), (128, 105, 73))
_FAR_WORK = 2**33  # that such a run may take, see `Affordable`: about a quarter of a second
_MOST_NUMBERS = 2  # in the code that are tried
_LEAST_NUMBER = 16  # smaller ones are near the sizes of the trace, or positions of axes
_SYMBOLS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_OPPOSITES = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}


class Affordable:
    """Which sizes a model runs at in about two seconds, with tensors that are not too large for its graph.

    Args:
        traced: The program.
        most_work: The most parameters times rows and tokens, and the most products of convolutions.
    """

    def __init__(self, traced: TracedProgram, most_work: int = _MOST_WORK) -> None:
        self._traced, self._most_work, sizes = traced, most_work, TracedSizes(traced)
        self._parameters = sum(parameter.numel() for parameter in traced.model.parameters() if parameter.ndim <= 2)
        products = sizes.kernel_products()
        limits = [(count, _LARGEST_TENSOR) for count in sizes.element_counts()]
        limits += [(count, most_work // min(len(products), _MOST_LEVELS)) for count in products]
        self._small_enough = [SizeCondition(f"{count} <= {most}") for count, most in limits]

    def __contains__(self, sizes: Mapping[str, int]) -> bool:
        shapes = self._traced.plan.shapes(self._traced.plan.completed(sizes)).values()
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


class SizeBranch(NamedTuple):
    """Sizes at which the model decides differently.

    Attributes:
        sizes: The sizes; None if they could not be tried.
        name: The variable that was changed.
        kept: The last size tried at which the model decides as before.
        place: File and line of the code that decides.
        is_larger: Whether the variable is larger at these sizes than before.
        is_near: Whether the model decides differently after that size; otherwise it may, at any size up to the new one.
        stated: What the code asks for where it decides as before, if it compares several variables.
    """

    sizes: dict[str, int] | None
    name: str
    kept: int
    place: str
    is_larger: bool
    is_near: bool = True
    stated: str | None = None

    def limit(self, kept: int) -> str:
        """Returns the condition that the variable does not go beyond a size.

        Args:
            kept: The last size that fulfils it.
        """
        return self.stated or f"{self.name} {'<=' if self.is_larger else '>='} {kept}"


Factors = Mapping[tuple[str, ...], float]  # of the products of these variables


def _has_moved(apart: float, then: float) -> bool:
    """Whether a difference of floats has changed by more than rounding does."""
    return math.isfinite(apart) and math.isfinite(then) and not math.isclose(apart, then, abs_tol=1e-9)


def _sum_of_products(factors: Factors, values: Mapping[str, int]) -> float:
    return sum(factor * math.prod(values[name] for name in group) for group, factor in factors.items())


def _polynomial(factors: Factors, start: Mapping[str, int], relation: str) -> str:
    """The condition that a polynomial is in a relation to 0; its variables are counted from a start."""
    terms: dict[tuple[str, ...], float] = {}
    for group, factor in factors.items():
        for kept in (kept for count in range(len(group) + 1) for kept in itertools.combinations(group, count)):
            more = factor * math.prod(-start[name] for name in group if name not in kept)
            terms[kept] = terms.get(kept, 0) + more
    constant, left = -terms.pop((), 0), ""
    for group, factor in sorted(terms.items(), key=lambda term: term[1] < 0):  # a positive one first
        if factor:
            size = "" if abs(factor) == 1 else f"{abs(factor):.17g} * "
            sign = (" + " if factor > 0 else " - ") if left else ("" if factor > 0 else "-")
            left += f"{sign}{size}{' * '.join(group)}"
    return f"{left} {relation} {constant:.17g}"


class SizeBranchSearch:
    """Finds the branches by sizes that a model takes on paths that were not traced.

    Args:
        traced: The program; all sizes that are tried are in its domain, apart from those of 0 and 1.
        reads: Runs the model at given sizes; None if it raises.
        of_trace: The run on the traced path, if there is one.
        settled: Other runs whose decisions are known.
        at_small_sizes: Whether sizes of 0 and 1 are tried that the run did not have.
    """

    def __init__(
        self,
        traced: TracedProgram,
        reads: Callable[[Mapping[str, int]], SizeReads | None],
        of_trace: SizeReads | None,
        settled: Sequence[SizeReads] = (),
        at_small_sizes: bool = False,
    ) -> None:
        self._traced, self._reads, self._of_trace, self._settled = traced, reads, of_trace, settled
        self._known = [*settled, *([] if of_trace is None else [of_trace])]
        self._at_small_sizes = at_small_sizes
        self._affordable: Affordable | None = None

    def of(self, start: SizeReads, sizes: Mapping[str, int]) -> Iterator[SizeBranch]:
        """Yields the branches beside a run, each by a change of one variable.

        Args:
            start: What the run read.
            sizes: Its sizes.
        """
        known = {each for other in self._known if other is not start for each in other.comparisons()}
        own = {each: sides for each, sides in start.comparisons().items() if each not in known}
        if start is self._of_trace:
            own = {each: sides for each, sides in own.items() if self._is_eager_only(each)}
        if own:
            yield from self._compared(dict(list(own.items())[:_MOST_COMPARISONS]), sizes, start.decisions())
        for each in list(own)[_MOST_COMPARISONS:]:
            for name, size in sizes.items():
                stated = f"{name} == {size}"
                yield SizeBranch(None, name, size, line_text(each.place), is_larger=True, stated=stated)
        code = start.code_beyond(self._known)
        if start.lost() and any(part.compares() for part in code):  # plain numbers that were made of sizes, perhaps
            yield from self._near(code[0].place(), sizes)
        texts = start.texts().difference(*(other.texts() for other in self._settled))  # a trace does not know them
        if code or texts:
            numbers = {number for part in code for number in part.numbers()}
            yield from self._unseen(min(texts, default="") or code[0].place(), numbers, sizes)

    def _is_eager_only(self, compared: SizeComparison) -> bool:
        """Whether the trace came by and made no such comparison, as in ``not is_compiling() and n > 9``.

        Code may ask whether it is traced, or whether a size is a `torch.SymInt`.
        """
        place, limit = compared.place, compared.limit
        if not is_model_code(place[0]) or is_check(place) or is_idle(place[:2]):
            return False
        asked = [guard.numbers() for guard in self._traced.questions if (guard.file, guard.line) == place[:2]]
        return not any(limit is None or not numbers or limit in numbers for numbers in asked)

    def _compared(
        self,
        own: Mapping[SizeComparison, tuple[int, float]],
        sizes: Mapping[str, int],
        decisions: frozenset[tuple[SizeComparison, bool]],
    ) -> Iterator[SizeBranch]:
        """The branches of comparisons, given their results."""
        seen = {tuple(sizes.items()): decisions}
        moving: dict[SizeComparison, dict[str, float]] = {each: {} for each in own}
        wanted = {name: self._wanted(own, sizes, name, moving) for name in sizes}
        several = {each: self._stated(each, sizes, [*names]) for each, names in moving.items() if len(names) > 1}
        for name, size in sizes.items():
            largest, smallest = size, size  # on this branch
            for each, other_size in wanted[name]:
                other = self._beside(sizes, name, other_size)
                if other is None or tuple(other.items()) in seen:
                    continue
                place, is_larger = line_text(each.place), other_size > size
                kept = largest if is_larger else smallest
                stated = several.get(each)
                if not self._is_affordable(sizes, other):
                    yield SizeBranch(None, name, kept, place, is_larger, stated=stated)
                    break
                reads = self._reads(other)
                if reads is None:
                    continue
                if reads.decisions() not in seen.values():
                    yield SizeBranch(other, name, kept, place, is_larger, stated=stated)
                elif is_larger:
                    largest = max(largest, other_size)
                else:
                    smallest = min(smallest, other_size)
                seen[tuple(other.items())] = reads.decisions()
        yield from self._together(own, sizes, moving, decisions)

    def _together(
        self,
        own: Mapping[SizeComparison, tuple[int, float]],
        sizes: Mapping[str, int],
        moving: Mapping[SizeComparison, Mapping[str, float]],
        decisions: frozenset[tuple[SizeComparison, bool]],
    ) -> Iterator[SizeBranch]:
        """A branch by comparisons that follow variables only together, as a product of numbers of blocks does."""
        names, step = [name for name, size in sizes.items() if size > 1], _STEPS[-1]
        beyond = self._all_larger(sizes, {name: sizes[name] + step for name in names})
        reads = self._reads(beyond) if len(names) > 1 and beyond is not None else None
        if reads is None:
            return
        sides, unlike = reads.comparisons(), list[SizeComparison]()
        for each, (left, right) in own.items():
            if each in sides:
                expected = left - right + step * sum(moving[each].values())
                unlike += [each] if _has_moved(expected, sides[each][0] - sides[each][1]) else []
        before = {(each, outcome) for each, outcome in decisions if each in unlike}
        kept = sizes
        for factor in _FACTORS if unlike else ():
            other = self._all_larger(sizes, {name: factor * sizes[name] for name in names})
            reads = None if other is None else self._reads(other)
            if other is None or reads is None:
                return
            if before - reads.decisions():
                place = line_text(unlike[0].place)
                stated = " and ".join(f"{name} <= {kept[name]}" for name in names)
                yield SizeBranch(other, names[0], kept[names[0]], place, is_larger=True, stated=stated)
                return
            kept = other

    def _all_larger(self, sizes: Mapping[str, int], larger: Mapping[str, int]) -> dict[str, int] | None:
        """The sizes with several larger ones; None if they are not in the domain, or take too long."""
        other = settled(self._traced.plan, {**sizes, **larger})
        is_inside = all(self._is_beside(sizes, other, name) for name in larger)
        return other if is_inside and self._is_affordable(sizes, other) else None

    def _stated(self, each: SizeComparison, sizes: Mapping[str, int], names: Sequence[str]) -> str | None:
        """The condition that a comparison of several variables comes out as at these sizes.

        The difference of its sides is taken for a polynomial that is linear in each variable, such as ``rows * columns
        - 4096``: its coefficients follow from sizes beside, and one more of them shows whether it is one. If it is not,
        the condition is that the variables do not change.
        """

        def apart(steps: Mapping[str, int]) -> float | None:
            reads = self._reads({**sizes, **{name: sizes[name] + step for name, step in steps.items()}})
            sides = None if reads is None else reads.comparisons().get(each)
            return None if sides is None else sides[0] - sides[1]

        unchanged = " and ".join(f"{name} == {sizes[name]}" for name in names)
        groups = [group for count in range(len(names) + 1) for group in itertools.combinations(names, count)]
        found = {group: apart(dict.fromkeys(group, 1)) for group in groups}
        shifted = {name: 3 + 2 * number for number, name in enumerate(names)}
        beyond = apart(shifted)
        known = {group: value for group, value in found.items() if value is not None}
        if beyond is None or len(known) < len(groups):
            return unchanged
        factors = {
            group: sum((-1) ** (len(group) - len(part)) * known[part] for part in groups if {*part} <= {*group})
            for group in groups
        }
        followed = {name for group, factor in factors.items() if factor for name in group}
        if followed != {*names} or not math.isclose(beyond, _sum_of_products(factors, shifted)):
            return unchanged
        relation = each.operator if getattr(operator, each.operator)(known[()], 0) else _OPPOSITES[each.operator]
        return _polynomial(factors, sizes, _SYMBOLS[relation])

    def _near(self, place: str, sizes: Mapping[str, int]) -> Iterator[SizeBranch]:
        """Small sizes, one after the other."""
        for name, size in sizes.items():
            for candidate in range(_MOST_NEAR):
                other = self._beside(sizes, name, candidate) if candidate != size else None
                if other is not None and self._is_affordable(sizes, other):
                    yield SizeBranch(other, name, size, place, candidate > size, is_near=False)

    def _unseen(self, place: str, numbers: Collection[int], sizes: Mapping[str, int]) -> Iterator[SizeBranch]:
        """Sizes at which code may decide differently whose decisions are not seen, given the numbers in it."""
        wanted = sorted(number for number in numbers if _LEAST_NUMBER <= number < _MOST_COMPARED)[:_MOST_NUMBERS]
        beside = [(number + more,) for number in wanted for more in (0, 1)]
        batch, affordable = self._traced.plan.with_role("batch"), Affordable(self._traced, _FAR_WORK)
        for name, size in sizes.items():
            far = _FAR[1:] if batch is not None and name == batch.name else _FAR
            for candidates in (*far, *beside):
                others = [self._beside(sizes, name, candidate) for candidate in candidates]
                other = next((other for other in others if other is not None and other in affordable), sizes)
                if other[name] != size:
                    yield SizeBranch(dict(other), name, size, place, other[name] > size, is_near=False)

    def _wanted(
        self,
        own: Mapping[SizeComparison, tuple[int, float]],
        sizes: Mapping[str, int],
        name: str,
        moving: Mapping[SizeComparison, dict[str, float]],
    ) -> list[tuple[SizeComparison, int]]:
        """The sizes of a variable at which comparisons may have a different result, the nearest first.

        How both sides follow the variable is seen at a size beside, or at larger ones, as for ``length // 32``. How
        far they move apart by one is added to ``moving``.
        """
        found: dict[int, SizeComparison] = {}
        left_over = dict(own)
        for step in (1, *_STEPS):
            other = self._beside(sizes, name, sizes[name] + step) if left_over else None
            if other is None or (step > 1 and not self._is_affordable(sizes, other)):
                continue
            reads = self._reads(other)
            sides = {} if reads is None else reads.comparisons()
            for each, (left, right) in list(left_over.items()):
                if each not in sides:  # it may have turned already
                    found.setdefault(other[name], each)
                    continue
                apart, then = left - right, sides[each][0] - sides[each][1]
                if _has_moved(apart, then) and abs(right) < _MOST_COMPARED:
                    del left_over[each]
                    moving[each][name] = (then - apart) / step
                    by_one = step / (then - apart)  # how far one side moves by one
                    zero, beyond = sizes[name] - math.floor(apart * by_one), math.ceil(abs(by_one))
                    for size in (zero - 1, zero, zero + 1, zero - beyond, zero + beyond):
                        if size < _MOST_COMPARED:
                            found.setdefault(size, each)
        by_distance = sorted(found, key=lambda size: abs(size - sizes[name]))
        return [(found[size], size) for size in by_distance if size >= 0 and size != sizes[name]]

    def _beside(self, sizes: Mapping[str, int], name: str, size: int) -> dict[str, int] | None:
        """The sizes with a different size for one variable; None if they are not in the domain."""
        other = settled(self._traced.plan, {**sizes, name: size})
        return other if self._is_beside(sizes, other, name) else None

    def _is_affordable(self, sizes: Mapping[str, int], other: Mapping[str, int]) -> bool:
        """Whether sizes can be tried: always if they are not much larger than those that were run."""
        if math.prod(n + 1 for n in other.values()) <= 4 * math.prod(n + 1 for n in sizes.values()):
            return True
        self._affordable = self._affordable or Affordable(self._traced)
        return other in self._affordable

    def _is_beside(self, sizes: Mapping[str, int], other: Mapping[str, int], name: str) -> bool:
        """Whether sizes are in the domain if others are, from which they differ in one variable."""
        variable, conditions = self._traced.plan.variable(name), self._traced.domain.conditions
        in_range = variable.minimum <= other[name] and (variable.maximum is None or other[name] <= variable.maximum)
        in_range &= self._at_small_sizes or small(other) == small(sizes)
        return in_range and all(c.holds(other) or not c.holds(sizes) for c in conditions)
