"""Numbers that a trace reads from tensors, such as how many values a mask selects: unknown in the trace."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch

from exportkit._torch_compat import require
from exportkit._torch_compat.symbolic_shapes import SYMBOLIC


def depends_on_values(condition: Any) -> bool:
    """Returns whether a traced condition or number depends on values of tensors, not on sizes alone.

    Seen in torch 2.13.
    """
    from torch.fx.experimental import symbolic_shapes

    if not isinstance(condition, SYMBOLIC):
        return isinstance(condition, torch.Tensor)
    return bool(require(symbolic_shapes, "has_free_unbacked_symbols")(condition))


def size_in_trace(size: torch.SymInt) -> int:
    """Returns the size that stands for a symbolic one while a trace runs. Seen in torch 2.13."""
    return int(require(size.node, "hint"))


def is_counted(size: Any) -> bool:
    """Returns whether a size comes from values, even if the trace has since replaced it. Seen in torch 2.13."""
    first = require(size.node, "_expr") if isinstance(size, torch.SymInt) else None
    return any(str(symbol).startswith("u") for symbol in getattr(first, "free_symbols", ()))


def sizes_that_follow() -> list[tuple[Any, dict[str, Any]]]:
    """Returns the attributes to replace, each with its owner, so that the length of a slice may become known later.

    While it traces ``x[:, :n]``, torch has no bounds for a number ``n`` that comes from data, so the length is a symbol
    of its own. When it goes through the program again, checks have given ``n`` bounds, and the length follows from
    ``n``; torch would expect another symbol. Seen in torch 2.13.
    """
    import sympy
    from torch.fx.experimental import symbolic_shapes
    from torch.utils import _pytree

    original = require(symbolic_shapes, "rebind_unbacked")

    def follows(symbol: Any, value: Any) -> bool:
        found = require(value.node, "_expr") if isinstance(value, torch.SymInt) else None
        if found is None or isinstance(found, sympy.Symbol | sympy.Piecewise):
            return found is not None and found == symbol
        return bool(found.free_symbols)

    def rebind(environment: Any, node: Any, result: Any) -> None:
        opened = node.meta.get("unbacked_bindings") or {}
        kept = {symbol: path for symbol, path in opened.items() if not follows(symbol, _pytree.key_get(result, path))}
        if len(kept) < len(opened):
            node = SimpleNamespace(op=node.op, target=node.target, meta={**node.meta, "unbacked_bindings": kept})
        original(environment, node, result)

    return [(symbolic_shapes, {"rebind_unbacked": rebind})]


def questions_about_sizes() -> tuple[type, str]:
    """Returns the class and the name of its method that decides about sizes in a trace. Seen in torch 2.13."""
    from torch.fx.experimental import symbolic_shapes

    environment = require(symbolic_shapes, "ShapeEnv")
    require(environment, "evaluate_expr")
    require(environment, "guard_or_defer_runtime_assert")
    return environment, "evaluate_expr"


def as_if_many(environment: Any, question: Any) -> Any:
    """Returns the answer to a question about a count for all counts of 2 and more, and asserts that it is the answer.

    Args:
        environment: The object whose method is asked, see `questions_about_sizes`.
        question: An expression of sympy.

    Returns:
        The answer; None if it differs between counts of 2 and more, or is not known to be the same.
    """
    import sympy

    count, apart = _counted_relation(question)
    if count not in require(environment, "size_like") or sympy.degree(apart, count) != 1:
        return None
    is_equation = isinstance(question, sympy.Eq | sympy.Ne)
    (equal,) = sympy.solve(apart, count)
    if apart.free_symbols != {count}:  # a product with another size, which is 0 if the count is
        if equal != 0 or not is_equation:
            return None
        answer, others = (sympy.true if isinstance(question, sympy.Ne) else sympy.false), [0]
    elif equal >= 2 and not (is_equation and not equal.is_integer):
        return None
    else:
        answer = question.subs(count, 2)
        others = [small for small in (0, 1) if question.subs(count, small) != answer]
    for small in others:
        environment.guard_or_defer_runtime_assert(sympy.Ne(count, small), "the number of selected values")
    return answer


def _counted_relation(question: Any) -> tuple[Any, Any]:
    """The one count that a relation is about, and the difference of its sides; None twice for other questions."""
    import sympy

    if not isinstance(question, sympy.core.relational.Relational):
        return None, None
    apart = sympy.expand(question.lhs - question.rhs)
    counts = [symbol for symbol in question.free_symbols if str(symbol).startswith("u")]
    return (counts[0], apart) if len(counts) == 1 and counts[0] in apart.free_symbols else (None, None)


def is_data_dependent(error: BaseException | None) -> bool:
    """Returns whether a trace failed because the model decides by the values of tensors."""
    return hasattr(error, "cond") or "data-dependent" in str(error) or "DataDependent" in type(error).__name__


def value_error() -> type[Exception]:
    """Returns the error that torch raises in a trace for a decision by values of tensors. Seen in torch 2.13."""
    from torch.fx.experimental import symbolic_shapes

    return require(symbolic_shapes, "GuardOnDataDependentSymNode")  # type: ignore[no-any-return]


def at_most(number: Any, limit: Any) -> Any:
    """Returns a size that a trace read from a tensor, promising that it lies between 0 and a limit.

    Seen in torch 2.13.
    """
    check = require(torch, "_check")
    check(number >= 0)
    check(number <= limit)
    return number


UNRECORDED_PATH_TEXT = "no recorded call takes another branch in "  # how the message of such an assertion begins


def asserted(condition: torch.Tensor, message: str) -> None:
    """Lets the trace that is running assert that a condition on values holds. Seen in torch 2.13."""
    require(torch, "_assert_async")(condition, message)


def number_asserted(condition: torch.SymBool) -> None:
    """Lets the trace that is running take a condition on numbers for granted, and assert it.

    torch divides bounds as floats, and raises if a quotient is rounded up, as for ``128 * rows == count``. Counts of
    elements therefore get a bound that floats hold exactly. Seen in torch 2.13.
    """
    from torch.utils._sympy import value_ranges

    environment, most = condition.node.shape_env, 2**52
    ranges = require(environment, "var_to_range")
    for symbol in condition.node.expr.free_symbols & ranges.keys():
        if most < ranges[symbol].upper < sys.maxsize:
            limited = require(value_ranges, "ValueRanges")(ranges[symbol].lower, most)
            require(environment, "_update_var_to_range")(symbol, limited)
    torch._check(condition)


def at_least(number: Any, least: Any) -> Any:
    """Returns a size of a trace, promising that it is at least a given size. Seen in torch 2.13."""
    require(torch, "_check")(number >= least)
    return number


def answer_for_some(condition: torch.SymBool) -> bool | None:
    """Returns what a condition on how many values there are is for all counts of 1 and more, unlike for 0.

    Returns:
        The answer; None if the condition is about something else. Seen in torch 2.13.
    """
    import sympy

    question, environment = condition.node.expr, condition.node.shape_env
    count, apart = _counted_relation(question)
    if count is None:
        return None
    if isinstance(question, sympy.Eq | sympy.Ne):  # of a product with sizes, too
        return None if apart.is_Add else isinstance(question, sympy.Ne)
    if apart.free_symbols != {count} or count not in require(environment, "size_like"):
        return None
    for_none, *for_some = (bool(question.subs(count, number)) for number in (0, 1, 2, 2**40))
    is_linear = sympy.degree(apart, count) == 1
    return for_some[0] if is_linear and len(set(for_some)) == 1 and for_none != for_some[0] else None
