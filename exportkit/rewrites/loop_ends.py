"""Loops that end early, by ``break`` or by the test of a ``while``, as loops whose last iterations change nothing."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from exportkit.rewrites.loop_syntax import added_element, appending, assigned, names_in, variable


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
    flagged = _with_flag(body, flag)
    if flagged is None:
        return None
    goes_on = ast.If(ast.UnaryOp(ast.Not(), variable(flag)), flagged, [])
    lists = [appending(variable(name), variable(each.name)) for name, each in elements.items()]
    return EarlyEnd([ast.copy_location(statement, body[0]) for statement in (goes_on, *lists)], flag, elements)


def _with_flag(body: list[ast.stmt], flag: str) -> list[ast.stmt] | None:
    """The body with a flag that is set instead of ``if test: break``, after which nothing is done."""
    for place, node in enumerate(body):
        match node:
            case ast.If(test, [*before, ast.Break() as end], rest):
                after = [*rest, *body[place + 1 :]]
                is_set = ast.copy_location(assigned(flag, ast.Constant(True)), end)
                again = ast.If(test, [*before, is_set], _with_flag(after, flag) or after)
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
