"""Evaluates expressions of the suite without running it: to a constant, a part of the suite, or UNKNOWN.

What is outside the suite (installed packages, the environment, operations on constants) is what it is for the
interpreter, platform, packages and environment variables of the scan itself, as it would be for pytest if it ran here.
Nothing of the suite is imported, and only operations that cannot do any harm are carried out.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import importlib.util
import operator
import os
import platform
import re
import shutil
import struct
import sys
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from functools import cache
from typing import Any

from exportkit.skipscan.values import UNKNOWN, External, Imported, PartialText, Scope, Skipped, is_true, known

SKIP_CALLS = {"pytest.skip", "_pytest.outcomes.skip"}
SKIP_ERRORS = {"unittest.SkipTest", "unittest.case.SkipTest", "pytest.skip.Exception"}
UNITTEST_DECORATORS = {"unittest.skip", "unittest.skipIf", "unittest.skipUnless"}
EXITS = {"pytest.fail", "pytest.xfail", "pytest.exit", "sys.exit"}  # what follows one of these is not reached

_MODULES = {module.__name__: module for module in (builtins, os, platform, shutil, struct, sys)}
# What conditions ask about the machine, and harmless functions and methods of built-in values: nothing that changes its
# arguments, or that makes a large result of small ones.
_VALUES = re.compile(r"sys\.(version_info|platform|maxsize|byteorder|implementation\.name)|os\.(name|sep)")
_FUNCTIONS = re.compile(
    r"builtins\.(abs|all|any|bool|dict|float|int|len|list|max|min|range|repr|round|set|sorted|str|sum|tuple)"
    r"|platform\.(system|machine|python_implementation)|os\.getenv|os\.environ\.get|shutil\.which|struct\.calcsize"
)
_METHODS = re.compile(
    r"format|join|lower|upper|title|l?strip|rstrip|split|replace|startswith|endswith|removeprefix|removesuffix"
    r"|isdigit|count|index|get|keys|values|items"
)
_LARGEST = 10_000  # elements or characters: larger results are not computed
_WIDE = re.compile(r"\d{5}")  # a width in a format that would pad a text to more than that
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: lambda left, right: UNKNOWN if _is_large(left, right) else left * right,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: lambda left, right: UNKNOWN if isinstance(left, str) and _WIDE.search(left) else left % right,
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
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}
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


@cache
def installed(package: str) -> bool:
    """Returns whether the top-level package of a dotted name is installed, without importing it."""
    top = package.partition(".")[0]
    if top in sys.stdlib_module_names:
        return True
    try:
        return importlib.machinery.PathFinder.find_spec(top) is not None or importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False


def external_value(name: str) -> Any:
    """Returns the value of a dotted name, or the name as an `External`."""
    return _resolved(name) if _VALUES.fullmatch(name) else External(name)


def call_external(name: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Returns the value of a call of something outside the suite, or UNKNOWN."""
    if name == "importlib.util.find_spec" and args and isinstance(args[0], str) and "." not in args[0]:
        return True if installed(args[0]) else None  # in place of a spec, which is true
    if name == "builtins.len" and len(args) == 1 and isinstance(args[0], list | tuple):
        return len(args[0])
    return compute(_resolved(name), *args, **keywords) if _FUNCTIONS.fullmatch(name) else UNKNOWN


def _resolved(name: str) -> Any:
    module, _, attribute = name.partition(".")
    return operator.attrgetter(attribute)(_MODULES[module])


def call_method(value: Any, method: str, args: Iterable[Any], keywords: Mapping[str, Any]) -> Any:
    """Returns the value of a method call of a built-in value, or UNKNOWN."""
    if not known(value) or not _METHODS.fullmatch(method) or (method == "format" and _WIDE.search(value)):
        return UNKNOWN
    return compute(getattr(value, method, None), *args, **keywords)


def operate(operation: ast.operator | ast.cmpop, left: Any, right: Any) -> Any:
    """Returns the value of a binary operation or a comparison, or UNKNOWN."""
    if isinstance(left, External) and isinstance(right, External) and isinstance(operation, ast.Is | ast.Eq):
        return left == right if {left.name[:9], right.name[:9]} == {"builtins."} else UNKNOWN
    if isinstance(operation, ast.Add) and isinstance(left, list | tuple) and type(left) is type(right):
        return type(left)([*left, *right])  # with unknown elements too
    return compute(_OPERATORS.get(type(operation)), left, right)


def _is_large(left: Any, right: Any) -> bool:
    """Returns whether a product repeats a text or a list too often."""
    sizes = [value if isinstance(value, int | float) else len(value) for value in (left, right)]
    return sizes != [left, right] and sizes[0] * sizes[1] > _LARGEST


def format_value(value: Any, conversion: int, spec: str) -> str | None:
    """Returns the text of a value in an f-string, or None if it is not known."""
    convert: Callable[[Any], str] | None = str if conversion == ord("s") else repr if conversion == ord("r") else None
    text = UNKNOWN if _WIDE.search(spec) else compute(lambda: format(convert(value) if convert else value, spec))
    return text if isinstance(text, str) and known(value) else None


def compute(function: Callable[..., Any] | None, *args: Any, **keywords: Any) -> Any:
    """Returns what a harmless function makes of constants; UNKNOWN for other values, or if it raises."""
    if function is None or not known(args) or not known(keywords):
        return UNKNOWN
    if function is range and any(isinstance(value, int) and abs(value) > _LARGEST for value in args):
        return UNKNOWN
    try:
        value = function(*args, **keywords)
    except Exception:  # the suite raises here
        return UNKNOWN
    return list(value) if isinstance(value, range | KeysView | ValuesView | ItemsView) else value


def reason_text(reason: Any, node: ast.AST | None) -> str:
    """Returns a reason as Python evaluates it; an unknown one is shown in braces, as in an f-string."""
    if isinstance(reason, PartialText) or known(reason):
        return "" if reason is None else str(reason)
    return f"{{{ast.unparse(node)}}}" if node is not None else ""
