"""Asks the model which sizes can vary, and which must vary together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from exportkit.errors import ExportkitError
from exportkit.plan.expression import Expression
from exportkit.plan.infer import infer_plan, name_variables, without_guess
from exportkit.plan.leaves import AxisKey, Finding, Leaf, Sizes, Variable, known
from exportkit.plan.plan import Plan
from exportkit.plan.sizes import choose_sizes
from exportkit.probing.ask import AskedModel
from exportkit.probing.probe_frames import frames_of_states


def extend_tokens(plan: Plan, asked: AskedModel) -> Plan:
    """Returns the plan in which lengths of tokens that never varied are variables, where the model accepts others.

    Asked for each length that a token input ``(batch, length)`` always had: together with the same length in other
    inputs (their mask, features of the encoder), and, where that is refused, for the token inputs alone; then for a
    mask over frames together with the states that an encoder made of them.
    """
    lengths = [*_token_axes(plan), *_cached_axes(plan)]
    for length in sorted({size for _, size in lengths}, reverse=True):
        tokens = [key for key, size in lengths if size == length and _is_static(plan, key)]
        if tokens:
            plan = _extended(plan, tokens, length, asked) or _with_frames(plan, tokens, length, asked) or plan
    return name_variables(_with_fixed_lengths(plan))


def _extended(plan: Plan, tokens: Sequence[AxisKey], length: int, asked: AskedModel) -> Plan | None:
    """The plan in which a length is a variable, if the model accepts others."""
    for axes in (_axes_of_length(plan, length), tokens):
        name = f"length_{length}"
        followed = _with_length(plan, name, length, axes)
        if _accepts_lengths(followed, name, length, asked):
            return followed
    return None


def _with_length(plan: Plan, name: str, length: int, axes: Sequence[AxisKey]) -> Plan:
    """The plan in which a length is a variable, and what a cache holds of it follows."""
    seen = tuple(length if any(plan.by_path[p].shapes[i] for p, _ in axes) else None for i in _calls(plan))
    evidence = f"always {length}; the model accepts other lengths"
    extended = plan.with_variable(Variable(name, "other", seen, evidence), axes)
    return _with_followers(extended, name, [v.name for v in plan.variables if known(v.seen) == {0, length}])


def _with_frames(plan: Plan, tokens: Sequence[AxisKey], length: int, asked: AskedModel) -> Plan | None:
    """The plan in which a mask over frames is as long as the states that an encoder made of them allow."""
    for states in sorted({size for _, size in _cached_axes(plan) if size < length}, reverse=True):
        name = f"length_{states}"
        followed = _with_length(plan, name, states, _axes_of_length(plan, states))
        frames = _frames_for(followed, name, states, tokens, length, asked)
        if frames is not None:
            ((_, stride),) = frames.terms
            text = f"always {states}; the model accepts other lengths, and {stride} more of {tokens[0][0]} for each"
            variables = (replace(v, evidence=text) if v.name == name else v for v in followed.variables)
            return replace(followed, variables=tuple(variables)).with_sizes(dict.fromkeys(tokens, frames))
    return None


def _frames_for(
    plan: Plan, name: str, states: int, tokens: Sequence[AxisKey], length: int, asked: AskedModel
) -> Expression | None:
    """The length of a mask over frames, given the variable for the number of states."""
    apart = plan.with_variable(Variable("frames", "other", (length,) * len(_calls(plan)), ""), tokens)
    along = [name, *(variable.name for variable in plan.variables if variable.follows == name)]
    try:
        sizes = choose_sizes(apart)
    except ExportkitError:
        return None

    def accepts(frames: int, number: int) -> bool:
        chosen = {**sizes, **dict.fromkeys(along, number), "frames": frames}
        return asked.accepts(apart, chosen, ones=[path for path, _ in tokens])

    return frames_of_states(accepts, length, states, name)


def _is_static(plan: Plan, key: AxisKey) -> bool:
    path, axis = key
    return plan.by_path[path].sizes[axis].is_static


def _with_fixed_lengths(plan: Plan) -> Plan:
    """The plan in which a cache of what an encoder of fixed length returned is never longer than that."""
    fixed = {size.constant for leaf in plan.leaves if leaf.growing is None for size in leaf.sizes if size.is_static}
    variables = [
        replace(v, maximum=max(known(v.seen)))
        if v.follows is None and len(known(v.seen)) == 2 and min(known(v.seen)) == 0 and max(known(v.seen)) in fixed
        else v
        for v in plan.variables
    ]
    return replace(plan, variables=tuple(variables))


def add_relations(plan: Plan, asked: AskedModel) -> Plan:
    """Returns a plan with relations of weaker evidence, if the model accepts that one and not this one."""
    bolder = infer_plan(asked.table, plan.constants, distinct=2)
    batch = plan.with_role("batch")
    if batch is not None and len(known(batch.seen)) == 1:
        bolder = without_guess(bolder, asked.table).with_variable(batch, plan.axes_of(batch.name))
    for candidate in (_tied(plan, asked), bolder, _tied(bolder, asked)):
        if asked.accepts_lengths(candidate):
            return candidate
    if asked.accepts(plan):
        return plan
    text = "the model refuses sizes other than those recorded; the relation between its inputs was not found."
    return plan.with_findings([Finding("sizes", "", text)])


def pull_apart(plan: Plan, asked: AskedModel) -> Plan:
    """Returns the plan with axes of different inputs separated, where the model accepts different sizes.

    Relations that the model does not need are given up too, but for those of a cache's length.
    """
    for number, size in enumerate(_doubtful(plan)):
        axes = [(leaf.path, i) for leaf in plan.leaves for i, other in enumerate(leaf.sizes) if other == size]
        name, seen = f"unrelated_{number}", asked.table.sizes_of(axes[0])
        sizes = ", ".join("absent" if value is None else str(value) for value in seen)
        separate = plan.with_variable(Variable(name, "other", seen, f"sizes {sizes}; accepted apart from {size}"), axes)
        if all(asked.accepts_apart(separate, other, name) for other in size.variables()):
            plan = separate
    for variable in plan.variables:
        if len(known(variable.seen)) == 1:
            continue  # found by changing these axes together; inputs that some calls ignore belong to them all the same
        for number, unit in enumerate(_units(plan, variable, asked)):
            name = f"{variable.name}_part_{number}"
            evidence = f"{variable.evidence}; accepted apart from {variable.name}"
            separate = plan.with_variable(replace(variable, name=name, role="other", evidence=evidence), unit)
            if asked.accepts_apart(separate, variable.name, name):
                plan = separate
    return plan


def _calls(plan: Plan) -> range:
    return range(len(plan.leaves[0].shapes) if plan.leaves else 0)


def _token_axes(plan: Plan) -> list[tuple[AxisKey, int]]:
    """Second axes of integer inputs ``(batch, length)`` whose length never varied, with that length."""
    batch = plan.with_role("batch")
    return [
        ((leaf.path, 1), leaf.sizes[1].constant)
        for leaf in plan.leaves
        if len(leaf.sizes) == 2 and "int" in leaf.dtype and leaf.sizes[1].is_static
        if batch is not None and leaf.sizes[0].variable == batch.name
    ]


def _cached_axes(plan: Plan) -> list[tuple[AxisKey, int]]:
    """Second axes of features ``(batch, length, ...)`` of which a cache has as many as them once it is filled."""
    filled = {max(known(v.seen)) for v in plan.variables if len(known(v.seen)) == 2 and min(known(v.seen)) == 0}
    return [(key, length) for length in sorted(filled) for key in _axes_of_length(plan, length)]


def _axes_of_length(plan: Plan, length: int) -> list[AxisKey]:
    """Static axes of that length right behind the batch, where masks and features have their positions."""
    return [
        (leaf.path, 1)
        for leaf in plan.leaves
        if len(leaf.sizes) > 1 and leaf.growing is None and leaf.sizes[1] == Expression.of(length)
        if leaf.sizes[0].variable is not None
    ]


def _accepts_lengths(plan: Plan, name: str, length: int, asked: AskedModel) -> bool:
    """Whether the model accepts longer and shorter ones; what follows this length goes along with it."""
    along = [variable.name for variable in plan.variables if variable.follows == name]
    try:
        sizes = choose_sizes(plan)
    except ExportkitError:
        return False
    longer = max([length, *sizes.values()]) + 2
    shorter = max(length - 2, 2) if length != 2 else 3
    return all(asked.accepts(plan, {**sizes, **dict.fromkeys([name, *along], new)}) for new in (longer, shorter))


def _with_followers(plan: Plan, name: str, followers: Sequence[str]) -> Plan:
    """The plan in which caches that always had a length, once they were filled, follow that length."""
    variables = (replace(v, follows=name) if v.name in followers else v for v in plan.variables)
    return replace(plan, variables=tuple(variables))


def _tied(plan: Plan, asked: AskedModel) -> Plan:
    """The plan in which inputs given in few calls take the variables that had their sizes in those calls."""
    found: dict[AxisKey, Expression] = {}
    for leaf, axis, sizes in asked.table.axes():
        if None in leaf.shapes and plan.by_path[leaf.path].sizes[axis].is_static:
            same = [v for v in plan.variables if _agrees(v, sizes)]
            found |= {(leaf.path, axis): Expression.of(same[0].name)} if same else {}
    return plan.with_sizes(found)


def _units(plan: Plan, variable: Variable, asked: AskedModel) -> Iterator[list[AxisKey]]:
    """Yields the axes of a variable that could be a size of their own: those of one input at one position.

    Left together are the leaves of one argument, the first input's axes, and integer inputs of equal shape (token ids
    and their mask), which mean the same positions.
    """
    axes = plan.axes_of(variable.name)
    units: dict[tuple[str, int], list[AxisKey]] = {}
    for path, axis in axes:
        units.setdefault((plan.by_path[path].argument, axis), []).append((path, axis))
    leaves = {leaf.path: leaf for leaf in asked.table.leaves}
    for unit in list(units.values())[1:]:
        rest = [key for key in axes if key not in unit]
        if not any(_twins(leaves[a], leaves[b]) and i == j for a, i in unit for b, j in rest):
            yield unit


def _doubtful(plan: Plan) -> list[Expression]:
    """Expressions that may fit by accident: those without a cache's length or a confirmed batch in them."""
    sure = {v.name for v in plan.variables if v.role == "past" or (v.role == "batch" and len(known(v.seen)) == 1)}
    sizes = dict.fromkeys(size for leaf in plan.leaves for size in leaf.sizes)
    return [size for size in sizes if not size.is_static and size.variable is None and not size.variables() & sure]


def _agrees(variable: Variable, sizes: Sizes) -> bool:
    return all(size is None or size == other for size, other in zip(sizes, variable.seen, strict=True))


def _twins(a: Leaf, b: Leaf) -> bool:
    return a.is_integer and b.is_integer and a.shapes == b.shapes
