"""Takes the ``parametrize`` marks of a test and gives its variants: identifier, values of arguments, and marks of each.

Identifiers are those of pytest where the values are known; a test with others stays one test without variants.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from exportkit.skips.marks import unpacked
from exportkit.skips.values import Applied, Class, External, Function, Skip, known

_MOST_VARIANTS = 500


@dataclass(frozen=True)
class Variant:
    """One set of arguments of a parametrised test; the identifier is None if the test has no (known) variants."""

    identifier: str | None = None
    values: dict[str, Any] = field(default_factory=dict)
    marks: tuple[Any, ...] = ()
    empty: Skip | None = None  # the skip of a test that is parametrised with nothing


def variants(marks: Iterable[Any]) -> list[Variant]:
    """Returns the variants of a test in the order of pytest; one without identifier if they are not known."""
    result = [Variant()]
    for mark, condition in unpacked(marks):
        if not isinstance(mark, Applied) or mark.name != "pytest.mark.parametrize":
            continue
        one_mark = _of_mark(mark)
        if one_mark is None or condition or len(result) * len(one_mark) > _MOST_VARIANTS:
            return [Variant()]
        result = [_joined(first, second) for first in result for second in one_mark]
    return result


def _joined(first: Variant, second: Variant) -> Variant:
    identifier = "-".join(part for part in (first.identifier, second.identifier) if part is not None)
    return Variant(identifier, first.values | second.values, first.marks + second.marks, first.empty or second.empty)


def _of_mark(mark: Applied) -> list[Variant] | None:
    names, sets = mark.argument(0, "argnames"), mark.argument(1, "argvalues")
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",") if name.strip()]
    if isinstance(sets, dict | set):
        sets = list(sets)
    if not isinstance(names, list | tuple) or not isinstance(sets, list | tuple):
        return None
    if not sets:
        reason = f"got empty parameter set for ({', '.join(map(str, names))})"
        return [Variant("NOTSET", empty=Skip(reason, mark.file, getattr(mark.node, "lineno", 0)))]
    identifiers = mark.keywords.get("ids")
    if isinstance(identifiers, list | tuple) and len(identifiers) == len(sets):
        given: Sequence[Any] = identifiers
    elif identifiers is None:
        given = [None] * len(sets)
    else:
        given = [_UNREADABLE] * len(sets)
    found = [_variant(names, values, position, given[position], mark) for position, values in enumerate(sets)]
    if any(variant is None or variant.identifier is None for variant in found):
        return None
    return _distinct([variant for variant in found if variant is not None])


_UNREADABLE = object()


def _variant(names: Sequence[str], values: Any, position: int, given: Any, mark: Applied) -> Variant | None:
    marks: tuple[Any, ...] = ()
    if isinstance(values, Applied) and values.name == "pytest.param":
        own, given = values.keywords.get("marks", ()), values.keywords.get("id", given)
        marks = tuple(own) if isinstance(own, list | tuple) else (own,)
        values = values.args if len(names) > 1 or len(values.args) != 1 else values.args[0]
    if len(names) == 1:
        values = (values,)
    if not isinstance(values, list | tuple) or len(values) != len(names):
        return None
    if given is _UNREADABLE:
        return None
    parts = [_identifier(name, value, position) for name, value in zip(names, values, strict=False)]
    if isinstance(given, str):
        identifier: str | None = given
    elif isinstance(given, bool | int | float):
        identifier = str(given)
    else:
        identifier = None if None in parts else "-".join(part for part in parts if part is not None)
    direct = not mark.keywords.get("indirect")
    return Variant(identifier, dict(zip(names, values, strict=False)) if direct else {}, marks)


def _identifier(name: str, value: Any, position: int) -> str | None:
    if isinstance(value, Function | Class):
        return None if isinstance(value.node, ast.Lambda) else value.node.name
    if isinstance(value, External):  # a class or function has its name as identifier, anything else has not
        kind = value.name.rpartition(".")[2]
        return kind if value.name.startswith("builtins.") else None
    if not known(value):
        return f"{name}{position}" if isinstance(value, list | tuple | dict) else None
    if isinstance(value, str):
        return value.encode("unicode_escape").decode("ascii")
    if isinstance(value, bytes):
        return value.decode("ascii", "backslashreplace")
    return str(value) if value is None or isinstance(value, bool | int | float | complex) else f"{name}{position}"


def _distinct(found: list[Variant]) -> list[Variant]:
    """Numbers the identifiers that occur several times, as pytest does."""
    counts = Counter(variant.identifier for variant in found)
    taken, seen, result = set(counts), Counter[str | None](), []
    for variant in found:
        identifier = variant.identifier
        if counts[identifier] > 1:
            suffix = "_" if identifier and identifier[-1].isdigit() else ""
            while f"{identifier}{suffix}{seen[identifier]}" in taken:
                seen[identifier] += 1
            name = f"{identifier}{suffix}{seen[identifier]}"
            taken.add(name)
            seen[identifier] += 1
            identifier = name
        result.append(Variant(identifier, variant.values, variant.marks, variant.empty))
    return result
