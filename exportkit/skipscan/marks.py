"""Interprets the marks of a test: which of them skip it, and its variants from ``parametrize``."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from exportkit.skipscan.expressions import UNITTEST_DECORATORS, reason_text
from exportkit.skipscan.suite import Suite
from exportkit.skipscan.values import (
    Class,
    External,
    ExternalCall,
    Function,
    Scope,
    Skip,
    flattened,
    is_true,
    known,
)

_MOST_VARIANTS = 500
_EVALUATED_NAMES = ("os", "sys", "platform")  # what pytest defines for a condition given as a string


def pytest_skips(suite: Suite, marks: Iterable[Any], scope: Scope) -> Iterator[Skip]:
    """Yields the skips of ``pytest.mark``: all conditions first, then the unconditional ones, as pytest does."""
    found = [mark for mark in flattened(list(marks)) if isinstance(mark, External | ExternalCall)]
    for mark in found:
        if mark.name == "pytest.mark.skipif" and isinstance(mark, ExternalCall):
            yield from _skipif(suite, mark, scope)
    for mark in found:
        if mark.name == "pytest.mark.skip":
            yield _skip(mark, 0, "unconditional skip")


def _skipif(suite: Suite, mark: ExternalCall, scope: Scope) -> Iterator[Skip]:
    for position in range(max(1, len(mark.args))):
        condition, source = mark.argument(position, "condition"), mark.source(position, "condition")
        reason, text = mark.keywords.get("reason"), ast.unparse(source) if source is not None else "a condition"
        if isinstance(condition, str):
            reason, text = f"condition: {condition}" if reason is None else reason, condition
            names = {name: External(name) for name in _EVALUATED_NAMES} | scope.module.names
            try:
                expression = ast.parse(condition, mode="eval").body
            except SyntaxError:
                continue  # an error in pytest
            condition = suite.evaluate(expression, Scope("function", scope.file, names))
        answer = is_true(condition)
        if answer is not False:
            reason = reason_text(reason, mark.source(len(mark.node.args), "reason"))
            yield Skip(reason, mark.file, mark.node.lineno, "" if answer else text)


def decorator_skips(marks: Iterable[Any], by_unittest: bool = True) -> Iterator[Skip]:
    """Yields the skips of unittest's decorators, outermost first, and of the decorators that the layout names."""
    for mark in reversed(list(flattened(list(marks)))):
        if isinstance(mark, Skip):
            yield mark
        elif not by_unittest or not isinstance(mark, External | ExternalCall) or mark.name not in UNITTEST_DECORATORS:
            continue
        elif mark.name == "unittest.skip":
            yield _skip(mark, 0)
        elif isinstance(mark, ExternalCall):
            wanted, answer = mark.name == "unittest.skipIf", is_true(mark.argument(0, "condition"))
            source = mark.source(0, "condition")
            if answer is None and source is not None:
                text = ast.unparse(source)
                yield _skip(mark, 1).under(text if wanted else f"not ({text})")
            elif answer is wanted:
                yield _skip(mark, 1)


def _skip(mark: External | ExternalCall, position: int, default: str = "") -> Skip:
    if isinstance(mark, External):  # without a call; the caller fills in the place
        return Skip(default, "", 0)
    reason = mark.argument(position, "reason", default=default)
    return Skip(reason_text(reason, mark.source(position, "reason")), mark.file, mark.node.lineno)


@dataclass(frozen=True)
class Variant:
    """One set of arguments of a parametrized test.

    Attributes:
        identifier: What pytest shows in brackets; None for a test without (known) variants.
        values: The arguments by name.
        marks: The marks of ``pytest.param``.
        empty: The skip of a test that is parametrized with nothing.
    """

    identifier: str | None = None
    values: dict[str, Any] = field(default_factory=dict)
    marks: tuple[Any, ...] = ()
    empty: Skip | None = None

    def combined(self, other: Variant) -> Variant:
        """Returns the variant with the arguments of both."""
        identifier = "-".join(part for part in (self.identifier, other.identifier) if part is not None)
        return Variant(identifier, self.values | other.values, self.marks + other.marks, self.empty or other.empty)


def variants(marks: Iterable[Any]) -> list[Variant]:
    """Returns the variants of a test in the order of pytest, or one without an identifier if they are unknown."""
    result = [Variant()]
    for mark in flattened(list(marks)):
        if isinstance(mark, ExternalCall) and mark.name == "pytest.mark.parametrize":
            added = _of_mark(mark)
            if added is None or len(result) * len(added) > _MOST_VARIANTS:
                return [Variant()]
            result = [first.combined(second) for first in result for second in added]
    return result


def _of_mark(mark: ExternalCall) -> list[Variant] | None:
    names, sets, ids = mark.argument(0, "argnames"), mark.argument(1, "argvalues"), mark.keywords.get("ids")
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",") if name.strip()]
    if not isinstance(names, list | tuple) or not isinstance(sets, list | tuple):
        return None
    if not sets:
        reason = f"got empty parameter set for ({', '.join(map(str, names))})"
        return [Variant("NOTSET", empty=Skip(reason, mark.file, mark.node.lineno))]
    ids = [None] * len(sets) if ids is None else ids
    if not isinstance(ids, list | tuple) or len(ids) != len(sets):
        return None
    indirect = bool(mark.keywords.get("indirect"))
    found = [_variant(names, values, position, ids[position], indirect) for position, values in enumerate(sets)]
    known_variants = [variant for variant in found if variant is not None]
    return _distinct(known_variants) if len(known_variants) == len(found) else None


def _variant(names: Sequence[str], values: Any, position: int, given: Any, indirect: bool) -> Variant | None:
    marks: tuple[Any, ...] = ()
    if isinstance(values, ExternalCall) and values.name == "pytest.param":
        marks, given = (values.keywords.get("marks", ()),), values.keywords.get("id", given)
        values = values.args if len(names) > 1 or len(values.args) != 1 else values.args[0]
    values = (values,) if len(names) == 1 else values
    if not isinstance(values, list | tuple) or len(values) != len(names):
        return None
    if given is None:
        parts = [_identifier(name, value, position) for name, value in zip(names, values, strict=True)]
        given = None if None in parts else "-".join(map(str, parts))
    if not isinstance(given, str | bool | int | float):
        return None
    return Variant(str(given), {} if indirect else dict(zip(names, values, strict=True)), marks)


def _identifier(name: str, value: Any, position: int) -> str | None:
    if isinstance(value, Function | Class):
        return value.node.name
    if isinstance(value, External) and value.name.startswith("builtins."):
        return value.name.rpartition(".")[2]
    if isinstance(value, list | tuple | dict | set):
        return f"{name}{position}"
    if not known(value):
        return None
    if isinstance(value, str):
        return value.encode("unicode_escape").decode("ascii")
    return value.decode("ascii", "backslashreplace") if isinstance(value, bytes) else str(value)


def _distinct(found: list[Variant]) -> list[Variant]:
    """Numbers identifiers that occur several times, as pytest does."""
    counts = Counter(variant.identifier for variant in found)
    taken, seen, result = set(counts), Counter[str | None](), []
    for variant in found:
        identifier = variant.identifier
        if identifier is not None and counts[identifier] > 1:
            suffix = "_" if identifier[-1:].isdigit() else ""
            while (name := f"{identifier}{suffix}{seen[identifier]}") in taken:
                seen[identifier] += 1
            taken.add(name)
            result.append(replace(variant, identifier=name))
        else:
            result.append(variant)
    return result
