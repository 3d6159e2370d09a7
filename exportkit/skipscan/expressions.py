"""Evaluates expressions of the suite without running it: to a constant, a part of the suite, or UNKNOWN."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterable
from typing import Any

from exportkit.skipscan.outside import call_method, external_value, format_value, operate
from exportkit.skipscan.values import (
    UNKNOWN,
    External,
    Imported,
    PartialText,
    Scope,
    Skipped,
    is_true,
    known,
)

_MOST_ELEMENTS = 1000  # of a comprehension; a longer one is unknown


class Expressions:
    """Evaluates expressions; subclasses define names, attributes and calls of the suite's own parts."""

    def attribute(self, value: Any, name: str) -> Any:
        """Returns an attribute of a part of the suite, or UNKNOWN."""
        raise NotImplementedError

    def call(self, function: Any, node: ast.Call, args: tuple[Any, ...], keywords: dict[str, Any], scope: Scope) -> Any:
        """Returns the value of a call."""
        raise NotImplementedError

    def look_up(self, imported: Imported) -> Any:
        """Returns what an import statement binds."""
        raise NotImplementedError

    def star_imported(self, name: str, scope: Scope) -> Any:
        """Returns what a star import binds to a name, or UNKNOWN."""
        raise NotImplementedError

    def evaluate(self, node: ast.expr | None, scope: Scope) -> Any:
        """Returns the value of an expression, or UNKNOWN."""
        if node is None:
            return None
        if isinstance(node, ast.Constant):
            return node.value
        handler = getattr(self, f"_{type(node).__name__}", None)
        if handler is not None:
            return handler(node, scope)
        for part in ast.iter_child_nodes(node):  # a call in it may skip
            if isinstance(part, ast.expr):
                self.evaluate(part, scope)
        return UNKNOWN

    def name(self, name: str, scope: Scope) -> Any:
        """Returns the value of a name."""
        found = scope.find(name)
        if found is None:
            value = self.star_imported(name, scope)
            is_builtin = value is UNKNOWN and hasattr(builtins, name) and not name.startswith("__")
            return External(f"builtins.{name}") if is_builtin else value
        value = found.names[name]
        if isinstance(value, Imported):
            value = found.names[name] = self.look_up(value)
        return value

    def assign(self, target: ast.expr, value: Any, scope: Scope) -> None:
        """Binds a name, or the names of a tuple."""
        if isinstance(target, ast.Name):
            scope.names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            matches = isinstance(value, list | tuple) and len(value) == len(target.elts)
            for position, part in enumerate(target.elts):
                self.assign(part, value[position] if matches else UNKNOWN, scope)

    def _Name(self, node: ast.Name, scope: Scope) -> Any:
        return self.name(node.id, scope)

    def _Attribute(self, node: ast.Attribute, scope: Scope) -> Any:
        value = self.evaluate(node.value, scope)
        if isinstance(value, External):
            return external_value(f"{value.name}.{node.attr}")
        if value is sys.version_info:
            return getattr(value, node.attr, UNKNOWN)
        return self.attribute(value, node.attr)

    def _Call(self, node: ast.Call, scope: Scope) -> Any:
        args = self._elements(node.args, scope)
        keywords: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, scope)
            if keyword.arg is not None:
                keywords[keyword.arg] = value
        if isinstance(node.func, ast.Attribute):
            receiver = self.evaluate(node.func.value, scope)
            if isinstance(receiver, str | list | tuple | dict):
                return UNKNOWN if args is None else call_method(receiver, node.func.attr, args, keywords)
        return self.call(self.evaluate(node.func, scope), node, tuple(args or ()), keywords, scope)

    def _JoinedStr(self, node: ast.JoinedStr, scope: Scope) -> str:
        texts = [self.evaluate(part, scope) for part in node.values]
        is_known = not any(isinstance(text, PartialText) for text in texts)
        return "".join(texts) if is_known else PartialText("".join(texts))

    def _FormattedValue(self, node: ast.FormattedValue, scope: Scope) -> str:
        spec = str(self.evaluate(node.format_spec, scope)) if node.format_spec else ""
        text = format_value(self.evaluate(node.value, scope), node.conversion, spec)
        return PartialText(f"{{{ast.unparse(node.value)}}}") if text is None else text

    def _Tuple(self, node: ast.Tuple, scope: Scope) -> Any:
        elements = self._elements(node.elts, scope)
        return UNKNOWN if elements is None else tuple(elements)

    def _List(self, node: ast.List, scope: Scope) -> Any:
        elements = self._elements(node.elts, scope)
        return UNKNOWN if elements is None else elements

    def _elements(self, nodes: Iterable[ast.expr], scope: Scope) -> list[Any] | None:
        """Returns the values of expressions, starred ones unpacked; None if one of these is unknown."""
        values: list[Any] = []
        for node in nodes:
            value = self.evaluate(node.value if isinstance(node, ast.Starred) else node, scope)
            if isinstance(node, ast.Starred) and not isinstance(value, list | tuple):
                return None
            values += value if isinstance(node, ast.Starred) else [value]
        return values

    def _ListComp(self, node: ast.ListComp | ast.GeneratorExp, scope: Scope) -> Any:
        inner = Scope("function", scope.file, parent=scope, owner=scope.owner)
        elements: list[Any] = []
        return elements if self._comprehend(node.elt, node.generators, inner, elements) else UNKNOWN

    _GeneratorExp = _ListComp

    def _comprehend(self, element: ast.expr, loops: list[ast.comprehension], scope: Scope, into: list[Any]) -> bool:
        """Adds the elements of a comprehension to a list; returns whether all of them are found."""
        if not loops:
            into.append(self.evaluate(element, scope))
            return len(into) <= _MOST_ELEMENTS
        values = self.evaluate(loops[0].iter, scope)
        if not isinstance(values, list | tuple):
            return False
        for value in values:
            self.assign(loops[0].target, value, scope)
            answers = [is_true(self.evaluate(condition, scope)) for condition in loops[0].ifs]
            if None in answers or (all(answers) and not self._comprehend(element, loops[1:], scope, into)):
                return False
        return True

    def _Dict(self, node: ast.Dict, scope: Scope) -> Any:
        keys = [UNKNOWN if key is None else self.evaluate(key, scope) for key in node.keys]
        values = [self.evaluate(value, scope) for value in node.values]
        try:
            return dict(zip(keys, values, strict=True)) if known(keys) else UNKNOWN
        except TypeError:  # a key that cannot be hashed
            return UNKNOWN

    def _Subscript(self, node: ast.Subscript, scope: Scope) -> Any:
        value, index = self.evaluate(node.value, scope), self.evaluate(node.slice, scope)
        try:
            return value[index] if isinstance(value, str | list | tuple | dict) and known(index) else UNKNOWN
        except (LookupError, TypeError):
            return UNKNOWN

    def _Slice(self, node: ast.Slice, scope: Scope) -> Any:
        parts = [self.evaluate(part, scope) for part in (node.lower, node.upper, node.step)]
        return slice(*parts) if known(parts) else UNKNOWN

    def _UnaryOp(self, node: ast.UnaryOp, scope: Scope) -> Any:
        value = self.evaluate(node.operand, scope)
        if isinstance(node.op, ast.Not):
            answer = is_true(value)
            return UNKNOWN if answer is None else not answer
        return -value if isinstance(node.op, ast.USub) and isinstance(value, int | float) else UNKNOWN

    def _BinOp(self, node: ast.BinOp, scope: Scope) -> Any:
        left, right = self.evaluate(node.left, scope), self.evaluate(node.right, scope)
        value = operate(node.op, left, right)
        if value is UNKNOWN and isinstance(node.op, ast.Add) and (isinstance(left, str) or isinstance(right, str)):
            sides = ((left, node.left), (right, node.right))  # still good as a reason
            return PartialText("".join(v if isinstance(v, str) else f"{{{ast.unparse(part)}}}" for v, part in sides))
        return value

    def _BoolOp(self, node: ast.BoolOp, scope: Scope) -> Any:
        decisive, is_decided, value = isinstance(node.op, ast.Or), True, None
        for part in node.values:
            try:
                value = self.evaluate(part, scope)
            except Skipped:
                if is_decided:
                    raise
                value = UNKNOWN
            answer = is_true(value)
            if answer is decisive:  # decides the truth, but the value may be that of an undecided part
                return value if is_decided or isinstance(value, bool) else UNKNOWN
            is_decided = is_decided and answer is not None
        return value if is_decided else UNKNOWN

    def _IfExp(self, node: ast.IfExp, scope: Scope) -> Any:
        answer = is_true(self.evaluate(node.test, scope))
        return UNKNOWN if answer is None else self.evaluate(node.body if answer else node.orelse, scope)

    def _Compare(self, node: ast.Compare, scope: Scope) -> Any:
        left, answer = self.evaluate(node.left, scope), True
        for operation, comparator in zip(node.ops, node.comparators, strict=True):
            right = self.evaluate(comparator, scope)
            answer = operate(operation, left, right)
            if answer is not True:
                break
            left = right
        return answer

    def _Lambda(self, _node: ast.Lambda, _scope: Scope) -> Any:
        return UNKNOWN  # its body is not reached here
