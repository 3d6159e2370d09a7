"""Plain forms of ``while`` loops: one that counts to a limit is a ``for`` loop; others may go by values of tensors."""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass, field
from typing import Any

from exportkit.rewrites.loop_bodies import belongs
from exportkit.rewrites.loop_elements import ReadElement
from exportkit.rewrites.loop_growth import Bunched, Element, Grown, with_break
from exportkit.rewrites.loop_syntax import added_element, call, names_in, same, variable, walk


@dataclass
class PlainLoop:
    """A loop in its plain form.

    Attributes:
        loop: The loop.
        places: Attributes and items that the body sets, by the local names that stand for them in the loop.
        grown: Tensors that grow.
        bunched: Lists to which every iteration adds several elements.
        counter: The loop's counter, if it was a ``while``; it has a value after the loop.
        targets: The names for what the loop's target is after it, by those of the target.
        elements: What the iterations add to lists before the loop ends, by the names of the lists, if it may end early.
        flag: The name of a flag that is set where the loop ends early.
        read: Elements of lists that iterations read, while each of them adds one.
        is_unbounded: Whether only the flag ends it; it is set at the end of an iteration, or after a ``break``.
        test: What an unbounded loop tests before its first iteration, if it does.
    """

    loop: ast.For
    places: dict[str, ast.expr] = field(default_factory=dict)
    grown: list[Grown] = field(default_factory=list)
    bunched: list[Bunched] = field(default_factory=list)
    counter: str | None = None
    targets: dict[str, str] = field(default_factory=dict)
    elements: dict[str, Element] = field(default_factory=dict)
    flag: str | None = None
    read: list[ReadElement] = field(default_factory=list)
    is_unbounded: bool = False
    test: ast.expr | None = None

    @property
    def adds(self) -> bool:
        """Whether it adds to lists, or to tensors that grow, besides the lists of `appended`."""
        return bool(self.elements or self.grown or self.bunched or self.read)


def plain_while(loop: ast.While, number: int, by_values: bool) -> PlainLoop | None:
    """Returns the first step to the plain form of a loop; None if it has none.

    Args:
        loop: The loop.
        number: Makes the new names unique.
        by_values: Whether a loop that does not count to a limit ends by the values of tensors.
    """
    found = _counted(with_break(loop), number)
    return _unbounded(loop, number) if found is None and by_values else found


def _counted(loop: ast.While, number: int) -> PlainLoop | None:
    """A ``while`` that counts to a limit as a loop over a range; None for others.

    ``while i < n: ...; i += 1`` is ``for i in range(i, n, 1)``, ``while i > 0: ...; i -= 1`` likewise, and
    ``while len(items) < n: ...; items.append(x)`` is ``for length in range(len(items), n, 1)``.
    """
    match loop.test, loop.body[-1]:
        case (
            ast.Compare(ast.Name(name), [relation], [limit]),
            ast.AugAssign(ast.Name(counter), ast.Add() | ast.Sub() as sign, ast.Constant(int() as size)),
        ) if name == counter:
            ends_at: str | None = counter
            start: ast.expr = variable(name)
            step, rest = size if isinstance(sign, ast.Add) else -size, loop.body[:-1]
        case ast.Compare(ast.Call(ast.Name("len"), [ast.Name(items)], []) as start, [relation], [limit]), _:
            name, step, ends_at = f"_exportkit_length_{number}", 1, None
            found = _with_length(loop.body, items, name)
            if found is None or items in names_in(limit):
                return None
            rest = found
        case _:
            return None
    stored = names_in(*rest, context=ast.Store)
    used = names_in(limit)
    calls = [node for node in ast.walk(limit) if isinstance(node, ast.Call)]
    if not rest or loop.orelse or name in stored or used & {*stored, name} or not all(map(_is_size, calls)):
        return None
    if any(isinstance(node, ast.Continue) and belongs(node, loop) for node in walk(rest)):
        return None  # such an iteration does not count
    beyond = _beyond(relation, step)
    if beyond is None:
        return None
    if beyond:
        limit = ast.BinOp(limit, ast.Add(), ast.Constant(beyond))
    limits = [start, limit, ast.Constant(step)]
    made = ast.For(ast.Name(name, ast.Store()), ast.Call(variable("range"), limits, []), rest, [], None)
    return PlainLoop(ast.fix_missing_locations(ast.copy_location(made, loop)), counter=ends_at)


def _unbounded(loop: ast.While, number: int) -> PlainLoop | None:
    """A ``while`` without a limit."""
    if loop.orelse or (isinstance(loop.test, ast.Constant) and not loop.test.value):
        return None
    test = None if isinstance(loop.test, ast.Constant) else loop.test
    made = ast.For(ast.Name(f"_exportkit_turn_{number}", ast.Store()), call("turns"), loop.body, [], None)
    return PlainLoop(ast.fix_missing_locations(ast.copy_location(made, loop)), is_unbounded=True, test=test)


def _with_length(body: list[ast.stmt], items: str, length: str) -> list[ast.stmt] | None:
    """The body of a loop with a name for the length of a list to which each iteration adds one element; else None."""
    added = [added_element(statement) for statement in body]
    adding = [place for place, each in enumerate(added) if each is not None and same(each[0], variable(items))]
    if len(adding) != 1 or items in names_in(*body[: adding[0]], *body[adding[0] + 1 :], context=ast.Store):
        return None
    after = ast.BinOp(variable(length), ast.Add(), ast.Constant(1))
    changed: list[Any] = []
    for place, statement in enumerate(body):
        changed.append(_Lengths(items, after if place > adding[0] else variable(length)).visit(statement))
    return changed


class _Lengths(ast.NodeTransformer):
    """Puts an expression in place of the length of a list."""

    def __init__(self, items: str, length: ast.expr) -> None:
        self._items, self._length = items, length

    def visit_Call(self, node: ast.Call) -> Any:
        match node:
            case ast.Call(ast.Name("len"), [ast.Name(name)], []) if name == self._items:
                return ast.copy_location(copy.deepcopy(self._length), node)
        return self.generic_visit(node)


def _beyond(relation: ast.cmpop, step: int) -> int | None:
    """How far a range goes beyond the limit of a counter; None if the counter does not come to its limit."""
    match relation:
        case ast.Lt() if step > 0:
            return 0
        case ast.Gt() if step < 0:
            return 0
        case ast.LtE() if step > 0:
            return 1
        case ast.GtE() if step < 0:
            return -1
        case ast.NotEq() if abs(step) == 1:
            return 0
    return None


def _is_size(call: ast.Call) -> bool:
    """Whether a call reads a size, which no iteration changes."""
    match call.func:
        case ast.Name("len") | ast.Attribute(_, "size" | "dim"):
            return True
    return False
