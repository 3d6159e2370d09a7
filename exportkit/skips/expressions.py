"""Takes an expression of the suite and the names around it, and evaluates it without running any code of the suite.

Out comes a constant, an entity such as a function or a decorator, or UNKNOWN; arithmetic runs on small constants only.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import operator
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from exportkit.skips.externals import WIDE, call_method, external_value
from exportkit.skips.values import (
    UNKNOWN,
    Applied,
    Class,
    External,
    Frame,
    Function,
    Imported,
    PartialText,
    known,
    truth,
)

_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}
_COMPARISONS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_CONVERSIONS: Mapping[int, Callable[[Any], Any]] = {
    -1: lambda value: value,
    ord("s"): str,
    ord("r"): repr,
    ord("a"): ascii,
}
_MOST_ELEMENTS = 1000
_LONGEST = 100_000  # characters or elements of a result: more is not worked out
_SIZED = (str, bytes, list, tuple)


class Expressions:
    """Evaluates expressions; a subclass says what calls and attributes of the suite's own entities give."""

    def evaluate(self, node: ast.expr | None, frame: Frame) -> Any:
        """Returns the value of an expression, or UNKNOWN."""
        if node is None:
            return None
        if isinstance(node, ast.Constant):
            return node.value
        method = getattr(self, f"_{type(node).__name__}", None)
        if method is None:
            self.evaluate_parts(node, frame)
            return UNKNOWN
        return method(node, frame)

    def evaluate_parts(self, node: ast.AST, frame: Frame) -> None:
        """Evaluates the parts of an expression for what they do; overridden by the interpreter."""

    def attribute(self, value: Any, name: str) -> Any:
        """Returns an attribute of an entity."""
        raise NotImplementedError

    def call(self, function: Any, node: ast.Call, args: tuple[Any, ...], keywords: dict[str, Any], frame: Frame) -> Any:
        """Returns what a call gives."""
        raise NotImplementedError

    def perhaps(self, node: ast.expr, frame: Frame, condition: str) -> Any:
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
        args: list[Any] = []
        for arg in node.args:
            value = self.evaluate(arg.value if isinstance(arg, ast.Starred) else arg, frame)
            if not isinstance(arg, ast.Starred):
                args.append(value)
            elif isinstance(value, list | tuple):
                args.extend(value)
            else:
                args.append(UNKNOWN)
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
        elements: list[Any] = []
        for element in node.elts:
            value = self.evaluate(element.value if isinstance(element, ast.Starred) else element, frame)
            if not isinstance(element, ast.Starred):
                elements.append(value)
            elif isinstance(value, list | tuple):
                elements.extend(value)
            else:
                return None
        return elements

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
        function = _OPERATORS.get(type(node.op))
        if function is None:
            return UNKNOWN
        both_sequences = isinstance(left, list | tuple) and type(left) is type(right) and isinstance(node.op, ast.Add)
        if not both_sequences and not (known(left) and known(right)):
            return self._partial_text(node, left, right)
        if _is_large(node.op, left, right):
            return UNKNOWN
        try:
            return function(left, right)
        except Exception:  # the suite would raise here
            return UNKNOWN

    @staticmethod
    def _partial_text(node: ast.BinOp, left: Any, right: Any) -> Any:
        """A text of which one part is known, as an f-string would show it: it can still serve as a reason."""
        if not isinstance(node.op, ast.Add) or not (isinstance(left, str) or isinstance(right, str)):
            return UNKNOWN
        sides = ((left, node.left), (right, node.right))
        return PartialText("".join(v if isinstance(v, str) else f"{{{ast.unparse(part)}}}" for v, part in sides))

    def _BoolOp(self, node: ast.BoolOp, frame: Frame) -> Any:
        decisive, uncertain, value = isinstance(node.op, ast.Or), list[str](), None
        for part in node.values:
            value = self.perhaps(part, frame, " and ".join(uncertain)) if uncertain else self.evaluate(part, frame)
            answer = truth(value)
            if answer is decisive:  # whatever the earlier parts are: known as a condition, not as another value
                return value if not uncertain or isinstance(value, bool) else UNKNOWN
            if answer is None:
                uncertain.append(ast.unparse(part))
        return UNKNOWN if uncertain else value

    def _IfExp(self, node: ast.IfExp, frame: Frame) -> Any:
        answer = truth(self.evaluate(node.test, frame))
        if answer is not None:
            return self.evaluate(node.body if answer else node.orelse, frame)
        condition = ast.unparse(node.test)
        first, second = (
            self.perhaps(node.body, frame, condition),
            self.perhaps(node.orelse, frame, f"not ({condition})"),
        )
        return first if known(first) and known(second) and first == second else UNKNOWN

    def _Compare(self, node: ast.Compare, frame: Frame) -> Any:
        left = self.evaluate(node.left, frame)
        for operation, comparator in zip(node.ops, node.comparators, strict=False):
            right = self.evaluate(comparator, frame)
            answer = self._compare(operation, left, right)
            if answer is not True:
                return answer
            left = right
        return True

    @staticmethod
    def _compare(operation: ast.cmpop, left: Any, right: Any) -> Any:
        if isinstance(operation, ast.In | ast.NotIn) and isinstance(right, External) and right.name == "os.environ":
            return UNKNOWN if not isinstance(left, str) else (left in os.environ) is isinstance(operation, ast.In)
        if not (known(left) and known(right)):
            if isinstance(operation, ast.Is | ast.IsNot | ast.Eq | ast.NotEq) and _are_builtins(left, right):
                return (left == right) is isinstance(operation, ast.Is | ast.Eq)
            if (
                isinstance(operation, ast.Is | ast.IsNot)
                and right is None
                and isinstance(left, list | tuple | dict | Applied)
            ):
                return isinstance(operation, ast.IsNot) if not isinstance(left, Applied) else UNKNOWN
            return UNKNOWN
        try:
            return bool(_COMPARISONS[type(operation)](left, right))
        except TypeError:
            return UNKNOWN

    def _NamedExpr(self, node: ast.NamedExpr, frame: Frame) -> Any:
        value = frame.names[node.target.id] = self.evaluate(node.value, frame)
        return value

    def _Await(self, node: ast.Await, frame: Frame) -> Any:
        return self.evaluate(node.value, frame)

    def _Lambda(self, node: ast.Lambda, frame: Frame) -> Any:
        return Function(node, frame)

    def _Starred(self, node: ast.Starred, frame: Frame) -> Any:
        return self.evaluate(node.value, frame)


def _is_large(operation: ast.operator, left: Any, right: Any) -> bool:
    """Whether working out a result may take much memory: repetition, or padding to a width."""
    if isinstance(operation, ast.Mult):
        sizes = [len(value) if isinstance(value, _SIZED) else value for value in (left, right)]
        is_text = isinstance(left, _SIZED) or isinstance(right, _SIZED)
        return is_text and all(isinstance(size, int) for size in sizes) and sizes[0] * sizes[1] > _LONGEST
    return isinstance(operation, ast.Mod) and isinstance(left, str) and WIDE.search(left) is not None


def _are_builtins(*values: Any) -> bool:
    return all(isinstance(value, External) and value.name.startswith("builtins.") for value in values)
