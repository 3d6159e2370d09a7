"""Arithmetic of symbolic sizes, in forms that torch can compare: integers, quotients, and sizes as they are given."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from exportkit._torch_compat import require
from exportkit._torch_compat.symbolic_shapes import always_holds, sympy_functions, traced_expression, with_remainders


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

    ranges = require(number.node.shape_env, "var_to_range")
    least = []
    for part in (above, below):
        expression = part if isinstance(part, int) else part.node.expr
        if isinstance(expression, int):
            least.append(expression)
        elif all(symbol in ranges for symbol in expression.free_symbols):
            least.append(require(value_ranges, "bound_sympy")(expression, ranges).lower)
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
            ranges = require(number.node.shape_env, "var_to_range")
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
    rounded = sympy_functions("RoundToInt", "FloorToInt", "CeilToInt", "TruncToInt")
    if quotient is not None and any(part.has(*rounded) for part in quotient):  # a graph has them as they were computed
        return None
    if quotient is None or not all(float(term).is_integer() for term in rest):
        return None
    above, below = (_number(part, number.node.shape_env) for part in quotient)
    return above, below, sum(int(term) for term in rest)


def _quotient(expression: Any) -> tuple[Any, Any] | None:
    """Integers whose quotient a traced float is, such that it is rounded at most once: ``a / (b * 7 / 7)``."""
    import sympy

    to_float, of_ints, of_floats = sympy_functions("ToFloat", "IntTrueDiv", "FloatTrueDiv")
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

    joins = {sympy.Add: operator.add, sympy.Mul: operator.mul, sympy_functions("FloorDiv")[0]: operator.floordiv}
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

    kinds = sympy_functions("Mod", "PythonMod")
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
    """Returns a number of a trace in terms of the quotient, if it is a remainder or the distance to a multiple.

    As ``n % 2`` equals ``-n % 2``, the padded size ``n + n % 2`` becomes ``-2 * (-n // 2)``. So does ``n + 2 - n % 2``
    in code that has asked whether ``n % 2`` is 0. Where it is, the model runs other code, which usually adds nothing;
    the size is right for both then. Seen in torch 2.13.
    """
    expression = traced_expression(number)
    found = None if expression is None else _in_quotients(expression, number.node.shape_env)
    return number if found is None else found


def subtracted_from(number: torch.SymInt, other: Any) -> Any:
    """Returns what ``other - number`` is in a trace, see `without_remainder`."""
    expression, found = traced_expression(number), None
    if isinstance(other, int) and isinstance(expression, sympy_functions("Mod", "PythonMod")):
        found = _in_quotients(other - expression, number.node.shape_env)
    return _subtracted_from(number, other) if found is None else found


_subtracted_from = torch.SymInt.__rsub__


def _in_quotients(expression: Any, environment: Any) -> Any:
    """A number made of remainders, computed from quotients instead; None for any other expression.

    A remainder that is known not to be 0 is ``n % k = n + k + k * (-n // k)``, which would be ``k`` for multiples.
    """
    import sympy

    kinds = sympy_functions("Mod", "PythonMod")
    if not expression.has(*kinds, *sympy_functions("FloorDiv")):
        return None
    found = with_remainders(expression)
    if isinstance(found, kinds) and found.args[1].is_Integer:
        dividend, divisor = (_number(part, environment) for part in found.args)
        dividend = -dividend if divisor == 2 and always_holds(found.args[0] >= 0, {}) else dividend
        return dividend - divisor * (dividend // divisor)
    (quotient,) = sympy_functions("FloorDiv")
    remainders = [part for part in found.atoms(*kinds) if part.args[1].is_Integer]
    known = {part: part.args for part in remainders if _is_known_to_remain(part, environment)}
    if not known:
        return None
    replaced = found.xreplace({part: n + k + k * quotient(-n, k) for part, (n, k) in known.items()})
    return _number(sympy.expand(replaced), environment)


def _is_known_to_remain(remainder: Any, environment: Any) -> bool:
    """Whether the code that is traced has asked whether a remainder is 0, and it is not."""
    import sympy

    (modulo,) = sympy_functions("Mod")
    left = modulo(*remainder.args)
    for guard in require(environment, "guards"):
        relation = guard.expr
        if isinstance(relation, sympy.Ne | sympy.Gt | sympy.Lt) and relation.lhs - relation.rhs in (left, -left):
            return True
    return False


def views_as_given() -> tuple[Any, dict[str, Any]]:
    """Returns the attribute to replace, with its owner, so that a view of a contiguous tensor has the sizes given.

    torch splits axes one by one, so that the last size of ``x.view(batch, height, width, -1)`` is a quotient of what
    was there before. Sizes that are computed from it grow with each layer, and take minutes. Seen in torch 2.13.
    """
    import torch._prims_common as common
    import torch._refs as references

    original = require(references, "_reshape_view_helper_core_alg")
    is_contiguous = require(common, "is_contiguous_or_false")
    strides_for = require(common, "make_contiguous_strides_for")

    def view(values: torch.Tensor, shape: Sequence[Any], allow_copy: bool) -> Any:
        if is_contiguous(values):
            return torch.as_strided(values, shape, strides_for(shape))
        return original(values, shape, allow_copy)

    return references, {"_reshape_view_helper_core_alg": view}


def orders_of_products() -> tuple[Any, dict[str, Any]]:
    """Returns the attribute to replace, with its owner, so that the order of a product with ``einsum`` fixes no sizes.

    For three and more tensors, torch asks the package opt_einsum for the order if it is installed, which computes with
    sizes as numbers. Here it gets those of the trace: every order has the same result. Seen in torch 2.13.
    """
    import torch.backends.opt_einsum as backend
    from torch.fx.experimental import symbolic_shapes

    owner = require(backend, "m")  # the Python module, for which another object stands in
    package = require(owner, "get_opt_einsum")
    number = require(symbolic_shapes, "optimization_hint")

    def contract_path(equation: str, *tensors: torch.Tensor, optimize: Any) -> Any:
        shapes = [[number(size, fallback=1) for size in tensor.shape] for tensor in tensors]
        return package().contract_path(equation, *shapes, optimize=optimize, shapes=True)

    return owner, {"get_opt_einsum": lambda: SimpleNamespace(contract_path=contract_path)}


def slices_of_any_length() -> tuple[Any, dict[str, Any]]:
    """Returns the attribute to replace, with its owner, so that a slice may reach beyond a symbolic length, or not.

    For ``x[:, -6:]``, torch decides by the sizes of the example whether there are 6 elements. Seen in torch 2.13.
    """
    from torch._subclasses import fake_impls
    from torch.fx.experimental import symbolic_shapes

    original = require(fake_impls, "_compute_slice_index")
    known = symbolic_shapes.statically_known_true

    def place(size: Any, index: Any) -> Any:
        if not isinstance(size, torch.SymInt) or not isinstance(index, int) or known(abs(index) <= size):
            return original(size, index)
        return torch.sym_min(index, size) if index >= 0 else torch.sym_max(index + size, 0)

    return fake_impls, {"_compute_slice_index": place}


def is_of_slices(place: str, function: str = "slice") -> bool:
    """Returns whether a line of torch decides how long slices are. Seen in torch 2.13.

    Args:
        place: Its file, and maybe its number.
        function: The function that it belongs to, if known: the same file has what decides about broadcasting.
    """
    return "_subclasses/fake_impls.py" in place and "slice" in function
