"""The domain of an exported graph: the inputs, sizes and constants for which it may be used in place of the model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from exportkit.calls.call import Call
from exportkit.errors import ArgumentError, PlanError, described
from exportkit.json_data import Size, read
from exportkit.plan.conditions import SizeCondition, bounds_of, exactly, leaves_out_sizes
from exportkit.plan.plan import Plan
from exportkit.plan.tables import aligned, html_lines, html_of, html_table, sizes_text
from exportkit.probing.traits import PLAIN, require_traits
from exportkit.programs.call_check import SMALLEST, CallCheck, DomainInput, SmallSizes, ranged
from exportkit.programs.python_values import PythonValues
from exportkit.trees import first_name
from exportkit.trees.json_form import dump_constant, load_value

_SHORT = 60  # characters of a condition that is stated in a line with others


@dataclass(frozen=True)
class Domain:
    """The calls that an exported graph accepts. Prints as a table.

    Attributes:
        inputs: The input tensors: dtype, sizes, and whether they may be left out.
        ranges: Smallest and largest size of each variable; None where there is no largest one.
        conditions: Conditions on sizes that the trace recorded, those of the model's own code first.
        patterns: Which variables may be 0 or 1 together: tracing assumes sizes of 2 and more, so smaller ones are
            inside only if they were recorded, or shown to give the same result.
        constants: Python values that are part of the graph, by path.
        values: Requirements on the Python values of a call.
        absent: The sets of inputs that may be left out together, by path: those that recorded calls left out, and
            those for which the model was seen to return what the graph returns. Each has the variables that have to
            be 0 then, because they were in all recorded calls, and the model accepts no other sizes that were tried.
        returned: Numbers among the outputs that follow from sizes: expressions over the variables of the plan, by path.
        waived: Conditions that the trace recorded and that change nothing, so that they are not required.
        traits: Further requirements on every input, such as being contiguous, because the model branches on them.
    """

    inputs: tuple[DomainInput, ...]
    ranges: Mapping[str, tuple[int, int | None]]
    conditions: tuple[SizeCondition, ...]
    patterns: tuple[SmallSizes, ...]
    constants: Mapping[str, Any]
    absent: Mapping[frozenset[str], tuple[str, ...]] = field(default_factory=lambda: {frozenset(): ()})
    values: PythonValues = field(default_factory=lambda: PythonValues({}, {}))
    returned: Mapping[str, str] = field(default_factory=dict)
    waived: tuple[SizeCondition, ...] = ()
    traits: tuple[str, ...] = ()

    @classmethod
    def of_plan(cls, plan: Plan) -> Domain:
        """Returns the domain of a graph that was exported for a plan, with no conditions yet."""
        return cls(
            tuple([DomainInput(x.path, x.dtype, x.sizes, x.is_optional, x.of_frames) for x in plan.leaves]),
            {variable.name: (variable.minimum, variable.maximum) for variable in plan.variables},
            (),
            (),
            {constant.path: constant.value for constant in plan.constants},
        )

    @cached_property
    def check(self) -> CallCheck:
        """What is required of the tensors of each call."""
        return CallCheck(self.inputs, self.ranges, self.conditions, self.patterns, self.absent)

    def require(self, given: Mapping[str, torch.Tensor], known: Mapping[str, int] | None = None) -> None:
        """Raises ArgumentError if a call is outside of the domain; the message names the condition that it breaks.

        Args:
            given: The tensors of the call by path.
            known: Sizes that the tensors do not show.
        """
        absent = self.optional.difference(given)
        if absent not in self.absent:
            self.check.require_inputs(given)
            sets = [self.names(paths) or "none" for paths in sorted(self.absent, key=sorted)]
            raise ArgumentError(
                "The graph is not proven for calls that leave out these inputs together.",
                where=self.names(absent) or "all inputs given",
                expected=f"left out: {'; or '.join(sets)}",
                got=f"left out: {self.names(absent) or 'none'}",
                hint="store a call that leaves out the same inputs (store_n_calls), then export again.",
            )
        self.check.require(given, known)
        if self.traits:
            require_traits(self.traits, given)

    @cached_property
    def optional(self) -> frozenset[str]:
        """Paths of the inputs that some calls may leave out."""
        return frozenset([item.path for item in self.inputs if item.optional])

    def names(self, paths: frozenset[str]) -> str:
        """Returns the names of inputs: arguments of which all inputs are meant, otherwise the paths themselves."""
        found: dict[str, None] = {}
        for item in self.inputs:
            if item.path in paths:
                name = first_name(item.path)
                whole = all(other.path in paths for other in self.inputs if first_name(other.path) == name)
                found[name if whole else item.path] = None
        return ", ".join(found)

    def explain(self, call: Call | Mapping[str, torch.Tensor], known: Mapping[str, int] | None = None) -> str:
        """Returns why a call is inside or outside of the domain, condition by condition.

        Args:
            call: A call, or its tensors by path.
            known: Sizes that the tensors do not show.
        """
        given = call.tensors() if isinstance(call, Call) else call
        try:
            self.require(given, known)
            verdict = "inside"
        except ArgumentError as error:
            verdict = f"outside: {error}"
        sizes = self.check.solve(given) | dict(known or {})
        lines = [f"{'yes' if holds else 'NO '}  {text}" for holds, text in self.check.explain(sizes)]
        return "\n".join([verdict, "sizes: " + sizes_text(sizes), *lines])

    def to_json(self) -> dict[str, Any]:
        """Returns the domain as JSON data."""
        return {
            "inputs": [{**vars(item), "sizes": [size.to_json() for size in item.sizes]} for item in self.inputs],
            "ranges": {name: list(limits) for name, limits in self.ranges.items()},
            "conditions": [{"text": c.text, "place": c.place, "own": c.own} for c in self.conditions],
            "patterns": [{"sizes": dict(pattern.sizes), "waived": list(pattern.waived)} for pattern in self.patterns],
            "constants": {path: dump_constant(value) for path, value in self.constants.items()},
            "values": self.values.to_json(),
            "absent": [[sorted(paths), list(self.absent[paths])] for paths in sorted(self.absent, key=sorted)],
            "waived": [{"text": c.text, "place": c.place, "own": c.own} for c in self.waived],
            "returned": dict(self.returned),
            "traits": list(self.traits),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Domain:
        """Returns the domain that `to_json` described.

        Raises:
            PlanError: if the data is not a domain.
        """
        try:
            found = cls(
                read(tuple[DomainInput, ...], data["inputs"]),
                read(Mapping[str, tuple[Size, Size | None]], data["ranges"]),
                read(tuple[SizeCondition, ...], data["conditions"]),
                read(tuple[SmallSizes, ...], data["patterns"]),
                {path: load_value(value) for path, value in data["constants"].items()},
                dict(read(tuple[tuple[frozenset[str], tuple[str, ...]], ...], data["absent"])),
                PythonValues.from_json(data["values"]),
                read(Mapping[str, str], data["returned"]),
                read(tuple[SizeCondition, ...], data["waived"]),
                read(tuple[str, ...], data["traits"]),
            )
            found.check.require_readable()
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise PlanError("This domain is damaged.", got=described(error)) from error
        return found

    def broken(self, sizes: Mapping[str, int]) -> list[SizeCondition]:
        """Returns the conditions that sizes break."""
        return [condition for condition in self.conditions if not condition.holds(sizes)]

    def requiring(self, sizes: Mapping[str, int], recorded: Sequence[Mapping[str, int]]) -> Domain:
        """Returns the domain in which the waived conditions that some sizes break are required.

        Args:
            sizes: The size of each variable.
            recorded: Sizes that stay inside in any case.
        """
        broken = [condition for condition in self.waived if not condition.holds(sizes)]
        required = []
        for condition in broken:
            kept = [f"({exactly(at)})" for at in recorded if not condition.holds(at)]
            required.append(replace(condition, text=" or ".join([*dict.fromkeys(kept), condition.text])))
        waived = tuple(condition for condition in self.waived if condition not in broken)
        return replace(self, conditions=(*self.conditions, *required), waived=waived)

    def limits(self) -> list[str]:
        """Returns the limits of the graph in words: bounds of the variables, then conditions.

        Conditions that exclude sizes are listed, except for long ones from torch's own code. The others are counted.
        """
        shown = [self._bounds(name) for name in self.ranges]
        others = [c for c in self.conditions if c.bounds() is None and c.text not in self._equivalent_bounds]
        small = {name: {p.sizes[name] for p in self.patterns if name in p.sizes} for name in self.ranges}
        allowed = {
            name: (min((*small[name], least)), most) for name in self.ranges for least, most in [self._range(name)]
        }
        limiting = [c for c in others if leaves_out_sizes(c, allowed)]
        stated = [c for c in limiting if c.own or len(c.text) <= _SHORT]
        shown += [c.text for c in stated]
        counts = {
            "longer condition{} on sizes": len(limiting) - len(stated),
            "condition{} of the model's code, excluding no sizes": sum(c.own and c not in limiting for c in others),
            "condition{} of torch's own code": sum(not c.own and c not in limiting for c in others),
        }
        single = {item for pattern in self.patterns if len(pattern.sizes) == 1 for item in pattern.sizes.items()}
        together = {pair for p in self.patterns for pair in itertools.combinations(sorted(p.sizes.items()), 2)}
        for first, second in itertools.combinations(sorted(single), 2):
            if first[1] and second[1] and first[0] != second[0] and (first, second) not in together:
                shown.append(f"not {first[0]} = {first[1]} with {second[0]} = {second[1]}")
        shown += [text for text in self._read_besides() if PLAIN not in text]  # hardly any tensor has such attributes
        return shown + [f"{count} {text.format('s' if count > 1 else '')}" for text, count in counts.items() if count]

    def _read_besides(self) -> list[str]:
        orders = {path: ", ".join(map(str, keys)) for path, keys in self.values.orders.items()}
        ordered = [f"keys of {path} in the order {order}" for path, order in orders.items()]
        return [*(f"every input {text}" for text in self.traits), *ordered]

    @cached_property
    def _equivalent_bounds(self) -> dict[str, tuple[str, int, int | None]]:
        """The conditions that amount to bounds of a variable without being written like that, by text."""
        found = {}
        for condition in self.conditions:
            if condition.bounds() is None and len(condition.variables()) == 1:
                (name,) = condition.variables()
                bounds = bounds_of(condition, self._range(name, plain=True))
                if bounds is not None:
                    found[condition.text] = name, *bounds
        return found

    def _range(self, name: str, plain: bool = False) -> tuple[int, int | None]:
        """The smallest size of a variable, apart from 0 and 1, and the largest; plain: by plain conditions alone."""
        least, most = self.ranges[name]
        bounds = [found for c in self.conditions if (found := c.bounds()) and found[0] == name]
        if not plain:
            bounds += [found for found in self._equivalent_bounds.values() if found[0] == name]
        smallest = max([SMALLEST, least, *(size for _, size, _ in bounds if size is not None)])
        return smallest, min(
            [size for size in (most, *(size for _, _, size in bounds)) if size is not None], default=None
        )

    def _bounds(self, name: str) -> str:
        least, _ = self.ranges[name]
        small = {pattern.sizes[name] for pattern in self.patterns if name in pattern.sizes}
        smallest, largest = self._range(name)
        for size in (1, 0):
            if size in small and least <= size == smallest - 1:
                smallest = size
        apart = [f"{name} = {size}" for size in sorted(small) if least <= size < smallest]
        return " or ".join([*apart, ranged(name, smallest, largest)])

    def __str__(self) -> str:
        return "\n".join([*aligned(self._rows()), *self._lines()])

    def _repr_html_(self) -> str:
        """Returns the same for notebooks."""
        return html_of(html_table(self._rows()), html_lines(self._lines()))

    def _rows(self) -> list[tuple[str, ...]]:
        optional = ["optional" if item.optional else "" for item in self.inputs]
        rows = [(item.path, item.dtype, f"({', '.join(map(str, item.sizes))})") for item in self.inputs]
        return [("input", "dtype", "sizes", ""), *((*row, note) for row, note in zip(rows, optional, strict=True))]

    def _small_sizes(self) -> list[str]:
        """The patterns of 0 and 1, in one line if all combinations are among them."""
        sizes: dict[str, set[int]] = {name: set() for name in self.ranges}
        for pattern in self.patterns:
            for name, size in pattern.sizes.items():
                sizes[name].add(size)
        combinations = math.prod(len(of_one) + 1 for of_one in sizes.values()) - 1
        if len({frozenset(pattern.sizes.items()) for pattern in self.patterns}) < max(combinations, 2):
            return [str(pattern) for pattern in self.patterns]
        stated = [f"{name} = {' or '.join(map(str, sorted(of_one)))}" for name, of_one in sizes.items() if of_one]
        return [", ".join(stated) + (", in any combination" if len(stated) > 1 else "")]

    def _lines(self) -> list[str]:
        lines = [f"sizes: {self._bounds(name)}" for name in self.ranges]
        lines += [f"small sizes: {text}" for text in self._small_sizes()]
        lines += [f"condition: {_placed(condition)}" for condition in self.conditions if condition.own]
        others = sum(not condition.own for condition in self.conditions)
        if others:
            lines.append(f"conditions of torch's own code: {others}")
        if self.waived:
            lines.append(f"conditions that change nothing, not required: {len(self.waived)}")
        if self.optional:
            sets = [self.names(paths) for paths in sorted(self.absent, key=sorted) if paths]
            lines.append(f"may be left out: {'; or '.join(sets) or 'nothing'}")
        lines += [f"required: {text}" for text in self._read_besides()]
        lines += [f"constant: {path} = {value!r}" for path, value in self.constants.items()]
        return [*lines, *(f"returns: {path or 'output'} = {text}" for path, text in self.returned.items())]


def _placed(condition: SizeCondition) -> str:
    return f"{condition.text}  ({condition.place})" if condition.place else condition.text
