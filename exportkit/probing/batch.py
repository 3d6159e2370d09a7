"""Finds the batch if it never varied: rows are repeated, and every output must repeat with them.

The first axis of each input that has the size of the batch is doubled, and the outputs are compared. If that fails,
other axes are tried, and flat rows (image features) that are a multiple of the batch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator

import torch

from exportkit._torch_compat.random_numbers import rows_alike
from exportkit.arguments.build import largest_tensors
from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.plan.expression import Expression
from exportkit.plan.infer import name_variables, without_guess
from exportkit.plan.leaves import CallTable, Finding, Variable, known
from exportkit.plan.plan import Plan
from exportkit.probing.model_probe import ModelProbe
from exportkit.probing.simplify import as_simplified, lists_of_many
from exportkit.running.compare import close

_MOST_CHOICES = 32  # ways to choose the batch axes that are tried, an eager run or two each
_MOST_LEFT_OUT = 8  # the same, without some of the inputs
_VARIABLE = "confirmed_batch"
_PRIME = 5  # a batch that divides no size by accident

# Path -> axis, and how many of its rows belong to one row of the batch; None if that differs from row to row.
Choice = dict[str, tuple[int, int | None]]


def confirm_batch(plan: Plan, probe: ModelProbe) -> Plan:
    """Returns the plan with the batch axes that repeated rows show; a guess they do not confirm becomes static."""
    varying = plan.with_role("batch")
    if varying is not None and len(known(varying.seen)) > 1:
        return _with_multiples(plan, varying, probe)
    plan = without_guess(plan)
    rows: Choice = dict.fromkeys([placeholder.rows for placeholder in plan.placeholders], (0, None))
    for grid in plan.grids:
        for path, axis in ((grid.path, 0), (grid.rows, grid.axis)):
            name = plan.by_path[path].sizes[axis].variable
            alike = () if name is None else plan.axes_of(name)  # other inputs may have as many rows
            rows |= {path: (axis, None), **{other: (along, None) for other, along in alike}}
    if plan.grids and all(not leaf.sizes[0].is_static for leaf in plan.leaves if leaf.sizes):
        return plan
    # The rows of the first call and of the call with the most tensors have to repeat. A model may mix rows when it is
    # given single tokens on a state, so the latter is also tried with the tokens of the largest call.
    calls = probe.observation.calls
    fullest = max(calls, key=lambda call: len(call.tensors()))
    for choices, size in itertools.product((_choices, _choices_of_some), _sizes(probe.table)):
        for chosen in choices(probe.table, size, rows):
            choice = {**chosen, **rows}
            if _rows_repeat(probe, calls[0], choice) and (
                fullest is calls[0]
                or _rows_repeat(probe, fullest, choice)
                or _rows_repeat(probe, _largest_call(probe.observation), choice)
            ):
                evidence = f"always {size}; with rows repeated, the outputs repeated too"
                batch = Variable(_VARIABLE, "batch", (size,) * len(probe.table.leaves[0].shapes), evidence)
                plain, multiples = [], {}
                for path, (axis, factor) in choice.items():
                    if factor == 1:
                        plain.append((path, axis))
                    elif factor is not None:
                        multiples[path, axis] = Expression(((batch.name, factor),))
                return name_variables(plan.with_variable(batch, plain).with_sizes(multiples))
    text = "no axis was found to be the batch: no input's rows could be repeated. The batch stays static."
    return name_variables(plan).with_findings([Finding("batch", "", text)])


def _with_multiples(plan: Plan, batch: Variable, probe: ModelProbe) -> Plan:
    """The plan with rows that are always as many times the batch, if the model accepts no other number of rows."""
    sizes = {v.name: max(known(v.seen), default=1) if v.seen[0] is None else v.seen[0] for v in plan.variables}
    sizes[batch.name] = _PRIME
    for variable in plan.variables:
        axes = plan.axes_of(variable.name)
        pairs = {(rows, of) for rows, of in zip(variable.seen, batch.seen, strict=True) if rows and of}
        factors = {divmod(rows, of) for rows, of in pairs}
        if len(pairs) < 2 or len(factors) > 1 or any(axis for _, axis in axes):
            continue
        ((factor, rest),) = factors
        if rest or factor < 2 or not probe.accepts(plan, {**sizes, variable.name: factor * _PRIME}):
            continue
        others = [{**sizes, variable.name: factor * _PRIME + more} for more in (1, -1)]
        if not any(probe.accepts(plan, other) for other in others):
            plan = plan.with_sizes(dict.fromkeys(axes, Expression(((batch.name, factor),))))
    return plan


def _sizes(table: CallTable) -> list[int]:
    """Sizes that never change on a leading axis, the most frequent first."""
    leading: Counter[int] = Counter()
    for leaf in table.leaves:
        if len(leaf.leading_sizes) == 1:
            leading.update(leaf.leading_sizes)
    return [size for size, _ in leading.most_common() if size > 0]


def _choices(table: CallTable, size: int, apart: Collection[str]) -> Iterator[Choice]:
    """Yields choices of one axis for each input that always has that size: the first ones, then others.

    The leaves of one argument take the same choice, as the layers of a cache do. Inputs without such an axis are left
    as they are, and then repeated on their first axis if that is a multiple of the size. Inputs ``apart`` are left out.
    """
    axes = _axes_of_size(table, size, apart)
    if not axes:
        return
    rows = _rows(table, size, set(apart).union(*axes.values()))
    turns = itertools.product(*(range(max(map(len, leaves.values()))) for leaves in axes.values()))
    for turn in itertools.islice(turns, _MOST_CHOICES):
        chosen: Choice = {
            path: (found[min(which, len(found) - 1)], 1)
            for which, leaves in zip(turn, axes.values(), strict=True)
            for path, found in leaves.items()
        }
        yield chosen
        if rows:
            yield {**chosen, **rows}


def _choices_of_some(table: CallTable, size: int, apart: Collection[str]) -> Iterator[Choice]:
    """Yields choices of the first such axis that leave inputs out, few at first: all rows may share an input."""
    axes = _axes_of_size(table, size, apart)
    left_out = (left for count in range(1, len(axes)) for left in itertools.combinations(axes, count))
    for left in itertools.islice(left_out, _MOST_LEFT_OUT):
        yield {
            path: (found[0], 1)
            for argument, leaves in axes.items()
            if argument not in left
            for path, found in leaves.items()
        }


def _axes_of_size(table: CallTable, size: int, apart: Collection[str]) -> dict[str, dict[str, list[int]]]:
    """Axes that always have a size, by argument and path."""
    axes: dict[str, dict[str, list[int]]] = {}
    for leaf, axis, sizes in table.axes():
        if known(sizes) == {size} and leaf.growing != axis and leaf.path not in apart:
            axes.setdefault(leaf.argument, {}).setdefault(leaf.path, []).append(axis)
    return axes


def _rows(table: CallTable, size: int, taken: set[str]) -> Choice:
    """Inputs without an axis of the batch's size whose first axis is a multiple of it."""
    found: Choice = {}
    for leaf in table.leaves:
        lengths = leaf.leading_sizes
        if leaf.path not in taken and len(lengths) == 1 and min(lengths) > size and min(lengths) % size == 0:
            found[leaf.path] = (0, min(lengths) // size)
    return found


def _rows_repeat(probe: ModelProbe, call: Call, choice: Choice) -> bool:
    """Returns whether doubling the chosen axes doubles outputs along one axis, both halves as before."""
    tensors = call.tensors()
    doubled = {p: torch.cat([tensors[p], tensors[p]], axis) for p, (axis, _) in choice.items() if p in tensors}
    with rows_alike():
        before, after = probe.outputs(call), probe.outputs(call.with_tensors(doubled))
    if before is None or after is None:
        return False
    lists = lists_of_many([before, after])  # a tensor for each image: more rows, more of them
    before, after = as_simplified(before, lists), as_simplified(after, lists)
    if before.keys() != after.keys():
        return False
    same = [_repeats(before[path], after[path]) for path in before]
    return None not in same and True in same


def _largest_call(observation: Observation) -> Call:
    return observation.merged_call.with_tensors(largest_tensors(observation))


def _repeats(before: torch.Tensor, after: torch.Tensor) -> bool | None:
    """True if ``after`` is ``before`` twice along one axis, False if it is the same, None if it is neither."""
    if before.shape == after.shape:
        return False if close(before, after) else None
    longer = [i for i, (a, b) in enumerate(zip(before.shape, after.shape, strict=False)) if a != b]
    if before.ndim != after.ndim or len(longer) != 1 or after.shape[longer[0]] != 2 * before.shape[longer[0]]:
        return None
    return True if all(close(before, half) for half in after.chunk(2, dim=longer[0])) else None
