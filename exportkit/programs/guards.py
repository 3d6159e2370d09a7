"""Reads what a trace took for granted about sizes, as conditions over the variables of the plan.

torch.export gives every dynamic axis a symbol. An axis whose size became a number or an expression in other symbols, a
range that became narrower, and a guard each are a condition. What follows from the plan, and from sizes of 2 and more,
which tracing assumes, is left out.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from exportkit._torch_compat.size_arithmetic import is_of_slices
from exportkit._torch_compat.symbolic_shapes import (
    ShapeGuard,
    always_holds,
    as_python,
    input_axes,
    shape_guards,
    traced_expression,
)
from exportkit.errors import PlanError
from exportkit.plan.conditions import SizeCondition
from exportkit.plan.expression import Expression
from exportkit.programs.call_check import SMALLEST
from exportkit.programs.program import TracedProgram
from exportkit.rewrites.model_code import EXPORTKIT, Line, is_model_code
from exportkit.rewrites.table import STRICT

# A limit that means none to torch.
_UNLIMITED = 2**31
_LONGEST_SHOWN = 200  # characters of a condition in an error

_CONVOLUTIONS = tuple([f"aten.{name}" for name in ("conv1d", "conv2d", "conv3d", "conv_transpose", "convolution.")])

Axis = tuple[str, int]


class TracedSizes:
    """The axes of a program's inputs as torch traced them: ints and expressions in symbols.

    Args:
        traced: The program.

    Attributes:
        guards: The guards of the trace.
    """

    def __init__(self, traced: TracedProgram) -> None:
        self._plan, self._program = traced.plan, traced.program
        self.guards, self._questions = shape_guards(traced.program), traced.questions
        self._is_strict = STRICT.name in traced.rules
        self._axes: dict[Axis, Any] = {}
        self._homes: dict[Any, Expression] = {}  # the plan's size of the axis that shows a symbol
        sizes = input_axes(traced.program)
        for node, path in traced.paths_by_node.items():
            for axis, size in enumerate(sizes[node]):
                self._axes[path, axis] = size
                planned = self._plan.by_path[path].sizes[axis]
                if getattr(size, "is_Symbol", False) and (size not in self._homes or planned.variable is not None):
                    self._homes[size] = planned
        self._names = {symbol: str(size) for symbol, size in self._homes.items()}
        self._values = {symbol: self._value(planned) for symbol, planned in self._homes.items()}
        self._texts: dict[Any, str] = {}  # of expressions

    def conditions(self) -> tuple[SizeCondition, ...]:
        """Returns the conditions under which the program may be used, those of the model's own code first."""
        stated = self.tightest((*self._of_guards(self.guards), *self._of_axes(), *self._of_ranges()))
        asked: dict[str, SizeCondition] = {}  # by the model's own code, maybe of a rewrite that asks torch in its place
        for condition in self._of_questions():
            if condition.own and (condition.gives_number or condition.text not in asked):
                asked[condition.text] = condition
        found = []
        for condition in stated:
            question = asked.get(condition.text, condition)
            is_own = condition.own or (not condition.place and question.own)
            found.append(replace(condition, own=is_own, gives_number=question.gives_number))
        return tuple(sorted(found, key=lambda condition: not condition.own))

    def tightest(self, conditions: Iterable[SizeCondition]) -> tuple[SizeCondition, ...]:
        """Returns each condition once, and the tightest one of several bounds of a variable."""
        found: dict[str, SizeCondition] = {}
        tightest: dict[tuple[str, bool], tuple[int, str]] = {}
        for condition in map(_plain, conditions):
            bounds = condition.bounds()
            if bounds is None:
                found.setdefault(condition.text, condition)
                continue
            name, least, most = bounds
            largest = self._plan.variable(name).maximum
            if most is not None and largest is not None and largest <= most:
                continue
            size, key = (least, (name, True)) if least is not None else (-(most or 0), (name, False))
            if key not in tightest or size > tightest[key][0]:
                if key in tightest:
                    del found[tightest[key][1]]
                found[condition.text] = condition
                tightest[key] = size, condition.text
        return tuple(found.values())

    def unstated(self) -> list[SizeCondition]:
        """Returns the conditions that the model's code, or a slice, asked for when others implied them."""
        return [condition for condition in self._of_questions() if condition.own or is_of_slices(condition.place)]

    def _of_questions(self) -> Iterator[SizeCondition]:
        for guard in self._questions:
            for condition in map(_plain, self._of_guards([guard])):
                yield replace(condition, gives_number=guard.gives_number)

    def of_lines(self, kind: Callable[[Line], bool]) -> frozenset[str]:
        """Returns the conditions that only lines of a kind ask for, of the model's own code."""
        places = defaultdict[str, list[bool]](list)
        for guard in (*self.guards, *self._questions):
            if self._is_own(guard) and guard.left.free_symbols <= self._homes.keys():
                places[_plain(self._condition(guard)).text].append(kind((guard.file, guard.line)))
        return frozenset(text for text, are_of_kind in places.items() if all(are_of_kind))

    def named(self, numbers: Mapping[str, Any]) -> dict[str, str]:
        """Returns traced numbers, by any key, as expressions over the variables of the plan."""
        return {key: as_python(number, self._names) for key, number in numbers.items()}

    def element_counts(self) -> list[str]:
        """Returns how many elements the tensors of the program have, as expressions over the variables of the plan.

        The weights of attention count as one, as a translated graph has it even where torch computes without it.
        Tensors whose size depends on values are left out.
        """
        found: dict[str, None] = {}
        for node in self._program.graph.nodes:
            value = node.meta.get("val")
            shapes: list[Sequence[Any]] = [value.shape] if isinstance(value, torch.Tensor) else []
            if node.target is torch.ops.aten.scaled_dot_product_attention.default:
                query, keys = (argument.meta["val"].shape for argument in node.args[:2])
                shapes.append((*query[:-1], keys[-2]))
            found.update(dict.fromkeys(count for shape in shapes if (count := self._count(shape))))
        return list(found)

    def kernel_products(self) -> list[str]:
        """Returns how many products the convolutions compute, as expressions over the variables of the plan.

        Those of convolutions with equally many results are one of them.
        """
        found = Counter[str]()
        for node in self._program.graph.nodes:
            name = str(node.target)
            if name.startswith(_CONVOLUTIONS):
                values, kernel = (argument.meta["val"].shape for argument in node.args[:2])
                count = self._count(values if "transpose" in name else node.meta["val"].shape)
                if count and all(isinstance(size, int) for size in kernel):
                    found[count] += math.prod(kernel[1:])
        return [f"{products} * {count}" for count, products in found.items()]

    def _count(self, shape: Sequence[Any]) -> str:
        """How many elements a tensor has, if that follows from sizes of inputs and from nothing else."""
        sizes = [size if expr is None else expr for size in shape for expr in [traced_expression(size)]]
        symbols = {symbol for size in sizes for symbol in getattr(size, "free_symbols", ())}
        if not symbols or not symbols <= self._homes.keys():
            return ""
        return " * ".join([str(size) if isinstance(size, int) else self._text(size) for size in sizes])

    def _text(self, size: Any) -> str:
        if size not in self._texts:
            self._texts[size] = f"({as_python(size, self._names)})"
        return self._texts[size]

    def fixed(self) -> frozenset[str]:
        """Returns the conditions that an axis became a number or depends on others: a graph takes nothing else."""
        return frozenset(condition.text for condition in self._of_axes())

    def unenforceable(self) -> list[ShapeGuard]:
        """Returns the guards of the model's own code that no sizes of inputs can be checked against."""
        return [g for g in self.guards if self._is_own(g) and not g.left.free_symbols <= self._homes.keys()]

    def _is_own(self, guard: ShapeGuard) -> bool:
        """Whether a line of the model may have asked. Strict tracing does not know some lines, which may be any.

        Otherwise, only the body of an operator such as scan is traced like this, which a rewrite made.
        """
        return is_model_code(guard.file) or (self._is_strict and not guard.file)

    def _of_guards(self, guards: Sequence[ShapeGuard]) -> Iterator[SizeCondition]:
        for guard in sorted(guards, key=lambda guard: not self._is_own(guard)):
            if guard.left.free_symbols <= self._homes.keys() and not self._is_implied(guard.left):
                yield self._condition(guard)

    def _condition(self, guard: ShapeGuard) -> SizeCondition:
        return SizeCondition(as_python(guard.left, self._names), _text_of(guard), self._is_own(guard))

    def _of_axes(self) -> Iterator[SizeCondition]:
        import sympy  # 0.4 s; loaded by then, as it is what torch traces with

        for (path, axis), size in self._axes.items():
            planned = self._plan.by_path[path].sizes[axis]
            if isinstance(size, int):
                if str(planned) != str(size):
                    yield SizeCondition(f"{planned} == {size}", *self._place(planned))
            elif self._homes.get(size) != planned and size.free_symbols <= self._homes.keys():
                text = as_python(size, self._names)
                if str(planned) != text and not self._is_implied(sympy.Eq(self._value(planned), size)):
                    yield SizeCondition(f"{planned} == {text}", *self._place(size))

    def _of_ranges(self) -> Iterator[SizeCondition]:
        for symbol in self._homes:
            allowed = self._program.range_constraints.get(symbol)
            bounds = () if allowed is None else ((symbol >= allowed.lower), (symbol <= allowed.upper))
            for relation in bounds:
                limit: Any = getattr(relation, "rhs", None)
                if getattr(limit, "is_Integer", False) and limit < _UNLIMITED and not self._is_implied(relation):
                    yield SizeCondition(as_python(relation, self._names), *self._place(symbol))

    def _place(self, size: Any) -> tuple[str, bool]:
        """The first line that asked something about a traced size, one of the model's own if there is any."""
        symbols: set[Any] = getattr(size, "free_symbols", set())
        own = [guard for guard in self.guards if guard.asked.free_symbols & symbols and self._is_own(guard)]
        return _text_of(own[0]) if own else "", bool(own)

    def _value(self, planned: Expression) -> Any:
        """A planned size over sympy's variables, each of which is the smallest size and something more."""
        import sympy

        sizes = {}
        for name in planned.variables():
            least = max(self._plan.variable(name).minimum, SMALLEST)
            sizes[name] = sympy.Symbol(name, integer=True, nonnegative=True) + least
        whole = sympy.sympify(planned.uncapped().evaluate(sizes))
        return whole if planned.cap is None else sympy.Min(whole, planned.cap)

    def _is_implied(self, relation: Any) -> bool:
        """Whether the plan, and sizes of 2 and more, leave no other possibility."""
        return always_holds(relation, self._values)


def _plain(condition: SizeCondition) -> SizeCondition:
    """The condition with the usual text, if it is a bound: ``n >= 10`` for ``n > 9``."""
    try:
        name, least, most = condition.bounds() or ("", None, None)
    except PlanError:  # a long one takes minutes in every trace: nothing else is tried
        text, length = condition.text, len(condition.text)
        raise PlanError(
            "The sizes that the exported graph would serve cannot be stated as a condition.",
            where=condition.place or f"{text[:100]}...",
            got=f"{length} characters" if length > _LONGEST_SHOWN else text,
            hint="compute the sizes in a simpler way, or observe calls of one length; the graph then serves these.",
        ) from None
    if not name:
        return condition
    return replace(condition, text=f"{name} >= {least}" if least is not None else f"{name} <= {most}")


def _text_of(guard: ShapeGuard) -> str:
    if Path(guard.file).is_relative_to(EXPORTKIT):  # a rewrite that asked in place of the model
        return ""
    return f"{guard.file.rpartition('site-packages/')[2]}:{guard.line}" if guard.file else ""
