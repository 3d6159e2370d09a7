"""Numbers that follow from sizes, as text over the variables of a plan."""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Mapping
from types import CodeType
from typing import Any

from exportkit.errors import PlanError

_FUNCTIONS: dict[str, Any] = {
    "min": min, "max": max, "abs": abs, "round": round, "int": int, "float": float,
    "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc, "sqrt": math.sqrt,
}  # fmt: skip
_ALLOWED = (
    ast.Expression, ast.Name, ast.Load, ast.Constant, ast.IfExp, ast.boolop, ast.BoolOp, ast.cmpop, ast.Compare,
    ast.unaryop, ast.UnaryOp, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow,
)  # fmt: skip
_LONGEST = 2000


def evaluate(text: str, sizes: Mapping[str, int]) -> Any:
    """Returns the value of an expression over variables.

    Args:
        text: The expression, such as ``sequence // 16`` or ``batch > 1``.
        sizes: The size of each variable.

    Raises:
        PlanError: if the text is not such an expression, or has no value for these sizes.

    Example:
        >>> evaluate("height // 16 * (width // 16)", {"height": 64, "width": 32})
        8
    """
    code = _compiled(text)
    try:
        return eval(code, {"__builtins__": {}, **_FUNCTIONS}, dict(sizes))  # numbers, sizes and functions of these
    except (ArithmeticError, ValueError, TypeError, NameError) as error:
        raise PlanError("A number has no value for these sizes.", where=text, got=f"{error}; {dict(sizes)}") from error


@functools.lru_cache(maxsize=256)
def _compiled(text: str) -> CodeType:
    try:
        tree = ast.parse(text[: _LONGEST + 1], mode="eval")
        for node in ast.walk(tree):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
            power = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and not _is_small(node.right)
            if len(text) > _LONGEST or power or not (called or isinstance(node, _ALLOWED)):
                raise ValueError(f"{type(node).__name__} is not allowed")
        return compile(tree, "<sizes>", "eval")
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise PlanError("This is not an expression over sizes.", where=str(text)[:200], got=error) from error


def _is_small(power: ast.expr) -> bool:
    return isinstance(power, ast.Constant) and isinstance(power.value, int | float) and 0 <= power.value <= 16
