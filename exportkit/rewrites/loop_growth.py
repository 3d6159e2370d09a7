"""What each iteration of a loop makes longer, and loops that end early.

Tensors grow by ``out = torch.cat([out, part])``, and lists by ``boxes += [x, y]``. Loops end early by ``break``, or by
the test of a ``while``.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from exportkit.rewrites.loop_names import uses_in
from exportkit.rewrites.loop_syntax import (
    added_element,
    appending,
    assigned,
    call,
    counter_of,
    names_in,
    same,
    variable,
    walk,
)

_OF_FUNCTION = {"super", "locals"}  # what means something else in a function inside
_CATS = {"cat", "concat", "concatenate"}


@dataclass
class Grown:
    """A tensor to which every iteration adds a slice, ``out = torch.cat([out, part], dim)``.

    Attributes:
        name: Its name.
        elements: The name of the list of the slices.
        dim: The axis.
        in_front: Whether slices are added in front.
        begins: Whether the first iteration begins it, whatever it was before.
    """

    name: str
    elements: str
    dim: ast.expr
    in_front: bool
    begins: bool


def grown_tensors(loop: ast.For, number: int) -> list[Grown]:
    """Returns the tensors to which every iteration of a loop adds a slice.

    The body changes: it adds the slices to lists.

    Args:
        loop: The loop.
        number: Makes the new names unique.
    """
    body, found = loop.body, list[Grown]()
    name, start = counter_of(loop)
    counter = name if isinstance(start, ast.Constant) and start.value == 0 else None
    for index, statement in enumerate(body):
        growth = _growth(statement, counter)
        if growth is None:
            continue
        tensor, element, dim, in_front, begins = growth
        if tensor in names_in(*body[:index], *body[index + 1 :], element):
            continue
        elements = f"_exportkit_grown_{number}_{len(found)}"
        found.append(Grown(tensor, elements, dim, in_front, begins))
        method = "appendleft" if in_front else "append"
        body[index] = ast.copy_location(appending(variable(elements), element, method), statement)
    return found


_Growth = tuple[str, ast.expr, ast.expr, bool, bool]


def _growth(statement: ast.stmt, counter: str | None) -> _Growth | None:
    """The name of a tensor that a statement adds a slice to, the slice, the axis, and where it begins."""
    match statement:
        case ast.Assign([ast.Name(name)], ast.IfExp(test, first, other)):
            return _begun(name, test, first, other, counter)
        case ast.If(test, [ast.Assign([ast.Name(name)], first)], [ast.Assign([ast.Name(again)], other)]) if (
            name == again
        ):
            return _begun(name, test, first, other, counter)
        case ast.Assign([ast.Name(name)], value):
            grown = _grown(name, value)
            return None if grown is None else (name, *grown, False)
    return None


def _begun(name: str, test: ast.expr, first: ast.expr, other: ast.expr, counter: str | None) -> _Growth | None:
    """``out = part if out is None else torch.cat([out, part])``, or the same ``if i == 0``."""
    match test:
        case ast.Compare(ast.Name(value), [ast.Is()], [ast.Constant(None)]) if value == name:
            is_first_iteration = False
        case ast.Compare(ast.Name(value), [ast.Eq()], [ast.Constant(0)]) if value == counter:
            is_first_iteration = True
        case ast.Compare(ast.Name(value), [ast.IsNot()], [ast.Constant(None)]) if value == name:
            first, other, is_first_iteration = other, first, False
        case ast.Compare(ast.Name(value), [ast.NotEq() | ast.Gt()], [ast.Constant(0)]) if value == counter:
            first, other, is_first_iteration = other, first, True
        case _:
            return None
    grown = _grown(name, other)
    return (name, *grown, is_first_iteration) if grown is not None and same(grown[0], first) else None


def _grown(name: str, value: ast.expr) -> tuple[ast.expr, ast.expr, bool] | None:
    match value:
        case ast.Call(ast.Attribute(ast.Name("torch"), cat), [ast.List(parts) | ast.Tuple(parts), *dims], options) if (
            cat in _CATS and len(parts) > 1
        ):
            dims = [*dims, *[option.value for option in options if option.arg in ("dim", "axis")]]
        case _:
            return None
    is_part = [isinstance(part, ast.Name) and part.id == name for part in parts]
    if is_part.count(True) != 1 or not (is_part[0] or is_part[-1]) or len(dims) > 1:
        return None
    dim = dims[0] if dims else ast.Constant(0)
    if not isinstance(dim, ast.Constant | ast.UnaryOp):
        return None
    rest = [part for part, is_grown in zip(parts, is_part, strict=True) if not is_grown]
    if len(rest) == 1:
        return rest[0], dim, is_part[-1]
    joined = ast.Call(ast.Attribute(variable("torch"), "cat", ast.Load()), [ast.List(rest, ast.Load()), dim], [])
    return joined, dim, is_part[-1]


@dataclass
class Bunched:
    """A list to which every iteration adds several elements.

    Attributes:
        name: Its name.
        elements: The name of the list of what each iteration adds.
    """

    name: str
    elements: str


def bunched_lists(loop: ast.For, number: int) -> list[Bunched]:
    """Returns the lists to which a loop's body adds more than one element, or not in a statement of its own.

    The body changes: it collects the elements in a list that each iteration makes, and adds them as one tensor.

    Args:
        loop: The loop.
        number: Makes the new names unique.
    """
    body, added, found = loop.body, dict[str, list[ast.stmt]](), list[Bunched]()
    uses = uses_in(body)
    for node in walk(body):
        match added_element(node), node:
            case ((ast.Name(items), _), ast.stmt() as statement) | (
                _,
                ast.AugAssign(ast.Name(items), ast.Add(), ast.List()) as statement,
            ):
                added.setdefault(items, []).append(statement)
    for items, statements in added.items():
        is_one = len(statements) == 1 and isinstance(statements[0], ast.Expr) and statements[0] in body
        if uses[items] != len(statements) or is_one:
            continue
        own, elements = (f"_exportkit_{kind}_{number}_{len(found)}" for kind in ("bunch", "bunches"))
        for node in walk(statements):
            if isinstance(node, ast.Name) and node.id == items:
                node.id = own
        made, add = assigned(own, ast.List([], ast.Load())), appending(variable(elements), call("bunch", variable(own)))
        first, last = body[0], body[-1]
        body.insert(0, ast.copy_location(made, first))
        body.append(ast.copy_location(add, last))
        found.append(Bunched(items, elements))
    return found


# Loops that end early, by ``break`` or by the test of a ``while``, as loops whose last iterations change nothing.


@dataclass(frozen=True)
class Element:
    """What the iterations of a loop that may end early add to a list.

    Attributes:
        name: The name for what an iteration adds.
        count: The name for how many iterations have added something.
    """

    name: str
    count: str


@dataclass(frozen=True)
class EarlyEnd:
    """How a loop ends early.

    Attributes:
        body: Its body, which changes nothing once the flag is set.
        flag: The name of a boolean that a ``break`` sets, and that is not set before the loop.
        elements: What its iterations add to lists, by the names of the lists.
    """

    body: list[ast.stmt]
    flag: str
    elements: dict[str, Element]


def without_returns(body: list[ast.stmt]) -> list[ast.stmt]:
    """Returns the body of a function with the ``return`` of a loop after the loop, which ends there.

    Args:
        body: The body. A loop with several of them, or before other code than one ``return``, stays as it is.
    """
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in walk(body)):
        return body
    for place, loop in enumerate(body):
        if not isinstance(loop, ast.For | ast.While):
            continue
        match body[place + 1 :]:
            case [ast.Return(ast.expr() as other) as last]:
                others, line = [other], last.lineno
            case [] if isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant):
                others, line = [], (loop.end_lineno or loop.lineno) + 1
            case _:
                continue
        leaves = [node for node in walk(loop.body) if isinstance(node, ast.Return | ast.Break)]
        returns = [node for node in leaves if isinstance(node, ast.Return)]
        for node in loop.body:
            match node:
                case ast.If(_, [*before, ast.Return(ast.expr() as value) as end]) if [end] == returns:
                    if (not others and len(leaves) > 1) or names_in(value, *others) & _OF_FUNCTION:
                        continue
                    flag = f"_exportkit_returned_{place}"
                    node.body = [*before, assigned(flag, ast.Constant(True)), ast.Break()]
                    if others:
                        sides = map(_function_of, [value, *others])
                        value = call("one_of_two", variable(flag), *sides, ast.Tuple([], ast.Load()))
                    first = ast.copy_location(assigned(flag, ast.Constant(False)), loop)
                    made = [first, loop, ast.copy_location(ast.Return(value), loop)]
                    for each in ast.walk(made[-1]):  # it reads what the loop leaves
                        if isinstance(each, ast.expr | ast.stmt):
                            each.lineno = each.end_lineno = line
                    return [*body[:place], *map(ast.fix_missing_locations, made)]
    return body


def _function_of(value: ast.expr) -> ast.Lambda:
    return ast.Lambda(ast.arguments([], [], None, [], [], None, []), value)


def with_break(loop: ast.While) -> ast.While:
    """Returns ``while i < n and test: ...`` as ``while i < n: ...`` that ends where the test does not hold.

    Args:
        loop: The loop. Others are returned as they are.
    """
    if not isinstance(loop.test, ast.BoolOp) or not isinstance(loop.test.op, ast.And):
        return loop
    values, counters = loop.test.values, names_in(loop.body[-1], context=ast.Store)
    limits = [value for value in values if isinstance(value, ast.Compare) and names_in(value.left) == counters]
    rest = [value for value in values if value not in limits]
    if len(limits) != 1 or not rest:
        return loop
    test = ast.UnaryOp(ast.Not(), ast.BoolOp(ast.And(), rest) if rest[1:] else rest[0])
    end = ast.copy_location(ast.If(test, [ast.Break()], []), loop.test)
    return ast.fix_missing_locations(ast.copy_location(ast.While(limits[0], [end, *loop.body], loop.orelse), loop))


def early_end(body: list[ast.stmt], number: int) -> EarlyEnd | None:
    """Returns how a loop ends early; None if it has no ``if test: break``, or cannot run all of its iterations.

    Args:
        body: The body of the loop, which stays as it is.
        number: Makes the new names unique.
    """
    kept = _with_elements(body, number)
    if kept is None:
        return None
    body, elements = kept
    flag = f"_exportkit_ended_{number}"
    flagged = with_flag(body, flag)
    if flagged is None:
        return None
    goes_on = ast.If(ast.UnaryOp(ast.Not(), variable(flag)), flagged, [])
    lists = [appending(variable(name), variable(each.name)) for name, each in elements.items()]
    return EarlyEnd([ast.copy_location(statement, body[0]) for statement in (goes_on, *lists)], flag, elements)


def with_flag(body: list[ast.stmt], flag: str) -> list[ast.stmt] | None:
    """Returns a body with a flag that is set instead of ``if test: break``, after which nothing is done.

    Args:
        body: The body, which stays as it is; None is returned if it has no such statement.
        flag: The name of the flag.
    """
    for place, node in enumerate(body):
        match node:
            case ast.If(test, [*before, ast.Break() as end], rest):
                after = [*rest, *body[place + 1 :]]
                is_set = ast.copy_location(assigned(flag, ast.Constant(True)), end)
                again = ast.If(test, [*before, is_set], with_flag(after, flag) or after)
                return [*body[:place], ast.copy_location(again, node)]
    return None


def _with_elements(body: list[ast.stmt], number: int) -> tuple[list[ast.stmt], dict[str, Element]] | None:
    """The body with names for what each iteration adds to lists; None if only some do, or if it reads the lists."""
    changed, found = list[ast.stmt](), dict[str, Element]()
    for node in body:
        match added_element(node):
            case ast.Name(name), element if name not in found:
                names = (f"_exportkit_{kind}_{number}_{len(found)}" for kind in ("element", "count"))
                found[name] = each = Element(*names)
                more = ast.BinOp(variable(each.count), ast.Add(), ast.Constant(1))
                new = (assigned(each.name, element), assigned(each.count, more))
                changed += [ast.copy_location(statement, node) for statement in new]
            case _:
                changed.append(node)
    rest = [each for node in changed for each in ast.walk(node)]
    adds = any(isinstance(each, ast.Attribute) and each.attr == "append" for each in rest)
    return None if adds or found.keys() & names_in(*changed) else (changed, found)
