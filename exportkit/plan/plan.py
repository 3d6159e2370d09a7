"""The plan: for each axis of each input a static size, a variable or an expression, and why; and edits of a plan."""

from __future__ import annotations

import keyword
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Self

from exportkit.errors import PlanError
from exportkit.plan.expression import Expression
from exportkit.plan.leaves import (
    AxisKey,
    Constant,
    Finding,
    PlannedLeaf,
    Role,
    Sizes,
    Variable,
    identifier,
    is_below,
    known,
    listed,
    unique_name,
)
from exportkit.plan.placeholders import Grids, Marker, Placeholder
from exportkit.plan.text import dump_plan, explain_axis, load_plan, plan_html, plan_source, plan_table


@dataclass(frozen=True)
class Plan:
    """Which axes vary, how their sizes depend on each other, and why: plain data.

    Attributes:
        leaves: All input tensors in signature order.
        variables: The sizes that callers choose.
        constants: Inputs that are not tensors.
        findings: What users should know about the plan.
        placeholders: Tokens that stand for rows of other inputs.
        joined: Paths of lists of tensors that are one input, their concatenation.
        unused: Paths of tensors that are passed to the model but never read; they are not inputs of the graph.
        passed_through: Outputs that are unchanged inputs: the path of the input by name of the output.
        structure: How the leaves are nested in each argument: lists, tuples and dicts with the path of a leaf, or None
            for a constant, as in torch's dynamic shapes. A cache is the list of its leaves.
        grids: Inputs that say how many rows other inputs have.
        markers: Inputs that say where placeholders stand.
    """

    leaves: tuple[PlannedLeaf, ...]
    variables: tuple[Variable, ...]
    constants: tuple[Constant, ...] = ()
    findings: tuple[Finding, ...] = ()
    placeholders: tuple[Placeholder, ...] = ()
    joined: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    passed_through: Mapping[str, str] = field(default_factory=dict)
    structure: Mapping[str, Any] = field(default_factory=dict)
    grids: tuple[Grids, ...] = ()
    markers: tuple[Marker, ...] = ()

    @cached_property
    def depending_on_past(self) -> frozenset[str]:
        """Paths of the leaves whose sizes depend on the number of cached tokens."""
        past = self.with_role("past")
        return frozenset([] if past is None else [leaf.path for leaf in self.leaves if past.name in leaf.variables()])

    @cached_property
    def by_path(self) -> Mapping[str, PlannedLeaf]:
        """The leaves by path."""
        return {leaf.path: leaf for leaf in self.leaves}

    @cached_property
    def new_tokens(self) -> Variable | None:
        """The variable for the number of new tokens; beside an encoder, of those of the decoder."""
        found = [variable for variable in self.variables if variable.role == "sequence"]
        past = self.with_role("past")
        sums = [size.variables() for leaf in self.leaves for size in leaf.sizes if len(size.terms) > 1]
        for variable in found:
            if past is not None and any({past.name, variable.name} <= set(names) for names in sums):
                return variable
        for variable in found:
            if any(self.by_path[path].argument.startswith("decoder_") for path, _ in self.axes_of(variable.name)):
                return variable
        return found[0] if found else None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the variables."""
        return tuple([variable.name for variable in self.variables])

    def variable(self, name: str) -> Variable:
        """Returns the variable of that name.

        Raises:
            PlanError: if the plan has no such variable.
        """
        for variable in self.variables:
            if variable.name == name:
                return variable
        raise PlanError(f"The plan has no variable {name!r}.", expected=", ".join(self.names) or "none", got=name)

    def with_role(self, role: Role) -> Variable | None:
        """Returns the first variable of that role, or None."""
        for variable in self.variables:
            if variable.role == role:
                return variable
        return None

    def shapes(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each leaf by path, given the sizes of all variables; see `completed`."""
        return {leaf.path: tuple([size.evaluate(sizes) for size in leaf.sizes]) for leaf in self.leaves}

    def completed(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Returns chosen sizes of all variables as a call may have them: those that follow from grids are computed."""
        found = dict(sizes)
        for grid in self.grids:
            for rows in self.by_path[grid.rows].sizes[grid.axis].variables():
                found[rows] = grid.count(self.by_path[grid.path].sizes[0].evaluate(sizes), sizes.get(rows))
        return found

    def static_sizes(self) -> frozenset[int]:
        """Returns all sizes that never change."""
        return frozenset([size.constant for leaf in self.leaves for size in leaf.sizes if size.is_static])

    def axes_of(self, name: str) -> tuple[AxisKey, ...]:
        """Returns the axes whose size is exactly the variable ``name``."""
        wanted = Expression.of(name)
        return tuple(
            [(leaf.path, axis) for leaf in self.leaves for axis, size in enumerate(leaf.sizes) if size == wanted]
        )

    def dynamic_axes(self) -> dict[str, tuple[int, ...]]:
        """Returns the axes of each leaf that are not static, by path."""
        return {leaf.path: tuple([i for i, s in enumerate(leaf.sizes) if not s.is_static]) for leaf in self.leaves}

    def with_sizes(self, changed: Mapping[AxisKey, Expression]) -> Self:
        """Returns the plan with the sizes of some axes replaced; variables that no axis needs any more are dropped."""
        leaves, needed = [], set[str]()
        for leaf in self.leaves:
            sizes = tuple([changed.get((leaf.path, axis), size) for axis, size in enumerate(leaf.sizes)])
            leaves.append(leaf if sizes == leaf.sizes else replace(leaf, sizes=sizes))
            needed.update(*map(Expression.variables, sizes))
        kept = [v for v in self.variables if v.name in needed]
        variables = [v if v.follows is None or v.follows in needed else replace(v, follows=None) for v in kept]
        return replace(self, leaves=tuple(leaves), variables=tuple(variables))

    def with_changed(self, variable: Variable) -> Self:
        """Returns the plan with a variable in place of the one of the same name."""
        return replace(self, variables=tuple([variable if v.name == variable.name else v for v in self.variables]))

    def with_variable(self, variable: Variable, axes: Iterable[AxisKey]) -> Self:
        """Returns the plan in which the given axes are one new variable."""
        extended = replace(self, variables=(*self.variables, variable))
        return extended.with_sizes(dict.fromkeys(axes, Expression.of(variable.name)))

    def with_names(self, names: Mapping[str, str]) -> Self:
        """Returns the plan with variables renamed, each from a key to its value, also in expressions."""
        changed = {}
        for leaf in self.leaves:
            for axis, size in enumerate(leaf.sizes):
                changed[leaf.path, axis] = size.renamed(names)
        variables = []
        for v in self.variables:
            variables.append(replace(v, name=names.get(v.name, v.name), follows=names.get(v.follows or "", v.follows)))
        return replace(self, variables=tuple(variables)).with_sizes(changed)

    def with_findings(self, findings: Collection[Finding]) -> Self:
        """Returns the plan with findings added."""
        return replace(self, findings=(*self.findings, *findings))

    def fields(self) -> dict[str, Any]:
        """Returns the attributes of the plan by name."""
        return {each.name: getattr(self, each.name) for each in fields(Plan)}

    def __str__(self) -> str:
        return plan_table(self.leaves, self.variables, self.findings)

    def _repr_html_(self) -> str:
        """Returns the same for notebooks."""
        return plan_html(self.leaves, self.variables, self.findings)

    def explain(self, path: str, axis: int) -> str:
        """Returns why an axis of an input has its size, in sentences.

        Args:
            path: Path of the input; of a container such as a cache, its first leaf is explained.
            axis: The axis.
        """
        return explain_axis(self._leaves_at(path, axis)[0], axis, self.leaves, self.variables)

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
        return plan_source(self.structure, self.by_path, self.variables)

    def to_json(self) -> str:
        """Returns the plan as JSON text."""
        return dump_plan(self.fields())

    @staticmethod
    def from_json(text: str) -> Plan:
        """Returns the plan that `to_json` wrote.

        Raises:
            PlanError: if the text is not a plan, or a plan of another version.
        """
        return Plan(**load_plan(text))

    # Edits by a person. Each returns a new plan, or raises an error that says which recorded calls contradict it.

    def rename(self, old: str, new: str) -> Self:
        """Returns the plan with the variable ``old`` called ``new``, also in ONNX.

        Raises:
            PlanError: if there is no such variable, or the name is taken or not valid.
        """
        self.variable(old)
        _require_name(new)
        if new in self.names:
            hint = f"plan.tie({new!r}, {old!r}) makes them one."
            raise PlanError(f"The plan already has a variable {new!r}.", hint=hint)
        return self.with_names({old: new})

    def static(self, target: str, axis: int | None = None) -> Self:
        """Returns the plan in which a variable, or an axis of an input, is static.

        Args:
            target: A variable; or, together with ``axis``, the path of an input (of a container, all of its leaves).
            axis: The axis.

        Raises:
            PlanError: if the recorded calls had several sizes there.
        """
        changed: dict[AxisKey, Expression] = {}
        if axis is not None:
            for leaf in self._leaves_at(target, axis):
                size = _only_size(f"Axis {axis} of {leaf.path}", leaf.seen(axis))
                changed[leaf.path, axis] = Expression.of(size)
            return self.with_sizes(changed)
        size = _only_size(f"The variable {target!r}", self.variable(target).seen)
        for leaf in self.leaves:
            for i, expression in enumerate(leaf.sizes):
                if target in expression.variables():
                    changed[leaf.path, i] = expression.with_value(target, size)
        return self.with_sizes(changed)

    def dynamic(self, path: str, axis: int, name: str | None = None) -> Self:
        """Returns the plan in which a static axis of an input is a variable.

        Args:
            path: Path of the input; of a container, all of its leaves.
            axis: The axis.
            name: Name of the variable.

        Raises:
            PlanError: if the axis varies already, or the name is taken or not valid.
        """
        leaves = self._leaves_at(path, axis)
        for leaf in leaves:
            if not leaf.sizes[axis].is_static:
                raise PlanError(f"Axis {axis} of {leaf.path} varies already.", got=str(leaf.sizes[axis]))
        if name is None:
            name = unique_name(f"{identifier(path)}_axis_{axis}", self.names)
        else:
            _require_name(name)
        if name in self.names:
            raise PlanError(f"The plan already has a variable {name!r}.", hint="choose another name.")
        seen = leaves[0].seen(axis)
        variable = Variable(name, "other", seen, f"made dynamic by hand; sizes {listed(seen)}")
        return self.with_variable(variable, [(leaf.path, axis) for leaf in leaves])

    def split(self, name: str, *paths: str) -> Self:
        """Returns the plan in which the axes of the inputs at ``paths`` are a new variable instead of ``name``.

        Raises:
            PlanError: if these are none or all of its axes.
        """
        old, every = self.variable(name), self.axes_of(name)
        axes = [(path, axis) for path, axis in every if any(is_below(path, target) for target in paths)]
        if not axes or len(axes) == len(every):
            raise PlanError(
                f"These inputs do not divide the variable {name!r}.",
                where=", ".join(paths),
                expected=f"some of {', '.join(dict.fromkeys(path for path, _ in every))}",
                got="none of them" if not axes else "all of them",
            )
        free = unique_name(name, self.names)
        apart = replace(old, name=free, evidence=f"{old.evidence}; split from {name} by hand")
        return self.with_variable(apart, axes)

    def tie(self, first: str, second: str) -> Self:
        """Returns the plan in which two variables are one, called ``first``.

        Raises:
            PlanError: if they are the same variable, had different sizes in a recorded call, or recorded sizes are
                outside of the range that both allow.
        """
        kept, tied, seen = self.variable(first), self.variable(second), list[int | None]()
        if first == second:
            raise PlanError("A variable cannot be tied to itself.", expected="two variables", got=first)
        for call, (a, b) in enumerate(zip(kept.seen, tied.seen, strict=True)):
            seen.append(b if a is None else a)
            if a is not None and b is not None and a != b:
                raise PlanError(
                    f"{first!r} and {second!r} cannot be one variable: a recorded call had different sizes.",
                    where=f"call {call}",
                    expected=f"{first} = {second}",
                    got=f"{a} and {b}",
                )
        limits = [limit for limit in (kept.maximum, tied.maximum) if limit is not None]
        merged = replace(
            kept,
            role=tied.role if kept.role == "other" else kept.role,
            seen=tuple(seen),
            minimum=max(kept.minimum, tied.minimum),
            maximum=min(limits, default=None),
            follows=None if kept.follows == second else kept.follows,
            required=kept.required or tied.required,
        )
        _require_within(first, merged.seen, merged.minimum, merged.maximum)
        renamed = self.with_names({second: first})
        variables = {variable.name: variable for variable in renamed.variables} | {first: merged}
        return replace(renamed, variables=tuple(variables.values()))

    def range(self, name: str, minimum: int = 0, maximum: int | None = None) -> Self:
        """Returns the plan in which a variable is between ``minimum`` and ``maximum``.

        An export that serves less raises an ExportError. Sizes of 0 and 1 are an exception, as torch.export assumes
        larger ones: if the graph does not serve them, a finding says so.

        Raises:
            PlanError: if a recorded size is outside.
        """
        _require_within(name, self.variable(name).seen, minimum, maximum)
        limited = replace(self.variable(name), minimum=minimum, maximum=maximum, required=True)
        return self.with_changed(limited)

    def widened(self, whole: Plan) -> Self:
        """Returns this plan of some calls, in which every axis varies that varies among all calls.

        Where the plan of all calls says how a size depends on others, it does so here; variables of inputs that none
        of these calls gives are 0.

        Args:
            whole: The plan of all calls.
        """
        homes: dict[str, tuple[PlannedLeaf, int]] = {}  # the first axis here that is a variable of the whole plan
        for leaf in reversed(self.leaves):
            for axis, size in enumerate(whole.by_path[leaf.path].sizes if leaf.path in whole.by_path else ()):
                if size.variable is not None:
                    homes[size.variable] = leaf, axis
        changed: dict[AxisKey, Expression] = {}
        for leaf in self.leaves:
            for axis, size in enumerate(leaf.sizes if leaf.path in whole.by_path else ()):
                wanted = whole.by_path[leaf.path].sizes[axis]
                for name in wanted.variables() - homes.keys():
                    wanted = wanted.with_value(name, 0)
                if size.is_static and not wanted.is_static:
                    changed[leaf.path, axis] = wanted
        names = {name for size in changed.values() for name in size.variables()}.difference(self.names)
        added = []
        for variable in whole.variables:  # in this order, the first ones keep the sizes that were seen
            if variable.name in names:
                leaf, axis = homes[variable.name]
                added.append(replace(variable, seen=leaf.seen(axis), follows=None))
        return replace(self, variables=(*self.variables, *added)).with_sizes(changed)

    def _leaves_at(self, target: str, axis: int) -> list[PlannedLeaf]:
        """The leaves that a path names, alone or as the root of many; each must have the axis."""
        leaves = [leaf for leaf in self.leaves if is_below(leaf.path, target)]
        if not leaves:
            raise PlanError(f"The plan has no input {target!r}.", expected=", ".join(self.by_path), got=target)
        for leaf in leaves:
            if not 0 <= axis < len(leaf.sizes):
                raise PlanError(f"{leaf.path} has no axis {axis}.", expected=f"0 to {len(leaf.sizes) - 1}", got=axis)
        return leaves


def _require_name(name: object) -> None:
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or "__" in name:
        raise PlanError(
            f"{name!r} is not a valid name for a variable.",
            expected="a Python identifier such as 'batch', not a keyword, without '__'",
            got=repr(name),
        )


def _require_within(name: str, sizes: Sizes, minimum: int, maximum: int | None) -> None:
    seen, is_whole = known(sizes), all(isinstance(limit, int) for limit in (minimum, maximum) if limit is not None)
    if not is_whole or minimum < 0 or (maximum is not None and maximum < minimum):
        raise PlanError("Not a valid range.", where=name, expected="0 <= minimum <= maximum", got=(minimum, maximum))
    outside = sorted([size for size in seen if size < minimum or (maximum is not None and size > maximum)])
    if outside:
        raise PlanError(
            f"The range of {name!r} leaves out sizes that were recorded.",
            expected=f"{min(seen)} to {max(seen)} within the range",
            got=f"{minimum} to {'any' if maximum is None else maximum}, without {outside}",
        )


def _only_size(what: str, seen: Sizes) -> int:
    if len(known(seen)) != 1:
        raise PlanError(f"{what} cannot be static: it was seen with several sizes.", got=listed(seen))
    return known(seen).pop()
