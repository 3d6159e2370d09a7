"""From seen sizes to a plan: varying axes become variables, sums of others expressions, and the rest stays static.

The variables get the field's standard names, from where they occur in the inputs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from exportkit.plan.expression import Expression
from exportkit.plan.leaves import (
    AxisKey,
    CallTable,
    Constant,
    Finding,
    PlannedLeaf,
    Role,
    Variable,
    identifier,
    known,
    listed,
    unique_name,
)
from exportkit.plan.placeholders import Grids, Placeholder
from exportkit.plan.plan import Plan
from exportkit.plan.relations import DISTINCT_OBSERVATIONS, Group, draft_name, find_relations, group_axes, with_past

_IMAGE_RANK, _IMAGE_CHANNELS = 4, (1, 3, 4)
_TOKENS_RANK = 2
_LENGTH_AXIS = 2  # of keys and values
_SUFFIXES = re.compile(r"_(ids|mask|values|features|embeds|states)$")


def infer_plan(table: CallTable, constants: Sequence[Constant] = (), distinct: int = DISTINCT_OBSERVATIONS) -> Plan:
    """Returns the plan that the seen sizes suggest.

    Args:
        table: Shapes of all leaves in all calls.
        constants: Inputs that are not tensors.
        distinct: How many distinct observations make a relation of plain axes credible.
    """
    groups = with_past(group_axes(table), table)
    relations = find_relations(groups, distinct)
    changed: dict[AxisKey, Expression] = {}
    variables = []
    for number, group in enumerate(groups):
        name = draft_name(number)
        if number not in relations:
            role: Role = "past" if group.grows else "other"
            variables.append(Variable(name, role, group.seen, _evidence(group), maximum=group.limit))
        changed |= dict.fromkeys(group.axes, relations.get(number, Expression.of(name)))
    leaves = []
    for leaf in table.leaves:
        sizes = tuple(map(Expression.of, leaf.first_shape))
        leaves.append(PlannedLeaf(leaf.path, leaf.argument, leaf.dtype, sizes, leaf.shapes, leaf.growing))
    plan = Plan(tuple(leaves), tuple(variables), tuple(constants)).with_sizes(changed)
    findings = []
    for constant in constants:
        if constant.value is not None:
            text = f"{constant.path}={constant.value!r} is baked into the graph."
            if constant.is_generator:
                text = f"{constant.path}: the graph ignores generators, so any generator is accepted."
            findings.append(Finding("constant", constant.path, text))
    if table.leaves and len(table.leaves[0].shapes) == 1:
        findings.append(Finding("one call", "", "only one call was recorded, so it is not known which sizes vary."))
    return name_variables(guess_batch(plan, table)).with_findings(findings)


def _evidence(group: Group) -> str:
    if group.grows:
        what = "length of the cache" if group.axes else "all tokens minus the new ones, as the windows confirm"
        return f"{what}: {listed(group.seen)}"
    count = len(dict(group.axes))
    return f"sizes {listed(group.seen)}" if count == 1 else f"same sizes in {count} inputs: {listed(group.seen)}"


def guess_batch(plan: Plan, table: CallTable) -> Plan:
    """Returns the plan with the common leading axis as one variable, if it has the same size in all calls.

    This is what the sizes alone suggest: all inputs whose leading axis never changes have the same leading size, and so
    have the first outputs. Only running the model with more rows can confirm it.
    """
    fixed, sizes = [], set()
    for leaf in table.leaves:
        leading = leaf.leading_sizes
        if leaf.growing is not None and len(leading) > 1:
            return plan  # caches of different batches
        if len(leading) == 1:
            fixed.append(leaf)
            sizes |= leading
    leading_outputs = {shapes[0][0] for shapes in table.output_shapes if shapes and shapes[0]}
    if len(sizes) != 1 or leading_outputs != sizes or all(leaf.rank < 2 for leaf in fixed):
        return plan
    size = sizes.pop()
    evidence = f"leading axis of every input and of an output, always {size}; not confirmed by a run"
    variable = Variable("guessed_batch", "batch", (size,) * len(table.leaves[0].shapes), evidence)
    return plan.with_variable(variable, [(leaf.path, 0) for leaf in fixed])


def without_guess(plan: Plan) -> Plan:
    """Returns the plan in which a batch that was guessed from sizes that never changed is static again."""
    guess = plan.with_role("batch")
    if guess is None or len(known(guess.seen)) > 1:
        return plan
    (size,) = known(guess.seen)
    return plan.with_sizes(dict.fromkeys(plan.axes_of(guess.name), Expression.of(size)))


def with_rows(plan: Plan, placeholders: Sequence[Placeholder]) -> Plan:
    """Returns the plan in which the rows that a placeholder stands for are a variable of their own.

    They follow from how often the token occurs, so they are not tied to any other size.
    """
    groups: dict[tuple[str, int], list[Placeholder]] = {}
    for placeholder in placeholders:
        groups.setdefault((placeholder.tokens, placeholder.value), []).append(placeholder)
    follow = {grid.rows for grid in plan.grids if grid.axis == 0}
    for number, ((tokens, value), group) in enumerate(groups.items()):
        if any(placeholder.rows in follow for placeholder in group):
            continue
        largest = max(placeholder.factor for placeholder in group)
        base = next(placeholder for placeholder in group if placeholder.factor == largest)
        leaf = plan.by_path[base.rows]
        times = "" if largest == 1 else f", {largest} times for each row"
        evidence = f"as many as token {value} occurs in {tokens}{times}; the model raises for other numbers"
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
    """Returns the plan in which the number of images of each grid, and the number of its rows, are variables.

    Other inputs may have as many rows as lengths say, and as many as there are lengths.
    """
    plan = replace(plan, grids=tuple(grids))
    for number, grid in enumerate(grids):
        one, all_of_them = "grid for each image", f"products of {grid.path} say"
        if grid.are_lengths:
            one, all_of_them = "length for each part", f"sum of {grid.path} says"
        axes = {
            f"images_{number}": (grid.path, 0, 1, f"one {one}"),
            f"patches_{number}": (grid.rows, grid.axis, grid.per, f"as many as the {all_of_them}"),
        }
        for name, (path, axis, per, evidence) in axes.items():
            seen = tuple(None if shape is None else shape[axis] // per for shape in plan.by_path[path].shapes)
            size = plan.by_path[path].sizes[axis]
            alike = plan.axes_of(size.variable) if grid.are_lengths and size.variable else [(path, axis)]
            plan = replace(plan, variables=(*plan.variables, Variable(name, "other", seen, evidence)))
            plan = plan.with_sizes(dict.fromkeys(alike, Expression(((name, per),))))
    return name_variables(plan)


def name_variables(plan: Plan) -> Plan:
    """Returns the plan with each variable named ``batch``, ``sequence``, ``past_sequence``, ... and its role set."""
    batch = _batch(plan)
    names: dict[str, str] = {}
    roles: dict[str, Role] = {}
    for variable in plan.variables:
        name: str = "batch"
        role: Role = "batch"
        if variable.name != batch:
            name, role = _name_and_role(plan, variable, roles)
        unique = unique_name(name, roles)
        names[variable.name], roles[unique] = unique, role
    named = plan.with_names(names)
    return replace(named, variables=tuple([replace(v, role=roles[v.name]) for v in named.variables]))


def _batch(plan: Plan) -> str | None:
    """The variable that leads the caches, else the one that leads most leaves; None if that is a length of tokens."""
    rows = {placeholder.rows for placeholder in plan.placeholders} | {grid.path for grid in plan.grids}
    rows |= {grid.rows for grid in plan.grids if grid.axis == 0}
    leading, caches = [], []
    for leaf in plan.leaves:
        name = leaf.sizes[0].variable if leaf.sizes and leaf.path not in rows else None
        if name is not None:
            leading.append((name, len(leaf.sizes)))
            if leaf.growing is not None:
                caches.append(name)
    if not leading:
        return None
    ((best, _),) = Counter(caches or [name for name, _ in leading]).most_common(1)
    return best if max(rank for name, rank in leading if name == best) > 1 else None


def _name_and_role(plan: Plan, variable: Variable, taken: Collection[str]) -> tuple[str, Role]:
    leaves = [(plan.by_path[path], axis) for path, axis in plan.axes_of(variable.name)]
    if not leaves and variable.role == "past":  # it only follows from others: every cache has a window
        return "past_sequence", "past"
    for grid in [grid for grid in plan.grids if not grid.are_lengths]:
        if (plan.by_path[grid.path], 0) in leaves:
            return f"{_stem(grid.path)}s", "other"
        if variable.name in plan.by_path[grid.rows].sizes[grid.axis].variables():
            return f"{_stem(grid.path)}_patches", "other"
    rows = {placeholder.rows for placeholder in plan.placeholders}
    growing = []
    for leaf, axis in leaves:
        if leaf.path in rows and axis == 0:
            return _rows_name(leaf), "other"
        if leaf.growing == axis:
            growing.append(leaf.path)
    if growing:
        crossing = all(".cross_attention_cache." in path for path in growing)
        return ("past_encoder_sequence", "other") if crossing else ("past_sequence", "past")
    past = {v.name for v in plan.variables if v.role == "past"}
    for leaf in plan.leaves:
        for size in leaf.sizes:
            if len(size.terms) > 1 and variable.name in (names := size.variables()) and names & past:
                return "sequence", "sequence"
    for leaf, axis in leaves:
        if axis == 1 and len(leaf.sizes) == _TOKENS_RANK and leaf.is_integer:
            if "sequence" not in taken:
                return "sequence", "sequence"
            stem = _SUFFIXES.sub("", leaf.argument).removesuffix("_input").removesuffix("_attention")
            return f"{identifier(stem)}_sequence", "sequence"  # such as decoder_sequence
    if any(other.follows == variable.name for other in plan.variables):
        return "encoder_sequence", "other"
    leaf, axis = leaves[0] if leaves else (plan.leaves[0], 0)
    if _is_image(leaf) and axis >= _IMAGE_RANK - 2:
        return ("height", "width")[axis - 2], "other"
    if leaf.sizes[0] == Expression.of(0):  # a Python number as the size of a tensor without elements
        return identifier(leaf.path), "other"
    if axis == _LENGTH_AXIS and ".layers[" in leaf.path and leaf.path.endswith((".keys", ".values")):
        return "cache_length", "other"  # of layers of a fixed length
    return f"{identifier(leaf.path)}_axis_{axis}", "other"


def _stem(path: str) -> str:
    """``image`` for ``image_grid_thw``."""
    return identifier(path).partition("_grid")[0].partition("_size")[0] or "image"


def _rows_name(leaf: PlannedLeaf) -> str:
    """Rows of images are ``images``; rows in ``mm_encoder_outputs.image.pooler_output[0]`` are ``image_rows``."""
    if _is_image(leaf):
        return "images"
    steps = leaf.path.split(".")
    return f"{identifier(steps[1] if len(steps) > 2 else _SUFFIXES.sub('', leaf.argument).removesuffix('s'))}_rows"


def _is_image(leaf: PlannedLeaf) -> bool:
    channels = leaf.sizes[1] if len(leaf.sizes) == _IMAGE_RANK else None
    return channels is not None and channels.is_static and channels.constant in _IMAGE_CHANNELS
