"""Comprehensions, such as ``[f(y) for y in x]``, as loops that append to a list."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any


def with_loops_for_comprehensions(definition: ast.FunctionDef) -> Any:
    """Returns the source of a function with a loop before each statement that has comprehensions."""
    return _Comprehensions().visit(definition)


class _Comprehensions(ast.NodeTransformer):
    """Puts a loop that appends to a list before each statement with a comprehension, such as ``[f(y) for y in x]``."""

    def __init__(self) -> None:
        self._count = 0
        self._before: list[ast.stmt] | None = None  # the loops of the statement that is being visited

    def _hoisted(self, node: Any) -> Any:
        if any(isinstance(each, ast.NamedExpr) for each in ast.walk(node)):  # set before the comprehension, or after it
            return node
        around, self._before = self._before, []
        changed = self.generic_visit(node)
        before, self._before = self._before, around
        return [*before, changed]

    visit_Assign = visit_AnnAssign = visit_AugAssign = visit_Return = visit_Expr = _hoisted

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
        return self.generic_visit(node)

    def _as_loop(self, node: ast.ListComp | ast.GeneratorExp, whole: ast.expr, is_sum: bool = False) -> ast.expr:
        """Adds the loop, and returns the name of its result; the whole expression if it is more than a plain loop."""
        generator = node.generators[0]
        if len(node.generators) > 1 or generator.ifs or generator.is_async or _has_scopes(node.elt):
            return whole
        self._count += 1
        name = f"_exportkit_list_{self._count}"
        own = {each.id: f"{name}_{each.id}" for each in ast.walk(generator.target) if isinstance(each, ast.Name)}
        target, element = _Renamed(own).visit(generator.target), _Renamed(own).visit(node.elt)
        result = ast.Name(name, ast.Load())
        add: ast.stmt = ast.Expr(ast.Call(ast.Attribute(result, "append", ast.Load()), [element], []))
        if is_sum:
            add = ast.Assign([ast.Name(name, ast.Store())], ast.BinOp(result, ast.Add(), element))
        first: ast.expr = ast.Constant(0) if is_sum else ast.List([], ast.Load())
        made = ast.Assign([ast.Name(name, ast.Store())], first)
        loop = ast.For(target, generator.iter, [add], [], None)
        places = [ast.fix_missing_locations(ast.copy_location(each, whole)) for each in (made, loop)]
        self._before = [*(self._before or []), *places]
        return ast.copy_location(ast.Name(name, ast.Load()), whole)

    def _left(self, node: Any) -> Any:
        return node  # evaluated later, or perhaps never

    visit_Lambda = visit_IfExp = visit_BoolOp = visit_SetComp = visit_DictComp = _left


class _Renamed(ast.NodeTransformer):
    """Renames variables."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> Any:
        return ast.copy_location(ast.Name(self._names.get(node.id, node.id), node.ctx), node)


def _has_scopes(node: ast.AST) -> bool:
    """Whether something in an expression has names of its own, or sets a name."""
    kinds = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.NamedExpr, ast.Await, ast.Yield)
    return any(isinstance(each, kinds) for each in ast.walk(node))
