"""Takes an expression of the suite and the names around it, and evaluates it without running any code of the suite.

Out comes a constant, an entity such as a function or a decorator, or UNKNOWN; arithmetic runs on small constants only.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from exportkit.skips.externals import WIDE, call_method, external_value
from exportkit.skips.operations import calculated, compared, partial_text
from exportkit.skips.values import (
    UNKNOWN,
    Class,
    Condition,
    External,
    Frame,
    Function,
    Imported,
    PartialText,
    all_of,
    known,
    truth,
)

_CONVERSIONS: Mapping[int, Callable[[Any], Any]] = {
    -1: lambda value: value,
    ord("s"): str,
    ord("r"): repr,
    ord("a"): ascii,
}
_UNPACKED = object()  # elements that a star stands for, if only a run would tell
_MOST_ELEMENTS = 1000


class Expressions:
    """Evaluates expressions; a subclass says what calls and attributes of the suite's own entities give."""

    def __init__(self) -> None:
        self._methods: dict[type, Any] = {}  # by class of syntax tree

    def method_for(self, node: ast.AST, prefix: str) -> Any:
        """Returns the method that is named after the class of a syntax tree, or None."""
        kind = type(node)
        if kind not in self._methods:
            self._methods[kind] = getattr(type(self), prefix + kind.__name__, None)
        return self._methods[kind]

    def evaluate(self, node: ast.expr | None, frame: Frame) -> Any:
        """Returns the value of an expression, or UNKNOWN."""
        if node is None:
            return None
        if isinstance(node, ast.Constant):
            return node.value
        method = self.method_for(node, "_")
        if method is None:
            self.evaluate_parts(node, frame)
            return UNKNOWN
        return method(self, node, frame)

    def evaluate_parts(self, node: ast.AST, frame: Frame) -> None:
        """Evaluates the parts of an expression for what they do; overridden by the interpreter."""

    def attribute(self, value: Any, name: str) -> Any:
        """Returns an attribute of an entity."""
        raise NotImplementedError

    def call(self, function: Any, node: ast.Call, args: tuple[Any, ...], keywords: dict[str, Any], frame: Frame) -> Any:
        """Returns what a call gives."""
        raise NotImplementedError

    def perhaps(self, node: ast.expr, frame: Frame, condition: Condition) -> Any:
        """Evaluates an expression that runs under a condition."""
        raise NotImplementedError

    def look_up(self, imported: Imported) -> Any:
        """Returns what an import statement bound."""
        raise NotImplementedError

    def missing_name(self, name: str, frame: Frame) -> Any:
        """Returns what a name means that no frame has: a star import's, or UNKNOWN."""
        raise NotImplementedError

    def _Name(self, node: ast.Name, frame: Frame) -> Any:
        found = frame.find(node.id)
        if found is None:
            value = self.missing_name(node.id, frame)
            if value is UNKNOWN and hasattr(builtins, node.id) and not node.id.startswith("__"):
                return External(f"builtins.{node.id}")
            return value
        value = found.names[node.id]
        if isinstance(value, Imported):
            value = found.names[node.id] = self.look_up(value)
        return value

    def _Attribute(self, node: ast.Attribute, frame: Frame) -> Any:
        value = self.evaluate(node.value, frame)
        if isinstance(value, External):
            return external_value(f"{value.name}.{node.attr}")
        if value is sys.version_info:
            return getattr(value, node.attr, UNKNOWN)
        return self.attribute(value, node.attr)

    def _Call(self, node: ast.Call, frame: Frame) -> Any:
        args, keywords = self._arguments(node, frame)
        if isinstance(node.func, ast.Attribute):
            value = self.evaluate(node.func.value, frame)
            if isinstance(value, str | list | tuple | dict):
                return call_method(value, node.func.attr, args, keywords)
        return self.call(self.evaluate(node.func, frame), node, args, keywords, frame)

    def _arguments(self, node: ast.Call, frame: Frame) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args = [UNKNOWN if value is _UNPACKED else value for value in self._unpacked(node.args, frame)]
        keywords: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, frame)
            if keyword.arg is not None:
                keywords[keyword.arg] = value
            elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
                keywords.update(value)
        return tuple(args), keywords

    def _JoinedStr(self, node: ast.JoinedStr, frame: Frame) -> str:
        parts = [self._formatted(part, frame) for part in node.values]
        whole = not any(isinstance(part, PartialText) for part in parts)
        return "".join(parts) if whole else PartialText("".join(parts))

    def _formatted(self, node: ast.expr, frame: Frame) -> str:
        if not isinstance(node, ast.FormattedValue):
            return str(self.evaluate(node, frame))
        value = self.evaluate(node.value, frame)
        if isinstance(value, Class | Function):
            value = UNKNOWN
        if known(value):
            convert = _CONVERSIONS[node.conversion]
            spec = str(self.evaluate(node.format_spec, frame)) if node.format_spec else ""
            with contextlib.suppress(TypeError, ValueError):
                return PartialText("") if WIDE.search(spec) else format(convert(value), spec)
        return PartialText(f"{{{ast.unparse(node.value)}}}")

    def _Tuple(self, node: ast.Tuple, frame: Frame) -> Any:
        elements = self._elements(node, frame)
        return UNKNOWN if elements is None else tuple(elements)

    def _List(self, node: ast.List, frame: Frame) -> Any:
        elements = self._elements(node, frame)
        return UNKNOWN if elements is None else elements

    def _Set(self, node: ast.Set, frame: Frame) -> Any:
        elements = self._elements(node, frame)
        try:
            return UNKNOWN if elements is None or not known(elements) else set(elements)
        except TypeError:
            return UNKNOWN

    def _elements(self, node: ast.Tuple | ast.List | ast.Set, frame: Frame) -> list[Any] | None:
        """The elements; None if not all of them are found."""
        elements = self._unpacked(node.elts, frame)
        return None if any(element is _UNPACKED for element in elements) else elements

    def _unpacked(self, nodes: Iterable[ast.expr], frame: Frame) -> list[Any]:
        """The values of expressions, starred ones unpacked; a mark stands for those that are not known."""
        values: list[Any] = []
        for node in nodes:
            if not isinstance(node, ast.Starred):
                values.append(self.evaluate(node, frame))
                continue
            value = self.evaluate(node.value, frame)
            values += value if isinstance(value, list | tuple) else [_UNPACKED]
        return values

    def _ListComp(self, node: ast.ListComp | ast.GeneratorExp, frame: Frame) -> Any:
        inner = Frame("function", frame.file, parent=frame, owner=frame.owner)
        elements: list[Any] = []
        return elements if self._comprehend(node.elt, node.generators, inner, elements) else UNKNOWN

    _GeneratorExp = _ListComp

    def _comprehend(self, element: ast.expr, loops: list[ast.comprehension], frame: Frame, into: list[Any]) -> bool:
        """Adds the elements of a comprehension; returns whether all of them are found."""
        if not loops:
            into.append(self.evaluate(element, frame))
            return len(into) <= _MOST_ELEMENTS
        values = self.evaluate(loops[0].iter, frame)
        if isinstance(values, dict | set | str):
            values = list(values)
        if not isinstance(values, list | tuple):
            return False
        for value in values:
            self.assign(loops[0].target, value, frame)
            answers = [truth(self.evaluate(condition, frame)) for condition in loops[0].ifs]
            if None in answers:
                return False
            if all(answers) and not self._comprehend(element, loops[1:], frame, into):
                return False
        return True

    def assign(self, target: ast.expr, value: Any, frame: Frame) -> None:
        """Binds a name, or the names of a tuple."""
        if isinstance(target, ast.Name):
            frame.names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            matches = isinstance(value, list | tuple) and len(value) == len(target.elts)
            for position, part in enumerate(target.elts):
                self.assign(part, value[position] if matches else UNKNOWN, frame)

    def _Dict(self, node: ast.Dict, frame: Frame) -> Any:
        pairs = [
            (UNKNOWN if key is None else self.evaluate(key, frame), value)
            for key, value in zip(node.keys, node.values, strict=False)
        ]
        values = [self.evaluate(value, frame) for _, value in pairs]
        try:
            return (
                {key: value for (key, _), value in zip(pairs, values, strict=False)}
                if all(known(key) for key, _ in pairs)
                else UNKNOWN
            )
        except TypeError:
            return UNKNOWN

    def _Subscript(self, node: ast.Subscript, frame: Frame) -> Any:
        value, index = self.evaluate(node.value, frame), self.evaluate(node.slice, frame)
        if isinstance(value, External) and value.name == "os.environ" and isinstance(index, str):
            return os.environ.get(index, UNKNOWN)
        if not isinstance(value, str | list | tuple | dict) or not known(index):
            return UNKNOWN
        try:
            return value[index]
        except (LookupError, TypeError):
            return UNKNOWN

    def _Slice(self, node: ast.Slice, frame: Frame) -> Any:
        parts = [self.evaluate(part, frame) for part in (node.lower, node.upper, node.step)]
        return slice(*parts) if known(parts) else UNKNOWN

    def _UnaryOp(self, node: ast.UnaryOp, frame: Frame) -> Any:
        value = self.evaluate(node.operand, frame)
        if isinstance(node.op, ast.Not):
            answer = truth(value)
            return UNKNOWN if answer is None else not answer
        if not isinstance(value, int | float):
            return UNKNOWN
        return -value if isinstance(node.op, ast.USub) else value if isinstance(node.op, ast.UAdd) else UNKNOWN

    def _BinOp(self, node: ast.BinOp, frame: Frame) -> Any:
        left, right = self.evaluate(node.left, frame), self.evaluate(node.right, frame)
        both_sequences = isinstance(left, list | tuple) and type(left) is type(right) and isinstance(node.op, ast.Add)
        if both_sequences or (known(left) and known(right)):
            return calculated(node.op, left, right)
        return partial_text(node, left, right)

    def _BoolOp(self, node: ast.BoolOp, frame: Frame) -> Any:
        decisive, uncertain, value = isinstance(node.op, ast.Or), list[ast.expr](), None
        for part in node.values:
            value = self.perhaps(part, frame, all_of(uncertain)) if uncertain else self.evaluate(part, frame)
            answer = truth(value)
            if answer is decisive:  # whatever the earlier parts are: known as a condition, not as another value
                return value if not uncertain or isinstance(value, bool) else UNKNOWN
            if answer is None:
                uncertain.append(part)
        return UNKNOWN if uncertain else value

    def _IfExp(self, node: ast.IfExp, frame: Frame) -> Any:
        answer = truth(self.evaluate(node.test, frame))
        if answer is not None:
            return self.evaluate(node.body if answer else node.orelse, frame)
        first = self.perhaps(node.body, frame, Condition(node.test))
        second = self.perhaps(node.orelse, frame, Condition("not (", node.test, ")"))
        return first if known(first) and known(second) and first == second else UNKNOWN

    def _Compare(self, node: ast.Compare, frame: Frame) -> Any:
        left = self.evaluate(node.left, frame)
        for operation, comparator in zip(node.ops, node.comparators, strict=False):
            right = self.evaluate(comparator, frame)
            answer = compared(operation, left, right)
            if answer is not True:
                return answer
            left = right
        return True

    def _NamedExpr(self, node: ast.NamedExpr, frame: Frame) -> Any:
        value = frame.names[node.target.id] = self.evaluate(node.value, frame)
        return value

    def _Await(self, node: ast.Await, frame: Frame) -> Any:
        return self.evaluate(node.value, frame)

    def _Lambda(self, node: ast.Lambda, frame: Frame) -> Any:
        return Function(node, frame)

    def _Starred(self, node: ast.Starred, frame: Frame) -> Any:
        return self.evaluate(node.value, frame)
