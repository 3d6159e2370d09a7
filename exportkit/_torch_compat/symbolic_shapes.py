"""Symbolic sizes: what torch.export calls them, and the guards it recorded on them."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from exportkit._torch_compat import require

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)  # the classes of numbers in a trace
SYMBOL_NAME = re.compile(r"\b[su]\d+\b")  # of a size, or of a number that comes from the values of tensors


def is_counted_in_loop(size: Any) -> bool:
    """Returns whether a size, or a limit of a slice, comes from values of tensors, in the body of a loop operator.

    torch compiles the body, and answers this question there for the shape of a tensor only, which has to be one that
    any number leads to. Seen in torch 2.13.
    """
    return has_counted_size(torch.empty(size % 7 + 1, device="meta"))


def has_counted_size(tensor: torch.Tensor) -> bool:
    """Returns whether a size of a tensor comes from values; also in code that torch compiles. Seen in torch 2.13."""
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

    return has_free_unbacked_symbols(tensor)


def is_same(size: Any, other: Any) -> bool:
    """Returns whether two sizes are known to be equal; also in code that torch compiles. Seen in torch 2.13."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(size == other))


def has_static_value(size: Any) -> bool:
    """Returns whether a size is a number, also in code that torch.compile traces. Seen in torch 2.13."""
    from torch.fx.experimental import symbolic_shapes

    return bool(symbolic_shapes.has_static_value(size))


def source_names(values: Any) -> list[str]:
    """Returns what torch.export's messages call the leaves of ``kwargs``, in torch's order. Seen in torch 2.13."""
    import torch._export.non_strict_utils as module
    import torch.utils._pytree as pytree

    name_of = require(module, "key_path_to_source")
    leaves = require(pytree, "tree_leaves_with_path")
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

    allowed = require(_sympy.value_ranges, "ValueRanges")
    infinite = require(_sympy.numbers, "int_oo")
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
        gives_number: Whether the code got a number for what follows from sizes, by which it may decide anything.
    """

    asked: Any
    left: Any
    file: str
    line: int
    gives_number: bool = False

    def numbers(self) -> set[float]:
        """Returns the numbers in the relation as the code asked for it."""
        return {float(atom) for atom in self.asked.atoms() if getattr(atom, "is_number", False)}


def shape_guards(program: torch.export.ExportedProgram) -> list[ShapeGuard]:
    """Returns the guards on sizes that torch recorded while it traced a program. Seen in torch 2.13."""
    environment, found = _environment(program), []
    for guard in require(environment, "guards") if environment is not None else ():
        found.append(ShapeGuard(guard.expr, guard.expr.xreplace(environment.replacements), *_place(guard.sloc)))
    return found


class Question(NamedTuple):
    """What code asked about sizes in a trace.

    Attributes:
        relation: What it learned.
        gives_number: Whether it got a number for what follows from sizes.
        file: File of the line that asked; empty if unknown.
        line: Its number.
    """

    relation: Any
    gives_number: bool
    file: str
    line: int


def relation_answered(question: Any, answer: Any) -> tuple[Any, bool] | None:
    """Returns the relation that the answer to a question of a trace states, and whether the answer is a number.

    Args:
        question: An expression of sympy.
        answer: Its value.

    Returns:
        The relation; None if there is nothing to state. Seen in torch 2.13.
    """
    import sympy

    if getattr(question, "is_Relational", False):
        return (question if answer else ~question), False
    if getattr(question, "free_symbols", None) and getattr(answer, "is_Number", False):
        return sympy.Eq(question, answer, evaluate=False), True
    return None


def answered_questions(program: torch.export.ExportedProgram, questions: Iterable[Question]) -> tuple[ShapeGuard, ...]:
    """Returns what a trace was asked about sizes, also what torch knew by then, in the form of guards.

    Args:
        program: The program.
        questions: What was asked.
    """
    environment = _environment(program)
    if environment is None:
        return ()
    replacements = environment.replacements
    return tuple(
        [
            ShapeGuard(
                asked.relation, asked.relation.xreplace(replacements), asked.file, asked.line, asked.gives_number
            )
            for asked in questions
        ]
    )


def forget_pending_sizes(program: torch.export.ExportedProgram) -> None:
    """Forgets sizes by values that a translation of the program has left: the next one would look for them in vain.

    Seen in torch 2.13.
    """
    environment = _environment(program)
    if environment is not None:
        require(environment, "pending_fresh_unbacked_symbols").clear()


def _environment(program: torch.export.ExportedProgram) -> Any:
    """The symbols of a program; None if it has none."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                return size.node.shape_env
    return None


def sympy_functions(*names: str) -> tuple[Any, ...]:
    """Returns the functions of torch in expressions of sympy. Seen in torch 2.13."""
    from torch.utils._sympy import functions

    return tuple(require(functions, name) for name in names)


def traced_expression(value: Any) -> Any:
    """Returns the sympy expression of a number that was traced symbolically; None for any other value.

    Seen in torch 2.13.
    """
    return value.node.expr if isinstance(value, SYMBOLIC) else None


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


def line_of_strict_trace(environment: Any) -> tuple[str, int]:
    """Returns the file and the line of the model that strict tracing has come to. Seen in torch 2.13.

    Args:
        environment: The symbols of the trace.
    """
    return _place(require(environment, "_get_sloc")())


def hold_equal(first: Any, second: Any) -> None:
    """Tells the trace that is running that two sizes are the same, so that they have one symbol.

    Args:
        first: A size.
        second: Another one; it has the same value in the trace.
    """
    torch._check(first == second)


def symbolic_square_root() -> Any:
    """Returns what a traced program calls for the square root of a size. Seen in torch 2.13."""
    return require(torch, "_sym_sqrt")


def always_holds(relation: Any, values: Mapping[Any, Any]) -> bool:
    """Returns whether a traced relation holds whatever the sizes are, as far as sympy and torch's ranges can tell.

    torch's own ``Min`` and ``Max`` decide less than those of sympy, which take their place. Seen in torch 2.13.

    Args:
        relation: A relation of sympy.
        values: For each symbol, an expression in symbols that are 0 or more.
    """
    return _always_holds(relation, tuple(values.items()))


@functools.lru_cache(maxsize=2**12)  # a trace, its audits and the translation ask the same, and sympy is slow
def _always_holds(relation: Any, values: tuple[tuple[Any, Any], ...]) -> bool:
    import sympy
    from torch.utils._sympy import numbers, value_ranges

    plain = relation
    for torch_own, general in zip(sympy_functions("Min", "Max"), (sympy.Min, sympy.Max), strict=True):
        plain = plain.replace(torch_own, general) if plain.has(torch_own) else plain
    plain = plain.xreplace(dict(values))
    if plain.is_Relational:
        difference = plain.lhs - plain.rhs
        if difference.has(sympy.Min, sympy.Max):
            difference = _sums_inside(difference)
        plain = plain.func(with_remainders(difference), 0)
    if plain in (sympy.true, sympy.false):
        return bool(plain)
    unlimited = require(value_ranges, "ValueRanges")(0, require(numbers, "int_oo"))
    try:
        found = require(value_ranges, "bound_sympy")(plain, dict.fromkeys(plain.free_symbols, unlimited))
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


def with_remainders(expression: Any) -> Any:
    """Returns a sum of multiples of quotients in terms of remainders: ``n - 2 * (n // 2)`` is ``n % 2``."""
    import sympy

    divide, modulo = sympy_functions("FloorDiv", "PythonMod")

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
        shorter = with_remainders(difference)
        if shorter.count_ops() < difference.count_ops():
            expression = expression.func(shorter, 0)

    class Printer(require(printers, "PythonPrinter")):  # type: ignore[misc]
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
