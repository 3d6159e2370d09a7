"""Sizes of 0 and 1, which a trace says nothing about: which variables to try together, and at which other sizes.

torch.export assumes that every size is 2 or more. So what a graph does at 0 and 1 has to be found by running it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from exportkit.plan.expression import Expression
from exportkit.plan.leaves import known
from exportkit.plan.plan import Plan
from exportkit.plan.sizes import settled, step_of

# Up to this many variables, every combination of 1 and more is tried; beyond that, pairs, and all of them together.
_EVERY_COMBINATION = 4
_MOST_PATTERNS = 64
# Sizes that are tried in place of those of the trace: distinct, and beyond the numbers of rows and tokens that code
# tends to decide by. Smaller ones come next, for models that do not take as many.
_LARGE = ((67, 71, 73, 79, 83, 89, 97), (31, 37, 41, 43, 47, 53, 59), (11, 13, 17, 19, 23, 29))
# Rows of many tokens are fewer, as code decides by lengths, and each row costs as much as the first: with 67 rows, this
# one call took two thirds of the proofs of the demo's Llama and Bert.
_FEWER_ROWS = 12
_USUAL = (2, 3, 4, 5, 7, 8, 12, 16, 24, 32, 33, 64, 67)

Pattern = Mapping[str, int]


def small(sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the variables that are 0 or 1."""
    return {name: size for name, size in sizes.items() if size < 2}


def small_patterns(plan: Plan) -> list[dict[str, int]]:
    """Returns which variables to try at 0 and 1 together, those with few such variables first.

    Variables are 0 only as they were together in some call, such as the cached tokens and the states of a prompt: on
    empty tensors that no model needs, onnxruntime may end the process (seen in 1.27, recurrent layers). A variable that
    stands for a Python number may be 0 by itself. Each of the others is 1, or more than that.

    Args:
        plan: The plan.
    """
    free = [v for v in plan.variables if v.follows is None and v.maximum not in (0, 1)]
    zeros = {frozenset[str](): None}
    for seen in zip(*[variable.seen for variable in plan.variables], strict=True):
        zeros[frozenset(v.name for v, size in zip(plan.variables, seen, strict=True) if not size)] = None
    numbers = {v.name for v in plan.variables if 0 in v.seen and _is_number(plan, v.name)}
    for empty in [*zeros] if numbers else ():
        zeros |= dict.fromkeys([empty | numbers, empty - numbers])
    found: dict[tuple[tuple[str, int], ...], None] = {}

    def add(empty: Iterable[str], single: Iterable[str]) -> None:
        sizes = {**dict.fromkeys(empty, 0), **dict.fromkeys(single, 1)}
        for variable in plan.variables:
            if variable.follows in sizes and variable.name not in sizes:
                sizes[variable.name] = sizes[variable.follows]
        if sizes and all(plan.variable(name).minimum <= size for name, size in sizes.items()):
            found.setdefault(tuple(sorted(sizes.items())), None)

    for empty in zeros:
        names = [v.name for v in free if v.name not in empty and known(v.seen) != {0, v.maximum}]
        counts = range(len(names) + 1) if len(names) <= _EVERY_COMBINATION else (0, 1, 2, len(names))
        for count in counts:
            for single in itertools.combinations(names, count):
                add(empty, single)
    patterns = sorted(map(dict, found), key=len)
    return patterns[:_MOST_PATTERNS]


def _is_number(plan: Plan, name: str) -> bool:
    """Whether only inputs without elements have a variable: it stands for a Python number."""
    axes = plan.axes_of(name)
    return bool(axes) and all(Expression.of(0) in plan.by_path[path].sizes for path, _ in axes)


def covering(patterns: Sequence[Pattern], covered: Iterable[Pattern], names: Sequence[str]) -> list[Pattern]:
    """Returns some of the patterns, in which each two variables are 0, 1 or more together as in any of the patterns.

    Args:
        patterns: Variables that are 0 or 1 together, for each pattern.
        covered: Patterns that need no other.
        names: All variables.

    Example:
        >>> covering([{"rows": 1}, {"columns": 1}, {"rows": 1, "columns": 1}], [{}, {"rows": 1}], ["rows", "columns"])
        [{'columns': 1}, {'rows': 1, 'columns': 1}]
    """

    def pairs(pattern: Pattern) -> set[tuple[tuple[str, int], ...]]:
        states = [(name, pattern.get(name, 2)) for name in names]
        return {*itertools.combinations(states, min(2, len(states)))}

    left = set[tuple[tuple[str, int], ...]]().union(*map(pairs, patterns)).difference(*map(pairs, covered))
    found: list[Pattern] = []
    while left:
        best = max(patterns, key=lambda pattern: len(left & pairs(pattern)))
        found.append(best)
        left -= pairs(best)
    return found


def larger_sizes(plan: Plan, sizes: Mapping[str, int], pattern: Pattern) -> Iterator[dict[str, int]]:
    """Yields sizes with the same pattern of small ones, in which all others are larger: the largest first.

    Args:
        plan: The plan.
        sizes: Sizes that the export used.
        pattern: Variables that are 0 or 1.
    """
    for numbers in _LARGE:
        found = {**sizes, **pattern}
        for variable, number in zip(plan.variables, itertools.cycle(numbers), strict=False):
            if variable.name not in pattern:
                step, fewer = step_of(variable), variable.role == "batch" and plan.new_tokens is not None
                large = number // _FEWER_ROWS if fewer else number
                wanted = max(-(-large // step) * step, sizes[variable.name] + step if numbers is _LARGE[-1] else 0)
                found[variable.name] = wanted if variable.maximum is None else min(wanted, variable.maximum)
        found = settled(plan, found, fit_rows=True)
        if small(found) == dict(pattern):
            yield found


def smallest_sizes(plan: Plan, sizes: Mapping[str, int], pattern: Pattern) -> dict[str, int]:
    """Returns the smallest sizes with the same pattern of small ones, in which all others are as small as they may be.

    Sums of sizes are smaller there than a trace assumes: 2 tokens without cached ones are fewer than 4.

    Args:
        plan: The plan.
        sizes: Sizes that the export used.
        pattern: Variables that are 0 or 1.
    """
    found = {**sizes, **pattern}
    for variable in plan.variables:
        if variable.name not in pattern:
            step = step_of(variable)
            found[variable.name] = max(variable.minimum, 2 if step == 1 else step)
    return settled(plan, found)


def sizes_beside(plan: Plan, sizes: Mapping[str, int], usual: Mapping[str, int]) -> list[dict[str, int]]:
    """Returns sizes in which the small ones are 2, 3, and as large as usual, and all others stay.

    Args:
        plan: The plan.
        sizes: Sizes, some of which are 0 or 1.
        usual: Sizes that the export used.
    """
    found = []
    for number in (2, 3, None):
        larger = {}
        for name in small(sizes):
            variable = plan.variable(name)
            step = step_of(variable)
            wanted = usual[name] if number is None else max(variable.minimum, number * step)
            larger[name] = wanted if variable.maximum is None else min(wanted, variable.maximum)
        found.append(settled(plan, {**sizes, **larger}, fit_rows=True))
    return [other for position, other in enumerate(found) if not small(other) and other not in found[:position]]


def varied_sizes(plan: Plan, sizes: Mapping[str, int], numbers: Iterable[int]) -> Iterator[dict[str, int]]:
    """Yields sizes in which one variable differs, two are equal, or one is as large as a number: none becomes small.

    Args:
        plan: The plan.
        sizes: Sizes to begin with.
        numbers: Sizes to try besides a few usual ones.
    """
    free = [variable for variable in plan.variables if sizes[variable.name] >= 2 and variable.follows is None]
    wanted = [(v, sizes[other.name]) for v in free for other in free if other is not v]
    wanted += [(v, number) for number in (*numbers, *_USUAL) for v in free]
    for variable, number in wanted:
        step = step_of(variable)
        if sizes[variable.name] % step:  # sizes between the multiples are tried, too
            step = 1
        size = number if number % step == 0 else number * step
        inside = max(variable.minimum, 2) <= size and (variable.maximum is None or size <= variable.maximum)
        if inside and size != sizes[variable.name]:
            found = settled(plan, {**sizes, variable.name: size}, fit_rows=True)
            if small(found) == small(sizes):
                yield found


def at_pattern(plan: Plan, sizes: Mapping[str, int], pattern: Pattern) -> dict[str, int]:
    """Returns the sizes of an export with some variables at 0 or 1.

    Args:
        plan: The plan.
        sizes: Sizes that the export used.
        pattern: Variables that are 0 or 1.
    """
    return settled(plan, {**sizes, **pattern})
