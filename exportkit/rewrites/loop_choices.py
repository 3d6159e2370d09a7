"""Decisions in the body of a loop operator, such as ``if i % 2 == 0:``, as choices.

An iteration that decides by its number, or by the value of a tensor, computes both sides, and chooses what each name
gets.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Mapping, Sequence

from exportkit.rewrites.loop_names import names_of, stored_in
from exportkit.rewrites.loop_syntax import (
    HELPERS,
    added_element,
    appending,
    assigned,
    call,
    is_in_place,
    names_in,
    rebound,
    tuple_of,
    variable,
    variables,
)

_TEST = "_exportkit_test"  # begins the name of what a decision tests


def with_opposite_conditions(body: list[ast.stmt]) -> list[ast.stmt]:
    """Returns the body of a loop without ``if test: continue``: the statements after it are under the opposite."""
    for place, node in enumerate(body):
        match node:
            case ast.If(test, [*before, ast.Continue()], []):
                again = ast.If(test, before or [ast.Pass()], with_opposite_conditions(body[place + 1 :]))
                return [*body[:place], ast.copy_location(again, node)]
    return body


def with_appends_in_any_case(body: list[ast.stmt], number: int) -> list[ast.stmt]:
    """Returns the body of a loop whose decisions set what they append to lists, which is appended after them.

    ``if keeps_states: states.append(state)`` leaves nothing, an empty tuple, where the test does not hold.

    Args:
        body: The body.
        number: Makes the new names unique.
    """
    changed, count = list[ast.stmt](), 0
    for node in body:
        lists = _appends_of_decision(node, body) if isinstance(node, ast.If) else []
        named = {ast.dump(place): f"_exportkit_appended_{number}_{count + index}" for index, place in enumerate(lists)}
        count += len(named)
        before = [assigned(name, tuple_of([])) for name in named.values()]
        after = [appending(place, variable(named[ast.dump(place)])) for place in lists]
        again = _Appends(named).visit(node) if named else node
        changed += [*[ast.copy_location(each, node) for each in before], again]
        changed += [ast.copy_location(each, node) for each in after]
    return changed


def _appends_of_decision(decision: ast.If, body: Sequence[ast.stmt]) -> list[ast.expr]:
    """The lists to which some side of a decision appends once, and nothing else in the body does."""
    most = _most_appends([decision])
    everywhere = Counter(key for statement in body for key in map(ast.dump, _appended_in(statement)))
    inside = Counter(map(ast.dump, _appended_in(decision)))
    places = {ast.dump(place): place for place in _appended_in(decision)}
    return [place for key, place in places.items() if most[key] == 1 and everywhere[key] == inside[key]]


def _appended_in(node: ast.AST) -> list[ast.expr]:
    """What the statements inside of another one append to, as often as they do."""
    return [added[0] for each in ast.walk(node) if (added := added_element(each)) is not None]


def _most_appends(statements: Sequence[ast.stmt]) -> Counter[str]:
    """How often statements append to each list at most, given that decisions take one side; twice means often."""
    found = Counter[str]()
    for node in statements:
        if isinstance(node, ast.If):
            found += _most_appends(node.body) | _most_appends(node.orelse)
        else:
            times = 1 if isinstance(node, ast.Expr) else 2
            found.update({ast.dump(place): times for place in _appended_in(node)})
    return found


class _Appends(ast.NodeTransformer):
    """Sets names in place of appending to lists.

    Args:
        named: The names, by what is appended to.
    """

    def __init__(self, named: Mapping[str, str]) -> None:
        self._named = named

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        added = added_element(node)
        name = None if added is None else self._named.get(ast.dump(added[0]))
        return node if added is None or name is None else ast.copy_location(assigned(name, added[1]), node)


def is_choice(node: ast.If) -> bool:
    """Returns whether the sides of a decision do nothing but to set names and their items."""
    return all(map(_is_plain, (*node.body, *node.orelse)))


def is_chosen(node: ast.If) -> bool:
    """Returns whether a decision is one that `choosing` made: the body of an inner loop has them already."""
    names = names_in(node.test)
    return bool(names) and all(name.startswith(_TEST) or name == HELPERS for name in names)


def older_names(node: ast.If, own: set[str]) -> list[str]:
    """Returns the names that some side of a decision leaves as they were, or reads as they were, of those that it sets.

    Args:
        node: The decision.
        own: Names that the sides have of their own.
    """
    sides = [names_of(side) for side in (node.body, node.orelse)]
    stored = [name for name in stored_in([node]) if name not in own]
    return [name for name in stored if any(name in side.read or name not in side.sure for side in sides)]


def choosing(original: ast.If, changed: ast.If, number: int, own: set[str], targets: set[str]) -> list[ast.stmt]:
    """Returns statements that compute both sides of a decision, and choose, if it is one by a tensor.

    Args:
        original: The decision.
        changed: The same, with what stands for its parts in the body of an operator.
        number: Makes the new names unique.
        own: Names that the sides have of their own.
        targets: Names that the loop sets, whose numbers may be indices on one side only.
    """
    stored, older = [name for name in stored_in([original]) if name not in own], older_names(original, own)
    numbers = sorted(targets & names_in(original))
    saved = [*older, *numbers]
    test, before, first = f"{_TEST}_{number}", f"_exportkit_before_{number}", f"_exportkit_first_{number}"

    def side(statements: list[ast.stmt], holds: bool) -> list[ast.stmt]:
        guards = [
            assigned(name, call("only_if", variable(name), variable(test), ast.Constant(holds))) for name in numbers
        ]
        return [*guards, *copy.deepcopy(statements)]

    choice = [
        *side(changed.body, True),
        assigned(first, variables(stored)),
        assigned(saved, variable(before)),
        *side(changed.orelse, False),
        assigned(stored, call("chosen", variable(test), variable(first), variables(stored))),
        assigned(numbers, ast.Subscript(variable(before), ast.Slice(ast.Constant(len(older))), ast.Load())),
    ]
    again = ast.If(variable(test), changed.body, changed.orelse)
    in_place = [name for name in older if name not in rebound(original)]
    return [
        assigned(test, call("truth", changed.test)),
        assigned(before, variables(saved)),
        ast.If(call("is_tensor", variable(test)), choice, [again]),
        *[
            assigned(
                name, call("written", ast.Subscript(variable(before), ast.Constant(place), ast.Load()), variable(name))
            )
            for place, name in enumerate(older)
            if name in in_place
        ],
    ]


def _is_plain(node: ast.stmt) -> bool:
    """Whether a statement does nothing but to set names and their items."""
    if isinstance(node, ast.If):
        return is_choice(node)
    calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    if any(isinstance(function, ast.Attribute) and is_in_place(function.attr) for function in calls):
        return False
    return isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Pass)


class _Logic(ast.NodeTransformer):
    """Writes the parts of a test that Python would decide at once as calls that may leave them to the graph."""

    def __init__(self, targets: set[str]) -> None:
        self._targets = targets

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        first, *rest = node.values
        found: ast.expr = self.visit(first)
        for value in rest:
            name = "both" if isinstance(node.op, ast.And) else "either"
            found = call(name, found, *later([self.visit(value)], self._targets))
        return ast.copy_location(found, node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        if not isinstance(node.op, ast.Not):
            return node
        return ast.copy_location(call("opposite", self.visit(node.operand)), node)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        if len(node.ops) > 1:
            sides = [node.left, *node.comparators]
            parts = [ast.Compare(a, [op], [b]) for a, op, b in zip(sides, node.ops, sides[1:], strict=False)]
            return self.visit_BoolOp(ast.copy_location(ast.BoolOp(ast.And(), [*parts]), node))
        match node:
            case ast.Compare(value, [ast.In() | ast.NotIn() as relation], [ast.Tuple() | ast.List() as items]):
                found = call("is_one_of", value, ast.Tuple(items.elts, ast.Load()))
                return ast.copy_location(found if isinstance(relation, ast.In) else call("opposite", found), node)
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        return node  # inside of other expressions, these are values


class _Number(ast.Name):
    """The number of an iteration, which is to be an index."""


def later(values: Sequence[ast.expr], targets: set[str]) -> list[ast.expr]:
    """Returns functions that compute values, and what to call them with: the numbers of the iteration.

    Args:
        values: The values.
        targets: Names that the loop sets.
    """
    names = sorted(names_in(*values) & targets)
    arguments = ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])
    numbers: list[ast.expr] = [_Number(name, ast.Load()) for name in names]
    return [*[ast.Lambda(copy.deepcopy(arguments), value) for value in values], ast.Tuple(numbers, ast.Load())]


def with_tensors(test: ast.expr, targets: set[str]) -> ast.expr:
    """Returns a test so that tensors may take part in it: ``and``, ``or``, ``not``, ``in``, chained comparisons.

    Args:
        test: The test.
        targets: Names that the loop sets.
    """
    changed: ast.expr = _Logic(targets).visit(test)
    return changed
