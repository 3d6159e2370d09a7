"""Takes statements of the suite that follow each other and says which paths are taken, and what skips on them.

A condition that only a run would tell leaves two paths: only what both do is certain. Loops run over known elements.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from exportkit.skips.externals import installed
from exportkit.skips.statements import FALL, LEAVE, STOP, Statements
from exportkit.skips.values import (
    UNKNOWN,
    Applied,
    Class,
    Condition,
    External,
    Frame,
    Function,
    Imported,
    Skip,
    Skipped,
    known,
    truth,
)

_Branch = Callable[[], frozenset[str]]

_MOST_ELEMENTS = 20
_CATCHES_UNITTEST = {"unittest.SkipTest", "unittest.case.SkipTest", "builtins.Exception"}
_CATCHES_PYTEST = {"pytest.skip.Exception", "_pytest.outcomes.Skipped", "_pytest.outcomes.OutcomeException"}
_IMPORT_ERRORS = {
    "builtins.ImportError",
    "builtins.ModuleNotFoundError",
    "builtins.Exception",
    "builtins.BaseException",
}
_OTHERWISE = (Condition(), lambda: FALL)  # the branch that does nothing
_SWALLOWS = {"pytest.raises", "contextlib.suppress"}


class ControlFlow(Statements):
    """Follows statements through branches, loops, context managers and exceptions."""

    def __init__(self) -> None:
        super().__init__()
        self._branch = Condition()  # the condition under which the last statement goes on, if it may not

    def execute(self, statements: Sequence[ast.stmt], frame: Frame) -> frozenset[str]:
        """Follows statements; returns how control may leave them: "fall", "stop" (return, raise) or "leave" (break)."""
        exits: frozenset[str] = frozenset()
        for position, statement in enumerate(statements):
            method = self.method_for(statement, "_do_")
            if method is None:
                continue
            outcome = method(self, statement, frame)
            exits |= outcome - FALL
            if "fall" not in outcome:
                return exits
            if exits:
                condition, rest = self._branch, statements[position + 1 :]
                later, skipped = self._under(condition, partial(self.execute, rest, frame))
                self._note(skipped, condition)
                return exits | later
        return exits | FALL

    def _do_If(self, node: ast.If, frame: Frame) -> frozenset[str]:
        answer = truth(self.evaluate(node.test, frame))
        if answer is not None:
            return self.execute(node.body if answer else node.orelse, frame)
        condition = Condition(node.test)
        return self._either(
            frame,
            (condition, partial(self.execute, node.body, frame)),
            (condition.negated(), partial(self.execute, node.orelse, frame)),
        )

    def _do_Match(self, node: ast.Match, frame: Frame) -> frozenset[str]:
        exits = FALL
        for case in node.cases:
            condition = Condition(node.subject, " matches ", case.pattern)
            exits |= self._either(frame, (condition, partial(self.execute, case.body, frame)), _OTHERWISE)
        return exits

    def _either(self, frame: Frame, *branches: tuple[Condition, _Branch]) -> frozenset[str]:
        """Follows two branches of which one is taken: only what both do is certain."""
        before, after = dict(frame.names), list[dict[str, Any]]()
        exits: frozenset[str] = frozenset()
        skips: list[tuple[Skipped | None, Condition]] = []
        for condition, branch in branches:
            frame.names.clear()
            frame.names.update(before)
            outcome, skipped = self._under(condition, branch)
            exits |= outcome
            if "fall" in outcome or frame.kind != "function":
                after.append(dict(frame.names))
            skips.append((skipped, condition))
            if outcome == STOP:
                self._branch = condition.negated()
        frame.names.clear()
        frame.names.update(_common_names(after) if after else before)
        certain = [skipped for skipped, _ in skips if skipped is not None]
        if len(certain) == len(branches):
            reason = " or ".join(dict.fromkeys(skipped.skip.reason for skipped in certain))
            raise Skipped(replace(certain[0].skip, reason=reason), certain[0].by_unittest)
        for skipped, condition in skips:
            self._note(skipped, condition)
        return exits

    def _under(
        self, condition: Condition, branch: Callable[[], frozenset[str]]
    ) -> tuple[frozenset[str], Skipped | None]:
        """Follows what is reached under a condition; returns how it leaves, and the skip that it surely ends in."""
        first_note = len(self.notes)
        self._conditions.append(condition)
        try:
            return branch(), None
        except Skipped as skipped:
            return STOP, skipped
        finally:
            self._conditions.pop()
            self.notes[first_note:] = [_conditional(note, condition) for note in self.notes[first_note:]]

    def _note(self, skipped: Skipped | None, condition: Condition) -> None:
        if skipped is not None:
            self.notes.append(_conditional(skipped.skip, condition))

    def _do_For(self, node: ast.For | ast.AsyncFor, frame: Frame) -> frozenset[str]:
        elements = self.evaluate(node.iter, frame)
        if isinstance(elements, dict | set | str):
            elements = list(elements)
        if not isinstance(elements, list | tuple):
            self.assign(node.target, UNKNOWN, frame)
            condition = Condition(node.iter, " is not empty")
            return self._loop(self._either(frame, (condition, partial(self.execute, node.body, frame)), _OTHERWISE))
        for element in elements[:_MOST_ELEMENTS]:
            self.assign(node.target, element, frame)
            outcome = self.execute(node.body, frame)
            if "fall" not in outcome:
                return self._loop(outcome)
            if outcome != FALL:
                return self._loop(outcome)
        return self.execute(node.orelse, frame)

    _do_AsyncFor = _do_For

    def _do_While(self, node: ast.While, frame: Frame) -> frozenset[str]:
        answer = truth(self.evaluate(node.test, frame))
        if answer is False:
            return self.execute(node.orelse, frame)
        if answer:
            return self._loop(self.execute(node.body, frame))
        condition = Condition(node.test)
        return self._loop(self._either(frame, (condition, partial(self.execute, node.body, frame)), _OTHERWISE))

    @staticmethod
    def _loop(outcome: frozenset[str]) -> frozenset[str]:
        return outcome - LEAVE | FALL if outcome & (LEAVE | FALL) else outcome

    def _do_With(self, node: ast.With | ast.AsyncWith, frame: Frame) -> frozenset[str]:
        swallowed: set[str] = set()
        for item in node.items:
            value = self.evaluate(item.context_expr, frame)
            swallowed |= self._swallowed(item.context_expr, value)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, UNKNOWN, frame)
        try:
            return self.execute(node.body, frame)
        except Skipped as skipped:
            if _catches(swallowed, skipped):
                return FALL
            raise

    _do_AsyncWith = _do_With

    def _swallowed(self, node: ast.expr, value: Any) -> set[str]:
        """Names of the exceptions that a context manager keeps from leaving its block."""
        if not isinstance(node, ast.Call):
            return set()
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if called == "subTest" or ast.unparse(node.func) == "subtests.test":
            return {"builtins.BaseException"}  # skips the subtest, not the test
        if isinstance(value, Applied) and (value.name in _SWALLOWS or called in ("assertRaises", "assertRaisesRegex")):
            return {name for argument in value.args for name in _exception_names(argument)}
        return set()

    def _do_Try(self, node: ast.Try, frame: Frame) -> frozenset[str]:
        try:
            outcome = self._attempt(node, frame)
        finally:
            final = self.execute(node.finalbody, frame)
        return outcome if "fall" in final else final

    def _attempt(self, node: ast.Try, frame: Frame) -> frozenset[str]:
        missing = next((i for i, part in enumerate(node.body) if self._fails_to_import(part)), None)
        if missing is not None:
            self.execute(node.body[:missing], frame)
            handler = next((h for h in node.handlers if self._caught(h, frame) & _IMPORT_ERRORS), None)
            return STOP if handler is None else self.execute(handler.body, frame)
        try:
            outcome = self.execute(node.body, frame)
        except Skipped as skipped:
            handler = next((h for h in node.handlers if _catches(self._caught(h, frame), skipped)), None)
            if handler is None:
                raise
            return self.execute(handler.body, frame)
        if "fall" in outcome:
            outcome = outcome - FALL | self.execute(node.orelse, frame)
        if all(isinstance(part, ast.Import | ast.ImportFrom | ast.Pass) or _is_constant(part) for part in node.body):
            return outcome  # nothing in it raises
        for handler in node.handlers:
            condition = Condition(handler.type or "an exception", " is raised")
            outcome |= self._either(frame, (condition, partial(self.execute, handler.body, frame)), _OTHERWISE) - FALL
        return outcome

    def _caught(self, handler: ast.ExceptHandler, frame: Frame) -> set[str]:
        return (
            {"builtins.BaseException"}
            if handler.type is None
            else set(_exception_names(self.evaluate(handler.type, frame)))
        )

    def _fails_to_import(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Import):
            return any(not self.is_importable(alias.name) for alias in node.names)
        return isinstance(node, ast.ImportFrom) and not node.level and not self.is_importable(node.module or "")

    def is_importable(self, module: str) -> bool:
        """Whether a module can be imported, as far as can be told without importing it."""
        return installed(module)


def _conditional(skip: Skip, condition: Condition) -> Skip:
    return replace(skip, condition=" and ".join(filter(None, (str(condition), skip.condition))) or "an earlier branch")


def _common_names(branches: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The names after branches of which one was taken, with a value where that does not depend on which."""
    merged: dict[str, Any] = {}
    entities = (Function, Class, Imported)
    for names in branches:
        for name, value in names.items():
            if name not in merged or isinstance(value, entities) > isinstance(merged[name], entities):
                merged[name] = value
    for name, value in merged.items():
        if not isinstance(value, entities) and not all(_same(names.get(name, UNKNOWN), value) for names in branches):
            merged[name] = UNKNOWN
    return merged


def _same(one: Any, other: Any) -> bool:
    return one is other or (known(one) and known(other) and type(one) is type(other) and one == other)


def _exception_names(value: Any) -> Iterable[str]:
    for part in value if isinstance(value, list | tuple) else (value,):
        if isinstance(part, External):
            yield part.name


def _catches(names: set[str], skipped: Skipped) -> bool:
    return "builtins.BaseException" in names or bool(
        names & (_CATCHES_UNITTEST if skipped.by_unittest else _CATCHES_PYTEST)
    )


def _is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
