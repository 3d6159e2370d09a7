"""The plan: for each axis of each input a static size, a variable or an expression, and why.

A plan is plain frozen data. In come inferred groups or edits by the user; out goes what the later stages evaluate:
shapes for given sizes, names for ONNX, a table for people.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from exportkit.errors import PlanError
from exportkit.plan.expression import Expression
from exportkit.plan.placeholder import Grids, Marker, Placeholder
from exportkit.plan.table import AxisKey, Sizes

Role = Literal["batch", "sequence", "past", "other"]


@dataclass(frozen=True)
class Variable:
    """A size that callers choose.

    Attributes:
        name: Its name, also in ONNX.
        role: What it means: the batch, new tokens, stored tokens, or something else.
        seen: Its size in each recorded call; None where all of its leaves are absent.
        evidence: One sentence: why these axes vary, and vary together.
        minimum: Smallest size that callers may choose.
        maximum: Largest size that callers may choose, or None.
        follows: Another variable whose size it has once it is not 0: a cache of what the encoder returned.
    """

    name: str
    role: Role
    seen: Sizes
    evidence: str
    minimum: int = 0
    maximum: int | None = None
    follows: str | None = None

    def filled_length(self, sizes: Mapping[str, int]) -> int | None:
        """Returns the size that it has whenever it is not 0; None if it takes many.

        Args:
            sizes: Sizes of the other variables.
        """
        if self.follows is not None:
            return sizes[self.follows]
        return self.maximum if {size for size in self.seen if size is not None} == {0, self.maximum} else None


@dataclass(frozen=True)
class PlannedLeaf:
    """One input tensor and the sizes of its axes.

    Attributes:
        path: Path of the leaf.
        argument: Parameter of the method that it belongs to.
        dtype: Element type, such as ``int64``.
        sizes: One expression for each axis.
        shapes: Its shape in each recorded call; None where it is absent.
        growing: Length axis of a dynamic cache, or None.
        restored: Whether no call had it: a mask of ones that was added since.
    """

    path: str
    argument: str
    dtype: str
    sizes: tuple[Expression, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    growing: int | None = None
    restored: bool = False

    @property
    def is_optional(self) -> bool:
        """Whether it may be left out: some recorded calls lack it."""
        return self.restored or None in self.shapes


@dataclass(frozen=True)
class Constant:
    """A Python value among the inputs: it becomes part of the graph and cannot change later."""

    path: str
    argument: str
    value: Any


@dataclass(frozen=True)
class Finding:
    """Something a person should know about the plan, such as a constant that is baked in."""

    kind: str
    where: str
    text: str


@dataclass(frozen=True)
class Plan:
    """Which axes vary, how their sizes depend on each other, and why.

    Attributes:
        leaves: All input tensors in signature order.
        variables: The sizes that callers choose.
        constants: Inputs that are no tensors.
        findings: What a person should know.
        placeholders: Tokens that stand for rows of other inputs.
        grids: Inputs that say how many rows other inputs have.
        markers: Inputs that say where placeholders stand.
        joined: Paths of lists of tensors that are one input, their concatenation.
        unused: Paths of tensors that the model was given and never reads; they are no inputs.
        echoes: Outputs that are inputs handed back: name of the output to path of the input.
        structure: How the leaves are nested in each argument: lists, tuples and dicts with the path of a leaf, or None
            for a constant, in the form that torch's dynamic shapes have. A cache is the list of its leaves.
    """

    leaves: tuple[PlannedLeaf, ...]
    variables: tuple[Variable, ...]
    constants: tuple[Constant, ...] = ()
    findings: tuple[Finding, ...] = ()
    placeholders: tuple[Placeholder, ...] = ()
    joined: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    echoes: Mapping[str, str] = field(default_factory=dict)
    structure: Mapping[str, Any] = field(default_factory=dict)
    grids: tuple[Grids, ...] = ()
    markers: tuple[Marker, ...] = ()

    @cached_property
    def by_path(self) -> Mapping[str, PlannedLeaf]:
        """The leaves by path."""
        return {leaf.path: leaf for leaf in self.leaves}

    def variable(self, name: str) -> Variable:
        """Returns the variable of that name.

        Raises:
            PlanError: if there is none.
        """
        for variable in self.variables:
            if variable.name == name:
                return variable
        names = ", ".join(variable.name for variable in self.variables)
        raise PlanError(f"The plan has no variable {name!r}.", expected=names or "none", got=name)

    def with_role(self, role: Role) -> Variable | None:
        """Returns the first variable of that role, or None."""
        return next((variable for variable in self.variables if variable.role == role), None)

    def shapes(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each leaf by path, given the sizes of all variables."""
        sizes = self.completed(sizes)
        return {leaf.path: tuple(size.evaluate(sizes) for size in leaf.sizes) for leaf in self.leaves}

    def completed(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Returns the sizes of all variables, with those that follow from grids as these say."""
        found = dict(sizes)
        for grid in self.grids:
            rows = self.by_path[grid.rows].sizes[0].variable
            if rows is not None:
                found[rows] = grid.count(self.by_path[grid.path].sizes[0].evaluate(sizes))
        return found

    def static_sizes(self) -> frozenset[int]:
        """Returns all sizes that never change."""
        return frozenset(size.constant for leaf in self.leaves for size in leaf.sizes if size.is_static)

    def axes_of(self, name: str) -> tuple[AxisKey, ...]:
        """Returns the axes whose size is exactly the variable ``name``."""
        sizes = ((leaf.path, axis, size) for leaf in self.leaves for axis, size in enumerate(leaf.sizes))
        return tuple((path, axis) for path, axis, size in sizes if size.variable == name)

    def dynamic_axes(self) -> dict[str, tuple[int, ...]]:
        """Returns the axes of each leaf that are not static, by path."""
        return {leaf.path: tuple(i for i, s in enumerate(leaf.sizes) if not s.is_static) for leaf in self.leaves}

    def with_sizes(self, changed: Mapping[AxisKey, Expression]) -> Plan:
        """Returns the plan with the sizes of some axes replaced; variables that no axis needs any more are dropped."""
        leaves = tuple(
            replace(leaf, sizes=tuple(changed.get((leaf.path, i), size) for i, size in enumerate(leaf.sizes)))
            for leaf in self.leaves
        )
        needed = {name for leaf in leaves for size in leaf.sizes for name in size.variables()}
        return replace(self, leaves=leaves, variables=tuple(v for v in self.variables if v.name in needed))

    def with_variable(self, variable: Variable, axes: Iterable[AxisKey]) -> Plan:
        """Returns the plan in which the given axes are one new variable."""
        extended = replace(self, variables=(*self.variables, variable))
        return extended.with_sizes(dict.fromkeys(axes, Expression.of(variable.name)))

    def with_findings(self, findings: Collection[Finding]) -> Plan:
        """Returns the plan with findings added."""
        return replace(self, findings=(*self.findings, *findings))

    def explain(self, path: str, axis: int) -> str:
        """Returns why an axis of an input has its size, in sentences.

        Args:
            path: Path of the input; of a container such as a cache, its first leaf is explained.
            axis: The axis.
        """
        from exportkit.plan.explain import explain_axis

        return explain_axis(self, path, axis)

    def rename(self, old: str, new: str) -> Plan:
        """Returns the plan with the variable ``old`` called ``new``, also in ONNX.

        Raises:
            PlanError: if there is no such variable, or the name is taken.
        """
        from exportkit.plan import edit

        return edit.rename(self, old, new)

    def static(self, target: str, axis: int | None = None) -> Plan:
        """Returns the plan in which a variable, or an axis of an input, is static.

        Args:
            target: A variable; or, together with ``axis``, the path of an input (of a container, all of its leaves).
            axis: The axis.

        Raises:
            PlanError: if the recorded calls had several sizes there.
        """
        from exportkit.plan import edit

        return edit.static(self, target, axis)

    def dynamic(self, path: str, axis: int, name: str | None = None) -> Plan:
        """Returns the plan in which a static axis of an input is a variable.

        Args:
            path: Path of the input; of a container, all of its leaves.
            axis: The axis.
            name: Name of the variable.

        Raises:
            PlanError: if the axis varies already, or the name is taken.
        """
        from exportkit.plan import edit

        return edit.dynamic(self, path, axis, name)

    def split(self, name: str, *paths: str) -> Plan:
        """Returns the plan in which the axes of the inputs at ``paths`` are apart from the variable ``name``.

        Raises:
            PlanError: if these are none or all of its axes.
        """
        from exportkit.plan import edit

        return edit.split(self, name, paths)

    def tie(self, first: str, second: str) -> Plan:
        """Returns the plan in which two variables are one, called ``first``.

        Raises:
            PlanError: if they had different sizes in a recorded call.
        """
        from exportkit.plan import edit

        return edit.tie(self, first, second)

    def range(self, name: str, minimum: int = 0, maximum: int | None = None) -> Plan:
        """Returns the plan in which a variable is between ``minimum`` and ``maximum``.

        Raises:
            PlanError: if a recorded size is outside.
        """
        from exportkit.plan import edit

        return edit.limit(self, name, minimum, maximum)

    def to_json(self) -> str:
        """Returns the plan as JSON text, without the recorded calls."""
        from exportkit.plan.json_form import dump_plan

        return dump_plan(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Returns the plan that `to_json` wrote.

        Raises:
            PlanError: if the text is no plan, or one of another version.
        """
        from exportkit.plan.json_form import load_plan

        return load_plan(text)

    def source(self) -> str:
        """Returns Python code to paste: dynamic shapes for torch.export, and with names for torch.onnx.

        Example:
            >>> import torch, exportkit
            >>> model, observer = torch.nn.Linear(4, 2), exportkit.InputObserver()
            >>> with observer(model):
            ...     _ = model(torch.ones(3, 4))
            >>> "'input': {0: DYNAMIC}" in observer.plan().source()
            True
        """
        from exportkit.plan.source import plan_source

        return plan_source(self)

    def __str__(self) -> str:
        from exportkit.plan.text import plan_table

        return plan_table(self)
