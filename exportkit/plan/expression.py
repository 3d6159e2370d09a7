"""Sizes as integer expressions: ``3``, ``batch``, ``past + seq``, ``length//320 + 1``, ``min(past, 5)``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from exportkit.errors import PlanError
from exportkit.json_data import Positive, read


@dataclass(frozen=True)
class Expression:
    """``min((sum of terms + shift) // divisor + constant, cap)``; most sizes need only the terms or the constant.

    Attributes:
        terms: Pairs of a variable and its coefficient, in a fixed order.
        constant: What is added; the whole size, if there are no terms.
        divisor: What the sum is divided by, rounded down.
        shift: What is added before the division; less than the divisor.
        cap: The largest value, such as what a sliding window stores.

    Example:
        >>> total = Expression.of("past") + Expression.of("seq")
        >>> str(total), total.evaluate({"past": 5, "seq": 4})
        ('past + seq', 9)
    """

    terms: tuple[tuple[str, int], ...] = ()
    constant: int = 0
    divisor: Positive = 1
    shift: int = 0
    cap: int | None = None

    @classmethod
    def of(cls, size: int | str) -> Expression:
        """Returns a static size, or a variable of that name."""
        return cls(((size, 1),)) if isinstance(size, str) else cls((), size)

    def __add__(self, other: Expression) -> Expression:
        if not (self.is_linear and other.is_linear):
            raise PlanError("Only sums of variables and constants can be added.", got=f"{self} and {other}")
        sums = dict(self.terms)
        for name, factor in other.terms:
            sums[name] = sums.get(name, 0) + factor
        return Expression(tuple((n, f) for n, f in sums.items() if f), self.constant + other.constant)

    def __str__(self) -> str:
        parts = [name if factor == 1 else f"{factor}*{name}" for name, factor in self.terms]
        if self.divisor != 1:
            parts += [str(self.shift)] if self.shift else []
            parts = [f"{_sum(parts)}//{self.divisor}" if len(parts) == 1 else f"({_sum(parts)})//{self.divisor}"]
        if self.constant or not parts:
            parts.append(str(self.constant))
        return _sum(parts) if self.cap is None else f"min({_sum(parts)}, {self.cap})"

    @property
    def is_static(self) -> bool:
        """Whether the size never changes."""
        return not self.terms

    @property
    def is_linear(self) -> bool:
        """Whether the size is a sum, without a division or a cap."""
        return self.divisor == 1 and self.cap is None

    @property
    def variable(self) -> str | None:
        """The variable's name, if the expression is nothing but one variable."""
        alone = len(self.terms) == 1 and self.terms[0][1] == 1 and not self.constant and self.is_linear
        return self.terms[0][0] if alone else None

    def variables(self) -> frozenset[str]:
        """Returns the names of its variables."""
        return frozenset(dict(self.terms))

    def evaluate(self, sizes: Mapping[str, int]) -> int:
        """Returns the size, given the sizes of the variables."""
        total = self.shift
        for name, factor in self.terms:
            total += factor * sizes[name]
        value = total // self.divisor + self.constant
        return value if self.cap is None else min(value, self.cap)

    def uncapped(self) -> Expression:
        """Returns the expression without its cap."""
        return replace(self, cap=None)

    def renamed(self, names: Mapping[str, str]) -> Expression:
        """Returns the expression with its variables renamed."""
        terms: dict[str, int] = {}
        for name, factor in self.terms:
            new = names.get(name, name)
            terms[new] = terms.get(new, 0) + factor
        return replace(self, terms=tuple(terms.items()))

    def with_value(self, name: str, value: int) -> Expression:
        """Returns the expression with a number in place of one of its variables."""
        added = dict(self.terms)[name] * value
        rest = tuple([term for term in self.terms if term[0] != name])
        if not rest:
            return Expression.of(self.evaluate({name: value}))
        if self.divisor == 1:
            return replace(self, terms=rest, constant=self.constant + added)
        return replace(self, terms=rest, shift=self.shift + added)

    def to_json(self) -> dict[str, Any]:
        """Returns the expression as JSON data, without fields that have their default values."""
        data = {"terms": [list(term) for term in self.terms]} if self.terms else {}
        fields = {"constant": 0, "divisor": 1, "shift": 0, "cap": None}
        return data | {name: getattr(self, name) for name, usual in fields.items() if getattr(self, name) != usual}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Expression:
        """Returns the expression that `to_json` wrote.

        Raises:
            InvalidDataError: if the data is not an expression.
        """
        expression: Expression = read(cls, data)
        return expression


def _sum(parts: list[str]) -> str:
    return " + ".join(parts).replace("+ -", "- ")
