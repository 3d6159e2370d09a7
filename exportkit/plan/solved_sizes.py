"""The sizes of a plan's variables as given shapes show them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from exportkit.plan.expression import Expression
from exportkit.plan.plan import Plan


def solve_sizes(plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Returns the size of each variable as the given inputs show it; variables that none of them shows are 0.

    Args:
        plan: The plan.
        shapes: Shapes of the inputs that are given, by path.
    """
    equations = [
        (size, value)
        for leaf in plan.leaves
        for size, value in zip(leaf.sizes, shapes.get(leaf.path, ()), strict=False)
    ]
    return solve_equations(equations, plan.names)


def solve_equations(equations: Iterable[tuple[Expression, int]], names: Iterable[str]) -> dict[str, int]:
    """Returns the size of each variable; 0 for those that no equation shows.

    Args:
        equations: Expressions with their values.
        names: The variables.
    """
    sizes: dict[str, int] = {}
    usable: list[tuple[Expression, int]] = []
    full: list[tuple[Expression, int]] = []
    for size, value in equations:
        if size.variable is not None:
            sizes.setdefault(size.variable, value)
        elif size.is_linear and not size.is_static:
            usable.append((size, value))
        elif size.divisor == 1 and size.cap is not None:  # a window that is not full shows how much was cached
            (usable if value < size.cap else full).append((size, value))
    for group in (usable, usable, full):  # sums are of plain variables, so two rounds settle them; a full window last
        for size, value in group:
            unknown, rest = [], value - size.constant
            for name, factor in size.terms:
                if name in sizes:
                    rest -= factor * sizes[name]
                else:
                    unknown.append((name, factor))
            if len(unknown) == 1:
                name, factor = unknown[0]
                sizes[name] = max(rest // factor, 0)
    return {name: sizes.get(name, 0) for name in names}


def size_in(plan: Plan, name: str, shapes: Mapping[str, tuple[Any, ...]]) -> Any:
    """Returns the size of a variable in the given shapes, which may be symbolic; None if they do not show it.

    Args:
        plan: The plan.
        name: The variable.
        shapes: Shapes by path, of ints or of a trace's symbols.
    """
    plain: dict[str, Any] = {}
    sums = []
    for leaf in plan.leaves:
        for size, value in zip(leaf.sizes, shapes.get(leaf.path, ()), strict=False):
            if size.variable is not None:
                plain.setdefault(size.variable, value)
            elif size.is_linear and (name, 1) in size.terms:
                sums.append((size, value))
    if name in plain:
        return plain[name]
    for size, value in sums:
        others = [(other, factor) for other, factor in size.terms if other != name]
        if all(other in plain for other, _ in others):
            return value - size.constant - sum(factor * plain[other] for other, factor in others)
    return None


def cached_length(plan: Plan, shapes: Mapping[str, tuple[Any, ...]]) -> Any:
    """Returns the number of cached tokens that the given shapes show; None if they show none.

    If no size says it, it is the length of the caches, which is always the same then.

    Args:
        plan: The plan.
        shapes: Shapes by path, of ints or of a trace's symbols.
    """
    past = plan.with_role("past")
    if past is not None:
        return size_in(plan, past.name, shapes)
    own = [leaf for leaf in plan.leaves if leaf.growing is not None and ".cross_attention_cache." not in leaf.path]
    lengths = [leaf.sizes[leaf.growing or 0].constant for leaf in own]
    return max(lengths) if lengths else None  # strict tracing, which comes here, knows no default of max


def is_hidden(plan: Plan, name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Returns whether the given inputs only show that a variable is at least as large as the windows of caches.

    Args:
        plan: The plan.
        name: The variable.
        shapes: Shapes of the inputs that are given, by path.
    """
    found = False
    for leaf in plan.leaves:
        for size, value in zip(leaf.sizes, shapes.get(leaf.path, ()), strict=False):
            if name in size.variables() and size.divisor == 1:
                if size.cap is None or value < size.cap:
                    return False
                found = True
    return found
