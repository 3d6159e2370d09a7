"""Which names statements may read before they set them, which they set in any case, and which a loop carries along."""

from __future__ import annotations

import ast
import types
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from exportkit.rewrites.loop_syntax import base, names_in, parameters_in, walk

_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_LEAVES = (ast.Return, ast.Raise, ast.Break, ast.Continue)


class Names(NamedTuple):
    """What some statements do with names.

    Attributes:
        read: The names that they may read before they set them.
        sure: The names that are set after them in any case.
    """

    read: set[str]
    sure: set[str]


def names_of(body: Iterable[ast.stmt], known: Iterable[str] = ()) -> Names:
    """Returns what statements do with names.

    Args:
        body: The statements.
        known: Names that are set before them.
    """
    read, sure = set[str](), {*known}
    for statement in body:
        found = _of_statement(statement, sure)
        read |= found.read
        sure = found.sure
    return Names(read, sure)


def _of_statement(node: ast.stmt, known: set[str]) -> Names:
    match node:
        case ast.If(test, body, orelse):
            sides = [names_of(side, known) for side in (body, orelse)]
            going_on = [found.sure for found, side in zip(sides, (body, orelse), strict=True) if not _ends(side)]
            read = (_loads(test) - known).union(*(found.read for found in sides))
            return Names(read, set.intersection(*going_on) if going_on else known)
        case ast.For(target, iterated, body, orelse):
            inside = known | names_in(target)
            read = (_loads(iterated) - known).union(*(names_of(part, inside).read for part in (body, orelse)))
            return Names(read, inside)
        case ast.While(test, body, orelse):
            return Names((_loads(test) - known).union(*(names_of(part, known).read for part in (body, orelse))), known)
        case ast.With(items, body):
            read = set[str]().union(*(_loads(item.context_expr) for item in items)) - known
            targets = names_in(*(item.optional_vars for item in items if item.optional_vars is not None))
            found = names_of(body, known | targets)
            return Names(read | found.read, found.sure)
        case ast.Try(body, handlers, orelse, final):
            parts = [body, *(handler.body for handler in handlers), orelse, final]
            return Names(set[str]().union(*(names_of(part, known).read for part in parts)), known)
        case ast.FunctionDef(name, arguments, body):
            return Names(names_of(body, parameters_in(arguments)).read - known, known | {name})
        case ast.AugAssign(ast.Name(name), _, value):
            return Names((_loads(value) | {name}) - known, known | {name})
    return Names(_loads(node) - known, known | names_in(node, context=ast.Store))


def _ends(side: Sequence[ast.stmt]) -> bool:
    return bool(side) and isinstance(side[-1], _LEAVES)


def _loads(node: ast.AST) -> set[str]:
    """The names that an expression or a simple statement reads, but for variables of its own."""
    match node:
        case ast.Name(name, ast.Load()):
            return {name}
        case ast.Lambda(arguments, body):
            return (_loads(body) - parameters_in(arguments)) | _loads(arguments)
    inside = set[str]().union(*(_loads(child) for child in ast.iter_child_nodes(node)))
    if isinstance(node, _Comprehension):
        return (inside - names_in(*(each.target for each in node.generators))) | _loads(node.generators[0].iter)
    return inside


def names_of_code(code: types.CodeType) -> set[str]:
    """Returns the global names and attributes that code uses, functions inside of it included."""
    inside = [names_of_code(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return {*code.co_names}.union(*inside)


def uses_in(body: Sequence[ast.stmt]) -> Counter[str]:
    """Returns how often statements use each name."""
    return Counter(node.id for node in walk(body) if isinstance(node, ast.Name))


def stored_in(body: Sequence[ast.stmt]) -> list[str]:
    """Returns the names that statements set, or items of what they stand for, each once."""
    found = dict[str, None]()
    for node in walk(body):
        place = base(node) if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) else node
        if isinstance(place, ast.Name) and (place is not node or isinstance(place.ctx, ast.Store)):
            found[place.id] = None
    return list(found)


def carried(
    definition: ast.FunctionDef, original: ast.stmt, loop: ast.For, around: Sequence[ast.stmt], needed: set[str]
) -> list[str]:
    """Returns the names that an iteration of a loop leaves to the next one, or to the code after it.

    Args:
        definition: The function.
        original: The loop in the function.
        loop: The loop in its plain form.
        around: The loops around it, outermost first.
        needed: Names that are needed after the loop in any case.
    """
    inside = {id(node) for node in ast.walk(original)}
    outer = around[0] if around else None
    after = set(needed)
    for node in ast.walk(definition):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in inside:
            is_later = node.lineno > (original.end_lineno or 0)
            if is_later or (outer is not None and outer.lineno <= node.lineno):
                after.add(node.id)
    targets = names_in(loop.target)
    after |= names_of(loop.body, targets).read
    return [name for name in stored_in(loop.body) if name in after and name not in targets]


def read_after(body: Sequence[ast.stmt], loop: ast.stmt) -> set[str] | None:
    """Returns the names that the code after a loop may read before it sets them; None if the loop is not in the body.

    Args:
        body: Statements.
        loop: The loop, at any depth in them.
    """
    for place, node in enumerate(body):
        rest = body[place + 1 :]
        if node is loop:
            return names_of(rest).read
        for name in ("body", "orelse", "finalbody", "handlers"):
            inner = getattr(node, name, None)
            parts = [each.body for each in inner] if name == "handlers" and inner else [inner] if inner else []
            for part in parts:
                found = read_after(part, loop) if isinstance(part, list) else None
                if found is not None:
                    again = [node] if isinstance(node, ast.For | ast.While) else []
                    return found | names_of([*again, *rest]).read
    return None
