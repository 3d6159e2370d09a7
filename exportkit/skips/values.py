"""What static evaluation works with: values that are known, entities of the suite, and what nobody can know.

In come pieces of syntax trees and constants; out come small classes that the interpreter passes around.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any


class _Unknown:
    """The value of an expression that only a run of the suite would tell."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()


class PartialText(str):
    """A text with parts that only a run would tell, shown as in an f-string: good as a reason, not as a value."""

    __slots__ = ()


@dataclass(eq=False, repr=False)
class Frame:
    """Names and their values: of a module, a class body, or a call of a function."""

    kind: str
    file: str
    names: dict[str, Any] = field(default_factory=dict)
    parent: Frame | None = None
    owner: Class | None = None
    returned: list[tuple[Any, Condition]] = field(default_factory=list)  # values, and the conditions that they hang on

    def find(self, name: str) -> Frame | None:
        """The frame in which Python would find a name; a class body is invisible from its methods."""
        frame: Frame | None = self
        while frame is not None:
            if name in frame.names and (frame is self or frame.kind != "class"):
                return frame
            frame = frame.parent
        return None


@dataclass(frozen=True)
class External:
    """Something outside the suite, by its full name: ``pytest.mark.skip``."""

    name: str


@dataclass(frozen=True, eq=False, repr=False)
class Imported:
    """A name bound by an import statement, resolved when it is needed."""

    module: str
    name: str | None
    level: int
    file: str


@dataclass(frozen=True, eq=False, repr=False)
class Applied:
    """A call of something outside the suite: ``pytest.mark.skipif(condition, reason="...")``."""

    name: str
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    node: ast.AST
    file: str

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        """The value of an argument, given by position or by one of its names."""
        if position < len(self.args):
            return self.args[position]
        return next((self.keywords[name] for name in names if name in self.keywords), default)


@dataclass(frozen=True, eq=False, repr=False)
class Perhaps:
    """A mark that is there under a condition."""

    mark: Any
    condition: str


@dataclass(frozen=True, eq=False, repr=False)
class NamedMark:
    """A decorator that is known by configuration."""

    key: str
    reason: str | None
    node: ast.AST
    file: str


@dataclass(frozen=True, eq=False, repr=False)
class Function:
    """A function of the suite, with the marks that its decorators put on it, innermost first."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    frame: Frame
    marks: tuple[Any, ...] = ()
    decorated: bool = False
    values: dict[str, Any] | None = None  # what names hold at its definition: that of a wrapper's closure

    @property
    def decorators(self) -> list[ast.expr]:
        """The decorators of its definition, outermost first."""
        return [] if isinstance(self.node, ast.Lambda) else self.node.decorator_list

    @property
    def is_static(self) -> bool:
        """Whether it is a static method."""
        return any(isinstance(decorator, ast.Name) and decorator.id == "staticmethod" for decorator in self.decorators)

    def with_mark(self, *marks: Any) -> Function:
        """The same function with more marks."""
        return replace(self, marks=(*self.marks, *marks))


@dataclass(eq=False, repr=False)
class Class:
    """A class of the suite; its namespace is that of its body."""

    node: ast.ClassDef
    frame: Frame  # that in which it is defined
    body: Frame
    scope: Frame  # what the names in its list of bases held when it was defined
    bases: tuple[Any, ...] = ()
    cached_marks: tuple[Any, ...] | None = None
    cached_order: tuple[Any, ...] | None = None

    @property
    def name(self) -> str:
        """The name that it is defined with."""
        return self.node.name


@dataclass(frozen=True, eq=False, repr=False)
class Instance:
    """``self`` in a test of a class."""

    cls: Class


@dataclass(frozen=True, eq=False, repr=False)
class Super:
    """``super()`` in a method of ``after``."""

    instance: Instance | Class
    after: Class


@dataclass(frozen=True, eq=False, repr=False)
class Bound:
    """A method of an instance or class, ready to be called."""

    function: Function
    receiver: Instance | Class
    owner: Class


@dataclass(frozen=True)
class Skip:
    """Why a test does not run.

    Attributes:
        reason: As Python would evaluate it; parts that only a run tells are shown as in an f-string.
        file: Where the skip is, relative to the root.
        line: Its line.
        condition: The condition that only a run of the suite would tell; empty if the test is skipped for certain.
    """

    reason: str
    file: str
    line: int
    condition: str = ""


class Condition:
    """A condition as text that is worked out when it is asked for: that of most conditions never is.

    Args:
        *parts: Text, syntax trees and conditions that make it up.
        negated: Whether it is the opposite of them.
    """

    __slots__ = ("_negated", "_parts", "_text")

    def __init__(self, *parts: str | ast.AST | Condition, negated: bool = False) -> None:
        self._parts, self._negated = parts, negated
        self._text: str | None = None

    def __bool__(self) -> bool:
        return self._negated or any(isinstance(part, ast.AST) or bool(part) for part in self._parts)

    def __str__(self) -> str:
        if self._text is None:
            text = "".join(ast.unparse(part) if isinstance(part, ast.AST) else str(part) for part in self._parts)
            self._text = _opposite(text) if self._negated else text
        return self._text

    def negated(self) -> Condition:
        """The opposite."""
        return Condition(self, negated=True)


def all_of(conditions: Iterable[ast.AST | Condition]) -> Condition:
    """Returns the condition that all of these hold."""
    parts: list[str | ast.AST | Condition] = []
    for condition in conditions:
        parts += [" and ", condition] if parts else [condition]
    return Condition(*parts)


def _opposite(text: str) -> str:
    is_negation = text.startswith("not ") and " " not in text[4:]
    return text.removeprefix("not ") if is_negation else f"not ({text})"


class Skipped(Exception):
    """Unwinds the interpreter as the suite's own exception would; pytest's is no ``Exception``, unittest's is."""

    def __init__(self, skip: Skip, by_unittest: bool) -> None:
        super().__init__(skip.reason)
        self.skip, self.by_unittest = skip, by_unittest


def known(value: Any) -> bool:
    """Whether a value is fully known, down to the elements of a container."""
    if value is UNKNOWN or isinstance(value, PartialText):
        return False
    if isinstance(value, dict):
        return all(known(part) for pair in value.items() for part in pair)
    if isinstance(value, _SEQUENCES):
        return all(known(part) for part in value)
    return not isinstance(value, _OPEN)


def truth(value: Any) -> bool | None:
    """Whether a value is true; None if only a run would tell."""
    if isinstance(value, _CONTAINERS):
        return bool(value)
    return bool(value) if known(value) else None


_SEQUENCES = (list, tuple, set, frozenset)
_CONTAINERS = (*_SEQUENCES, dict)
_OPEN = (External, Applied, Imported, Perhaps)
