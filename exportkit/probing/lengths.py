"""Runs the model to find which lengths can vary, which sizes must vary together, and how many frames make a state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from exportkit.errors import ExportkitError
from exportkit.plan.expression import Expression
from exportkit.plan.infer import infer_plan, name_variables, without_guess
from exportkit.plan.leaves import AxisKey, Finding, Variable, known, listed
from exportkit.plan.plan import Plan
from exportkit.plan.sizes import choose_sizes
from exportkit.probing.model_probe import ModelProbe

_LARGEST_STEP = 2**14  # frames for each state; strides of audio encoders are a thousand at most

Accepts = Callable[[int, int], bool]


def extend_tokens(plan: Plan, probe: ModelProbe) -> Plan:
    """Returns the plan in which lengths of tokens that never varied are variables, if the model accepts other lengths.

    This is tried for each length that a token input ``(batch, length)`` always had: together with the same length in
    other inputs (their mask, features of the encoder); if the model raises, for the token inputs alone; then for a mask
    over frames together with the states that an encoder made of them.
    """
    lengths = [*_token_axes(plan), *_cached_axes(plan)]
    for length in sorted(set(dict(lengths).values()), reverse=True):
        tokens = [(p, axis) for (p, axis), size in lengths if size == length and plan.by_path[p].sizes[axis].is_static]
        if tokens:
            plan = _extended(plan, tokens, length, probe) or _with_frames(plan, tokens, length, probe) or plan
    # a cache of what an encoder of fixed length returned is never longer than that
    fixed = {size.constant for leaf in plan.leaves if leaf.growing is None for size in leaf.sizes if size.is_static}
    variables = []
    for v in plan.variables:
        longest = _filled_length(v)
        capped = v.follows is None and longest is not None and longest in fixed
        variables.append(replace(v, maximum=longest) if capped else v)
    return name_variables(replace(plan, variables=tuple(variables)))


def follow_encoder(plan: Plan) -> Plan:
    """Returns the plan in which caches of what an encoder returned follow its length.

    Such a cache is empty in the first call for an input of the encoder, and as long as the encoder's states in the
    calls after it. The cache of the decoder itself, which grows with each token, tells it apart.
    """
    cached = [v for v in plan.variables if all(plan.by_path[p].growing is not None for p, _ in plan.axes_of(v.name))]
    found: dict[str, str] = {}
    for variable in cached:
        if variable.follows is None and len(known(variable.seen) - {0}) > 1:
            for other in plan.variables:
                follows = all(a in (0, None, b) for a, b in zip(variable.seen, other.seen, strict=True))
                if follows and other not in cached and any(axis == 1 for _, axis in plan.axes_of(other.name)):
                    found.setdefault(variable.name, other.name)
    if len(found) == len(cached):
        return plan
    variables = [replace(v, follows=found.get(v.name, v.follows)) for v in plan.variables]
    return replace(plan, variables=tuple(variables))


def _filled_length(variable: Variable) -> int | None:
    """The one size that it was seen with apart from 0; None if it was never 0, or had several sizes."""
    seen = sorted(known(variable.seen))
    return seen[1] if len(seen) == 2 and seen[0] == 0 else None


def _extended(plan: Plan, tokens: Sequence[AxisKey], length: int, probe: ModelProbe) -> Plan | None:
    """The plan in which a length is a variable, if the model accepts other lengths.

    Where inputs are longer than the cache by this length, as a mask over all tokens is, it is the new tokens' length.
    """
    name, past = f"length_{length}", plan.with_role("past")
    for axes in (_axes_of_length(plan, length), tokens):
        made = [_with_length(plan, name, length, axes)]
        if past is not None:
            total = Expression.of(past.name) + Expression.of(length)
            keys = [(leaf.path, axis) for leaf in plan.leaves for axis, size in enumerate(leaf.sizes) if size == total]
            summed = dict.fromkeys(keys, Expression.of(past.name) + Expression.of(name))
            made = [made[0].with_sizes(summed), *made] if keys else made
        found = next((tried for tried in made if _accepts_lengths(tried, name, length, probe)), None)
        if found is not None:
            return found
    return None


def _with_length(plan: Plan, name: str, length: int, axes: Sequence[AxisKey]) -> Plan:
    """The plan in which a length is a variable; caches that always had this length once they were filled follow it."""
    columns = zip(*[plan.by_path[path].shapes for path, _ in axes], strict=True)
    seen = tuple([length if any(shapes) else None for shapes in columns] if axes else [None] * _count_calls(plan))
    evidence = f"always {length}; the model accepts other lengths"
    extended = plan.with_variable(Variable(name, "other", seen, evidence), axes)
    variables = [replace(v, follows=name) if _filled_length(v) == length else v for v in extended.variables]
    return replace(extended, variables=tuple(variables))


def _with_frames(plan: Plan, tokens: Sequence[AxisKey], length: int, probe: ModelProbe) -> Plan | None:
    """The plan in which a mask over frames is as long as the states that an encoder made of them allow."""
    for states in sorted({size for _, size in _cached_axes(plan) if size < length}, reverse=True):
        name = f"length_{states}"
        followed = _with_length(plan, name, states, _axes_of_length(plan, states))
        frames = _frames_for(followed, name, states, tokens, length, probe)
        if frames is not None:
            ((_, stride),) = frames.terms
            text = f"always {states}; the model accepts other lengths, and {stride} more of {tokens[0][0]} for each"
            variables = (replace(v, evidence=text) if v.name == name else v for v in followed.variables)
            masks = {path for path, _ in tokens}
            leaves = (replace(leaf, of_frames=True) if leaf.path in masks else leaf for leaf in followed.leaves)
            found = replace(followed, variables=tuple(variables), leaves=tuple(leaves))
            return found.with_sizes(dict.fromkeys(tokens, frames))
    return None


def _frames_for(
    plan: Plan, name: str, states: int, tokens: Sequence[AxisKey], length: int, probe: ModelProbe
) -> Expression | None:
    """The length of a mask over frames, given the variable for the number of states."""
    apart = plan.with_variable(Variable("frames", "other", (length,) * _count_calls(plan), ""), tokens)
    along = [name, *(variable.name for variable in plan.variables if variable.follows == name)]
    try:
        sizes = choose_sizes(apart)
    except ExportkitError:
        return None

    def accepts(frames: int, number: int) -> bool:
        chosen = {**sizes, **dict.fromkeys(along, number), "frames": frames}
        return probe.accepts(apart, chosen, ones=[path for path, _ in tokens])

    return frames_of_states(accepts, length, states, name)


def add_relations(plan: Plan, probe: ModelProbe) -> Plan:
    """Returns a plan with relations of weaker evidence, if the model accepts that plan and not this one."""
    bolder = follow_encoder(infer_plan(probe.table, plan.constants, distinct=2))
    batch = plan.with_role("batch")
    if batch is not None and len(known(batch.seen)) == 1:
        bolder = without_guess(bolder).with_variable(batch, plan.axes_of(batch.name))
    for start, is_square in ((plan, False), (plan, True), (bolder, None), (bolder, False), (bolder, True)):
        candidate = start if is_square is None else _tied(start, probe, is_square)
        if probe.accepts_lengths(candidate):
            return candidate
    if probe.accepts(plan):
        return plan
    text = "the model raises for sizes other than the recorded ones; the relation between its inputs was not found."
    return plan.with_findings([Finding("sizes", "", text)])


def pull_apart(plan: Plan, probe: ModelProbe) -> Plan:
    """Returns the plan with axes of different inputs separated, if the model accepts different sizes.

    Relations that the model does not need are given up too, except those of a cache's length.
    """
    for number, (size, axes) in enumerate(_doubtful(plan).items()):
        name, seen = f"unrelated_{number}", probe.table.sizes_of(axes[0])
        evidence = f"sizes {listed(seen)}; accepted apart from {size}"
        separate = plan.with_variable(Variable(name, "other", seen, evidence), axes)
        if all(probe.accepts_apart(separate, other, name) for other in size.variables()):
            plan = separate
    for variable in plan.variables:
        if len(known(variable.seen)) == 1:
            continue  # found by changing these axes together, which also holds for inputs that some calls ignore
        for number, unit in enumerate(_units(plan, variable, probe)):
            name = f"{variable.name}_part_{number}"
            evidence = f"{variable.evidence}; accepted apart from {variable.name}"
            separate = plan.with_variable(replace(variable, name=name, role="other", evidence=evidence), unit)
            if probe.accepts_apart(separate, variable.name, name):
                plan = separate
    return plan


def _count_calls(plan: Plan) -> int:
    return len(plan.leaves[0].shapes) if plan.leaves else 0


def _token_axes(plan: Plan) -> list[tuple[AxisKey, int]]:
    """Second axes of integer inputs ``(batch, length)`` whose length never varied, with that length."""
    batch, found = plan.with_role("batch"), []
    for leaf in plan.leaves:
        is_tokens = len(leaf.sizes) == 2 and "int" in leaf.dtype and leaf.sizes[1].is_static
        if is_tokens and batch is not None and leaf.sizes[0].variable == batch.name:
            found.append(((leaf.path, 1), leaf.sizes[1].constant))
    return found


def _cached_axes(plan: Plan) -> list[tuple[AxisKey, int]]:
    """Second axes of features ``(batch, length, ...)`` that are as long as a cache is once it is filled."""
    filled = {length for length in map(_filled_length, plan.variables) if length is not None}
    return [(key, length) for length in sorted(filled) for key in _axes_of_length(plan, length)]


def _axes_of_length(plan: Plan, length: int) -> list[AxisKey]:
    """Static axes of that length right after the batch, where masks and features have their positions."""
    return [
        (leaf.path, 1)
        for leaf in plan.leaves
        if len(leaf.sizes) > 1 and leaf.growing is None and leaf.sizes[1] == Expression.of(length)
        if leaf.sizes[0].variable is not None
    ]


def _accepts_lengths(plan: Plan, name: str, length: int, probe: ModelProbe) -> bool:
    """Whether the model accepts a longer and a shorter length; variables that follow it change with it."""
    along = [variable.name for variable in plan.variables if variable.follows == name]
    try:
        sizes = choose_sizes(plan)
    except ExportkitError:
        return False
    longer = max([length, *sizes.values()]) + 2
    shorter = max(length - 2, 2) if length != 2 else 3
    return all(probe.accepts(plan, {**sizes, **dict.fromkeys([name, *along], new)}) for new in (longer, shorter))


def _tied(plan: Plan, probe: ModelProbe, is_square: bool) -> Plan:
    """The plan in which inputs given in few calls take the variables that had their sizes in those calls.

    Args:
        plan: The plan.
        probe: The model and its calls.
        is_square: Whether an input may have a variable along several axes.
    """
    found: dict[AxisKey, Expression] = {}
    for leaf, axis, sizes in probe.table.axes():
        own = plan.by_path[leaf.path].sizes
        if None in leaf.shapes and own[axis].is_static:
            taken = () if is_square else {*own, *(size for (path, _), size in found.items() if path == leaf.path)}
            for variable in plan.variables:
                size = Expression.of(variable.name)
                if size not in taken and all(a in (None, b) for a, b in zip(sizes, variable.seen, strict=True)):
                    found[leaf.path, axis] = size
                    break
    return plan.with_sizes(found)


def _units(plan: Plan, variable: Variable, probe: ModelProbe) -> Iterator[list[AxisKey]]:
    """Yields axes of a variable that could be a size of their own: the axes of one input at one position.

    Not separated are the leaves of one argument, the first input's axes, and integer inputs of equal shape (token ids
    and their mask) as well as marks of placeholders, which describe the same positions.
    """
    axes = plan.axes_of(variable.name)
    units: dict[tuple[str, int], list[AxisKey]] = {}
    for path, axis in axes:
        units.setdefault((plan.by_path[path].argument, axis), []).append((path, axis))
    leaves = {leaf.path: leaf for leaf in probe.table.leaves}
    marks = {marker.path for marker in plan.markers}
    for unit in list(units.values())[1:]:
        rest = [key for key in axes if key not in unit]
        integers = {(leaves[path].shapes, axis) for path, axis in rest if leaves[path].is_integer}
        if not any(p in marks or (leaves[p].is_integer and (leaves[p].shapes, axis) in integers) for p, axis in unit):
            yield unit


def _doubtful(plan: Plan) -> dict[Expression, list[AxisKey]]:
    """Expressions that may fit by accident, and their axes: no cache's length, confirmed batch or grid is in them."""
    sure = {v.name for v in plan.variables if v.role == "past" or (v.role == "batch" and len(known(v.seen)) == 1)}
    sure |= {name for grid in plan.grids for name in plan.by_path[grid.rows].sizes[grid.axis].variables()}
    found: dict[Expression, list[AxisKey]] = {}
    for leaf in plan.leaves:
        for axis, size in enumerate(leaf.sizes):
            if not size.is_static and size.variable is None and not size.variables() & sure:
                found.setdefault(size, []).append((leaf.path, axis))
    return found


def frames_of_states(accepts: Accepts, frames: int, states: int, name: str) -> Expression | None:
    """Returns the number of frames as a multiple of the number of states, plus a constant; None if it is not one.

    An encoder shortens its input by strides, so each further state stands for as many more frames, and a mask over
    frames must not be longer than the states cover.

    Args:
        accepts: Whether the model accepts this many frames with this many states.
        frames: The recorded number of frames.
        states: The recorded number of states.
        name: The variable for the number of states.

    Example:
        >>> str(frames_of_states(lambda frames, states: (frames - 1) // 4 + 1 <= states, 28, 7, "states"))
        '4*states'
    """
    if states > 1 and accepts(frames, states - 1):
        return None
    first = _most_frames(accepts, frames, states)
    second = None if first is None else _most_frames(accepts, first + 1, states + 1)
    if first is None or second is None:
        return None
    stride = second - first
    third = second + stride
    if not accepts(third, states + 2) or accepts(third + 1, states + 2):
        return None
    return Expression(((name, stride),), frames - stride * states)


def _most_frames(accepts: Accepts, least: int, states: int) -> int | None:
    """The largest number of frames that is accepted; None if ``least`` is too many, or if there is no largest one."""
    if not accepts(least, states):
        return None
    low, step = least, 1
    while accepts(low + step, states):
        low, step = low + step, 2 * step
        if step > _LARGEST_STEP:
            return None
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if accepts(middle, states) else (low, middle)
    return low
