"""Symbolic sizes: what torch.export calls them, and the guards it recorded on them."""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from exportkit._torch_compat import require


def source_names(values: Any) -> list[str]:
    """Returns what torch.export's messages call the leaves of ``kwargs``, in torch's order. Seen in torch 2.13."""
    import torch._export.non_strict_utils as module
    import torch.utils._pytree as pytree

    name_of = require(module, "key_path_to_source", "torch 2.13")
    leaves = require(pytree, "tree_leaves_with_path", "torch 2.13")
    names = {key: [str(name_of(path).name) for path, _ in leaves(value)] for key, value in values.items()}
    return [name.replace("L['args']", f"L[{key!r}]", 1) for key, found in names.items() for name in found]


def input_axes(program: torch.export.ExportedProgram) -> dict[str, tuple[Any, ...]]:
    """Returns the traced sizes of each input by node name: ints, and sympy expressions. Seen in torch 2.13."""
    sizes = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            sizes[node.name] = tuple([size if isinstance(size, int) else size.node.expr for size in value.shape])
    return sizes


def with_ranges(
    program: torch.export.ExportedProgram, ranges: Mapping[Any, tuple[int, int | None]]
) -> torch.export.ExportedProgram:
    """Gives symbols of a program other bounds, each the smallest and the largest value or None, and returns it.

    A trace assumes sizes of 2 and more, and derives bounds of sums from that; a program may serve other sizes, which
    its file is to say. Seen in torch 2.13.
    """
    from torch.utils import _sympy

    allowed = require(_sympy.value_ranges, "ValueRanges", "torch 2.13")
    infinite = require(_sympy.numbers, "int_oo", "torch 2.13")
    for expression in [key for key in program.range_constraints if not key.is_Symbol]:
        del program.range_constraints[expression]
    for symbol, (least, most) in ranges.items():
        program.range_constraints[symbol] = allowed(least, infinite if most is None else most)
    return program


class ShapeGuard(NamedTuple):
    """A guard on sizes: sympy relations, and the line of code that caused it.

    Attributes:
        asked: The relation as the code asked for it.
        left: The same relation after torch's replacements of sizes by other sizes.
        file: File of the innermost line outside of torch's tracing code; empty if unknown.
        line: Its number.
    """

    asked: Any
    left: Any
    file: str
    line: int


def shape_guards(program: torch.export.ExportedProgram) -> list[ShapeGuard]:
    """Returns the guards on sizes that torch recorded while it traced a program. Seen in torch 2.13."""
    environment, found = _environment(program), []
    for guard in require(environment, "guards", "torch 2.13") if environment is not None else ():
        found.append(ShapeGuard(guard.expr, guard.expr.xreplace(environment.replacements), *_place(guard.sloc)))
    return found


def forget_pending_sizes(program: torch.export.ExportedProgram) -> None:
    """Forgets sizes by values that a translation of the program has left: the next one would look for them in vain.

    Seen in torch 2.13.
    """
    environment = _environment(program)
    if environment is not None:
        require(environment, "pending_fresh_unbacked_symbols", "torch 2.13").clear()


def _environment(program: torch.export.ExportedProgram) -> Any:
    """The symbols of a program; None if it has none."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                return size.node.shape_env
    return None


def _functions(*names: str) -> tuple[Any, ...]:
    """The functions of torch in expressions of sympy."""
    from torch.utils._sympy import functions

    return tuple(require(functions, name, "torch 2.13") for name in names)


def traced_expression(value: Any) -> Any:
    """Returns the sympy expression of a number that was traced symbolically; None for any other value.

    Seen in torch 2.13.
    """
    return value.node.expr if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else None


def _place(location: Any) -> tuple[str, int]:
    """File and line of a guard. Strict tracing has the line of the model as text, its file relative to torch's folder.

    Without such a text, the line is that of torch's tracing code, and the one behind it is unknown.
    """
    match = re.search(r"# (?P<file>[^#]+):(?P<line>\d+) in ", location.maybe_user_loc or "")
    if match:
        files = [folder / match["file"] for folder in Path(torch.__file__).parents]
        return next((str(file) for file in files if file.is_file()), ""), int(match["line"])
    place = location.framework_loc
    if not hasattr(place, "filename") or "/torch/_dynamo/" in Path(place.filename).as_posix():
        return "", 0
    return place.filename, place.lineno


def exact_rounding(name: str) -> Callable[[Any], Any]:
    """Returns ``__ceil__``, ``__floor__`` or ``__trunc__`` for traced numbers, in integers for a quotient of sizes.

    torch keeps ``ceil(a / b)`` as a float division, whose conditions cannot be simplified: every length computed from
    it becomes a number. For sizes below 2**31, the integers are the same. Seen in torch 2.13.
    """
    original = getattr(torch.SymFloat, name)

    def rounded(number: Any) -> Any:
        parts = quotient_parts(number)
        if parts is None:
            return original(number)
        above, below, rest = parts
        if name == "__trunc__" and not _is_positive(number, above, below, rest):
            return original(number)
        return (-(-above // below) if name == "__ceil__" else above // below) + rest

    return rounded


def _is_positive(number: torch.SymFloat, above: Any, below: Any, rest: int) -> bool:
    """Whether ``above / below + rest`` is 0 or more for all sizes in their ranges."""
    from torch.utils._sympy import value_ranges

    ranges = require(number.node.shape_env, "var_to_range", "torch 2.13")
    least = []
    for part in (above, below):
        expression = part if isinstance(part, int) else part.node.expr
        if isinstance(expression, int):
            least.append(expression)
        elif all(symbol in ranges for symbol in expression.free_symbols):
            least.append(require(value_ranges, "bound_sympy", "torch 2.13")(expression, ranges).lower)
        else:
            return False
    return bool(least[0] >= 0 and least[1] > 0 and rest >= 0)


def decided_extreme(name: str) -> Callable[[Any, Any], Any]:
    """Returns ``__sym_max__`` or ``__sym_min__`` for traced sizes, which is one of the two where that is certain.

    Sizes computed from a maximum cannot be simplified, and repeat it each time they occur. In ``max(2 * -(-n // 2) - n,
    0)``, the padding of a convolution that keeps sizes, nothing has to be chosen. Seen in torch 2.13.
    """
    original = getattr(torch.SymInt, name)

    def extreme(number: torch.SymInt, other: Any) -> Any:
        if isinstance(other, int | torch.SymInt):
            difference = traced_expression(number) - (other if isinstance(other, int) else traced_expression(other))
            ranges = require(number.node.shape_env, "var_to_range", "torch 2.13")
            if all(symbol in ranges and ranges[symbol].lower >= 0 for symbol in difference.free_symbols):
                larger, smaller = (number, other) if name == "__sym_max__" else (other, number)
                if always_holds(difference >= 0, {}):
                    return larger
                if always_holds(difference <= 0, {}):
                    return smaller
        return original(number, other)

    return extreme


def quotient_parts(number: torch.SymFloat) -> tuple[Any, Any, int] | None:
    """Returns the integers ``a``, ``b`` and ``c`` of a traced number ``a / b + c``; None if it is computed otherwise.

    Seen in torch 2.13.
    """
    import sympy

    terms = sympy.Add.make_args(number.node.expr)
    parts = [term for term in terms if not term.is_number]
    rest = [term for term in terms if term.is_number]
    quotient = _quotient(parts[0]) if len(parts) == 1 else None
    if quotient is None or not all(float(term).is_integer() for term in rest):
        return None
    above, below = (_number(part, number.node.shape_env) for part in quotient)
    return above, below, sum(int(term) for term in rest)


def _quotient(expression: Any) -> tuple[Any, Any] | None:
    """Integers whose quotient a traced float is, such that it is rounded at most once: ``a / (b * 7 / 7)``."""
    import sympy

    to_float, of_ints, of_floats = _functions("ToFloat", "IntTrueDiv", "FloatTrueDiv")
    one = sympy.Integer(1)
    if expression.is_number:
        return (sympy.Integer(int(expression)), one) if float(expression).is_integer() else None
    if isinstance(expression, to_float):
        return expression.args[0], one
    if isinstance(expression, of_ints):
        above, below = expression.args
    elif isinstance(expression, of_floats | sympy.Mul):
        parts = [_quotient(part) for part in expression.args]
        whole = [part[0] for part in parts if part is not None and part[1] == one]
        if len(whole) < len(parts):
            return None
        if isinstance(expression, sympy.Mul):
            return sympy.Mul(*whole), one
        above, below = whole
    else:
        return None
    ratio = sympy.cancel(above / below)
    return (ratio, one) if ratio.is_integer else (above, below)


def _number(expression: Any, environment: Any) -> Any:
    """A number of a trace, computed step by step: torch itself traces no product or sum of more than two numbers."""
    import sympy

    joins = {sympy.Add: operator.add, sympy.Mul: operator.mul, _functions("FloorDiv")[0]: operator.floordiv}
    if expression.is_Integer:
        return int(expression)
    if expression.func not in joins:
        return environment.create_symintnode(expression, hint=None)
    return functools.reduce(joins[expression.func], [_number(part, environment) for part in expression.args])


def remainder(number: torch.SymInt, divisor: Any) -> Any:
    """Returns what ``number % divisor`` is in a trace, in terms of the quotient if the number is made of remainders.

    Sizes that are padded to full windows are short then: ``n + (7 - n % 7) % 7`` is ``-7 * (-n // 7)``. torch would
    carry the remainders along in every size that follows. Seen in torch 2.13.
    """
    if isinstance(divisor, int) and divisor > 0:
        plain = _without_remainders(number.node.expr, divisor)
        if plain != number.node.expr:
            dividend = _number(plain, number.node.shape_env)
            return dividend - divisor * (dividend // divisor)
    return _modulo(number, divisor)


_modulo = torch.SymInt.__mod__


def _without_remainders(expression: Any, divisor: int) -> Any:
    """A sum that leaves the same remainder, without remainders for the same divisor and multiples of it."""
    import sympy

    kinds = _functions("Mod", "PythonMod")
    if not expression.has(*kinds):
        return expression
    terms = [term.as_coeff_Mul() for term in sympy.Add.make_args(expression)]
    same = [
        factor * (term.args[0] if isinstance(term, kinds) and term.args[1] == divisor else term)
        for factor, term in terms
    ]
    return sympy.Add(
        *[term for term in sympy.Add.make_args(sympy.expand(sympy.Add(*same))) if term.as_coeff_Mul()[0] % divisor]
    )


def without_remainder(number: Any) -> Any:
    """Returns a number of a trace in terms of the quotient, if it is a remainder. Seen in torch 2.13.

    As ``n % 2`` equals ``-n % 2``, the padded size ``n + n % 2`` becomes ``-2 * (-n // 2)``.
    """
    kinds = _functions("Mod", "PythonMod")
    expression = traced_expression(number)
    if not isinstance(expression, kinds) or not expression.args[1].is_Integer:
        return number
    dividend, divisor = (_number(part, number.node.shape_env) for part in expression.args)
    dividend = -dividend if divisor == 2 else dividend
    return dividend - divisor * (dividend // divisor)


def hold_equal(first: Any, second: Any) -> None:
    """Tells the trace that is running that two sizes are the same, so that they have one symbol.

    Args:
        first: A size.
        second: Another one; it has the same value in the trace.
    """
    torch._check(first == second)


def symbolic_square_root() -> Any:
    """Returns what a traced program calls for the square root of a size. Seen in torch 2.13."""
    return require(torch, "_sym_sqrt", "torch 2.13")


def always_holds(relation: Any, values: Mapping[Any, Any]) -> bool:
    """Returns whether a traced relation holds whatever the sizes are, as far as sympy and torch's ranges can tell.

    torch's own ``Min`` and ``Max`` decide less than those of sympy, which take their place. Seen in torch 2.13.

    Args:
        relation: A relation of sympy.
        values: For each symbol, an expression in symbols that are 0 or more.
    """
    import sympy
    from torch.utils._sympy import numbers, value_ranges

    plain = relation
    for torch_own, general in zip(_functions("Min", "Max"), (sympy.Min, sympy.Max), strict=True):
        plain = plain.replace(torch_own, general)
    plain = plain.xreplace(values)
    if plain.is_Relational:
        difference = plain.lhs - plain.rhs
        if difference.has(sympy.Min, sympy.Max):
            difference = _sums_inside(difference)
        plain = plain.func(_with_remainders(difference), 0)
    if plain in (sympy.true, sympy.false):
        return bool(plain)
    unlimited = require(value_ranges, "ValueRanges", "torch 2.13")(0, require(numbers, "int_oo", "torch 2.13"))
    try:
        found = require(value_ranges, "bound_sympy", "torch 2.13")(plain, dict.fromkeys(plain.free_symbols, unlimited))
    except (ArithmeticError, NotImplementedError, AssertionError, AttributeError, TypeError):
        return False
    return bool(found.lower == True)  # noqa: E712


def _sums_inside(expression: Any) -> Any:
    """An expression whose sums are inside of minimum and maximum: ``a - max(b, a - c)`` is ``min(a - b, c)``."""
    import sympy

    if expression.is_Add:
        extremes = [term for term in expression.args if term.as_coeff_Mul()[1].func in (sympy.Min, sympy.Max)]
        if extremes:
            term = max(extremes, key=sympy.count_ops)
            factor, extreme = term.as_coeff_Mul()
            kind = {sympy.Min: sympy.Max, sympy.Max: sympy.Min}[extreme.func] if factor < 0 else extreme.func
            return kind(*[sympy.expand(expression - term + factor * value) for value in extreme.args])
    return expression.func(*map(_sums_inside, expression.args)) if expression.args else expression


def _with_remainders(expression: Any) -> Any:
    """A sum of multiples of quotients in terms of remainders, which have limits: ``n - 2 * (n // 2)`` is ``n % 2``."""
    import sympy

    divide, modulo = _functions("FloorDiv", "PythonMod")

    def without_quotient(term: Any) -> Any:
        factor, quotient = term.as_coeff_Mul()
        if quotient.func is divide and factor.is_Integer and quotient.args[1].is_Integer:
            number, divisor = quotient.args
            common = sympy.gcd(factor, divisor)
            if common > 1:
                inner = divide(number, divisor // common)
                return factor // common * (inner - modulo(inner, common))
        return term

    return sympy.expand(sympy.Add(*map(without_quotient, sympy.Add.make_args(sympy.expand(expression)))))


def as_python(expression: Any, names: Mapping[Any, str]) -> str:
    """Returns a traced expression as Python code, in which functions of ``math`` go by their own names.

    Args:
        expression: An expression or a relation of sympy.
        names: Code for each symbol.

    Example:
        >>> import sympy
        >>> s = sympy.Symbol("s0", integer=True)
        >>> as_python(sympy.Le(s * 2, 8), {s: "batch"})
        '2 * batch <= 8'
    """
    from torch.utils._sympy import printers

    if expression.is_Relational:
        difference = expression.lhs - expression.rhs
        shorter = _with_remainders(difference)
        if shorter.count_ops() < difference.count_ops():
            expression = expression.func(shorter, 0)

    class Printer(require(printers, "PythonPrinter", "torch 2.13")):  # type: ignore[misc]
        def _print_Symbol(self, symbol: Any) -> str:
            return f"({names[symbol]})"

        def _print_ToFloat(self, value: Any) -> str:
            return f"float({self._print(value.args[0])})"

        def _print_PowByNatural(self, value: Any) -> str:
            base, exponent = value.args
            if exponent.is_number:
                return str(super()._print_PowByNatural(value))
            return f"pow({self._print(base)}, {self._print(exponent)})"  # a power whose size is checked

        def _helper_sqrt(self, value: Any) -> str:
            return f"sqrt({self._print(value)})"

    return ast.unparse(_Differences().visit(ast.parse(Printer().doprint(expression).replace("math.", ""), mode="eval")))


class _Differences(ast.NodeTransformer):
    """Writes ``-1 + a`` as ``a - 1``, and ``a + -1 * b`` as ``a - b``."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        for left, right in ((node.left, node.right), (node.right, node.left)) if isinstance(node.op, ast.Add) else ():
            match right:
                case ast.UnaryOp(op=ast.USub(), operand=operand):
                    return ast.BinOp(left, ast.Sub(), operand)
                case ast.BinOp(left=ast.UnaryOp(op=ast.USub(), operand=factor), op=ast.Mult(), right=rest):
                    is_one = isinstance(factor, ast.Constant) and factor.value == 1
                    return ast.BinOp(left, ast.Sub(), rest if is_one else ast.BinOp(factor, ast.Mult(), rest))
        return node
