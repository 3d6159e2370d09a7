"""Takes an operator and values on both sides, and gives what it makes of them: a constant, or UNKNOWN."""

from __future__ import annotations

import ast
import operator
import os
from collections.abc import Callable, Mapping
from typing import Any

from exportkit.skips.externals import WIDE
from exportkit.skips.values import UNKNOWN, Applied, External, PartialText, known

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
_LONGEST = 100_000  # characters or elements of a result: more is not worked out
_SIZED = (str, bytes, list, tuple)


def calculated(operation: ast.operator, left: Any, right: Any) -> Any:
    """Returns what an arithmetic operator gives for known values, or UNKNOWN."""
    function = _OPERATORS.get(type(operation))
    if function is None or _is_large(operation, left, right):
        return UNKNOWN
    try:
        return function(left, right)
    except Exception:  # the suite would raise here
        return UNKNOWN


def partial_text(node: ast.BinOp, left: Any, right: Any) -> Any:
    """Returns a text of which one part is known, as an f-string would show it: it can still serve as a reason."""
    if not isinstance(node.op, ast.Add) or not (isinstance(left, str) or isinstance(right, str)):
        return UNKNOWN
    sides = ((left, node.left), (right, node.right))
    return PartialText("".join(v if isinstance(v, str) else f"{{{ast.unparse(part)}}}" for v, part in sides))


def compared(operation: ast.cmpop, left: Any, right: Any) -> Any:
    """Returns what a comparison gives, or UNKNOWN."""
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


def _is_large(operation: ast.operator, left: Any, right: Any) -> bool:
    """Whether working out a result may take much memory: repetition, or padding to a width."""
    if isinstance(operation, ast.Mult):
        sizes = [len(value) if isinstance(value, _SIZED) else value for value in (left, right)]
        is_text = isinstance(left, _SIZED) or isinstance(right, _SIZED)
        return is_text and all(isinstance(size, int) for size in sizes) and sizes[0] * sizes[1] > _LONGEST
    return isinstance(operation, ast.Mod) and isinstance(left, str) and WIDE.search(left) is not None


def _are_builtins(*values: Any) -> bool:
    return all(isinstance(value, External) and value.name.startswith("builtins.") for value in values)
