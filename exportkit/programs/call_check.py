"""Checks calls against the inputs and sizes of a domain: prepared once, as it runs on every call."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from exportkit.calls.call import shapes_text
from exportkit.errors import ArgumentError
from exportkit.json_data import Size
from exportkit.plan.conditions import SizeCondition, first_broken
from exportkit.plan.expression import Expression
from exportkit.plan.solved_sizes import solve_equations
from exportkit.plan.tables import sizes_text
from exportkit.running.compare import Tensors
from exportkit.trees.tree import dtype_name

# torch.export assumes that every size is at least this.
SMALLEST = 2
_LIMITS = (int, type(None))


@dataclass(frozen=True)
class DomainInput:
    """An input tensor of a graph.

    Attributes:
        path: Path of the leaf.
        dtype: Its dtype, such as ``int64``.
        sizes: One expression over the variables for each axis.
        optional: Whether a call may leave it out.
        of_frames: Whether its length may be up to one step more or less than a multiple of a variable.
    """

    path: str
    dtype: str
    sizes: tuple[Expression, ...]
    optional: bool = False
    of_frames: bool = False


@dataclass(frozen=True)
class SmallSizes:
    """Variables that are 0 or 1 together, while all others are 2 or more.

    Attributes:
        sizes: The size of each of them.
        waived: Texts of the conditions that need not hold then.
    """

    sizes: Mapping[str, Size]
    waived: tuple[str, ...] = ()

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> SmallSizes:
        """Returns those of some sizes that are 0 or 1."""
        return cls({name: size for name, size in sizes.items() if size < SMALLEST})

    def __str__(self) -> str:
        return ", ".join(f"{name} = {size}" for name, size in self.sizes.items())


class CallCheck:
    """The requirements that each call has to meet.

    Args:
        inputs: The inputs.
        ranges: Smallest and largest size of each variable.
        conditions: Conditions on sizes.
        patterns: The variables that may be 0 or 1 together.
        absent: The sets of inputs that may be left out, each with the variables that have to be 0 then.
    """

    def __init__(
        self,
        inputs: Sequence[DomainInput],
        ranges: Mapping[str, tuple[int, int | None]],
        conditions: Sequence[SizeCondition],
        patterns: Sequence[SmallSizes],
        absent: Mapping[frozenset[str], Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self.inputs, self.ranges, self.conditions, self.patterns = inputs, ranges, conditions, patterns
        groups: dict[tuple[str, tuple[Expression, ...], bool], list[str]] = {}
        for item in inputs:  # the layers of a cache are alike, so most tensors need two comparisons
            groups.setdefault((item.dtype, item.sizes, item.optional), []).append(item.path)
        self._groups = [
            (getattr(torch, d, None), sizes, paths, optional) for (d, sizes, optional), paths in groups.items()
        ]
        self._shown = {item.path: {size.terms[0][0] for size in item.sizes if len(size.terms) == 1} for item in inputs}
        self._absent, self._empty = absent, dict[frozenset[str], tuple[str, ...]]()
        self._frames = {size for item in inputs if item.of_frames for size in item.sizes if _steps(size)}
        self._frames -= {size for item in inputs if not item.of_frames for size in item.sizes}
        self._limits = [(least, math.inf if most is None else most) for least, most in ranges.values()]
        self._waived = {self._key(SmallSizes({})): (), **{self._key(p): p.waived for p in patterns}}
        self._checks: dict[tuple[str, ...], Callable[[Sequence[int]], int]] = {}

    def _key(self, pattern: SmallSizes) -> tuple[int, ...]:
        return tuple([pattern.sizes.get(name, SMALLEST) for name in self.ranges])

    def require(self, given: Tensors, known: Mapping[str, int] | None = None) -> None:
        """Raises ArgumentError if a call is outside of the domain.

        Args:
            given: The tensors of the call by path.
            known: Sizes that the tensors do not show.
        """
        equations: list[tuple[Expression, int]] = []
        count, absent = 0, []
        for dtype, sizes, paths, optional in self._groups:
            shape = None
            for path in paths:
                tensor = given.get(path)
                if tensor is None:
                    if optional:
                        absent.append(path)
                        continue
                    raise self._misfit(given)
                count += 1
                if shape is None:
                    shape = tensor.shape
                    if len(shape) != len(sizes):
                        raise self._misfit(given)
                    equations += zip(sizes, shape, strict=True)
                elif tensor.shape != shape:
                    raise self._misfit(given)
                if tensor.dtype is not dtype:
                    raise self._misfit(given)
        if count != len(given):
            raise self._misfit(given)
        equations += [(Expression.of(name), size) for name, size in (known or {}).items()]
        solved = solve_equations(equations, self.ranges)
        for size, value in equations:
            if size.evaluate(solved) != value and not self._ends_within(size, size.evaluate(solved) - value):
                raise self._misfit(given)
        if absent:
            self._require_empty(frozenset(absent), solved)
        self.require_sizes(solved, {name for size, _ in equations for name, _ in size.terms})

    def _ends_within(self, size: Expression, missing: int) -> bool:
        return size in self._frames and abs(missing) < _steps(size)

    def _require_empty(self, absent: frozenset[str], sizes: Mapping[str, int]) -> None:
        """Raises ArgumentError if sizes that inputs show count elements of those left out, such as cached tokens."""
        if absent not in self._empty:
            given = set[str]().union(*(names for path, names in self._shown.items() if path not in absent))
            own = set[str]().union(*(self._shown[path] for path in absent))
            self._empty[absent] = tuple(sorted((own - given).union(self._absent.get(absent, ()))))
        for name in self._empty[absent]:
            if sizes[name]:
                where = [path for path, names in self._shown.items() if path in absent and name in names]
                raise ArgumentError(
                    "The sizes of the inputs refer to elements of an input that was left out.",
                    where=next(iter(where), ", ".join(sorted(absent))),
                    expected=f"{name} = 0",
                    got=f"{name} = {sizes[name]}",
                    hint="give this input, or inputs that have no elements for it.",
                )

    def require_sizes(self, sizes: Mapping[str, int], shown: Collection[str] | None = None) -> None:
        """Raises ArgumentError if the sizes of the variables are outside of the domain.

        Args:
            sizes: The size of each variable.
            shown: Variables that inputs of the call show, by default all. The others are 0; where no pattern of small
                sizes is about them, they do not count: which inputs may be left out is asked elsewhere.
        """
        values = [sizes[name] for name in self.ranges]
        for (least, most), value in zip(self._limits, values, strict=True):
            if not least <= value <= most:
                raise self._out_of_range(sizes)
        waived = self._waived.get(tuple([value if value < SMALLEST else SMALLEST for value in values]))
        if waived is None and shown is not None and len(shown) < len(values):
            hidden = {name for name in self.ranges if name not in shown}
            rest = SmallSizes.of({name: size for name, size in sizes.items() if name not in hidden})
            waived = self._waived.get(self._key(rest))
            if waived is not None:
                waived += tuple([c.text for c in self.conditions if c.variables() & hidden])
        if waived is None:
            raise self._unproven(sizes)
        number = self._conditions(waived)(values)
        if number >= 0:
            raise broken_condition(self._kept(waived)[number], sizes)

    def require_readable(self) -> None:
        """Raises PlanError if a condition cannot be read, ValueError if another part makes no sense."""
        first_broken(self.conditions, list(self.ranges))
        names = {name for item in self.inputs for size in item.sizes for name in size.variables()}
        small = {size for pattern in self.patterns for size in pattern.sizes.values()}
        names |= {name for pattern in self.patterns for name in pattern.sizes}
        wrong = [item.dtype for item in self.inputs if not isinstance(getattr(torch, item.dtype, None), torch.dtype)]
        wrong += [str(limit) for limits in self.ranges.values() for limit in limits if type(limit) not in _LIMITS]
        wrong += [*sorted(names - self.ranges.keys()), *map(str, small - {0, 1})]
        if len({item.path for item in self.inputs}) < len(self.inputs):
            raise ValueError("an input appears twice")
        if wrong:
            raise ValueError(f"{', '.join(wrong)[:200]} is not a dtype, a limit, a variable or a small size")

    def contains(self, sizes: Mapping[str, int]) -> bool:
        """Returns whether sizes of the variables are inside."""
        try:
            self.require_sizes(sizes)
        except ArgumentError:
            return False
        return True

    def solve(self, given: Tensors) -> dict[str, int]:
        """Returns the size of each variable as a call shows it.

        Args:
            given: The tensors of the call by path.
        """
        return solve_equations([(size, value) for _, _, size, value in self._sizes(given)], self.ranges)

    def explain(self, sizes: Mapping[str, int]) -> Iterator[tuple[bool, str]]:
        """Yields each condition with the sizes put in, and whether it holds."""
        for name, (least, most) in self.ranges.items():
            inside = least <= sizes[name] and (most is None or sizes[name] <= most)
            yield inside, f"{ranged(name, least, most)}: {sizes[name]}"
        small = SmallSizes.of(sizes)
        waived = self._waived.get(self._key(small))
        if small.sizes:
            yield waived is not None, f"small sizes that were shown equal: {small}"
        for condition in self.conditions:
            if condition.text in (waived or ()):
                yield True, f"{condition.text}: {condition.got(sizes)}, waived for {small}"
            else:
                yield condition.holds(sizes), f"{condition.text}: {condition.got(sizes)}"

    def _conditions(self, waived: tuple[str, ...]) -> Callable[[Sequence[int]], int]:
        if waived not in self._checks:
            self._checks[waived] = first_broken(self._kept(waived), list(self.ranges))
        return self._checks[waived]

    def _kept(self, waived: tuple[str, ...]) -> list[SizeCondition]:
        return [condition for condition in self.conditions if condition.text not in waived]

    def _sizes(self, given: Tensors) -> Iterator[tuple[str, int, Expression, int]]:
        for item in self.inputs:
            shape = given[item.path].shape if item.path in given else ()
            for axis, (size, value) in enumerate(zip(item.sizes, shape, strict=False)):
                yield item.path, axis, size, value

    def require_inputs(self, given: Tensors) -> None:
        """Raises ArgumentError if a tensor is unknown or has a wrong dtype or shape, or a required input is missing.

        Args:
            given: The tensors of the call by path.
        """
        inputs = {item.path: item for item in self.inputs}
        for path, tensor in given.items():
            if path not in inputs:
                raise ArgumentError(
                    "The graph has no input for this tensor.",
                    where=path,
                    expected=", ".join(inputs),
                    got=tuple(tensor.shape),
                    hint="observe a call that gives it, then export again.",
                )
            item = inputs[path]
            dtype = dtype_name(tensor.dtype)
            fits = len(item.sizes) == tensor.ndim and all(
                not size.is_static or size.constant == have for size, have in zip(item.sizes, tensor.shape, strict=True)
            )
            if dtype != item.dtype or not fits:
                raise ArgumentError(
                    "An input does not fit the graph.",
                    where=path,
                    expected=f"{item.dtype} ({', '.join(map(str, item.sizes))})",
                    got=f"{dtype} {tuple(tensor.shape)}",
                )
        missing = next((path for path, item in inputs.items() if path not in given and not item.optional), None)
        if missing is not None:
            raise ArgumentError(
                "A required input is missing.",
                where=missing,
                got=shapes_text(given) or "no tensor",
                hint="every recorded call gave a tensor here; an input is optional if a recorded call left it out.",
            )

    def _misfit(self, given: Tensors) -> ArgumentError:
        """The error about a tensor that is unknown, missing, or of a wrong dtype or shape."""
        self.require_inputs(given)
        solved = self.solve(given)
        for path, axis, size, value in self._sizes(given):
            if size.evaluate(solved) != value and not self._ends_within(size, size.evaluate(solved) - value):
                others = [(p, a) for p, a, s, v in self._sizes(given) if s == size and v != value]
                shown = f", as axis {others[0][1]} of {others[0][0]} shows" if others else ""
                numbers = ", ".join(f"{name} = {solved[name]}" for name, _ in size.terms)
                return ArgumentError(
                    "The sizes of the inputs are inconsistent.",
                    where=f"axis {axis} of {path}",
                    expected=f"{size} = {size.evaluate(solved)}{shown}",
                    got=f"{value}" if size.variable is not None else f"{value}, where {numbers}",
                )
        expected, got = ", ".join(self.ranges), shapes_text(given)
        return ArgumentError("The inputs do not fit the graph.", expected=expected, got=got)

    def _out_of_range(self, sizes: Mapping[str, int]) -> ArgumentError:
        for name, (least, most) in self.ranges.items():
            if sizes[name] < least or (most is not None and sizes[name] > most):
                where = next((item.path for item in self.inputs if Expression.of(name) in item.sizes), name)
                limit = "" if most is None else f" and at most {most}"
                expected = f"{name} at least {least}{limit}"
                return ArgumentError("An input is out of range.", where=where, expected=expected, got=sizes[name])
        raise AssertionError("These sizes are in range.")

    def _unproven(self, sizes: Mapping[str, int]) -> ArgumentError:
        small = SmallSizes.of(sizes)
        allowed = "; ".join(map(str, self.patterns))
        return ArgumentError(
            f"The graph is not proven for {small}.",
            expected=f"{', '.join(small.sizes)} at least {SMALLEST}{f'; or {allowed}' if allowed else ''}",
            got=sizes_text(sizes),
            hint="torch.export assumes sizes of at least 2; record a call with these sizes, then export again.",
        )


def broken_condition(condition: SizeCondition, sizes: Mapping[str, int]) -> ArgumentError:
    """Returns the error about sizes that break a condition."""
    return ArgumentError(
        f"The graph does not serve these sizes: {condition.text}, got {condition.got(sizes)}.",
        where=condition.place or None,
        got=sizes_text(sizes),
        hint="the trace assumed this condition; record a call with these sizes, then export again.",
    )


def ranged(name: str, least: int, most: int | None) -> str:
    """Returns a range in words: ``batch >= 1``, ``2 <= length <= 512``."""
    if most is None:
        return f"{name} >= {least}"
    return f"{name} = {least}" if most == least else f"{least} <= {name} <= {most}"


def _steps(size: Expression) -> int:
    """The factor of a size that is a multiple of one variable, and something more; 0 for any other size."""
    return size.terms[0][1] if size.is_linear and len(size.terms) == 1 and size.terms[0][1] > 1 else 0
