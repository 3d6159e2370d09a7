"""Sizes as integer expressions over variables: ``3``, ``batch``, ``past_sequence + sequence``, ``4*images + 1``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Expression:
    """A constant plus a sum of variables with integer coefficients.

    Attributes:
        terms: Pairs of a variable and its coefficient, in a fixed order.
        constant: What is added to them; the whole size, when there are no terms.

    Example:
        >>> total = Expression.of("past") + Expression.of("seq")
        >>> str(total), total.evaluate({"past": 5, "seq": 4})
        ('past + seq', 9)
    """

    terms: tuple[tuple[str, int], ...] = ()
    constant: int = 0

    @classmethod
    def of(cls, size: int | str) -> Expression:
        """Returns a static size, or a variable of that name."""
        return cls(((size, 1),)) if isinstance(size, str) else cls((), size)

    def __add__(self, other: Expression) -> Expression:
        sums = dict(self.terms)
        for name, factor in other.terms:
            sums[name] = sums.get(name, 0) + factor
        return Expression(tuple((n, f) for n, f in sums.items() if f), self.constant + other.constant)

    def __str__(self) -> str:
        parts = [name if factor == 1 else f"{factor}*{name}" for name, factor in self.terms]
        if self.constant or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts).replace("+ -", "- ")

    @property
    def is_static(self) -> bool:
        """Whether the size never changes."""
        return not self.terms

    @property
    def variable(self) -> str | None:
        """The variable's name, if the expression is nothing but one variable."""
        return self.terms[0][0] if len(self.terms) == 1 and self.terms[0][1] == 1 and not self.constant else None

    def variables(self) -> frozenset[str]:
        """Returns the names of the variables in it."""
        return frozenset(name for name, _ in self.terms)

    def evaluate(self, sizes: Mapping[str, int]) -> int:
        """Returns the size, given those of the variables."""
        return self.constant + sum(factor * sizes[name] for name, factor in self.terms)

    def renamed(self, names: Mapping[str, str]) -> Expression:
        """Returns the expression with its variables renamed."""
        return Expression(tuple((names.get(name, name), factor) for name, factor in self.terms), self.constant)
