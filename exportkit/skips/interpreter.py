"""Takes calls and decorators of the suite and follows them: into its own functions, and by what is known of others.

A call gives its value, notes skips under a condition, and raises `Skipped` for one that is certain.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from exportkit.skips.control import ControlFlow
from exportkit.skips.externals import EXITS, SKIP_CALLS, UNITTEST_DECORATORS, call_external
from exportkit.skips.statements import FALL
from exportkit.skips.values import (
    UNKNOWN,
    Applied,
    Bound,
    Class,
    Condition,
    External,
    Frame,
    Function,
    Instance,
    Perhaps,
    Skip,
    Skipped,
    Super,
    known,
)

_DEEPEST = 8  # calls within calls


class Interpreter(ControlFlow):
    """Follows calls; a subclass finds the modules and the attributes of classes."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0

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
        for parameter, value in zip(positional, args, strict=False):
            frame.names[parameter.arg] = value
        given = {parameter.arg for parameter in positional[: len(args)]} | set(keywords)
        defaults = [*zip(reversed(positional), reversed(arguments.defaults), strict=False)]
        defaults += [(p, d) for p, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=False) if d is not None]
        for parameter, default in defaults:
            if parameter.arg not in given:
                frame.names[parameter.arg] = self.evaluate(default, function.frame)
        for rest in (arguments.vararg, arguments.kwarg):
            if rest is not None:
                frame.names[rest.arg] = UNKNOWN
        if positional and args and isinstance(args[0], Instance | Class):
            frame.names["__receiver__"] = args[0]

    def evaluate_parts(self, node: ast.AST, frame: Frame) -> None:
        """Follows the calls inside an expression that has no value of its own here."""
        if isinstance(node, ast.SetComp | ast.DictComp | ast.Yield | ast.YieldFrom):
            return
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr):
                self.evaluate(part, frame)

    def perhaps(self, node: ast.expr, frame: Frame, condition: Condition) -> Any:
        """Evaluates an expression that runs under a condition."""
        values: list[Any] = []

        def branch() -> frozenset[str]:
            values.append(self.evaluate(node, frame))
            return FALL

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
            raise Skipped(self.skip_at(node, frame, reason, _reason_node(node)), by_unittest=True)
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
            raise Skipped(self.skip_at(node, frame, reason, _reason_node(node)), by_unittest=False)
        if name == "pytest.importorskip":
            return self._import_or_skip(node, args, keywords, frame)
        if name == "builtins.type" and len(args) == 1 and isinstance(args[0], Instance):
            return self.attribute(args[0], "__class__")
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
            raise Skipped(self.skip_at(node, frame, text, None), by_unittest=False)
        if not isinstance(module, str) or len(args) > 1 or "minversion" in keywords:
            self.notes.append(Skip(str(text), frame.file, node.lineno, "the module is missing or too old"))
        return UNKNOWN

    def decorate(self, decorator: Any, function: Function) -> Function:
        """Returns a function with what a decorator adds to it."""
        if isinstance(decorator, Applied) and decorator.name == "functools.wraps":
            wrapped = decorator.args[0] if decorator.args else None
            return (
                replace(function, marks=(*wrapped.marks, *function.marks))
                if isinstance(wrapped, Function)
                else function
            )
        if isinstance(decorator, External | Applied) and (
            decorator.name.startswith("pytest.mark.")
            or decorator.name in UNITTEST_DECORATORS
            or "fixture" in decorator.name
        ):
            return function.with_mark(decorator)
        if isinstance(decorator, Function):
            result = self.run(decorator, (function,))
            return result if isinstance(result, Function) else function
        return function


def _reason_node(node: ast.Call) -> ast.AST | None:
    named = (keyword.value for keyword in node.keywords if keyword.arg in ("reason", "msg"))
    return node.args[0] if node.args else next(named, None)


def _merged(returned: list[tuple[Any, Condition]]) -> Any:
    """The value of a call that may return in several places."""
    if not returned:
        return None
    last, condition = returned[-1]
    if len(returned) == 1:
        return last if not condition else _only_perhaps(last)
    if all(isinstance(value, Function) for value, _ in returned):
        extra = [Perhaps(m, str(c)) for value, c in returned[:-1] for m in value.marks if m not in last.marks]
        own = [Perhaps(m, str(condition)) if condition and m not in returned[0][0].marks else m for m in last.marks]
        return replace(last, marks=(*own, *extra))
    same = all(known(value) and value == last and type(value) is type(last) for value, _ in returned)
    return last if same else UNKNOWN


def _only_perhaps(value: Any) -> Any:
    return value if isinstance(value, Function) else UNKNOWN
