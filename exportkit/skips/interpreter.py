"""Takes statements of the suite and follows them without running any: which paths are taken, and what skips on them.

A skip that is certain unwinds the interpreter as it would unwind Python; one that hangs on a condition which only a run
would tell is noted with that condition. Loops run over known elements only, calls to a limited depth.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from exportkit.skips.expressions import Expressions
from exportkit.skips.externals import (
    EXITS,
    SKIP_CALLS,
    SKIP_ERRORS,
    UNITTEST_DECORATORS,
    call_external,
    installed,
)
from exportkit.skips.values import (
    UNKNOWN,
    Applied,
    Bound,
    Class,
    External,
    Frame,
    Function,
    Imported,
    Instance,
    Perhaps,
    Skip,
    Skipped,
    Super,
    known,
    truth,
)

_FALL, _STOP, _LEAVE = frozenset({"fall"}), frozenset({"stop"}), frozenset({"leave"})
_DEEPEST, _MOST_ELEMENTS = 8, 20
_CATCHES_UNITTEST = {"unittest.SkipTest", "unittest.case.SkipTest", "builtins.Exception"}
_CATCHES_PYTEST = {"pytest.skip.Exception", "_pytest.outcomes.Skipped", "_pytest.outcomes.OutcomeException"}
_IMPORT_ERRORS = {
    "builtins.ImportError",
    "builtins.ModuleNotFoundError",
    "builtins.Exception",
    "builtins.BaseException",
}
_SWALLOWS = {"pytest.raises", "contextlib.suppress"}


class Interpreter(Expressions):
    """Follows statements; a subclass finds the modules and the attributes of classes."""

    def __init__(self) -> None:
        self.notes: list[Skip] = []  # skips under a condition, in the order in which they are met
        self._conditions: list[str] = []
        self._branch = ""  # the condition under which the last statement goes on, if it may not
        self._depth = 0

    # Statements

    def execute(self, statements: Sequence[ast.stmt], frame: Frame) -> frozenset[str]:
        """Follows statements; returns how control may leave them: "fall", "stop" (return, raise) or "leave" (break)."""
        exits: frozenset[str] = frozenset()
        for position, statement in enumerate(statements):
            method = getattr(self, f"_do_{type(statement).__name__}", None)
            if method is None:
                continue
            outcome = method(statement, frame)
            exits |= outcome - _FALL
            if "fall" not in outcome:
                return exits
            if exits:
                condition, rest = self._branch, statements[position + 1 :]
                later, skipped = self._under(condition, lambda rest=rest: self.execute(rest, frame))
                self._note(skipped, condition)
                return exits | later
        return exits | _FALL

    def run(
        self,
        function: Function,
        args: Sequence[Any] = (),
        keywords: dict[str, Any] | None = None,
        owner: Class | None = None,
    ) -> Any:
        """Follows a call of a function of the suite; returns its value."""
        if self._depth >= _DEEPEST:
            return UNKNOWN
        parent = function.frame
        while parent.kind == "class" and parent.parent is not None:
            parent = parent.parent
        frame = Frame("function", function.frame.file, parent=parent, owner=owner)
        self._bind_arguments(function, frame, args, keywords or {})
        self._depth += 1
        outside, self._conditions = self._conditions, []
        try:
            if isinstance(function.node, ast.Lambda):
                return self.evaluate(function.node.body, frame)
            self.execute(function.node.body, frame)
        finally:
            self._conditions = outside
            self._depth -= 1
        return _merged(frame.returned)

    def _bind_arguments(self, function: Function, frame: Frame, args: Sequence[Any], keywords: dict[str, Any]) -> None:
        arguments = function.node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        for parameter in (*positional, *arguments.kwonlyargs):
            frame.names[parameter.arg] = keywords.get(parameter.arg, UNKNOWN)
        for parameter, value in zip(positional, args):
            frame.names[parameter.arg] = value
        given = {parameter.arg for parameter in positional[: len(args)]} | set(keywords)
        defaults = [*zip(reversed(positional), reversed(arguments.defaults))]
        defaults += [(p, d) for p, d in zip(arguments.kwonlyargs, arguments.kw_defaults) if d is not None]
        for parameter, default in defaults:
            if parameter.arg not in given:
                frame.names[parameter.arg] = self.evaluate(default, function.frame)
        for rest in (arguments.vararg, arguments.kwarg):
            if rest is not None:
                frame.names[rest.arg] = UNKNOWN
        if positional and args and isinstance(args[0], Instance | Class):
            frame.names["__receiver__"] = args[0]

    def _do_Expr(self, node: ast.Expr, frame: Frame) -> frozenset[str]:  # noqa: N802
        if isinstance(node.value, ast.Yield | ast.YieldFrom):
            return _STOP  # what follows in a fixture is its teardown
        value = self.evaluate(node.value, frame)
        return _STOP if isinstance(value, Applied) and value.name in EXITS else _FALL

    def _do_Assign(self, node: ast.Assign, frame: Frame) -> frozenset[str]:  # noqa: N802
        if isinstance(node.value, ast.Yield):
            return _STOP
        value = self.evaluate(node.value, frame)
        for target in node.targets:
            self.assign(target, value, frame)
        return _FALL

    def _do_AnnAssign(self, node: ast.AnnAssign, frame: Frame) -> frozenset[str]:  # noqa: N802
        if node.value is not None:
            self.assign(node.target, self.evaluate(node.value, frame), frame)
        return _FALL

    def _do_AugAssign(self, node: ast.AugAssign, frame: Frame) -> frozenset[str]:  # noqa: N802
        if isinstance(node.target, ast.Name):
            read = ast.Name(node.target.id, ast.Load())
            frame.names[node.target.id] = self.evaluate(ast.BinOp(read, node.op, node.value), frame)
        return _FALL

    def _do_Delete(self, node: ast.Delete, frame: Frame) -> frozenset[str]:  # noqa: N802
        for target in node.targets:
            if isinstance(target, ast.Name):
                frame.names.pop(target.id, None)
        return _FALL

    def _do_Return(self, node: ast.Return, frame: Frame) -> frozenset[str]:  # noqa: N802
        frame.returned.append((self.evaluate(node.value, frame), " and ".join(self._conditions)))
        return _STOP

    def _do_Raise(self, node: ast.Raise, frame: Frame) -> frozenset[str]:  # noqa: N802
        value = self.evaluate(node.exc, frame)
        if isinstance(value, External | Applied) and value.name in SKIP_ERRORS:
            reason = value.argument(0, "msg", "reason", default="") if isinstance(value, Applied) else ""
            raise Skipped(self._skip_at(node, frame, reason, node.exc), "unittest" in value.name)
        return _STOP

    def _do_Break(self, _node: ast.Break, _frame: Frame) -> frozenset[str]:  # noqa: N802
        return _LEAVE

    _do_Continue = _do_Break

    def _do_Assert(self, node: ast.Assert, frame: Frame) -> frozenset[str]:  # noqa: N802
        return _STOP if truth(self.evaluate(node.test, frame)) is False else _FALL

    def _do_If(self, node: ast.If, frame: Frame) -> frozenset[str]:  # noqa: N802
        answer = truth(self.evaluate(node.test, frame))
        if answer is not None:
            return self.execute(node.body if answer else node.orelse, frame)
        condition = ast.unparse(node.test)
        return self._either(
            frame,
            (condition, lambda: self.execute(node.body, frame)),
            (_negated(condition), lambda: self.execute(node.orelse, frame)),
        )

    def _do_Match(self, node: ast.Match, frame: Frame) -> frozenset[str]:  # noqa: N802
        subject = ast.unparse(node.subject)
        exits = _FALL
        for case in node.cases:
            condition = f"{subject} matches {ast.unparse(case.pattern)}"
            exits |= self._either(
                frame, (condition, lambda case=case: self.execute(case.body, frame)), ("", lambda: _FALL)
            )
        return exits

    def _either(self, frame: Frame, *branches: tuple[str, Callable[[], frozenset[str]]]) -> frozenset[str]:
        """Follows two branches of which one is taken: only what both do is certain."""
        before, exits, skips, after = dict(frame.names), frozenset(), [], []
        for condition, branch in branches:
            frame.names.clear()
            frame.names.update(before)
            outcome, skipped = self._under(condition, branch)
            exits |= outcome
            if "fall" in outcome or frame.kind != "function":
                after.append(dict(frame.names))
            skips.append((skipped, condition))
            if outcome == _STOP:
                self._branch = _negated(condition)
        frame.names.clear()
        frame.names.update(_common_names(after) if after else before)
        certain = [skipped for skipped, _ in skips if skipped is not None]
        if len(certain) == len(branches):
            reason = " or ".join(dict.fromkeys(skipped.skip.reason for skipped in certain))
            raise Skipped(replace(certain[0].skip, reason=reason), certain[0].by_unittest)
        for skipped, condition in skips:
            self._note(skipped, condition)
        return exits

    def _under(self, condition: str, branch: Callable[[], frozenset[str]]) -> tuple[frozenset[str], Skipped | None]:
        """Follows what is reached under a condition; returns how it leaves, and the skip that it surely ends in."""
        first_note = len(self.notes)
        self._conditions.append(condition)
        try:
            return branch(), None
        except Skipped as skipped:
            return _STOP, skipped
        finally:
            self._conditions.pop()
            self.notes[first_note:] = [_conditional(note, condition) for note in self.notes[first_note:]]

    def _note(self, skipped: Skipped | None, condition: str) -> None:
        if skipped is not None:
            self.notes.append(_conditional(skipped.skip, condition))

    def _do_For(self, node: ast.For | ast.AsyncFor, frame: Frame) -> frozenset[str]:  # noqa: N802
        elements = self.evaluate(node.iter, frame)
        if isinstance(elements, dict | set | str):
            elements = list(elements)
        if not isinstance(elements, list | tuple):
            self.assign(node.target, UNKNOWN, frame)
            condition = f"{ast.unparse(node.iter)} is not empty"
            return self._loop(
                self._either(frame, (condition, lambda: self.execute(node.body, frame)), ("", lambda: _FALL))
            )
        for element in elements[:_MOST_ELEMENTS]:
            self.assign(node.target, element, frame)
            outcome = self.execute(node.body, frame)
            if "fall" not in outcome:
                return self._loop(outcome)
            if outcome != _FALL:
                return self._loop(outcome)
        return self.execute(node.orelse, frame)

    _do_AsyncFor = _do_For

    def _do_While(self, node: ast.While, frame: Frame) -> frozenset[str]:  # noqa: N802
        answer = truth(self.evaluate(node.test, frame))
        if answer is False:
            return self.execute(node.orelse, frame)
        if answer:
            return self._loop(self.execute(node.body, frame))
        condition = ast.unparse(node.test)
        return self._loop(self._either(frame, (condition, lambda: self.execute(node.body, frame)), ("", lambda: _FALL)))

    @staticmethod
    def _loop(outcome: frozenset[str]) -> frozenset[str]:
        return outcome - _LEAVE | _FALL if outcome & (_LEAVE | _FALL) else outcome

    def _do_With(self, node: ast.With | ast.AsyncWith, frame: Frame) -> frozenset[str]:  # noqa: N802
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
                return _FALL
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

    def _do_Try(self, node: ast.Try, frame: Frame) -> frozenset[str]:  # noqa: N802
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
            return _STOP if handler is None else self.execute(handler.body, frame)
        try:
            outcome = self.execute(node.body, frame)
        except Skipped as skipped:
            handler = next((h for h in node.handlers if _catches(self._caught(h, frame), skipped)), None)
            if handler is None:
                raise
            return self.execute(handler.body, frame)
        if "fall" in outcome:
            outcome = outcome - _FALL | self.execute(node.orelse, frame)
        if all(isinstance(part, ast.Import | ast.ImportFrom | ast.Pass) or _is_constant(part) for part in node.body):
            return outcome  # nothing in it raises
        for handler in node.handlers:
            condition = f"{ast.unparse(handler.type) if handler.type else 'an exception'} is raised"
            ways = (condition, lambda handler=handler: self.execute(handler.body, frame)), ("", lambda: _FALL)
            outcome |= self._either(frame, *ways) - _FALL
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

    def _do_Import(self, node: ast.Import, frame: Frame) -> frozenset[str]:  # noqa: N802
        for alias in node.names:
            module = alias.name if alias.asname else alias.name.partition(".")[0]
            frame.names[alias.asname or module] = Imported(module, None, 0, frame.file)
        return _FALL

    def _do_ImportFrom(self, node: ast.ImportFrom, frame: Frame) -> frozenset[str]:  # noqa: N802
        for alias in node.names:
            imported = Imported(node.module or "", alias.name, node.level, frame.file)
            if alias.name == "*":
                frame.names.setdefault("*", []).append(imported)
            else:
                frame.names[alias.asname or alias.name] = imported
        return _FALL

    def _do_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef, frame: Frame) -> frozenset[str]:  # noqa: N802
        frame.names[node.name] = Function(node, frame)
        return _FALL

    _do_AsyncFunctionDef = _do_FunctionDef

    def _do_ClassDef(self, node: ast.ClassDef, frame: Frame) -> frozenset[str]:  # noqa: N802
        body = Frame("class", frame.file, parent=frame)
        names = {part.id for base in node.bases for part in ast.walk(base) if isinstance(part, ast.Name)}
        held = {name: found.names[name] for name in names if (found := frame.find(name)) is not None}
        body.owner = frame.names[node.name] = Class(node, frame, body, Frame("function", frame.file, held, frame))
        self.execute(node.body, body)
        return _FALL

    # Expressions

    def evaluate_parts(self, node: ast.AST, frame: Frame) -> None:
        """Follows the calls inside an expression that has no value of its own here."""
        if isinstance(node, ast.SetComp | ast.DictComp | ast.Yield | ast.YieldFrom):
            return
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr):
                self.evaluate(part, frame)

    def perhaps(self, node: ast.expr, frame: Frame, condition: str) -> Any:
        """Evaluates an expression that runs under a condition."""
        values: list[Any] = []

        def branch() -> frozenset[str]:
            values.append(self.evaluate(node, frame))
            return _FALL

        _, skipped = self._under(condition, branch)
        self._note(skipped, condition)
        return values[0] if values else UNKNOWN

    def call(self, function: Any, node: ast.Call, args: tuple[Any, ...], keywords: dict[str, Any], frame: Frame) -> Any:
        """Returns what a call gives; raises `Skipped` if it skips."""
        if isinstance(function, External):
            return self._call_external(function.name, node, args, keywords, frame)
        if isinstance(function, Applied) and args and isinstance(args[0], Function):
            return self.decorate(function, args[0])
        if isinstance(function, Function):
            return self.run(function, args, keywords)
        if isinstance(function, Bound):
            return self.run(function.function, (function.receiver, *args), keywords, function.owner)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name == "skipTest" and self._is_self(node.func, frame):
            reason = args[0] if args else keywords.get("reason", "")
            raise Skipped(self._skip_at(node, frame, reason, _reason_node(node)), by_unittest=True)
        return Applied(name, args, keywords, node, frame.file) if name.startswith("assertRaises") else UNKNOWN

    def _is_self(self, node: ast.expr, frame: Frame) -> bool:
        receiver = self.evaluate(node.value, frame) if isinstance(node, ast.Attribute) else None
        return isinstance(receiver, Instance | Super)

    def _call_external(
        self, name: str, node: ast.Call, args: tuple[Any, ...], keywords: dict[str, Any], frame: Frame
    ) -> Any:
        if name in SKIP_CALLS:
            if frame.kind != "function" and keywords.get("allow_module_level") is not True:
                return UNKNOWN  # pytest refuses this with an error
            reason = args[0] if args else keywords.get("reason", keywords.get("msg", ""))
            raise Skipped(self._skip_at(node, frame, reason, _reason_node(node)), by_unittest=False)
        if name == "pytest.importorskip":
            return self._import_or_skip(node, args, keywords, frame)
        if name == "builtins.super":
            found = frame.find("__receiver__")
            return (
                Super(found.names["__receiver__"], frame.owner)
                if found is not None and frame.owner is not None
                else UNKNOWN
            )
        if (
            name.startswith(("pytest.", "pytest_asyncio.", "unittest.", "contextlib."))
            or name == "functools.wraps"
            or name in EXITS
        ):
            return Applied(name, args, keywords, node, frame.file)
        return call_external(name, args, keywords)

    def _import_or_skip(self, node: ast.Call, args: tuple[Any, ...], keywords: dict[str, Any], frame: Frame) -> Any:
        module = args[0] if args else keywords.get("modname")
        text = keywords.get("reason") or f"could not import {module!r}: No module named {str(module)!r}"
        if isinstance(module, str) and not self.is_importable(module):
            raise Skipped(self._skip_at(node, frame, text, None), by_unittest=False)
        if not isinstance(module, str) or len(args) > 1 or "minversion" in keywords:
            self.notes.append(Skip(str(text), frame.file, node.lineno, "the module is missing or too old"))
        return UNKNOWN

    def _skip_at(self, node: ast.stmt | ast.expr, frame: Frame, reason: Any, reason_node: ast.AST | None) -> Skip:
        return Skip(reason_text(reason, reason_node), frame.file, node.lineno)

    # Decorators

    def decorate(self, decorator: Any, function: Function) -> Function:
        """Returns a function with what a decorator adds to it."""
        if isinstance(decorator, Applied) and decorator.name == "functools.wraps":
            wrapped = decorator.args[0] if decorator.args else None
            return (
                replace(function, marks=(*wrapped.marks, *function.marks))
                if isinstance(wrapped, Function)
                else function
            )
        if isinstance(decorator, External | Applied):
            if (
                decorator.name.startswith("pytest.mark.")
                or decorator.name in UNITTEST_DECORATORS
                or "fixture" in decorator.name
            ):
                return function.with_mark(decorator)
        if isinstance(decorator, Function):
            result = self.run(decorator, (function,))
            return result if isinstance(result, Function) else function
        return function


def reason_text(reason: Any, node: ast.AST | None) -> str:
    """Returns a reason as Python would evaluate it; what only a run tells is shown as in an f-string."""
    if isinstance(reason, str):
        return str(reason)
    if known(reason) and not isinstance(reason, Function | Class | Instance):
        return "" if reason is None else str(reason)
    return f"{{{ast.unparse(node)}}}" if node is not None else ""


def _reason_node(node: ast.Call) -> ast.AST | None:
    named = (keyword.value for keyword in node.keywords if keyword.arg in ("reason", "msg"))
    return node.args[0] if node.args else next(named, None)


def _negated(condition: str) -> str:
    return (
        condition.removeprefix("not ")
        if condition.startswith("not ") and " " not in condition[4:]
        else f"not ({condition})"
    )


def _conditional(skip: Skip, condition: str) -> Skip:
    return replace(skip, condition=" and ".join(filter(None, (condition, skip.condition))) or "an earlier branch")


def _merged(returned: list[tuple[Any, str]]) -> Any:
    """The value of a call that may return in several places."""
    if not returned:
        return None
    last, condition = returned[-1]
    if len(returned) == 1:
        return last if not condition else _only_perhaps(last)
    if all(isinstance(value, Function) for value, _ in returned):
        extra = [Perhaps(m, c) for value, c in returned[:-1] for m in value.marks if m not in last.marks]
        own = [Perhaps(m, condition) if condition and m not in returned[0][0].marks else m for m in last.marks]
        return replace(last, marks=(*own, *extra))
    same = all(known(value) and value == last and type(value) is type(last) for value, _ in returned)
    return last if same else UNKNOWN


def _only_perhaps(value: Any) -> Any:
    return value if isinstance(value, Function) else UNKNOWN


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
