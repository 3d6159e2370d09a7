"""Conditions on sizes as text over the variables of a plan: read safely, checked in one go, explained with numbers.

Bounds that a condition amounts to, and sizes that it leaves out, are read from its text or found by evaluating it.
"""

from __future__ import annotations

import ast
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from itertools import product
from types import CodeType
from typing import Any

from exportkit.errors import PlanError, described

# Bounds of powers, whether the exponent is a number or computed.
_LARGEST_NUMBER, _LARGEST_POWER, _MOST_DOUBLINGS = 2**63, 16, 64


def _power(base: float, exponent: int) -> Any:
    """A power that takes no more than a moment."""
    if abs(base) >= _LARGEST_NUMBER or not 0 <= exponent <= _MOST_DOUBLINGS:
        raise ValueError(f"{base} ** {exponent} is too large")
    return base**exponent


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min, "max": max, "abs": abs, "round": round, "int": int, "float": float,
    "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc, "sqrt": math.sqrt, "log2": math.log2,
    "sin": math.sin, "cos": math.cos, "tan": math.tan, "sinh": math.sinh, "cosh": math.cosh, "tanh": math.tanh,
    "asin": math.asin, "acos": math.acos, "atan": math.atan, "pow": _power,
}  # fmt: skip
_OPERATORS = (
    ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.UAdd, ast.IfExp,
    ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Div, ast.Mod, ast.Pow, ast.BitAnd, ast.BitOr, ast.BitXor,
    ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Load,
)  # fmt: skip
# A text from a file is bounded before it is parsed, and so are the numbers that it can lead to. The longest condition
# of the models that were tried has 900 characters.
_LONGEST, _DEEPEST = 20_000, 100
# Conditions of this form are bounds of a variable; the number is what makes the bound inclusive.
_LOWER, _UPPER = {ast.GtE: 0, ast.Gt: 1}, {ast.LtE: 0, ast.Lt: -1}
_MIRRORED = {ast.GtE: ast.LtE, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.Lt: ast.Gt}
# Conditions of any other form are evaluated at some sizes.
_LONGEST_AXIS = 2**31 - 1  # no axis of a tensor that fits into memory is longer
_ONE_BY_ONE = 1024  # sizes that are tried one by one; beyond, those around powers of two
_TRIED = (2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 31, 64, 100, 255, 1000, 4096, 65_537, 1_000_000)
_BESIDE = (2, 3, 17, 1000)  # sizes of the other variables
_MOST_NUMBERS = 6  # in a condition near which sizes are tried

Range = tuple[int, int | None]


@dataclass(frozen=True)
class SizeCondition:
    """A condition on sizes under which a graph was traced, or which limits it.

    Attributes:
        text: The condition over the variables of the plan, such as ``past_sequence + sequence <= 16``.
        place: File and line that asked for it; empty if unknown.
        own: Whether that line belongs to the model, not to torch or another library.
        gives_number: Whether that line got a number for what follows from sizes, by which the code may decide anything.

    Example:
        >>> condition = SizeCondition("rows * columns <= 4096")
        >>> condition.holds({"rows": 64, "columns": 80}), condition.got({"rows": 64, "columns": 80})
        (False, '64 * 80 = 5120')
    """

    text: str
    place: str = ""
    own: bool = False
    gives_number: bool = field(default=False, compare=False)

    @cached_property
    def tree(self) -> ast.expr:
        """The parsed text.

        Raises:
            PlanError: if the text is not a condition on sizes.
        """
        return _parsed(self.text)

    def variables(self) -> frozenset[str]:
        """Returns the names in the condition."""
        calls = {node.func for node in ast.walk(self.tree) if isinstance(node, ast.Call)}
        names = [node for node in ast.walk(self.tree) if isinstance(node, ast.Name) and node not in calls]
        return frozenset([node.id for node in names])

    def numbers(self) -> frozenset[int]:
        """Returns the integers in the condition."""
        values = [node.value for node in ast.walk(self.tree) if isinstance(node, ast.Constant)]
        return frozenset([value for value in values if type(value) is int])

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Returns whether sizes fulfil the condition; one that has no value, as it divides by 0, does not hold.

        Args:
            sizes: The size of each variable.
        """
        names, check = self._check
        return check([sizes[name] for name in names]) < 0

    @cached_property
    def _check(self) -> tuple[list[str], Callable[[Sequence[int]], int]]:
        names = sorted(self.variables())
        return names, first_broken([self], names)

    def got(self, sizes: Mapping[str, int]) -> str:
        """Returns the condition's left side with numbers put in, or the sizes of all its variables.

        Args:
            sizes: The size of each variable.
        """
        tree = self.tree
        if isinstance(tree, ast.Compare) and len(tree.ops) == 1:
            sides = [side for side in (tree.left, tree.comparators[0]) if not isinstance(side, ast.Constant)]
            return " and ".join(_with_numbers(side, sizes) for side in sides)
        return ", ".join(f"{name} = {sizes[name]}" for name in sizes if name in self.variables())

    def bounds(self) -> tuple[str, int | None, int | None] | None:
        """Returns a variable with its smallest and its largest size, if the condition says no more than that."""
        tree = self.tree
        if not (isinstance(tree, ast.Compare) and len(tree.ops) == 1):
            return None
        left, right, kind = tree.left, tree.comparators[0], type(tree.ops[0])
        if isinstance(left, ast.Constant) and kind in _MIRRORED:
            left, right, kind = right, left, _MIRRORED[kind]
        if not (isinstance(left, ast.Name) and isinstance(right, ast.Constant) and isinstance(right.value, int)):
            return None
        if kind in _LOWER:
            return left.id, right.value + _LOWER[kind], None
        return (left.id, None, right.value + _UPPER[kind]) if kind in _UPPER else None


def first_broken(conditions: Sequence[SizeCondition], names: Sequence[str]) -> Callable[[Sequence[int]], int]:
    """Returns a function that takes sizes and returns the number of the first condition that they break, or -1.

    All conditions become one function, because it runs on every call.

    Args:
        conditions: The conditions.
        names: The variables, in the order in which the function takes their sizes.

    Raises:
        PlanError: if a text is not a condition on sizes, or has another variable.
    """
    short = {name: f"v{number}" for number, name in enumerate(names)}
    lines = [f"def check({', '.join(short.values())}):", f"{_STEP}pass"]
    for number, condition in enumerate(conditions):
        unknown = condition.variables() - short.keys()
        if unknown:
            raise PlanError(
                "A condition on sizes uses a variable that the plan does not have.",
                where=condition.text[:200],
                expected=", ".join(names) or "no variable",
                got=", ".join(sorted(unknown))[:200],
            )
        # no name in a file becomes one in code
        text = ast.unparse(_Replaced(short).visit(copy.deepcopy(condition.tree)))
        lines.append(f"{_STEP}if not ({text}): return {number}")
    lines.append(f"{_STEP}return -1")
    space: dict[str, Any] = {"__builtins__": {}, **_FUNCTIONS}
    exec("\n".join(lines), space)  # built from parsed trees of numbers, sizes and the operators above, nothing else
    check = space["check"]

    @cache
    def each() -> list[Callable[[Sequence[int]], int]]:
        return [first_broken([condition], names) for condition in conditions]

    def run(sizes: Sequence[int]) -> int:
        try:
            found: int = check(*sizes)
        except (ArithmeticError, ValueError, TypeError):  # a division by 0, a root of a negative number
            return 0 if len(conditions) == 1 else next(i for i, alone in enumerate(each()) if alone(sizes) == 0)
        return found

    return run


def exactly(sizes: Mapping[str, int]) -> str:
    """Returns the text of the condition that holds for one set of sizes only."""
    return " and ".join(f"{name} == {size}" for name, size in sizes.items())


def bounds_of(condition: SizeCondition, allowed: Range) -> Range | None:
    """Returns the smallest and the largest size for which a condition holds, if it holds for all sizes between.

    Args:
        condition: The condition.
        allowed: The smallest and the largest size of its variable.

    Returns:
        The bounds; None if the condition has several variables, leaves out nothing, or leaves out sizes between.

    Example:
        >>> bounds_of(SizeCondition("(4095 + 8 * batch) // 4096 == 1"), (2, None))
        (2, 512)
    """
    if len(condition.variables()) != 1:
        return None
    (name,) = condition.variables()
    least, most = allowed
    sizes = sorted({*_around_powers(), *range(least, least + _ONE_BY_ONE), least, most or _LONGEST_AXIS})
    sizes = [size for size in sizes if least <= size <= (_LONGEST_AXIS if most is None else most)]
    inside = [place for place, size in enumerate(sizes) if condition.holds({name: size})]
    if not inside or len(inside) == len(sizes) or inside[-1] - inside[0] + 1 != len(inside):
        return None
    first, last = inside[0], inside[-1]
    lower = sizes[first] if first == 0 else _edge(condition, name, sizes[first], sizes[first - 1])
    if last == len(sizes) - 1:
        return lower, most
    return lower, _edge(condition, name, sizes[last], sizes[last + 1])


def leaves_out_sizes(condition: SizeCondition, allowed: Mapping[str, Range]) -> bool:
    """Returns whether a condition does not hold for some of the sizes that are tried.

    Args:
        condition: The condition.
        allowed: The smallest and the largest size of each variable.
    """
    names, numbers = sorted(condition.variables()), sorted(condition.numbers())[:_MOST_NUMBERS]
    near = dict.fromkeys(number + more for number in numbers for more in (0, 1, -1))
    for name, beside in product(names, (*_BESIDE, *numbers)):
        for size in (*_TRIED, *near, allowed[name][1] or _LONGEST_AXIS):
            sizes = {other: size if other == name else beside for other in names}
            if all(_is_within(sizes[other], allowed[other]) for other in names) and not condition.holds(sizes):
                return True
    return False


def _around_powers() -> Iterator[int]:
    for power in range(1, 32):
        yield from (2**power - 1, 2**power, 2**power + 1)


def _edge(condition: SizeCondition, name: str, inside: int, outside: int) -> int:
    """The last size from ``inside`` towards ``outside`` for which the condition holds."""
    while abs(outside - inside) > 1:
        middle = (inside + outside) // 2
        inside, outside = (middle, outside) if condition.holds({name: middle}) else (inside, middle)
    return inside


def _is_within(size: int, allowed: Range) -> bool:
    return allowed[0] <= size and (allowed[1] is None or size <= allowed[1])


def evaluate(text: str, sizes: Mapping[str, int]) -> Any:
    """Returns the value of an expression over variables, such as a number that a model returns.

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
        variables = {f"size_{name}": size for name, size in sizes.items()}
        return eval(code, {"__builtins__": {}, **_FUNCTIONS, **variables})  # sizes and the operators above
    except (ArithmeticError, ValueError, TypeError, NameError) as error:
        raise PlanError(
            "An expression cannot be evaluated for these sizes.", where=text, got=f"{error}; {dict(sizes)}"
        ) from error


@lru_cache(maxsize=256)
def _compiled(text: str) -> CodeType:
    condition = SizeCondition(text)
    names = {name: f"size_{name}" for name in condition.variables()}
    return compile(ast.unparse(_Replaced(names).visit(copy.deepcopy(condition.tree))), "<sizes>", "eval")


_STEP = "    "


class _Replaced(ast.NodeTransformer):
    """Puts names or numbers in place of variables; a function keeps its name, whatever the variables are called."""

    def __init__(self, values: Mapping[str, str | int]) -> None:
        self._values = values

    def visit_Call(self, node: ast.Call) -> ast.Call:
        return ast.Call(node.func, [self.visit(argument) for argument in node.args], [])

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self._values.get(node.id, node.id)
        return ast.Name(value) if isinstance(value, str) else ast.Constant(value)


def _with_numbers(side: ast.expr, sizes: Mapping[str, int]) -> str:
    """An expression with numbers put in, and its value: ``64 * 80 = 5120``."""
    text = ast.unparse(_Replaced(sizes).visit(copy.deepcopy(side)))
    if isinstance(side, ast.Name):
        return text
    try:
        value = eval(text, {"__builtins__": {}, **_FUNCTIONS})  # numbers and the operators above, nothing else
    except (ArithmeticError, ValueError, TypeError) as error:
        return f"{text}, which has no value: {error}"
    return f"{text} = {value}"


def _parsed(text: str) -> ast.expr:
    def refused(reason: str) -> PlanError:
        return PlanError("Not a condition on sizes.", where=str(text)[:200], got=reason)

    if not isinstance(text, str) or len(text) > _LONGEST:
        raise refused(f"more than {_LONGEST} characters" if isinstance(text, str) else type(text).__name__)
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise refused(described(error)) from None
    level: list[ast.AST] = [tree]
    for _ in range(_DEEPEST):
        for node in level:
            reason = _reason_against(node)
            if reason:
                raise refused(reason)
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return tree
    raise refused(f"more than {_DEEPEST} levels")


def _reason_against(node: ast.AST) -> str:
    """Why a node has no place in a condition; an empty string if it has."""
    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            return "" if abs(value) < _LARGEST_NUMBER else "a number that is too large"  # NaN is neither
        case ast.BinOp(op=ast.Pow(), left=base, right=ast.Constant(value=int() | float() as power)):
            nested = any(isinstance(inner, ast.Pow) for inner in ast.walk(base))
            return "" if not nested and 0 <= power <= _LARGEST_POWER else "a power that is too large"
        case ast.BinOp(op=ast.Pow()):
            return "a power that is not a number"
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return "" if _takes(name, len(args)) else f"{name} of {len(args)} numbers"
        case ast.Name(id=name):
            return "" if not name.startswith("__") else f"the name {name}"
        case _ if isinstance(node, _OPERATORS):
            return ""
    return f"{type(node).__name__} is not allowed in it"


def _takes(name: str, count: int) -> bool:
    """Whether a function takes that many numbers."""
    return count > 1 if name in ("min", "max") else count == (2 if name == "pow" else 1)
