"""Comprehensions, such as ``[f(y) for y in x]``, as loops that append to a list, and ``functools.reduce`` as a loop.

``x.unbind(1)``, ``x.split(lengths.tolist())`` and the like become lists that may have a symbolic length.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from typing import Any

from exportkit.rewrites.loop_syntax import ITERATIONS, appending, assigned, call, helper, parameters_in, variable

_LISTING = {"unbind", "chunk", "split", "tolist"}


def with_loops_for_comprehensions(definition: ast.FunctionDef) -> Any:
    """Returns the source of a function with a loop before each statement that has comprehensions."""
    return _Comprehensions().visit(definition)


class _Comprehensions(ast.NodeTransformer):
    """Puts a loop that appends to a list before each statement with a comprehension, such as ``[f(y) for y in x]``."""

    def __init__(self) -> None:
        self._count = 0
        self._before: list[ast.stmt] | None = None  # the loops of the statement that is being visited

    def _hoisted(self, node: Any, header: str = "") -> Any:
        """Puts the loops before a statement; of one that holds others, those of its header, which is evaluated once."""
        part = getattr(node, header) if header else node
        before: list[ast.stmt] = []
        if not any(isinstance(each, ast.NamedExpr) for each in ast.walk(part)):  # set before it, or after it
            around, self._before = self._before, before
            part = self.visit(part) if header else self.generic_visit(part)
            before, self._before = self._before, around
        if header:
            setattr(node, header, part)
            self.generic_visit(node)
        return [*before, node]

    visit_Assign = visit_AnnAssign = visit_AugAssign = visit_Return = visit_Expr = _hoisted

    def visit_For(self, node: ast.For) -> Any:
        return self._hoisted(node, "iter")

    def visit_If(self, node: ast.If) -> Any:
        return self._hoisted(node, "test")

    def visit_ListComp(self, node: ast.ListComp) -> Any:
        return self._as_loop(node, node) if self._before is not None else node

    def visit_Call(self, node: ast.Call) -> Any:
        match node:
            case ast.Call(ast.Name("list" | "tuple"), [ast.GeneratorExp() as given], []) if self._before is not None:
                return self._as_loop(given, node)
            case ast.Call(ast.Name("sum"), [ast.GeneratorExp() | ast.ListComp() as given], []) if (
                self._before is not None
            ):
                return self._as_loop(given, node, is_sum=True)
            case ast.Call(_, [_, _] | [_, _, _], []) if self._before is not None and _is_reduction(node):
                self.generic_visit(node)
                return self._as_reduction(node)
        return self.generic_visit(node)

    def _as_reduction(self, node: ast.Call) -> ast.expr:
        """Adds a loop for ``functools.reduce(f, items)``, and returns the name of its result."""
        self._count += 1
        name, each, rest, called = (f"_exportkit_{kind}_{self._count}" for kind in ("result", "item", "rest", "called"))
        function, items, *start = node.args
        first = [assigned(rest, items), *[assigned(name, value) for value in start]]
        if not start:
            unpacked = ast.Tuple([ast.Name(name, ast.Store()), ast.Starred(ast.Name(rest, ast.Store()))], ast.Store())
            first = [ast.Assign([unpacked], items)]
        iteration = ast.Call(variable(called), [variable(name), variable(each)], [])
        loop = ast.For(ast.Name(each, ast.Store()), variable(rest), [assigned(name, iteration)], [])
        self._put_before(node, assigned(called, function), *first, loop)
        return ast.copy_location(variable(name), node)

    def _put_before(self, whole: ast.expr, *statements: ast.stmt) -> None:
        places = [ast.fix_missing_locations(ast.copy_location(each, whole)) for each in statements]
        self._before = [*(self._before or []), *places]

    def _as_loop(self, node: ast.ListComp | ast.GeneratorExp, whole: ast.expr, is_sum: bool = False) -> ast.expr:
        """Adds the loop, and returns the name of its result; the whole expression if it is more than a plain loop."""
        generator = node.generators[0]
        if len(node.generators) > 1 or generator.ifs or generator.is_async or _has_scopes(node.elt):
            return whole
        generator.iter = self.visit(generator.iter)  # which is evaluated once
        self._count += 1
        name = f"_exportkit_list_{self._count}"
        own = {each.id: f"{name}_{each.id}" for each in ast.walk(generator.target) if isinstance(each, ast.Name)}
        target, element = _Renamed(own).visit(generator.target), _Renamed(own).visit(node.elt)
        longer = ast.BinOp(variable(name), ast.Add(), element)
        add = assigned(name, longer) if is_sum else appending(variable(name), element)
        first = ast.Constant(0) if is_sum else ast.List([], ast.Load())
        loop = ast.For(target, generator.iter, [add], [], None)
        self._put_before(whole, assigned(name, first), loop)
        return ast.copy_location(variable(name), whole)

    def _left(self, node: Any) -> Any:
        return node  # evaluated later, or perhaps never

    visit_Lambda = visit_IfExp = visit_BoolOp = visit_SetComp = visit_DictComp = _left


class _Renamed(ast.NodeTransformer):
    """Renames variables."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> Any:
        return ast.copy_location(ast.Name(self._names.get(node.id, node.id), node.ctx), node)


def _is_reduction(node: ast.Call) -> bool:
    """Whether a call is ``functools.reduce``; einops has a ``reduce``, too, which takes a tensor first."""
    called, first = ast.unparse(node.func), node.args[0]
    is_function = isinstance(first, ast.Lambda) or ast.unparse(first).startswith(("torch.", "operator."))
    return called == "functools.reduce" or (called == "reduce" and is_function)


def _has_scopes(node: ast.AST) -> bool:
    """Whether something in an expression has names of its own, or sets a name."""
    kinds = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.NamedExpr, ast.Await, ast.Yield)
    return any(isinstance(each, kinds) for each in ast.walk(node))


class SymbolicLists(ast.NodeTransformer):
    """Makes ``x.unbind(1)`` or ``x.tolist()`` a list that may have a symbolic length, wherever it stands.

    Args:
        definition: The function.

    Attributes:
        found: How many calls and assignments were changed.
    """

    def __init__(self, definition: ast.FunctionDef) -> None:
        self.found = 0
        self._numbers = _names_of_numbers(definition)

    def visit_For(self, node: ast.For) -> Any:
        """Makes what a loop runs over numbers that it computes with."""
        self.generic_visit(node)
        for each in ast.walk(node.iter):
            match each:
                case ast.Call(ast.Name(function), args) if function in ITERATIONS:
                    each.args = [self._of_numbers(arg) for arg in args]
        node.iter = self._of_numbers(node.iter)
        return node

    def _of_numbers(self, node: ast.expr) -> ast.expr:
        """A list of numbers that were read from a tensor, so that a loop over it computes with numbers."""
        is_name = isinstance(node, ast.Name) and node.id in self._numbers
        return ast.copy_location(call("tolist", node), node) if is_name else node

    def visit_Call(self, node: ast.Call) -> Any:
        """Makes a call of such a method a call of a helper."""
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in _LISTING:
            return node
        self.found += 1
        return ast.copy_location(ast.Call(helper(node.func.attr), [node.func.value, *node.args], node.keywords), node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        """Makes ``first, *rest = items`` an assignment of a part, which may have a symbolic length."""
        self.generic_visit(node)
        targets = getattr(node.targets[0], "elts", [])
        for place, target in enumerate(targets):
            if isinstance(target, ast.Starred) and len(node.targets) == 1:
                targets[place] = target.value
                counts = [ast.Constant(place), ast.Constant(len(targets) - place - 1)]
                node.value = ast.copy_location(call("starred", node.value, *counts), node.value)
                self.found += 1
        return node


def _names_of_numbers(definition: ast.FunctionDef) -> set[str]:
    """The names that stand for nothing but ``x.tolist()``."""
    found, stored = Counter[str](), Counter[str]()
    for node in ast.walk(definition):
        match node:
            case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)) if len(targets) == len(values):
                found.update(map(_name_of_numbers, targets, values))
            case ast.Assign([target], value):
                found.update([_name_of_numbers(target, value)])
            case ast.Name(name, ast.Store()):
                stored[name] += 1
    return {name for name in found if found[name] == stored[name]} - parameters_in(definition.args)


def _name_of_numbers(target: ast.expr, value: ast.expr) -> str:
    match target, value:
        case ast.Name(name), ast.Call(ast.Attribute(_, "tolist"), [], []):
            return name
    return ""
