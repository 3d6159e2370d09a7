"""What conditions on sizes amount to: bounds of a variable, or sizes that they leave out, found by evaluating them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from exportkit.plan.conditions import SizeCondition

Range = tuple[int, int | None]

_LARGEST = 2**31 - 1  # no axis of a tensor that fits into memory is longer
_ONE_BY_ONE = 1024  # sizes that are tried one by one; beyond, those around powers of two
_SIZES = (2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 31, 64, 100, 255, 1000, 4096, 65_537, 1_000_000)
_BESIDE = (2, 3, 17, 1000)  # sizes of the other variables


def bounds_of(condition: SizeCondition, allowed: Range) -> Range | None:
    """Returns the smallest and the largest size for which a condition holds, if it holds for all sizes between.

    Args:
        condition: The condition.
        allowed: The smallest and the largest size of its variable.

    Returns:
        The bounds; None if the condition has several variables, leaves out nothing, or leaves out sizes between.

    Example:
        >>> bounds_of(SizeCondition("(4095 + 8 * batch) // 4096 == 1"), (2, None))
        (2, 512)
    """
    if len(condition.variables()) != 1:
        return None
    (name,) = condition.variables()
    least, most = allowed
    sizes = sorted({*_around_powers(), *range(least, least + _ONE_BY_ONE), least, most or _LARGEST})
    sizes = [size for size in sizes if least <= size <= (_LARGEST if most is None else most)]
    inside = [place for place, size in enumerate(sizes) if condition.holds({name: size})]
    if not inside or len(inside) == len(sizes) or inside[-1] - inside[0] + 1 != len(inside):
        return None
    first, last = inside[0], inside[-1]
    lower = sizes[first] if first == 0 else _edge(condition, name, sizes[first], sizes[first - 1])
    if last == len(sizes) - 1:
        return lower, most
    return lower, _edge(condition, name, sizes[last], sizes[last + 1])


def leaves_out_sizes(condition: SizeCondition, allowed: Mapping[str, Range]) -> bool:
    """Returns whether a condition does not hold for some of the sizes that are tried.

    Args:
        condition: The condition.
        allowed: The smallest and the largest size of each variable.
    """
    names = sorted(condition.variables())
    for name, beside in product(names, _BESIDE):
        for size in (*_SIZES, allowed[name][1] or _LARGEST):
            sizes = {other: size if other == name else beside for other in names}
            if all(_is_within(sizes[other], allowed[other]) for other in names) and not condition.holds(sizes):
                return True
    return False


def _around_powers() -> Iterator[int]:
    for power in range(1, 32):
        yield from (2**power - 1, 2**power, 2**power + 1)


def _edge(condition: SizeCondition, name: str, inside: int, outside: int) -> int:
    """The last size from ``inside`` towards ``outside`` for which the condition holds."""
    while abs(outside - inside) > 1:
        middle = (inside + outside) // 2
        inside, outside = (middle, outside) if condition.holds({name: middle}) else (inside, middle)
    return inside


def _is_within(size: int, allowed: Range) -> bool:
    return allowed[0] <= size and (allowed[1] is None or size <= allowed[1])
