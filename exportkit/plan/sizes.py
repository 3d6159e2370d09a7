"""The sizes of a plan's variables that are chosen for the export and for the proof.

torch.export specialises an axis whose example size is 0 or 1, and ties axes whose example sizes are equal to each other
or to a constant. So all sizes of an export are distinct, greater than 1, and equal to no static size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from exportkit.errors import ArgumentError
from exportkit.plan.expression import Expression
from exportkit.plan.leaves import Variable, known
from exportkit.plan.placeholders import tokens_fit
from exportkit.plan.plan import Plan

_OPTIONS = 12  # sizes that are tried for each variable
_SEARCH_LIMIT = 20_000  # combinations of them that are tried: less than a second for the plans of real models
_SMALLEST_PATCH = 4  # a smaller common factor of all sizes seen is taken for chance


@dataclass(frozen=True)
class UnseenSizes:
    """One combination of sizes that was never run, with a few words that say what it stands for."""

    label: str
    sizes: Mapping[str, int]


def choose_sizes(
    plan: Plan, partly_cached: bool = False, chunk: int | None = None, between: bool = False
) -> dict[str, int]:
    """Returns a size for each variable: distinct, greater than 1, near the recorded ones.

    The sizes of expressions (``past + sequence``) are distinct from all others too.

    Args:
        plan: The plan.
        partly_cached: Let caches that follow a length be shorter than it, instead of as long, if sizes can be found.
        chunk: Let the new tokens be more than a chunk of this size, and not a multiple of it, if their range allows it.
        between: Choose sizes that are not multiples of what the model may pad to: other sizes where only multiples of a
            number were seen, otherwise seen ones that have little in common with the largest one.

    Raises:
        ArgumentError: if no such sizes are found.
    """
    taken = plan.static_sizes()
    expressions = {size for leaf in plan.leaves for size in leaf.sizes if size.terms}
    free: dict[str, Variable] = {}
    followers: dict[str, str] = {}
    for variable in plan.variables:
        if variable.follows is None:
            free[variable.name] = variable
        else:
            followers[variable.name] = variable.follows
            expressions.discard(Expression.of(variable.name))
    # As large as the recorded sizes first; if that fills the windows of caches, small enough not to fill them. The last
    # resort is to fill them.
    for within_windows, may_fill in ((False, False), (True, False), (False, True)):
        options = []
        for variable in free.values():
            most = variable.maximum
            if within_windows:
                caps = [e.cap - 1 for e in expressions if e.cap is not None and e.uncapped().variable == variable.name]
                most = min([*caps, *([] if most is None else [most])], default=None)
            options.append(list(itertools.islice(_export_sizes(variable, most, taken, chunk, between), _OPTIONS)))
        for choice in itertools.islice(_by_cost(options), _SEARCH_LIMIT):
            sizes = dict(zip(free, choice, strict=True))
            for name, followed in followers.items():
                sizes[name] = sizes[followed]
            sizes = plan.completed(sizes)
            if not _are_distinct(expressions, sizes, taken, may_fill):
                continue
            if partly_cached and not _shorten(plan, sizes):
                continue
            if tokens_fit(plan.placeholders, plan.shapes(sizes), plan.grids):
                return sizes
    if partly_cached:
        return choose_sizes(plan, False, chunk, between)
    raise ArgumentError(
        "No distinct sizes were found for the variables of this plan.",
        where=", ".join(free),
        expected="sizes greater than 1 that differ from each other and from static sizes",
        got=f"static sizes {sorted(taken)}",
        hint="make one of the axes static, or give the arguments yourself.",
    )


def _export_sizes(
    variable: Variable, most: int | None, taken: frozenset[int], chunk: int | None, between: bool
) -> Iterator[int]:
    """Yields sizes for a variable that equal no static size: those recorded, then those near the largest one."""
    seen, step = _seen_and_step(variable)
    least, top = max(variable.minimum, 2), math.inf if most is None else most
    if chunk is not None and variable.role == "sequence":
        beyond = itertools.takewhile(lambda size: size <= top, itertools.count(max(chunk + 2, least)))
        yield from (size for size in beyond if size % chunk and size not in taken)
    if between and step > 1:
        near = range(max(seen) + 1, max(seen) + step * _OPTIONS)
        yield from (size for size in near if size % step and least <= size <= top and size not in taken)
        return
    largest_first = list(reversed(seen))
    for size in sorted(largest_first, key=lambda size: math.gcd(size, seen[-1])) if between else largest_first:
        if least <= size <= top and size not in taken:
            yield size
    start = (max(seen, default=2) // step) * step
    for distance in itertools.count(1):
        for size in (start + distance * step, start - distance * step):
            if least <= size <= top and size not in taken and size not in seen:
                yield size
        if distance * step > max(top - start, start):
            return


def _by_cost(options: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Yields combinations, those made of early options first."""
    longest = max(map(len, options), default=0)
    for limit in range(1, longest + 1):
        for choice in itertools.product(*[range(min(limit, len(option))) for option in options]):
            if limit == 1 or max(choice) == limit - 1:
                yield tuple([option[i] for option, i in zip(options, choice, strict=True)])
    if not options:
        yield ()


def _are_distinct(
    expressions: Collection[Expression], sizes: Mapping[str, int], taken: frozenset[int], may_fill: bool
) -> bool:
    """Whether all sizes are distinct and greater than 1, and each cache with a window is below its limit, or may be."""
    values: dict[Expression, int] = {}
    for expression in expressions:
        whole = expression.uncapped()
        values[whole] = whole.evaluate(sizes)
        if expression.cap is not None and values[whole] >= expression.cap and not may_fill:
            return False
    found = set(values.values())
    return len(found) == len(values) and not taken & found and min(found, default=2) > 1


def _shorten(plan: Plan, sizes: dict[str, int]) -> bool:
    """Gives caches that follow a length a distinct smaller size; returns whether there is one for each.

    What is left of the length is a size of the graph too, so it is distinct and greater than 1 as well.
    """
    for variable in plan.variables:
        length = variable.filled_length(sizes)
        if length is not None:
            used = {size.evaluate({**sizes, variable.name: 0}) for leaf in plan.leaves for size in leaf.sizes}
            free = [size for size in range(2, length - 1) if not {size, length - size} & used]
            shorter = next((size for size in free if size != length - size), None)
            if shorter is None:
                return False
            sizes[variable.name] = shorter
    return True


def beyond_recorded(plan: Plan) -> Plan:
    """Returns the plan in which batches are larger than any recorded one, and lengths at least twice as large."""
    variables = []
    for variable in plan.variables:
        most = max(known(variable.seen), default=1)
        least = most + 1 if variable.role == "batch" else 2 * most
        if variable.maximum is not None:
            least = min(least, variable.maximum)
        variables.append(replace(variable, minimum=max(variable.minimum, least)))
    return replace(plan, variables=tuple(variables))


def unseen_sizes(plan: Plan, exported: Mapping[str, int]) -> list[UnseenSizes]:
    """Returns combinations of sizes that were neither recorded nor exported with.

    Batch 1 and more than 1; for models with a cache also one token, an empty cache, and several tokens on a filled
    one; longer and shorter than anything recorded. The model may raise for some of them.

    Args:
        plan: The plan.
        exported: Sizes that the export used.
    """
    if not plan.variables:
        return []
    fresh = {v.name: _fresh_sizes(v, exported[v.name]) for v in plan.variables}
    past, batch = plan.with_role("past"), plan.with_role("batch")
    found: list[UnseenSizes] = []
    for label, picks in _combinations(plan):
        sizes = {}
        for variable in plan.variables:
            pick = picks.get(variable.role, picks["other"])
            sizes[variable.name] = _within(variable, pick) if isinstance(pick, int) else fresh[variable.name][pick]
        for variable in plan.variables:
            filled = variable.filled_length(sizes)
            if filled is not None:
                sizes[variable.name] = 0 if past is not None and not sizes[past.name] else filled
        _fit_rows(plan, sizes)
        sizes = plan.completed(sizes)
        text = label if batch is None else f"{label}, batch {sizes[batch.name]}"
        if all(sizes != earlier.sizes for earlier in found):
            found.append(UnseenSizes(text, sizes))
    return found


def sizes_between(plan: Plan, exported: Mapping[str, int]) -> list[UnseenSizes]:
    """Returns sizes next to those of an export, for each variable of which only multiples of a number were seen.

    Args:
        plan: The plan.
        exported: Sizes that the export used.
    """
    found = []
    for variable in plan.variables:
        step = step_of(variable)
        size = _within(variable, exported[variable.name] + (1 if exported[variable.name] % step == 0 else 0))
        if step > 1 and size % step:
            found.append(UnseenSizes(f"not a multiple of {step}", settled(plan, {**exported, variable.name: size})))
    return found


def settled(plan: Plan, sizes: Mapping[str, int], fit_rows: bool = False) -> dict[str, int]:
    """Returns sizes in which variables that follow others do so, unless they are 0.

    Args:
        plan: The plan.
        sizes: Sizes of all variables.
        fit_rows: Limit the rows that placeholders stand for to what the tokens have room for.
    """
    found = dict(sizes)
    for variable in plan.variables:
        filled = variable.filled_length(found)
        if filled is not None and found[variable.name]:
            found[variable.name] = filled
    if fit_rows:
        _fit_rows(plan, found)
    return plan.completed(found)


def _fit_rows(plan: Plan, sizes: dict[str, int]) -> None:
    """Limits the rows that placeholders stand for to what the tokens have room for: none beside a single token."""
    if not plan.placeholders:
        return
    images = {grid.rows: grid.path for grid in plan.grids if grid.axis == 0}
    rows: set[str] = set()
    for placeholder in plan.placeholders:
        rows |= plan.by_path[images.get(placeholder.rows, placeholder.rows)].sizes[0].variables()
    while any(sizes[name] for name in rows):
        if tokens_fit(plan.placeholders, plan.shapes(plan.completed(sizes)), plan.grids):
            break
        largest = max(rows, key=sizes.__getitem__)
        sizes[largest] -= 1


_LONGER, _LONGEST, _OTHER, _SHORTEST = "longer", "longest", "other", "shortest"


def _combinations(plan: Plan) -> list[tuple[str, dict[str, int | str]]]:
    """A label for each combination, and by role which size the variables get."""
    if plan.with_role("past") is None:
        return [
            ("longer", {"batch": _LONGER, "sequence": _LONGER, "other": _LONGER}),
            ("longest", {"batch": 1, "sequence": _LONGEST, "other": _LONGEST}),
            ("other sizes", {"batch": _OTHER, "sequence": _OTHER, "other": _OTHER}),
            ("shortest", {"batch": _OTHER, "sequence": _SHORTEST, "other": _SHORTEST}),
        ]
    rows: list[tuple[str, dict[str, int | str]]] = [
        ("longer prompt, empty past", {"batch": _OTHER, "sequence": _LONGEST, "past": 0, "other": _LONGER}),
        ("one token", {"batch": 1, "sequence": 1, "past": _LONGEST, "other": _LONGER}),
        ("several tokens on a past", {"batch": _LONGER, "sequence": _OTHER, "past": _OTHER, "other": _OTHER}),
        ("one token after one", {"batch": _OTHER, "sequence": 1, "past": 1, "other": _OTHER}),
        ("short prompt, empty past", {"batch": 1, "sequence": _OTHER, "past": 0, "other": _LONGEST}),
    ]
    if plan.new_tokens is None:  # every recorded call had the same number of new tokens
        rows = [("longer past", rows[1][1]), ("other past", rows[2][1]), ("past of one", rows[3][1])]
    return rows


def step_of(variable: Variable) -> int:
    """Returns the step between sizes that are made up for a variable: a patch of images, or 1."""
    return _seen_and_step(variable)[1]


def _seen_and_step(variable: Variable) -> tuple[list[int], int]:
    """The sizes seen, without 0, and the step between new sizes.

    Image sizes and the like are multiples of a patch: new sizes keep a large common factor of those seen.
    """
    seen = sorted(known(variable.seen) - {0})
    factor = math.gcd(*seen) if len(seen) > 1 and variable.role == "other" else 1
    return seen, factor if factor >= _SMALLEST_PATCH else 1


def _fresh_sizes(variable: Variable, exported: int) -> dict[str, int]:
    seen, step = _seen_and_step(variable)
    used = {*seen, exported}
    top = max(used)
    longer = top + step if step > 1 else top + 2
    longest = longer + step if step > 1 else longer + 3
    between = [s for s in range(max(step, 2), top) if s % step == 0 and s not in used]
    other = between[len(between) // 2] if between else top + 1 if step == 1 else longest + step
    sizes = {_LONGER: longer, _LONGEST: longest, _OTHER: other, _SHORTEST: min([*between, other])}
    return {pick: _within(variable, size) for pick, size in sizes.items()}


def _within(variable: Variable, size: int) -> int:
    size = max(size, variable.minimum)
    return size if variable.maximum is None else min(size, variable.maximum)
