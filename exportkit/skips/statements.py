"""Takes single statements of the suite and follows what each does: names it binds, values it returns, skips it raises.

A skip unwinds the interpreter as it would unwind Python; what only a run would tell is noted with its condition.
"""

from __future__ import annotations

import ast
from typing import Any

from exportkit.skips.expressions import Expressions
from exportkit.skips.externals import EXITS, SKIP_ERRORS
from exportkit.skips.values import (
    Applied,
    Class,
    Condition,
    External,
    Frame,
    Function,
    Imported,
    Instance,
    Skip,
    Skipped,
    all_of,
    known,
    truth,
)

# How control may leave statements: to the next one, out of the function, out of the loop or its round.
FALL, STOP, LEAVE = frozenset({"fall"}), frozenset({"stop"}), frozenset({"leave"})


class Statements(Expressions):
    """Follows simple statements; a subclass says how several follow each other."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Skip] = []  # skips under a condition, in the order in which they are met
        self._conditions: list[Condition] = []

    def execute(self, statements: list[ast.stmt], frame: Frame) -> frozenset[str]:
        """Follows statements; returns how control may leave them."""
        raise NotImplementedError

    def skip_at(self, node: ast.stmt | ast.expr, frame: Frame, reason: Any, reason_node: ast.AST | None) -> Skip:
        """Returns the skip at a place of the suite."""
        return Skip(reason_text(reason, reason_node), frame.file, node.lineno)

    def _do_Expr(self, node: ast.Expr, frame: Frame) -> frozenset[str]:
        if isinstance(node.value, ast.Yield | ast.YieldFrom):
            return STOP  # what follows in a fixture is its teardown
        value = self.evaluate(node.value, frame)
        return STOP if isinstance(value, Applied) and value.name in EXITS else FALL

    def _do_Assign(self, node: ast.Assign, frame: Frame) -> frozenset[str]:
        if isinstance(node.value, ast.Yield):
            return STOP
        value = self.evaluate(node.value, frame)
        for target in node.targets:
            self.assign(target, value, frame)
        return FALL

    def _do_AnnAssign(self, node: ast.AnnAssign, frame: Frame) -> frozenset[str]:
        if node.value is not None:
            self.assign(node.target, self.evaluate(node.value, frame), frame)
        return FALL

    def _do_AugAssign(self, node: ast.AugAssign, frame: Frame) -> frozenset[str]:
        if isinstance(node.target, ast.Name):
            read = ast.Name(node.target.id, ast.Load())
            frame.names[node.target.id] = self.evaluate(ast.BinOp(read, node.op, node.value), frame)
        return FALL

    def _do_Delete(self, node: ast.Delete, frame: Frame) -> frozenset[str]:
        for target in node.targets:
            if isinstance(target, ast.Name):
                frame.names.pop(target.id, None)
        return FALL

    def _do_Return(self, node: ast.Return, frame: Frame) -> frozenset[str]:
        frame.returned.append((self.evaluate(node.value, frame), all_of(self._conditions)))
        return STOP

    def _do_Raise(self, node: ast.Raise, frame: Frame) -> frozenset[str]:
        value = self.evaluate(node.exc, frame)
        if isinstance(value, External | Applied) and value.name in SKIP_ERRORS:
            reason = value.argument(0, "msg", "reason", default="") if isinstance(value, Applied) else ""
            raise Skipped(self.skip_at(node, frame, reason, node.exc), "unittest" in value.name)
        return STOP

    def _do_Break(self, _node: ast.Break, _frame: Frame) -> frozenset[str]:
        return LEAVE

    _do_Continue = _do_Break

    def _do_Assert(self, node: ast.Assert, frame: Frame) -> frozenset[str]:
        return STOP if truth(self.evaluate(node.test, frame)) is False else FALL

    def _do_Import(self, node: ast.Import, frame: Frame) -> frozenset[str]:
        for alias in node.names:
            module = alias.name if alias.asname else alias.name.partition(".")[0]
            frame.names[alias.asname or module] = Imported(module, None, 0, frame.file)
        return FALL

    def _do_ImportFrom(self, node: ast.ImportFrom, frame: Frame) -> frozenset[str]:
        for alias in node.names:
            imported = Imported(node.module or "", alias.name, node.level, frame.file)
            if alias.name == "*":
                frame.names.setdefault("*", []).append(imported)
            else:
                frame.names[alias.asname or alias.name] = imported
        return FALL

    def _do_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef, frame: Frame) -> frozenset[str]:
        frame.names[node.name] = Function(node, frame)
        return FALL

    _do_AsyncFunctionDef = _do_FunctionDef

    def _do_ClassDef(self, node: ast.ClassDef, frame: Frame) -> frozenset[str]:
        body = Frame("class", frame.file, parent=frame)
        names = {part.id for base in node.bases for part in ast.walk(base) if isinstance(part, ast.Name)}
        held = {name: found.names[name] for name in names if (found := frame.find(name)) is not None}
        body.owner = frame.names[node.name] = Class(node, frame, body, Frame("function", frame.file, held, frame))
        self.execute(node.body, body)
        return FALL


def reason_text(reason: Any, node: ast.AST | None) -> str:
    """Returns a reason as Python would evaluate it; what only a run tells is shown as in an f-string."""
    if isinstance(reason, str):
        return str(reason)
    if known(reason) and not isinstance(reason, Function | Class | Instance):
        return "" if reason is None else str(reason)
    return f"{{{ast.unparse(node)}}}" if node is not None else ""
