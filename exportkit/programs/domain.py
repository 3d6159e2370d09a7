"""The domain of an exported graph: the inputs, sizes and constants for which it may be used in place of the model."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from exportkit.errors import ArgumentError
from exportkit.plan.expression import Expression
from exportkit.plan.plan import Plan
from exportkit.probing.simplify import first_step
from exportkit.programs.python_values import PythonValues
from exportkit.trees.json_form import dump_constant, load_value


@dataclass(frozen=True)
class SizeCondition:
    """A condition on sizes under which a graph was traced, or which limits it.

    Attributes:
        text: The condition over the variables of the plan, such as ``past_sequence + sequence <= 16``.
        place: File and line that asked for it; empty if unknown.
        own: Whether that line belongs to the model, not to torch or another library.
    """

    text: str
    place: str = ""
    own: bool = False


@dataclass(frozen=True)
class DomainInput:
    """An input tensor of a graph.

    Attributes:
        path: Path of the leaf.
        dtype: Its dtype, such as ``int64``.
        sizes: One expression over the variables for each axis.
        optional: Whether a call may leave it out.
    """

    path: str
    dtype: str
    sizes: tuple[Expression, ...]
    optional: bool = False


@dataclass(frozen=True)
class Domain:
    """Where an exported graph may be used. Prints as a table.

    Attributes:
        inputs: The input tensors: dtype, sizes, and whether they may be left out.
        ranges: Smallest and largest size of each variable; None where there is no largest one.
        limits: Upper limits on sizes that the audit of the program found.
        guards: Conditions that torch recorded during the trace, those of the model's own code first. torch.export
            assumes that every size is 2 or more.
        constants: Python values that are part of the graph, by path.
        values: What is asked of the Python values of a call.
        absent: The sets of inputs that may be left out together, by path: those that recorded calls left out, and
            those for which the model was seen to return what the graph returns.
        returned: Numbers among the outputs that follow from sizes: expressions over the variables of the plan, by path.
    """

    inputs: tuple[DomainInput, ...]
    ranges: Mapping[str, tuple[int, int | None]]
    limits: tuple[SizeCondition, ...]
    guards: tuple[SizeCondition, ...]
    constants: Mapping[str, Any]
    absent: frozenset[frozenset[str]] = frozenset([frozenset()])
    values: PythonValues = field(default_factory=lambda: PythonValues({}, {}))
    returned: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_plan(
        cls,
        plan: Plan,
        limits: tuple[SizeCondition, ...] = (),
        guards: tuple[SizeCondition, ...] = (),
        absent: frozenset[frozenset[str]] = frozenset([frozenset()]),
    ) -> Domain:
        """Returns the domain of a graph that was exported for a plan.

        Args:
            plan: The plan.
            limits: Upper limits on sizes that the audit found.
            guards: Conditions that torch recorded during the trace.
            absent: The sets of inputs that may be left out together.
        """
        return cls(
            tuple(DomainInput(leaf.path, leaf.dtype, leaf.sizes, leaf.is_optional) for leaf in plan.leaves),
            {variable.name: (variable.minimum, variable.maximum) for variable in plan.variables},
            limits,
            guards,
            {constant.path: constant.value for constant in plan.constants},
            absent,
        )

    def require_tensors(self, given: Mapping[str, torch.Tensor]) -> None:
        """Raises ArgumentError if a tensor is unknown or has a wrong dtype or size, or a required input is missing.

        Args:
            given: The tensors of a call by path.
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
            dtype = str(tensor.dtype).removeprefix("torch.")
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
                got=", ".join(given) or "no tensor",
                hint="every recorded call gave it; an input is optional if a recorded call left it out.",
            )
        absent = self._optional.difference(given)
        if absent not in self.absent:
            sets = [self.names(paths) or "none" for paths in sorted(self.absent, key=sorted)]
            raise ArgumentError(
                "These inputs may not be left out together: no recorded call did, and the graph is not proven for it.",
                where=self.names(absent) or "all inputs given",
                expected=f"left out: {'; or '.join(sets)}",
                got=f"left out: {self.names(absent) or 'none'}",
                hint="observe the model with a call that leaves out the same inputs, then export again.",
            )

    @functools.cached_property
    def _optional(self) -> frozenset[str]:
        return frozenset([item.path for item in self.inputs if item.optional])

    def names(self, paths: frozenset[str]) -> str:
        """Returns the names of inputs: arguments of which all inputs are meant, otherwise the paths themselves."""
        found: dict[str, None] = {}
        for item in self.inputs:
            if item.path in paths:
                name = first_step(item.path)
                whole = all(other.path in paths for other in self.inputs if first_step(other.path) == name)
                found[name if whole else item.path] = None
        return ", ".join(found)

    def require_ranges(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ArgumentError if the size of a variable is out of its range.

        Args:
            shapes: Shapes of the tensors of a call by path.
        """
        for item in self.inputs:
            for size, have in zip(item.sizes, shapes.get(item.path, ()), strict=False):
                if size.variable is None:
                    continue
                least, most = self.ranges[size.variable]
                if have < least or (most is not None and have > most):
                    limit = "" if most is None else f" and at most {most}"
                    raise ArgumentError(
                        "An input is out of range.",
                        where=item.path,
                        expected=f"{size.variable} at least {least}{limit}",
                        got=have,
                    )

    def to_json(self) -> dict[str, Any]:
        """Returns the domain as JSON data."""
        return {
            "inputs": [{**vars(item), "sizes": [size.to_json() for size in item.sizes]} for item in self.inputs],
            "ranges": {name: list(limits) for name, limits in self.ranges.items()},
            "limits": [dict(vars(condition)) for condition in self.limits],
            "guards": [dict(vars(condition)) for condition in self.guards],
            "constants": {path: dump_constant(value) for path, value in self.constants.items()},
            "values": self.values.to_json(),
            "absent": sorted(map(sorted, self.absent)),
            "returned": dict(self.returned),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Domain:
        """Returns the domain that `to_json` described."""
        return cls(
            tuple(
                DomainInput(**{**item, "sizes": tuple(Expression.from_json(size) for size in item["sizes"])})
                for item in data["inputs"]
            ),
            {name: (least, most) for name, (least, most) in data["ranges"].items()},
            tuple(SizeCondition(**item) for item in data["limits"]),
            tuple(SizeCondition(**item) for item in data["guards"]),
            {path: load_value(value) for path, value in data["constants"].items()},
            frozenset(map(frozenset, data["absent"])),
            PythonValues.from_json(data["values"]),
            dict(data["returned"]),
        )

    def __str__(self) -> str:
        rows = [("input", "dtype", "sizes", "")]
        rows += [
            (item.path, item.dtype, f"({', '.join(map(str, item.sizes))})", "optional" if item.optional else "")
            for item in self.inputs
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        for name, (least, most) in self.ranges.items():
            lines.append(f"range: {name} >= {least}" if most is None else f"range: {least} <= {name} <= {most}")
        lines += [f"limit: {_placed(condition)}" for condition in self.limits]
        lines += [f"guard: {_placed(condition)}" for condition in self.guards if condition.own]
        others = sum(not condition.own for condition in self.guards)
        if others:
            lines.append(f"guards of torch's own code: {others}")
        if self._optional:
            sets = [self.names(paths) for paths in sorted(self.absent, key=sorted) if paths]
            lines.append(f"may be left out: {'; or '.join(sets) or 'nothing'}")
        lines += [f"constant: {path} = {value!r}" for path, value in self.constants.items()]
        return "\n".join([*lines, *(f"returns: {path or 'output'} = {text}" for path, text in self.returned.items())])


def _placed(condition: SizeCondition) -> str:
    return f"{condition.text}  ({condition.place})" if condition.place else condition.text
