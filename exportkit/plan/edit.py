"""Edits of a plan by a person. Each returns a new plan, or says which recorded calls contradict it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from exportkit.errors import PlanError
from exportkit.plan.expression import Expression
from exportkit.plan.plan import Plan, PlannedLeaf, Variable
from exportkit.plan.table import Sizes, known


def rename(plan: Plan, old: str, new: str) -> Plan:
    """Returns the plan with a variable renamed."""
    plan.variable(old)
    if not new.isidentifier():
        raise PlanError(f"{new!r} is no name for a variable.", expected="a name such as 'batch'", got=repr(new))
    if any(variable.name == new for variable in plan.variables):
        raise PlanError(f"The plan has a variable {new!r} already.", hint=f"plan.tie({new!r}, {old!r}) makes them one.")
    leaves = tuple(replace(leaf, sizes=tuple(s.renamed({old: new}) for s in leaf.sizes)) for leaf in plan.leaves)
    variables = [replace(v, follows=new) if v.follows == old else v for v in plan.variables]
    variables = [replace(v, name=new) if v.name == old else v for v in variables]
    return replace(plan, leaves=leaves, variables=tuple(variables))


def static(plan: Plan, target: str, axis: int | None = None) -> Plan:
    """Returns the plan in which a variable, or one axis of an input, has the one size that was seen."""
    if axis is None:
        size = _only_size(f"The variable {target!r}", plan.variable(target).seen)
        free = tuple(replace(v, follows=None) if v.follows == target else v for v in plan.variables)
        return replace(plan, variables=free).with_sizes(
            {
                (leaf.path, i): _with_value(expression, target, size)
                for leaf in plan.leaves
                for i, expression in enumerate(leaf.sizes)
                if target in expression.variables()
            }
        )
    leaves = leaves_of(plan, target, axis)
    sizes = {(leaf.path, axis): _only_size(f"Axis {axis} of {leaf.path}", seen_sizes(leaf, axis)) for leaf in leaves}
    return plan.with_sizes({key: Expression.of(size) for key, size in sizes.items()})


def dynamic(plan: Plan, target: str, axis: int, name: str | None = None) -> Plan:
    """Returns the plan in which an axis that was static is a variable."""
    leaves = leaves_of(plan, target, axis)
    for leaf in leaves:
        if not leaf.sizes[axis].is_static:
            raise PlanError(f"Axis {axis} of {leaf.path} varies already.", got=str(leaf.sizes[axis]))
    taken = {variable.name for variable in plan.variables}
    wanted = name or "_".join(filter(str.isidentifier, [*target.replace("[", ".").split("."), f"axis_{axis}"]))
    if wanted in taken:
        raise PlanError(f"The plan has a variable {wanted!r} already.", hint="choose another name.")
    seen = seen_sizes(leaves[0], axis)
    variable = Variable(wanted, "other", seen, f"made dynamic by hand; sizes {_text(seen)}")
    return plan.with_variable(variable, [(leaf.path, axis) for leaf in leaves])


def split(plan: Plan, name: str, targets: Iterable[str]) -> Plan:
    """Returns the plan in which the axes of some inputs are a variable of their own, apart from ``name``."""
    old = plan.variable(name)
    wanted = tuple(targets)
    axes = [(path, axis) for path, axis in plan.axes_of(name) if any(_is_below(path, target) for target in wanted)]
    if not axes or len(axes) == len(plan.axes_of(name)):
        raise PlanError(
            f"These inputs do not divide the variable {name!r}.",
            where=", ".join(wanted),
            expected=f"some of {', '.join(dict.fromkeys(path for path, _ in plan.axes_of(name)))}",
            got="none of them" if not axes else "all of them",
        )
    number = next(i for i in range(2, 1000) if all(v.name != f"{name}_{i}" for v in plan.variables))
    apart = replace(old, name=f"{name}_{number}", evidence=f"{old.evidence}; split from {name} by hand")
    return plan.with_variable(apart, axes)


def tie(plan: Plan, first: str, second: str) -> Plan:
    """Returns the plan in which two variables are one, called ``first``."""
    kept, gone = plan.variable(first), plan.variable(second)
    for call, (a, b) in enumerate(zip(kept.seen, gone.seen, strict=True)):
        if a is not None and b is not None and a != b:
            raise PlanError(
                f"{first!r} and {second!r} cannot be one variable: a recorded call had different sizes.",
                where=f"call {call}",
                expected=f"{first} = {second}",
                got=f"{a} and {b}",
            )
    leaves = tuple(replace(leaf, sizes=tuple(s.renamed({second: first}) for s in leaf.sizes)) for leaf in plan.leaves)
    return replace(plan, leaves=leaves, variables=tuple(v for v in plan.variables if v.name != second))


def limit(plan: Plan, name: str, minimum: int, maximum: int | None) -> Plan:
    """Returns the plan in which a variable has the given range."""
    variable = plan.variable(name)
    if minimum < 0 or (maximum is not None and maximum < minimum):
        raise PlanError("This is no range.", where=name, expected="0 <= minimum <= maximum", got=(minimum, maximum))
    outside = [s for s in known(variable.seen) if s < minimum or (maximum is not None and s > maximum)]
    if outside:
        raise PlanError(
            f"The range of {name!r} leaves out sizes that were recorded.",
            expected=f"{min(known(variable.seen))} to {max(known(variable.seen))} within the range",
            got=f"{minimum} to {'any' if maximum is None else maximum}, without {sorted(outside)}",
        )
    variables = (replace(v, minimum=minimum, maximum=maximum) if v.name == name else v for v in plan.variables)
    return replace(plan, variables=tuple(variables))


def with_sizes_of(plan: Plan, whole: Plan) -> Plan:
    """Returns the plan of some calls in which axes vary that vary among all calls.

    Where all calls say how a size depends on others, it does so here; an input that none of these calls gives is empty.

    Args:
        plan: The plan of some of the calls.
        whole: The plan of all of them.
    """
    homes = {
        size.variable: (leaf, axis)
        for leaf in reversed(plan.leaves)
        if leaf.path in whole.by_path
        for axis, size in enumerate(whole.by_path[leaf.path].sizes)
        if size.variable is not None
    }
    sizes: dict[tuple[str, int], Expression] = {}
    for leaf in plan.leaves:
        for axis, size in enumerate(leaf.sizes if leaf.path in whole.by_path else ()):
            wanted = whole.by_path[leaf.path].sizes[axis]
            for name in wanted.variables() - homes.keys():
                wanted = _with_value(wanted, name, 0)
            if size.is_static and not wanted.is_static:
                sizes[leaf.path, axis] = wanted
    known_names = {variable.name for variable in plan.variables}
    wanted_names = {name for size in sizes.values() for name in size.variables()}
    added = tuple(
        replace(whole.variable(name), seen=seen_sizes(*homes[name]), follows=None)
        for name in sorted(wanted_names - known_names)
    )
    return replace(plan, variables=(*plan.variables, *added)).with_sizes(sizes)


def leaves_of(plan: Plan, target: str, axis: int) -> list[PlannedLeaf]:
    """Returns the leaves that a path names, alone or as the root of many; each must have the axis."""
    leaves = [leaf for leaf in plan.leaves if _is_below(leaf.path, target)]
    if not leaves:
        raise PlanError(f"The plan has no input {target!r}.", expected=", ".join(plan.by_path), got=target)
    for leaf in leaves:
        if not 0 <= axis < len(leaf.sizes):
            raise PlanError(f"{leaf.path} has no axis {axis}.", expected=f"0 to {len(leaf.sizes) - 1}", got=axis)
    return leaves


def seen_sizes(leaf: PlannedLeaf, axis: int) -> Sizes:
    """Returns the sizes of an axis in all calls; None where the leaf is absent, 0 where that means an empty cache."""
    absent = 0 if axis == leaf.growing else None
    return tuple(absent if shape is None else shape[axis] for shape in leaf.shapes)


def _is_below(path: str, target: str) -> bool:
    return path == target or path.startswith((f"{target}.", f"{target}["))


def _only_size(what: str, seen: Sizes) -> int:
    sizes = sorted(known(seen))
    if len(sizes) != 1:
        raise PlanError(f"{what} cannot be static: it was seen with several sizes.", got=_text(seen))
    return sizes[0]


def _with_value(expression: Expression, name: str, value: int) -> Expression:
    """The expression with a number in the place of a variable."""
    rest = tuple(term for term in expression.terms if term[0] != name)
    added = dict(expression.terms)[name] * value
    if not rest:
        return Expression.of(expression.evaluate({name: value}))
    if expression.divisor == 1:
        return replace(expression, terms=rest, constant=expression.constant + added)
    return replace(expression, terms=rest, shift=expression.shift + added)


def _text(seen: Sizes) -> str:
    return ", ".join("absent" if size is None else str(size) for size in seen)
