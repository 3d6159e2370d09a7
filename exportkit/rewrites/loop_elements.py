"""Elements of the lists that a loop adds to, where an iteration reads them: ``states.append(cell(x, states[-1]))``.

The elements get names, which one iteration leaves to the next one.
"""

from __future__ import annotations

import ast
import copy
import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

from exportkit.rewrites.loop_names import uses_in
from exportkit.rewrites.loop_syntax import (
    added_element,
    appending,
    assigned,
    counter_of,
    is_in_place,
    names_in,
    variable,
    walk,
)
from exportkit.rewrites.symbolic_lists import SymbolicList

_MOST = 8  # how far back an iteration may read
_NOT_YET = "an element that a list does not have yet"  # code that uses it raises, as no branch may stand for it


@dataclass(frozen=True)
class ReadElement:
    """An element of a list that a loop adds to.

    Attributes:
        name: The name that it has in the loop.
        items: The name of the list.
        index: Where it is in the list before the loop.
        length: How long the list has to be then; None if it may have any length.
    """

    name: str
    items: str
    index: int
    length: ast.expr | None = None


def read_elements(loop: ast.For, number: int) -> list[ReadElement]:
    """Returns the elements that the iterations of a loop read of lists to which each of them adds one.

    The body changes: it reads and sets names for the elements.

    Args:
        loop: The loop.
        number: Makes the new names unique.
    """
    found, uses = list[ReadElement](), uses_in(loop.body)
    for items in _lists_of_one_more(loop.body):
        place = next(place for place, each in enumerate(loop.body) if _list_added_to(each) == items)
        reads = _Reads(items, loop, place, f"_exportkit_read_{number}_{items}")
        body = reads.replaced(loop.body)
        is_plain = uses[items] == len(reads.seen) + 1 and not _changes_elements(loop.body, reads)
        if not reads.found or not is_plain or items in _parameters(loop.body):
            continue
        loop.body[:] = [*body[:place], *_with_element(body[place], reads), *body[place + 1 :]]
        found += [reads.found[index] for index in sorted(reads.found)]
    return found


def _lists_of_one_more(body: list[ast.stmt]) -> list[str]:
    """The lists to which one statement of a body adds an element."""
    counts = Counter(_list_added_to(statement) for statement in body)
    return [items for items, count in counts.items() if items is not None and count == 1]


def _list_added_to(statement: ast.stmt) -> str | None:
    """The name of the list to which a statement adds an element; None for others."""
    match added_element(statement):
        case ast.Name(items), _:
            return items
    return None


def _with_element(statement: ast.stmt, reads: _Reads) -> list[ast.stmt]:
    """The statement that adds an element, after which the names stand for the elements that are as far back again."""
    last, added = -min(reads.found), added_element(statement)
    if last < 1 or added is None:
        return [statement]
    target, new_element = added
    names = [f"{reads.prefix}_{back}" for back in range(1, last + 1)]
    new = f"{reads.prefix}_new"
    moved = [assigned(older, variable(newer)) for newer, older in reversed([*itertools.pairwise(names)])]
    changed = [assigned(new, new_element), *moved, assigned(names[0], variable(new)), appending(target, variable(new))]
    return [ast.copy_location(each, statement) for each in changed]


def _changes_elements(body: list[ast.stmt], reads: _Reads) -> bool:
    """Whether a body changes an element of the list in place, which has another name in an operator."""
    aliases = set[str]()

    def is_element(node: ast.AST) -> bool:
        while isinstance(node, ast.Attribute | ast.Subscript | ast.Call) and not reads.is_read(node):
            node = node.func if isinstance(node, ast.Call) else node.value
        return reads.is_read(node) or (isinstance(node, ast.Name) and node.id in aliases)

    for node in walk(body):
        if isinstance(node, ast.Assign) and any(
            is_element(each) for each in (node.value, *getattr(node.value, "elts", ()))
        ):
            aliases |= names_in(*node.targets, context=ast.Store)
    for node in walk(body):
        match node:
            case ast.Call(ast.Attribute(receiver, method)) if is_in_place(method) and is_element(receiver):
                return True
            case ast.Subscript(place, _, ast.Store()) | ast.AugAssign(place) if is_element(place):
                return True
    return False


def _parameters(body: list[ast.stmt]) -> set[str]:
    """The names of parameters of functions in a body."""
    return {node.arg for node in walk(body) if isinstance(node, ast.arg)}


class _Reads(ast.NodeTransformer):
    """Puts names in place of the elements of a list, by where they are before the loop.

    Args:
        items: The list.
        loop: The loop.
        place: Where the statement is in the body that adds an element.
        prefix: What the names begin with.
    """

    def __init__(self, items: str, loop: ast.For, place: int, prefix: str) -> None:
        self._items, self._place, self.prefix = items, place, prefix
        self._counter, self._start = counter_of(loop)
        if self._counter in names_in(*loop.body, context=ast.Store) | _parameters(loop.body):
            self._counter = None
        self._ahead = 0  # how much longer the list is than the first number of the counter
        self._is_added = False  # whether the element of this iteration has been added
        self.seen = list[ast.Subscript]()
        self.found = dict[int, ReadElement]()

    def replaced(self, body: list[ast.stmt]) -> list[Any]:
        """Returns the statements with names in place of the elements."""
        for position, statement in enumerate(body):  # code that reads an element finds it in the list
            offsets = [self._offset(node) for node in ast.walk(statement) if self.is_read(node)]
            needed = [offset + 1 - (position > self._place) for offset in offsets if offset is not None]
            self._ahead = max(self._ahead, *needed, 0)
        changed = []
        for position, statement in enumerate(body):
            self._is_added = position > self._place
            changed.append(self.visit(copy.deepcopy(statement)))
        return changed

    def is_read(self, node: ast.AST) -> bool:
        """Returns whether this is an element of the list."""
        match node:
            case ast.Subscript(ast.Name(items), _, ast.Load()):
                return items == self._items
        return False

    def _offset(self, node: Any) -> int | None:
        """How far an element is from the one whose number is the counter; None if it is not counted like this."""
        match node.slice:
            case ast.Name(name) if name == self._counter:
                return 0
            case ast.BinOp(ast.Name(name), ast.Add() | ast.Sub() as sign, ast.Constant(int() as distance)) if (
                name == self._counter
            ):
                return distance if isinstance(sign, ast.Add) else -distance
        return None

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        if not self.is_read(node):
            return self.generic_visit(node)
        offset, length = self._offset(node), None
        match node.slice:
            case ast.Constant(int() as index) if index >= 0:
                return self._named(node, index, None)
            case ast.UnaryOp(ast.USub(), ast.Constant(int() as back)):
                pass
            case _ if offset is not None:
                back = self._ahead - offset + self._is_added
                length = ast.BinOp(self._start, ast.Add(), ast.Constant(self._ahead))
            case _:
                return node
        return self._named(node, -back, length) if 0 < back <= _MOST else node

    def _named(self, node: ast.Subscript, index: int, length: ast.expr | None) -> ast.expr:
        self.seen.append(node)
        ending = f"first_{index}" if index >= 0 else str(-index)
        for each in (index, *range(-1, index, -1)):  # an element further back was a later one before
            known = self.found.get(each)
            name = f"{self.prefix}_{ending if each == index else -each}"
            asked = length if each == index else None
            kept = asked if known is None or known.length is None else known.length
            self.found[each] = ReadElement(name, self._items, each, kept)
        return ast.copy_location(variable(self.found[index].name), node)


def element(items: Any, index: int, length: Any) -> Any:
    """Returns an element of a list as it is before a loop; a text if the first iterations add it.

    Args:
        items: The list.
        index: Where the element is.
        length: How long the list has to be so that this is the element which the loop reads; None for any length.
    """
    count = items.count if isinstance(items, SymbolicList) else len(items)
    if length is not None and (type(length) is not int or type(count) is not int or count != length):
        raise TypeError("a loop reads elements of a list by numbers that do not begin where the list ends")
    if index >= 0 and (isinstance(items, SymbolicList) or index >= count):
        raise TypeError("a loop reads an element from the start of a list, which may not be there before the loop")
    return items[index] if isinstance(items, SymbolicList) or -count <= index else _NOT_YET
