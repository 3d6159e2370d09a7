"""Helpers to read and write the source of loops: queries on a syntax tree, and short names for its nodes."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence

import torch

IS_IDLE = "_exportkit_is_idle"  # whether an iteration changes nothing; None if all of them count
ITERATIONS = {"range", "enumerate", "zip", "reversed"}
HELPERS = "_exportkit_loops"  # the name under which the source finds `loop_helpers.Helpers`


def variable(name: str) -> ast.Name:
    """Returns a variable that is read."""
    return ast.Name(name, ast.Load())


def variables(names: Sequence[str], context: ast.expr_context | None = None) -> ast.Tuple:
    """Returns a tuple of variables, which are read unless another context is given."""
    context = context or ast.Load()
    return ast.Tuple([ast.Name(name, context) for name in names], context)


def tuple_of(values: Sequence[ast.expr]) -> ast.Tuple:
    """Returns a tuple."""
    return ast.Tuple([*values], ast.Load())


def assigned(target: str | list[str], value: ast.expr) -> ast.Assign:
    """Returns the assignment of a value to a variable, or to a tuple of them."""
    place = variables(target, ast.Store()) if isinstance(target, list) else ast.Name(target, ast.Store())
    return ast.Assign([place], value)


def helper(name: str) -> ast.Attribute:
    """Returns a function of `loop_helpers.Helpers`."""
    return ast.Attribute(variable(HELPERS), name, ast.Load())


def call(name: str, *arguments: ast.expr) -> ast.Call:
    """Returns a call of a function of `loop_helpers.Helpers`."""
    return ast.Call(helper(name), [*arguments], [])


def appending(target: ast.expr, element: ast.expr, method: str = "append") -> ast.Expr:
    """Returns the statement that adds an element to a list."""
    return ast.Expr(ast.Call(ast.Attribute(loaded(target), method, ast.Load()), [element], []))


def added_element(statement: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    """Returns the list to which a statement adds one element, and the element; None for other statements."""
    match statement:
        case (
            ast.Expr(ast.Call(ast.Attribute(place, "append"), [element], []))
            | ast.Expr(ast.Call(ast.Attribute(place, "extend"), [ast.List([element])], []))
            | ast.AugAssign(place, ast.Add(), ast.List([element]))
        ) if not isinstance(element, ast.Starred):
            return place, element
        case ast.Assign([place], ast.BinOp(left, ast.Add(), ast.List([element]))) if same(
            place, left
        ) and not isinstance(element, ast.Starred):
            return place, element
    return None


def as_statements(found: ast.AST | list[ast.stmt]) -> list[ast.stmt]:
    """Returns what an `ast.NodeTransformer` made of a statement as a list."""
    return found if isinstance(found, list) else [found]  # type: ignore[list-item]


def loaded(node: ast.expr) -> ast.expr:
    """Returns a copy of a name, attribute or item that is read."""
    return in_context(node, ast.Load())


def in_context(node: ast.expr, context: ast.expr_context) -> ast.expr:
    """Returns a copy of a name, attribute or item in another context."""
    again = copy.deepcopy(node)
    if isinstance(again, ast.Name | ast.Attribute | ast.Subscript):
        again.ctx = context
    return again


def same(one: ast.expr, other: ast.expr) -> bool:
    """Returns whether two expressions are the same, read or set."""
    return ast.dump(loaded(one)) == ast.dump(loaded(other))


def base(node: ast.expr) -> ast.expr:
    """Returns what a subscript of subscripts is taken of."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node


def root_of(node: ast.expr) -> ast.expr:
    """Returns what ``a.b[c].d`` begins with."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node


def names_in(*nodes: ast.AST, context: type[ast.expr_context] = ast.expr_context) -> set[str]:
    """Returns the names in some nodes: all of them, or those in one context, such as ``ast.Store``."""
    names = [each for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name)]
    return {name.id for name in names if isinstance(name.ctx, context)}


def parameters_in(arguments: ast.arguments) -> set[str]:
    """Returns the names of the parameters of a function."""
    return {each.arg for each in ast.walk(arguments) if isinstance(each, ast.arg)}


def rebound(*nodes: ast.AST) -> set[str]:
    """Returns the names that some nodes set as such: ``x[0] = 1`` and ``x += 1`` may change what a name stands for."""
    found = [each for node in nodes for each in ast.walk(node)]
    changing = {id(each.target) for each in found if isinstance(each, ast.AugAssign)}
    names = [each for each in found if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
    return {name.id for name in names if id(name) not in changing}


def walk(statements: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """Yields all nodes in some statements."""
    for statement in statements:
        yield from ast.walk(statement)


def holds(node: ast.expr | ast.stmt, line: int) -> bool:
    """Returns whether a node has a line."""
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def counter_of(loop: ast.For) -> tuple[str | None, ast.expr]:
    """Returns the name that counts the iterations one by one, None if there is none, and where it starts."""
    match loop.target, loop.iter:
        case ast.Name(name), ast.Call(ast.Name("range"), [_], []):
            return name, ast.Constant(0)
        case ast.Name(name), ast.Call(ast.Name("range"), [start, _] | [start, _, ast.Constant(1)], []):
            return name, start
        case ast.Tuple([ast.Name(name), *_]), ast.Call(ast.Name("enumerate"), [_], []):
            return name, ast.Constant(0)
        case ast.Tuple([ast.Name(name), *_]), ast.Call(ast.Name("enumerate"), [_, start], []):
            return name, start
    return None, ast.Constant(0)


def is_in_place(name: str) -> bool:
    """Returns whether a method of this name changes a tensor in place."""
    return name.endswith("_") and not name.endswith("__") and hasattr(torch.Tensor, name)
