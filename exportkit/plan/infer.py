"""From seen sizes to a plan: varying axes become variables, sums of others expressions, the rest stays static."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from exportkit.plan.expression import Expression
from exportkit.plan.groups import Group, group_axes
from exportkit.plan.names import name_variables
from exportkit.plan.placeholder import Grids, Placeholder
from exportkit.plan.plan import Constant, Finding, Plan, PlannedLeaf, Role, Variable
from exportkit.plan.relations import DISTINCT_OBSERVATIONS, draft_name, find_relations, with_past
from exportkit.plan.table import AxisKey, CallTable, Leaf, known


def infer_plan(table: CallTable, constants: Sequence[Constant] = (), distinct: int = DISTINCT_OBSERVATIONS) -> Plan:
    """Returns the plan that the seen sizes suggest.

    Args:
        table: Shapes of all leaves in all calls.
        constants: Inputs that are no tensors.
        distinct: How many distinct observations make a relation of plain axes believable.
    """
    groups = with_past(group_axes(table))
    relations = find_relations(groups, distinct)
    changed: dict[AxisKey, Expression] = {}
    variables = []
    for number, group in enumerate(groups):
        name = draft_name(number)
        if number not in relations:
            role: Role = "past" if group.grows else "other"
            variables.append(Variable(name, role, group.seen, _evidence(group), maximum=group.limit))
        changed |= dict.fromkeys(group.axes, relations.get(number, Expression.of(name)))
    plan = Plan(tuple(_static(leaf) for leaf in table.leaves), tuple(variables), tuple(constants))
    plan = guess_batch(plan.with_sizes(changed), table)
    return name_variables(plan).with_findings(_findings(table, constants))


def guess_batch(plan: Plan, table: CallTable) -> Plan:
    """Returns the plan with the common leading axis as one variable, where it has the same size in all calls.

    This is what the sizes alone suggest: each input whose leading axis never changes has the same leading size, and so
    have the first outputs. To know it, the model must run again with more rows.
    """
    fixed = [leaf for leaf, axis, sizes in table.axes() if axis == 0 and len(known(sizes)) == 1]
    sizes = {next(iter(known(leaf.sizes(0)))) for leaf in fixed}
    leading_outputs = {shapes[0][0] for shapes in table.output_shapes if shapes and shapes[0]}
    caches_vary = any(leaf.growing is not None and len(known(leaf.sizes(0))) > 1 for leaf in table.leaves)
    if len(sizes) != 1 or leading_outputs != sizes or caches_vary or all(leaf.rank < 2 for leaf in fixed):
        return plan
    size = sizes.pop()
    evidence = f"leading axis of every input and of an output, always {size}; not confirmed by a run"
    seen = tuple(size for _ in table.leaves[0].shapes)
    variable = Variable("guessed_batch", "batch", seen, evidence)
    return plan.with_variable(variable, [(leaf.path, 0) for leaf in fixed])


def without_guess(plan: Plan, table: CallTable) -> Plan:
    """Returns the plan with a batch that was guessed from sizes that never changed made static again."""
    guess = plan.with_role("batch")
    if guess is None or len(known(guess.seen)) > 1:
        return plan
    static = {leaf.path: next(shape for shape in leaf.shapes if shape is not None) for leaf in table.leaves}
    return plan.with_sizes({(p, axis): Expression.of(static[p][axis]) for p, axis in plan.axes_of(guess.name)})


def with_rows(plan: Plan, placeholders: Sequence[Placeholder]) -> Plan:
    """Returns the plan in which the rows that a placeholder stands for are a variable of their own.

    They follow from how often the token occurs, so they are tied to no other size.
    """
    groups: dict[tuple[str, int], list[Placeholder]] = {}
    for placeholder in placeholders:
        groups.setdefault((placeholder.tokens, placeholder.value), []).append(placeholder)
    follow = {grid.rows for grid in plan.grids}
    for number, ((tokens, value), group) in enumerate(groups.items()):
        if any(placeholder.rows in follow for placeholder in group):
            continue
        largest = max(placeholder.factor for placeholder in group)
        base = next(placeholder for placeholder in group if placeholder.factor == largest)
        leaf = plan.by_path[base.rows]
        times = "" if largest == 1 else f", {largest} times for each row"
        evidence = f"as many as token {value} stands in {tokens}{times}; the model refuses other numbers"
        seen = tuple(None if shape is None else shape[0] for shape in leaf.shapes)
        name = f"rows_{number}"
        sizes = {
            (placeholder.rows, 0): Expression(((name, largest // placeholder.factor),))
            for placeholder in group
            if largest % placeholder.factor == 0
        }
        variable = Variable(name, "other", seen, evidence)
        plan = replace(plan, variables=(*plan.variables, variable)).with_sizes(sizes)
    return name_variables(replace(plan, placeholders=tuple(placeholders)))


def with_grids(plan: Plan, grids: Sequence[Grids]) -> Plan:
    """Returns the plan in which the number of images of each grid, and the number of its rows, are variables."""
    plan = replace(plan, grids=tuple(grids))
    for number, grid in enumerate(grids):
        axes = {
            f"images_{number}": (grid.path, "one grid for each image"),
            f"patches_{number}": (grid.rows, f"as many as the products of {grid.path} say"),
        }
        for name, (path, evidence) in axes.items():
            seen = tuple(None if shape is None else shape[0] for shape in plan.by_path[path].shapes)
            plan = plan.with_variable(Variable(name, "other", seen, evidence), [(path, 0)])
    return name_variables(plan)


def _static(leaf: Leaf) -> PlannedLeaf:
    first = next(shape for shape in leaf.shapes if shape is not None)
    sizes = tuple(Expression.of(size) for size in first)
    return PlannedLeaf(leaf.path, leaf.argument, leaf.dtype, sizes, leaf.shapes, leaf.growing)


def _evidence(group: Group) -> str:
    sizes = ", ".join("absent" if size is None else str(size) for size in group.seen)
    if group.grows:
        what = "length of the cache" if group.axes else "all tokens less the new ones, which the windows bear out"
        return f"{what}: {sizes}"
    count = len({path for path, _ in group.axes})
    return f"sizes {sizes}" if count == 1 else f"same sizes in {count} inputs: {sizes}"


def _findings(table: CallTable, constants: Sequence[Constant]) -> list[Finding]:
    found = [
        Finding("constant", constant.path, f"{constant.path}={constant.value!r} is baked into the graph.")
        for constant in constants
        if constant.value is not None
    ]
    calls = len(table.leaves[0].shapes) if table.leaves else 0
    if calls == 1:
        found.append(Finding("one call", "", "only one call was recorded, so no size was seen to vary."))
    return found
