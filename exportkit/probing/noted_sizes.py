"""Integers and floats that record how they, and numbers computed from them, are compared."""

from __future__ import annotations

import math
import operator
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

_OWN = f"{Path(__file__).parents[1]}{os.sep}"  # what exportkit compares on its way to the model is left out
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_NOT_THE_MODELS = (_OWN, _TORCH)
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_ARITHMETIC = (
    "add", "sub", "mul", "floordiv", "mod", "divmod", "truediv", "pow", "lshift", "rshift", "and", "or", "xor",
)  # fmt: skip
_CHANGES: Mapping[str, Callable[..., Any]] = {
    "neg": operator.neg, "abs": abs, "round": round, "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc,
}  # fmt: skip


class SizeComparison(NamedTuple):
    """A comparison of a size, or of a number that is calculated from sizes.

    Attributes:
        place: Where it is: file, line, and position in the code of the function.
        operator: Its name, such as ``lt``.
        limit: The right side, if it does not come from sizes.
    """

    place: tuple[str, int, int]
    operator: str
    limit: float | None


class SizeFormatted(NamedTuple):
    """Code that makes text of a size.

    Attributes:
        place: File and line.
    """

    place: str


class SizeEscaped(NamedTuple):
    """Code that makes a plain number of a size, or looks it up: how that is compared is not seen.

    Attributes:
        place: File and line.
    """

    place: str


class _Noting:
    """A number that is calculated from sizes, and notes how it is compared."""

    log: list[tuple[Any, ...]]

    def __bool__(self) -> bool:
        self.note("ne", 0)
        return bool(plain_number(self) != 0)

    def note(self, name: str, other: Any) -> None:
        """Notes that the caller of the caller compares this number."""
        frame = sys._getframe(2)
        place = (frame.f_code.co_filename, frame.f_lineno, frame.f_lasti)
        if not place[0].startswith(_OWN):
            comparison = SizeComparison(place, name, None if isinstance(other, _Noting) else plain_number(other))
            self.log.append((comparison, plain_number(self), plain_number(other)))

    def __repr__(self) -> str:
        note_use(SizeFormatted, self.log)
        return repr(plain_number(self))

    def __format__(self, spec: str) -> str:
        note_use(SizeFormatted, self.log)
        return format(plain_number(self), spec)

    def __int__(self) -> int:
        note_use(SizeEscaped, self.log)
        return int(plain_number(self))

    def __float__(self) -> float:
        note_use(SizeEscaped, self.log)
        return float(plain_number(self))

    def __hash__(self) -> int:
        note_use(SizeEscaped, self.log)
        return hash(plain_number(self))


class _Size(_Noting, int):
    """A size, or an integer that is calculated from sizes."""


class _Fraction(_Noting, float):
    """Any other number that is calculated from sizes."""


def note_use(kind: Callable[[str], tuple[Any, ...]], log: list[tuple[Any, ...]], past_torch: bool = False) -> None:
    """Notes that the caller of the caller makes something else of a size.

    Args:
        kind: What it makes of it: `SizeFormatted` or `SizeEscaped`.
        log: What it is noted in.
        past_torch: Whether the caller is the one that called torch for it.
    """
    frame = sys._getframe(2)
    while past_torch and frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    if not frame.f_code.co_filename.startswith(_NOT_THE_MODELS):
        log.append((kind(f"{frame.f_code.co_filename}:{frame.f_lineno}"),))


def plain_number(value: Any) -> Any:
    """Returns Python's own number for a number that notes, and any other value as it is."""
    if isinstance(value, int):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, float) else value


def noted_size(value: Any, log: list[tuple[Any, ...]]) -> Any:
    """Returns the same number, which notes how it is compared.

    Args:
        value: The number; anything else is returned as it is.
        log: What it is noted in.
    """
    if type(value) is not int and type(value) is not float:
        return value
    found: Any = _Size(value) if type(value) is int else _Fraction(value)
    found.log = log
    return found


def _comparing(name: str) -> Callable[[_Noting, Any], Any]:
    compare = getattr(operator, name)

    def compared(self: _Noting, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        self.note(name, other)
        return compare(plain_number(self), plain_number(other))

    return compared


def _calculating(calculate: Callable[..., Any], reflected: bool) -> Callable[[_Noting, Any], Any]:
    def calculated(self: _Noting, other: Any, *modulus: int) -> Any:
        if not isinstance(other, _Noting) and type(other) not in (int, float, bool):
            return NotImplemented
        values = (plain_number(other), plain_number(self)) if reflected else (plain_number(self), plain_number(other))
        found = calculate(*values, *modulus)
        if isinstance(found, tuple):  # of divmod
            return tuple([noted_size(part, self.log) for part in found])
        return noted_size(found, self.log)

    return calculated


def _changing(change: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: _Noting, *options: Any) -> Any:
        return noted_size(change(plain_number(self), *options), self.log)

    return changed


for _name in _COMPARISONS:
    setattr(_Noting, f"__{_name}__", _comparing(_name))
for _name in _ARITHMETIC:
    _function = divmod if _name == "divmod" else getattr(operator, f"__{_name}__")
    setattr(_Noting, f"__{_name}__", _calculating(_function, False))
    setattr(_Noting, f"__r{_name}__", _calculating(_function, True))
for _name, _function in _CHANGES.items():
    setattr(_Noting, f"__{_name}__", _changing(_function))
