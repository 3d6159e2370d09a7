"""Takes the marks that decorators, ``pytestmark`` and ``pytest.param`` put on a test, and says which of them skip it.

Out come skips, certain or under a condition, in the order in which pytest and unittest decide.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any

from exportkit.skips.externals import UNITTEST_DECORATORS
from exportkit.skips.statements import reason_text
from exportkit.skips.suite import Suite
from exportkit.skips.values import Applied, External, Frame, NamedMark, Perhaps, Skip, truth

_WITH_NAMES = (Applied, External)
_ENVIRONMENT = ("os", "sys", "platform")  # what pytest gives to a condition that is a string


def pytest_skips(suite: Suite, marks: Iterable[Any], frame: Frame) -> Iterator[Skip]:
    """Yields what skips by ``pytest.mark``: all conditions first, then the unconditional ones, as pytest does."""
    marks = list(unpacked(marks))
    for mark, condition in marks:
        if _name(mark) == "pytest.mark.skipif" and isinstance(mark, Applied):
            for skip in _skipif(suite, mark, frame):
                yield _with(skip, condition)
    for mark, condition in marks:
        if _name(mark) == "pytest.mark.skip":
            yield _with(_skip(mark, "unconditional skip"), condition)


def other_skips(marks: Iterable[Any], by_unittest: bool = True) -> Iterator[Skip]:
    """Yields what skips by the decorators of unittest, outermost first, and by marks known from the configuration."""
    for mark, condition in reversed(list(unpacked(marks))):
        name = _name(mark)
        if isinstance(mark, NamedMark):
            skip = Skip(
                mark.reason or mark.key,
                mark.file,
                _line(mark.node),
                "" if mark.reason else f"not available: {mark.key}",
            )
            yield _with(skip, condition)
        elif by_unittest and name == "unittest.skip":
            yield _with(_skip(mark, ""), condition)
        elif by_unittest and name in UNITTEST_DECORATORS and isinstance(mark, Applied):
            answer = truth(mark.argument(0, "condition"))
            wanted = name == "unittest.skipIf"
            if answer is None:
                text = _text(mark, 0, "condition")
                yield _with(_skip(mark, "", 1), f"{text}" if wanted else f"not ({text})")
            elif answer is wanted:
                yield _with(_skip(mark, "", 1), condition)


def unpacked(marks: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    """Yields each mark of nested lists of marks, with the condition that it is there under."""
    for mark in marks:
        if isinstance(mark, Perhaps):
            yield from ((inner, _both(mark.condition, condition)) for inner, condition in unpacked([mark.mark]))
        elif isinstance(mark, (list, tuple)):
            yield from unpacked(mark)
        else:
            yield mark, ""


def _name(mark: Any) -> str:
    return mark.name if isinstance(mark, _WITH_NAMES) else ""


def _skipif(suite: Suite, mark: Applied, frame: Frame) -> Iterator[Skip]:
    conditions = mark.args if mark.args else (mark.keywords.get("condition"),)
    for position, condition in enumerate(conditions):
        reason = mark.keywords.get("reason")
        value, text = condition, _text(mark, position, "condition")
        if isinstance(condition, str):
            value, text = _evaluated(suite, condition, frame), condition
            reason = f"condition: {condition}" if reason is None else reason
        answer = truth(value)
        if answer is not False:
            yield _with(
                Skip(reason_text(reason, _node(mark, -1, "reason")), mark.file, _line(mark.node)),
                "" if answer else text,
            )


def _evaluated(suite: Suite, text: str, frame: Frame) -> Any:
    module = frame
    while module.parent is not None:
        module = module.parent
    names = {name: External(name) for name in _ENVIRONMENT} | module.names
    try:
        return suite.evaluate(ast.parse(text, mode="eval").body, Frame("function", frame.file, names))
    except SyntaxError:
        return False  # an error of its own, not a skip


def _skip(mark: Any, default: str, position: int = 0) -> Skip:
    if not isinstance(mark, Applied):
        return Skip(default, "", 0)
    reason = mark.argument(position, "reason", default=default)
    if _is_function(reason):
        reason = default
    return Skip(reason_text(reason, _node(mark, position, "reason")), mark.file, _line(mark.node))


def _is_function(value: Any) -> bool:
    return type(value).__name__ in ("Function", "Class")


def _node(mark: Applied, position: int, keyword: str) -> ast.AST | None:
    call = mark.node
    if not isinstance(call, ast.Call):
        return None
    if 0 <= position < len(call.args):
        return call.args[position]
    return next((part.value for part in call.keywords if part.arg == keyword), None)


def _text(mark: Applied, position: int, keyword: str) -> str:
    node = _node(mark, position, keyword)
    return ast.unparse(node) if node is not None else "a condition"


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


def _both(first: str, second: str) -> str:
    return " and ".join(filter(None, (first, second)))


def _with(skip: Skip, condition: str) -> Skip:
    return Skip(skip.reason, skip.file, skip.line, _both(condition, skip.condition))
