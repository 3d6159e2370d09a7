"""Plain forms of loops: attributes, in-place methods and counters as local names, and what grows as lists."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import Any

from exportkit.rewrites.loop_choices import with_appends_in_any_case, with_opposite_conditions
from exportkit.rewrites.loop_elements import read_elements
from exportkit.rewrites.loop_growth import bunched_lists, early_end, grown_tensors, with_flag
from exportkit.rewrites.loop_names import names_of
from exportkit.rewrites.loop_syntax import (
    added_element,
    appending,
    as_statements,
    assigned,
    call,
    in_context,
    is_in_place,
    loaded,
    names_in,
    root_of,
    same,
    variable,
    walk,
)
from exportkit.rewrites.loop_whiles import PlainLoop, plain_while


def plain_loop(loop: ast.For | ast.While, number: int, by_values: bool = False) -> PlainLoop | None:
    """Returns the plain form of a loop; None for a ``while`` that is not known to have one.

    Args:
        loop: The loop, which stays as it is.
        number: Makes the new names unique.
        by_values: Whether a ``while`` that does not count to a limit ends by the values of tensors.
    """
    loop = _Appending().visit(copy.deepcopy(loop))
    found = PlainLoop(loop) if isinstance(loop, ast.For) else plain_while(loop, number, by_values)
    if found is None:
        return None
    found.loop.body = with_appends_in_any_case(with_opposite_conditions(found.loop.body), number)
    found.read = read_elements(found.loop, number)
    (_end_by_flag if found.is_unbounded else _end_early)(found, number)
    targets = names_in(found.loop.target)
    own = names_in(*found.loop.body, context=ast.Store) - names_of(found.loop.body).read
    rewriter = _Statements(targets, targets | own)
    found.loop.body = [each for statement in found.loop.body for each in as_statements(rewriter.visit(statement))]
    _name_places(found, number)
    found.grown = grown_tensors(found.loop, number)
    found.bunched = bunched_lists(found.loop, number)
    ast.fix_missing_locations(found.loop)
    if found.is_unbounded and (found.flag is None or found.adds):
        return None
    return found


def unbounded_loops(tree: ast.AST) -> Iterator[ast.While]:
    """Yields the ``while`` loops in some code that have a plain form only if they end by the values of tensors."""
    for node in ast.walk(tree):
        if isinstance(node, ast.While) and plain_loop(node, 0) is None and plain_loop(node, 0, True) is not None:
            yield node


def _end_early(found: PlainLoop, number: int) -> None:
    """Lets a loop that may end early change nothing after its end; a counter is kept as it is at the end."""
    counter, count, body = found.counter, f"_exportkit_count_{number}", found.loop.body
    if counter is not None:
        more = ast.BinOp(variable(counter), ast.Add(), found.loop.iter.args[-1])  # type: ignore[attr-defined]
        body = [*body, ast.copy_location(assigned(count, call("kept", more)), body[-1])]
    end = early_end(body, number)
    if end is None:
        return
    found.loop.body, found.flag, found.elements = end.body, end.flag, end.elements
    if counter is not None:
        found.targets[counter], found.counter = count, None


def nested_loops(loop: ast.For) -> ast.For | None:
    """Returns two loops over ranges, one of which is the whole body of the other, as one loop; None for others.

    Args:
        loop: The outer loop, which stays as it is.
    """
    match copy.deepcopy(loop):
        case ast.For(target, limits, [ast.For(inner, inner_limits, body, [])], []):
            changed = names_in(target) | names_in(inner) | names_in(*body, context=ast.Store)
            ends = any(isinstance(node, ast.Break) for node in walk(body))
            if ends or changed & names_in(inner_limits) or not (_is_range(limits) and _is_range(inner_limits)):
                return None
            both = call("nested", limits, inner_limits)
            made = ast.For(ast.Tuple([target, inner], ast.Store()), both, body, [], None)
            return ast.fix_missing_locations(ast.copy_location(made, loop))
    return None


def _is_range(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"


def keep_targets(found: PlainLoop, later: set[str], number: int) -> None:
    """Lets a loop keep what its target is in the last iteration.

    Args:
        found: The loop, unless it was a ``while``.
        later: Names that the code after the loop reads.
        number: Makes the new names unique.
    """
    body = found.loop.body
    if found.flag is not None and isinstance(body[0], ast.If):
        body = body[0].body
    targets = names_in(found.loop.target) - found.targets.keys()
    for name in sorted(targets & later) if found.counter is None else []:
        found.targets[name] = last = f"_exportkit_last_{number}_{name}"
        kept = ast.copy_location(assigned(last, call("kept", variable(name))), body[0])
        body.insert(0, ast.fix_missing_locations(kept))


def _end_by_flag(found: PlainLoop, number: int) -> None:
    """Lets a loop without a limit set a flag where it ends: at a ``break``, and where its test does not hold."""
    flag, body, test = f"_exportkit_ended_{number}", found.loop.body, found.test
    flagged = with_flag(body, flag)
    if test is not None:
        found.test = ast.copy_location(ast.UnaryOp(ast.Not(), test), test)
        last = ast.copy_location(assigned(flag, found.test), body[-1])
        goes_on = ast.copy_location(ast.UnaryOp(ast.Not(), variable(flag)), last)
        body = [*body, last] if flagged is None else [*flagged, ast.copy_location(ast.If(goes_on, [last], []), last)]
    elif flagged is not None:
        body = flagged
    else:
        return
    found.loop.body, found.flag = body, flag


class _Appending(ast.NodeTransformer):
    """Writes each statement that adds one element to a list, such as ``items += [x]``, as ``items.append(x)``."""

    def _changed(self, node: Any) -> Any:
        added = added_element(node)
        return node if added is None else ast.copy_location(appending(*added), node)

    visit_AugAssign = visit_Assign = visit_Expr = _changed

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        return node  # a function inside is left alone


class _Statements(ast.NodeTransformer):
    """Writes statements that change a tensor in place as ones that assign a new tensor.

    Args:
        targets: The names that the loop sets.
        own: These, and the names that an iteration sets before it reads them.
    """

    def __init__(self, targets: set[str], own: set[str]) -> None:
        self._targets, self._own = targets, own

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        base = self._changed_in_place(node.value)
        return node if base is None else _reassigned(base, node.value, node)

    def visit_Assign(self, node: ast.Assign) -> ast.stmt | list[ast.stmt]:
        base = self._changed_in_place(node.value)
        if base is None:
            return node
        changed = _reassigned(base, node.value, node)
        if len(node.targets) == 1 and same(node.targets[0], base):
            return changed
        return [changed, ast.copy_location(ast.Assign(node.targets, loaded(base)), node)]

    def _changed_in_place(self, value: ast.expr) -> ast.expr | None:
        """The tensor that ``tensor.mul_(x).add_(y)`` changes, if it is older than the iteration."""
        found = False
        while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and is_in_place(value.func.attr):
            value, found = value.func.value, True
        is_older = isinstance(value, ast.Attribute) or (
            isinstance(value, ast.Name) and value.id not in self._own and value.id != "self"
        )
        return value if found and is_older else None

    def visit_If(self, node: ast.If | ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        node.test = self._test(node.test)
        return node

    visit_IfExp = visit_If

    def _test(self, test: ast.expr) -> ast.expr:
        """``if i`` as ``if i != 0``, and ``if 0 < i`` as ``if i > 0``."""
        swapped = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE, ast.Eq: ast.Eq}
        match test:
            case ast.Name(name) if name in self._targets:
                test = ast.Compare(test, [ast.NotEq()], [ast.Constant(0)])
            case ast.UnaryOp(ast.Not(), ast.Name(name) as value) if name in self._targets:
                test = ast.Compare(value, [ast.Eq()], [ast.Constant(0)])
            case ast.Compare(ast.Constant() as left, [relation], [ast.Name(name) as right]) if (
                name in self._targets and type(relation) in swapped
            ):
                test = ast.Compare(right, [swapped[type(relation)]()], [left])
            case ast.BoolOp(_, values):
                test.values = [self._test(value) for value in values]
        return test

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        return node  # a function inside is left alone


def _reassigned(base: ast.expr, value: ast.expr, place: ast.stmt) -> ast.stmt:
    """``tensor = tensor.clone().mul_(x)`` in place of ``tensor.mul_(x)``."""
    target, inner = in_context(base, ast.Store()), value
    while isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.value is not base:
        inner = inner.func.value
    if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
        inner.func.value = ast.Call(ast.Attribute(base, "clone", ast.Load()), [], [])
    return ast.copy_location(ast.Assign([target], value), place)


# Attributes, and items with constant keys


def _name_places(found: PlainLoop, number: int) -> None:
    """Puts local names in place of attributes and items that the body changes, where that is the same."""
    body = found.loop.body
    stored = names_in(found.loop, context=ast.Store)
    stores = [node for node in walk(body) if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)]
    items = {node.value.id for node in stores if isinstance(node.value, ast.Name)}
    for node in [each for statement in body for each in ast.walk(statement)]:
        place = _changed_place(node)
        if place is None or ast.dump(loaded(place)) in [ast.dump(each) for each in found.places.values()]:
            continue
        root = root_of(place)
        if (
            not isinstance(root, ast.Name)
            or root.id in stored
            or (isinstance(place, ast.Subscript) and root.id in items)
        ):
            continue
        found.places[f"_exportkit_place_{number}_{len(found.places)}"] = loaded(place)
    for name, place in [*found.places.items()]:
        again = _Places(name, ast.dump(place))
        changed: list[Any] = [again.visit(copy.deepcopy(statement)) for statement in body]
        if _is_used_otherwise(place, changed):
            del found.places[name]
        else:
            body = changed
    found.loop.body = body


def _changed_place(node: ast.AST) -> ast.expr | None:
    """The attribute, or the item with a constant key, that a part of the body sets or changes."""
    match node:
        case ast.Attribute(ctx=ast.Store()):
            return node
        case ast.Subscript(ast.Attribute() as value, ctx=ast.Store()):
            return value
        case ast.Call(ast.Attribute((ast.Attribute() | ast.Subscript(ast.Name(), ast.Constant())) as value, "append")):
            return value
    return None


def _is_used_otherwise(place: ast.expr, body: list[ast.stmt]) -> bool:
    """Whether a body uses an object as a whole, an attribute or item of which has a local name."""
    root = root_of(place)
    parts = [node for node in walk(body) if isinstance(node, ast.Attribute | ast.Subscript)]
    named = [n for n in parts if isinstance(n, ast.Attribute) or isinstance(n.slice, ast.Constant)]
    known = {id(node.value) for node in named}
    return any(ast.dump(node) == ast.dump(root) and id(node) not in known for node in walk(body))


class _Places(ast.NodeTransformer):
    """Puts a name in place of an attribute or item.

    Args:
        name: The name.
        place: What it stands for, as ``ast.dump`` writes it.
    """

    def __init__(self, name: str, place: str) -> None:
        self._name, self._place = name, place

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Attribute | ast.Subscript) and ast.dump(loaded(node)) == self._place:
            return ast.copy_location(ast.Name(self._name, node.ctx), node)
        changed: ast.AST = self.generic_visit(node)
        return changed
