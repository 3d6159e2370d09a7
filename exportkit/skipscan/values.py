"""Defines the values that static evaluation works with: constants, parts of the suite, external names, and UNKNOWN."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any


class _Unknown:
    """The value of an expression that is only known at run time."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()


class PartialText(str):
    """A text with unknown parts, shown in braces as in an f-string: usable as a reason, but not as a value."""

    __slots__ = ()


@dataclass(eq=False, repr=False)
class Scope:
    """The names of a module, a class body or a function call, and their values."""

    kind: str
    file: str
    names: dict[str, Any] = field(default_factory=dict)
    parent: Scope | None = None
    owner: Class | None = None
    returned: list[Any] = field(default_factory=list)

    def find(self, name: str) -> Scope | None:
        """Returns the scope in which Python finds a name; a class body is invisible from its methods."""
        scope: Scope | None = self
        while scope is not None and (name not in scope.names or (scope is not self and scope.kind == "class")):
            scope = scope.parent
        return scope

    @property
    def module(self) -> Scope:
        """The scope of the module."""
        return self if self.parent is None else self.parent.module


@dataclass(frozen=True)
class External:
    """Something outside the suite, by its full name: ``pytest.mark.skip``."""

    name: str


@dataclass(frozen=True)
class Imported:
    """A name bound by an import statement, resolved on first use."""

    module: str
    name: str | None
    level: int
    file: str


@dataclass(frozen=True, eq=False, repr=False)
class ExternalCall:
    """A call of something outside the suite: ``pytest.mark.skipif(condition, reason="...")``."""

    name: str
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    node: ast.Call
    file: str

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        """Returns the value of an argument given by position or by one of its names."""
        if position < len(self.args):
            return self.args[position]
        return next((self.keywords[name] for name in names if name in self.keywords), default)

    def source(self, position: int, *names: str) -> ast.expr | None:
        """Returns the expression of an argument, or None if it is not given."""
        if position < len(self.node.args):
            return self.node.args[position]
        return next((keyword.value for keyword in self.node.keywords if keyword.arg in names), None)


@dataclass(frozen=True, eq=False, repr=False)
class Function:
    """A function of the suite, with the marks that its decorators put on it, innermost first."""

    node: ast.FunctionDef | ast.AsyncFunctionDef
    scope: Scope
    marks: tuple[Any, ...] = ()
    decorated: bool = False

    @property
    def kinds(self) -> set[str]:
        """The names of its plain decorators, such as ``staticmethod``."""
        return {decorator.id for decorator in self.node.decorator_list if isinstance(decorator, ast.Name)}

    def with_marks(self, *marks: Any) -> Function:
        """Returns the function with more marks."""
        return replace(self, marks=(*self.marks, *marks))


@dataclass(eq=False, repr=False)
class Class:
    """A class of the suite; its namespace is the scope of its body."""

    node: ast.ClassDef
    scope: Scope
    body: Scope
    bases: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        """The name in its definition."""
        return self.node.name


@dataclass(frozen=True, eq=False, repr=False)
class Instance:
    """``self`` in a test of a class, or ``super()`` in a method of the class ``after``."""

    cls: Class
    after: Class | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Bound:
    """A method of an instance or class, ready to be called."""

    function: Function
    receiver: Instance | Class


@dataclass(frozen=True)
class Skip:
    """Why a test does not run.

    Attributes:
        reason: As Python would evaluate it; parts only known at run time are shown in braces, as in an f-string.
        file: The file of the skip, relative to the root.
        line: Its line.
        condition: The condition, if it is only known at run time; empty if the skip is certain.
    """

    reason: str
    file: str
    line: int
    condition: str = ""

    def under(self, condition: str) -> Skip:
        """Returns the skip under a further condition."""
        return replace(self, condition=f"{condition} and {self.condition}" if self.condition else condition)


class Skipped(Exception):
    """Unwinds the interpreter like the exception of the suite, which is an ``Exception`` for unittest only."""

    def __init__(self, skip: Skip, by_unittest: bool) -> None:
        super().__init__(skip.reason)
        self.skip, self.by_unittest = skip, by_unittest

    def is_caught_by(self, names: set[str]) -> bool:
        """Returns whether ``except`` with one of these classes catches it."""
        own = {"unittest.SkipTest", "builtins.Exception"} if self.by_unittest else {"pytest.skip.Exception"}
        return not names.isdisjoint({*own, "builtins.BaseException"})


def known(value: Any) -> bool:
    """Returns whether a value is a constant, down to the elements of a container."""
    if isinstance(value, dict):
        return all(known(key) and known(part) for key, part in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(known(part) for part in value)
    return not isinstance(value, _NOT_CONSTANT)


def is_true(value: Any) -> bool | None:
    """Returns whether a value is true; None if this is only known at run time."""
    if isinstance(value, list | tuple | dict) or known(value):
        return bool(value)
    return True if isinstance(value, Function | Class | Instance | Bound) else None


def flattened(marks: Any) -> Iterator[Any]:
    """Yields each mark of nested lists of marks."""
    if isinstance(marks, list | tuple):
        for mark in marks:
            yield from flattened(mark)
    else:
        yield marks


def common_names(branches: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns the names after branches of which one was taken, with a value where it does not depend on which."""
    merged: dict[str, Any] = {}
    parts = (Function, Class, Imported)  # these are kept from any branch
    for names in branches:
        for name, value in names.items():
            if name not in merged or isinstance(value, parts) > isinstance(merged[name], parts):
                merged[name] = value
    for name, value in merged.items():
        if not isinstance(value, parts) and not all(is_same(names.get(name, UNKNOWN), value) for names in branches):
            merged[name] = UNKNOWN
    return merged


def is_same(one: Any, other: Any) -> bool:
    """Returns whether two values are the same object, or equal constants of one type."""
    return one is other or (known(one) and known(other) and type(one) is type(other) and one == other)


_NOT_CONSTANT = (
    *(_Unknown, PartialText, External, ExternalCall, Imported, Skip),
    *(Function, Class, Instance, Bound, Scope),
)
