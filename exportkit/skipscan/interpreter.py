"""Follows statements and calls of the suite: which paths are taken, what they bind, return and skip.

A certain skip unwinds the interpreter as it would unwind Python. If a condition is only known at run time, both paths
are followed: what both do is certain, and a skip on one of them is noted with its condition.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from exportkit.skipscan.expressions import (
    EXITS,
    SKIP_CALLS,
    SKIP_ERRORS,
    UNITTEST_DECORATORS,
    Expressions,
    call_external,
    installed,
    reason_text,
)
from exportkit.skipscan.values import (
    UNKNOWN,
    Bound,
    Class,
    External,
    ExternalCall,
    Function,
    Imported,
    Instance,
    Scope,
    Skip,
    Skipped,
    common_names,
    is_same,
    is_true,
)

# How control may leave statements: to the next one, out of the function, or out of the loop or its iteration.
_NEXT, _LEAVE, _BREAK = frozenset({"next"}), frozenset({"leave"}), frozenset({"break"})
_Exits = frozenset[str]
_Branch = tuple[str, Callable[[], _Exits]]  # a condition, and what is done under it
_OTHERWISE: _Branch = ("an earlier branch", lambda: _NEXT)  # the branch that does nothing

_DEEPEST = 8  # calls within calls
_MOST_CALLS = 200  # followed for one test: helpers that call helpers multiply
_MOST_ELEMENTS = 20  # iterations of a loop

_EVERYTHING = External("builtins.BaseException")
_CATCHES_IMPORT = {"builtins.ImportError", "builtins.ModuleNotFoundError", "builtins.Exception", _EVERYTHING.name}
_SWALLOWS = ("pytest.raises", "contextlib.suppress", "assertRaises", "assertRaisesRegex")


class Interpreter(Expressions):
    """Follows statements and calls; a subclass finds modules and the attributes of classes."""

    def __init__(self) -> None:
        self.conditional: list[Skip] = []  # the skips under a condition, in the order in which they are met
        self._rest = ""  # the condition for reaching what follows a statement that may leave
        self._depth = self._calls = 0

    # Statements

    def execute(self, statements: Sequence[ast.stmt], scope: Scope) -> _Exits:
        """Follows statements; returns how control may leave them: "next", "leave" or "break"."""
        exits: _Exits = frozenset()
        for position, statement in enumerate(statements):
            handler = getattr(self, f"_do_{type(statement).__name__}", None)
            outcome = self._do_other(statement, scope) if handler is None else handler(statement, scope)
            exits |= outcome - _NEXT
            if not outcome & _NEXT:
                return exits
            if exits:
                condition, rest = self._rest, statements[position + 1 :]
                later, skipped = self._under(condition, partial(self.execute, rest, scope))
                self._note(skipped, condition)
                return exits | later
        return exits | _NEXT

    def _do_other(self, node: ast.stmt, scope: Scope) -> _Exits:
        """Passes over a statement that is not followed: the names it assigns are unknown."""
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                scope.names[part.id] = UNKNOWN
        return _NEXT

    def _do_Expr(self, node: ast.Expr, scope: Scope) -> _Exits:
        if isinstance(node.value, ast.Yield):
            return _LEAVE  # the rest of a fixture is its teardown
        value = self.evaluate(node.value, scope)
        return _LEAVE if isinstance(value, ExternalCall) and value.name in EXITS else _NEXT

    def _do_Assign(self, node: ast.Assign | ast.AnnAssign, scope: Scope) -> _Exits:
        if node.value is not None:
            value = self.evaluate(node.value, scope)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self.assign(target, value, scope)
        return _NEXT

    _do_AnnAssign = _do_Assign

    def _do_Delete(self, node: ast.Delete, scope: Scope) -> _Exits:
        for target in node.targets:
            if isinstance(target, ast.Name):
                scope.names.pop(target.id, None)
        return _NEXT

    def _do_Return(self, node: ast.Return, scope: Scope) -> _Exits:
        scope.returned.append(self.evaluate(node.value, scope))
        return _LEAVE

    def _do_Raise(self, node: ast.Raise, scope: Scope) -> _Exits:
        value = self.evaluate(node.exc, scope)
        if isinstance(value, External | ExternalCall) and value.name in SKIP_ERRORS:
            skip = _skip_of(value) if isinstance(value, ExternalCall) else Skip("", scope.file, node.lineno)
            raise Skipped(skip, by_unittest="unittest" in value.name)
        return _LEAVE

    def _do_Break(self, _node: ast.Break | ast.Continue, _scope: Scope) -> _Exits:
        return _BREAK

    _do_Continue = _do_Break

    def _do_Import(self, node: ast.Import, scope: Scope) -> _Exits:
        for alias in node.names:
            module = alias.name if alias.asname else alias.name.partition(".")[0]
            scope.names[alias.asname or module] = Imported(module, None, 0, scope.file)
        return _NEXT

    def _do_ImportFrom(self, node: ast.ImportFrom, scope: Scope) -> _Exits:
        for alias in node.names:
            imported = Imported(node.module or "", alias.name, node.level, scope.file)
            if alias.name == "*":
                scope.names.setdefault("*", []).append(imported)
            else:
                scope.names[alias.asname or alias.name] = imported
        return _NEXT

    def _do_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> _Exits:
        scope.names[node.name] = Function(node, scope)
        return _NEXT

    _do_AsyncFunctionDef = _do_FunctionDef

    def _do_ClassDef(self, node: ast.ClassDef, scope: Scope) -> _Exits:
        body = Scope("class", scope.file, parent=scope)
        bases = (self.evaluate(base, scope) for base in node.bases)
        body.owner = Class(node, scope, body, tuple(base for base in bases if isinstance(base, Class | External)))
        scope.names[node.name] = body.owner
        self.execute(node.body, body)
        return _NEXT

    # Branches, loops and exceptions

    def _do_If(self, node: ast.If, scope: Scope) -> _Exits:
        answer = is_true(self.evaluate(node.test, scope))
        if answer is not None:
            return self.execute(node.body if answer else node.orelse, scope)
        condition = ast.unparse(node.test)
        otherwise = (_negated(condition), partial(self.execute, node.orelse, scope))
        return self._either(scope, (condition, partial(self.execute, node.body, scope)), otherwise)

    def _do_For(self, node: ast.For | ast.AsyncFor, scope: Scope) -> _Exits:
        elements = self.evaluate(node.iter, scope)
        elements = list(elements) if isinstance(elements, dict) else elements
        if not isinstance(elements, list | tuple):
            self.assign(node.target, UNKNOWN, scope)
            return self._perhaps(node.body, f"{ast.unparse(node.iter)} is not empty", scope) - _BREAK
        for element in elements[:_MOST_ELEMENTS]:
            self.assign(node.target, element, scope)
            outcome = self.execute(node.body, scope)
            if outcome != _NEXT:
                return outcome - _BREAK | _NEXT if outcome & (_BREAK | _NEXT) else outcome
        return self.execute(node.orelse, scope)

    _do_AsyncFor = _do_For

    def _do_While(self, node: ast.While, scope: Scope) -> _Exits:
        answer = is_true(self.evaluate(node.test, scope))
        if answer is None:
            return self._perhaps(node.body, ast.unparse(node.test), scope) - _BREAK
        outcome = self.execute(node.body if answer else node.orelse, scope)
        return outcome - _BREAK | _NEXT if answer and outcome & (_BREAK | _NEXT) else outcome

    def _do_Match(self, node: ast.Match, scope: Scope) -> _Exits:
        exits = _NEXT
        for case in node.cases:
            condition = f"{ast.unparse(node.subject)} matches {ast.unparse(case.pattern)}"
            exits |= self._perhaps(case.body, condition, scope)
        return exits

    def _do_With(self, node: ast.With | ast.AsyncWith, scope: Scope) -> _Exits:
        swallowed: set[str] = set()
        for item in node.items:
            value = self.evaluate(item.context_expr, scope)
            if isinstance(value, ExternalCall) and value.name in _SWALLOWS:
                swallowed |= _exception_names(value.args)
            elif isinstance(value, ExternalCall) and value.name == "subTest":
                swallowed.add(_EVERYTHING.name)  # skips the subtest, not the test
            if item.optional_vars is not None:
                self.assign(item.optional_vars, UNKNOWN, scope)
        try:
            return self.execute(node.body, scope)
        except Skipped as skipped:
            if skipped.is_caught_by(swallowed):
                return _NEXT
            raise

    _do_AsyncWith = _do_With

    def _do_Try(self, node: ast.Try, scope: Scope) -> _Exits:
        try:
            outcome = self._try_without_finally(node, scope)
        except Skipped:
            last = self.execute(node.finalbody, scope)
            if last & _NEXT:
                raise
            return last
        if not outcome & _NEXT and any(isinstance(part, ast.Yield) for part in ast.walk(node)):
            return outcome  # `finally` is part of the teardown of a fixture
        last = self.execute(node.finalbody, scope)
        return outcome | last - _NEXT if last & _NEXT else last

    def _try_without_finally(self, node: ast.Try, scope: Scope) -> _Exits:
        caught = (self.evaluate(handler.type, scope) if handler.type else _EVERYTHING for handler in node.handlers)
        handlers = [(handler, _exception_names(value)) for handler, value in zip(node.handlers, caught, strict=True)]
        missing = next((i for i, statement in enumerate(node.body) if self._fails_to_import(statement)), None)
        try:
            outcome = self.execute(node.body[:missing], scope)
        except Skipped as skipped:
            handler = next((handler for handler, names in handlers if skipped.is_caught_by(names)), None)
            if handler is None:
                raise
            return self.execute(handler.body, scope)
        if missing is not None:
            handler = next((handler for handler, names in handlers if names & _CATCHES_IMPORT), None)
            return _LEAVE if handler is None else self.execute(handler.body, scope)
        if outcome & _NEXT:
            outcome = outcome - _NEXT | self.execute(node.orelse, scope)
        imports = (ast.Import, ast.ImportFrom, ast.Pass)  # they succeeded
        constants = [s for s in node.body if isinstance(s, ast.Assign) and isinstance(s.value, ast.Constant)]
        for handler, _ in handlers if any(not isinstance(s, imports) and s not in constants for s in node.body) else ():
            condition = f"{ast.unparse(handler.type) if handler.type else 'an exception'} is raised"
            outcome |= self._perhaps(handler.body, condition, scope) - _NEXT
        return outcome

    def _fails_to_import(self, node: ast.stmt) -> bool:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        return not all(map(self.is_importable, names))

    def is_importable(self, module: str) -> bool:
        """Returns whether a module can be imported, as far as this is known without importing it."""
        return installed(module)

    def _perhaps(self, body: Sequence[ast.stmt], condition: str, scope: Scope) -> _Exits:
        """Follows statements that may not be reached."""
        return self._either(scope, (condition, partial(self.execute, body, scope)), _OTHERWISE)

    def _either(self, scope: Scope, *branches: _Branch) -> _Exits:
        """Follows two branches of which one is taken: only what both do is certain."""
        before, after = dict(scope.names), list[dict[str, Any]]()
        exits: _Exits = frozenset()
        skips: list[tuple[Skipped | None, str]] = []
        for condition, branch in branches:
            scope.names.clear()
            scope.names.update(before)
            outcome, skipped = self._under(condition, branch)
            exits |= outcome
            if outcome & _NEXT or scope.kind != "function":
                after.append(dict(scope.names))
            skips.append((skipped, condition))
            if outcome == _LEAVE:
                self._rest = _negated(condition)
        scope.names.clear()
        scope.names.update(common_names(after) if after else before)
        certain = [skipped for skipped, _ in skips if skipped is not None]
        if len(certain) == len(branches):
            reason = " or ".join(dict.fromkeys(skipped.skip.reason for skipped in certain))
            raise Skipped(replace(certain[0].skip, reason=reason), certain[0].by_unittest)
        for skipped, condition in skips:
            self._note(skipped, condition)
        return exits

    def _under(self, condition: str, branch: Callable[[], _Exits]) -> tuple[_Exits, Skipped | None]:
        """Follows what is reached under a condition; returns how control leaves it, and the skip that it ends in."""
        first = len(self.conditional)
        try:
            return branch(), None
        except Skipped as skipped:
            return _LEAVE, skipped
        finally:
            self.conditional[first:] = [skip.under(condition) for skip in self.conditional[first:]]

    def _note(self, skipped: Skipped | None, condition: str) -> None:
        if skipped is not None:
            self.conditional.append(skipped.skip.under(condition))

    # Calls

    def run(self, function: Function, args: Sequence[Any] = (), keywords: dict[str, Any] | None = None) -> Any:
        """Follows a call of a function of the suite and returns its value."""
        self._calls = self._calls + 1 if self._depth else 0
        if self._depth >= _DEEPEST or self._calls > _MOST_CALLS:
            return UNKNOWN
        parent = function.scope
        owner = parent.owner
        while parent.kind == "class" and parent.parent is not None:
            parent = parent.parent
        scope = Scope("function", function.scope.file, parent=parent, owner=owner)
        self._bind_arguments(function, scope, args, keywords or {})
        self._depth += 1
        try:
            exits = self.execute(function.node.body, scope)
        finally:
            self._depth -= 1
        returned = [*scope.returned, *([None] if exits & _NEXT else [])]
        last: Any = returned[-1] if returned else UNKNOWN
        if returned and all(isinstance(value, Function) for value in returned):  # what all of them are marked with
            marks = [mark for mark in last.marks if all(mark in value.marks for value in returned)]
            return replace(last, marks=tuple(marks))
        return last if all(is_same(value, last) for value in returned) else UNKNOWN

    def _bind_arguments(self, function: Function, scope: Scope, args: Sequence[Any], keywords: dict[str, Any]) -> None:
        arguments = function.node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        values: dict[str, Any] = {
            parameter.arg: UNKNOWN
            for parameter in (*positional, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
            if parameter is not None
        }
        defaults = [*zip(reversed(positional), reversed(arguments.defaults), strict=False)]
        defaults += [(p, d) for p, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None]
        values |= {parameter.arg: self.evaluate(default, function.scope) for parameter, default in defaults}
        values |= {name: value for name, value in keywords.items() if name in values}
        values |= {parameter.arg: value for parameter, value in zip(positional, args, strict=False)}
        scope.names.update(values)
        if args and isinstance(args[0], Instance | Class):
            scope.names["__receiver__"] = args[0]

    def call(self, function: Any, node: ast.Call, args: tuple[Any, ...], keywords: dict[str, Any], scope: Scope) -> Any:
        """Returns the value of a call, or raises `Skipped` if it skips."""
        if isinstance(function, External):
            return self._call_external(ExternalCall(function.name, args, keywords, node, scope.file), scope)
        if isinstance(function, ExternalCall) and args and isinstance(args[0], Function):
            return self.decorate(function, args[0])
        if isinstance(function, Function):
            return self.run(function, args, keywords)
        if isinstance(function, Bound):
            return self.run(function.function, (function.receiver, *args), keywords)
        if not isinstance(node.func, ast.Attribute):
            return UNKNOWN
        call = ExternalCall(node.func.attr, args, keywords, node, scope.file)
        if call.name == "skipTest" and isinstance(self.evaluate(node.func.value, scope), Instance):
            raise Skipped(_skip_of(call), by_unittest=True)
        return call if call.name == "subTest" or call.name in _SWALLOWS else UNKNOWN

    def _call_external(self, call: ExternalCall, scope: Scope) -> Any:
        name = call.name
        if name in SKIP_CALLS:
            if scope.kind != "function" and call.keywords.get("allow_module_level") is not True:
                return UNKNOWN  # an error in pytest
            raise Skipped(_skip_of(call), by_unittest=False)
        if name == "pytest.importorskip":
            module = call.argument(0, "modname")
            if isinstance(module, str) and not self.is_importable(module):
                reason = call.keywords.get("reason") or f"could not import {module!r}: No module named {module!r}"
                raise Skipped(Skip(str(reason), call.file, call.node.lineno), by_unittest=False)
            return UNKNOWN
        if name == "builtins.type" and len(call.args) == 1 and isinstance(call.args[0], Instance):
            return call.args[0].cls
        if name == "builtins.super":
            found = scope.find("__receiver__")
            receiver = UNKNOWN if found is None else found.names["__receiver__"]
            cls = receiver.cls if isinstance(receiver, Instance) else receiver
            return Instance(cls, after=scope.owner) if isinstance(cls, Class) else UNKNOWN
        if name.startswith(("pytest.", "unittest.", "contextlib.")) or name == "functools.wraps" or name in EXITS:
            return call
        return call_external(name, call.args, call.keywords)

    def decorate(self, decorator: Any, function: Function) -> Function:
        """Returns a function with what a decorator adds to it, or the wrapper that it puts in its place."""
        if isinstance(decorator, Function):
            result = self.run(decorator, (function,))
            return result if isinstance(result, Function) else function
        if not isinstance(decorator, External | ExternalCall):
            return function
        if isinstance(decorator, ExternalCall) and decorator.name == "functools.wraps":
            wrapped = decorator.argument(0, "wrapped")
            marks = wrapped.marks if isinstance(wrapped, Function) else ()
            return replace(function, marks=(*marks, *function.marks))
        is_mark = decorator.name.startswith("pytest.mark.") or decorator.name in UNITTEST_DECORATORS
        return function.with_marks(decorator) if is_mark or "fixture" in decorator.name else function


def _skip_of(call: ExternalCall) -> Skip:
    reason = call.argument(0, "reason", "msg", default="")
    return Skip(reason_text(reason, call.source(0, "reason", "msg")), call.file, call.node.lineno)


def _negated(condition: str) -> str:
    is_negation = condition.startswith("not ") and " " not in condition[4:]
    return condition[4:] if is_negation else f"not ({condition})"


def _exception_names(value: Any) -> set[str]:
    values = value if isinstance(value, list | tuple) else (value,)
    return {part.name for part in values if isinstance(part, External)}
