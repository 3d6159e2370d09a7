"""Says what is known about things outside the suite: installed packages, the environment, and operations on constants.

The answers hold for the interpreter, platform, packages and environment variables of the scan itself, as they would for
pytest if it ran here. Nothing of the suite is imported, and only operations that cannot do any harm are carried out.
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

from exportkit.skipscan.values import UNKNOWN, External, PartialText, known

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
