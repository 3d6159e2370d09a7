"""The statements in the body of a loop operator: they change no object, and leave to the graph what Python decides."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from exportkit.rewrites.loop_choices import choosing, is_choice, is_chosen, later, older_names, with_tensors
from exportkit.rewrites.loop_names import names_of, uses_in
from exportkit.rewrites.loop_syntax import (
    IS_IDLE,
    as_statements,
    assigned,
    call,
    helper,
    holds,
    loaded,
    names_in,
    parameters_in,
    variable,
    walk,
)
from exportkit.rewrites.loop_values import NOTHING
from exportkit.rewrites.model_code import only_raises

_RESULT = "_exportkit_result"  # the name of what a function returns
_OF_SLICES = {"sum", "mean", "amax", "amin", "max"}
_VIEWS = {"data", "T", "mT", "H", "mH", "real", "imag"}  # attributes of tensors
# Operators that a helper computes, by its name: a tensor rounds otherwise than a number of Python, or see the helper.
_HELPERS_OF = {
    **{ast.Pow: "power", ast.LShift: "shifted", ast.FloorDiv: "floored", ast.Mod: "remainder"},
    ast.MatMult: "product_of_matrices",
}


def body_statements(loop: ast.For, added: dict[int, str], kept: set[str]) -> list[ast.stmt]:
    """Returns the statements of a loop's body as ones that change no object.

    Numbers that the loop sets as its targets are tensors wherever they are not in an index.

    Args:
        loop: The loop, whose body changes, too.
        added: By the identity of the statement that adds to a list, the name that takes the element.
        kept: Names that have values before the body.
    """
    read = _read_names(loop.body) | _read_targets(loop.target, loop.iter)
    rewriter = _Statements(added, names_in(loop.target), kept, uses_in(loop.body), read)
    first, statements = loop.body[0], rewriter.visited(loop.body)
    return [*rewriter.begun(first), *statements]


def value_before(test: ast.expr, flag: str) -> list[ast.stmt]:
    """Returns statements that set a flag to a test before a loop, as its body does.

    Args:
        test: The test.
        flag: The name of the flag.
    """
    body: list[ast.stmt] = [ast.copy_location(assigned(flag, test), test)]
    rewriter = _Statements({}, set(), {flag}, uses_in(body), _read_names(body))
    return [assigned(IS_IDLE, ast.Constant(None)), *rewriter.visited(copy.deepcopy(body))]


def compute_both_sides(definition: ast.FunctionDef, lines: Collection[int]) -> bool:
    """Lets a function that the body of a loop calls compute both sides of decisions; returns whether it has any.

    Args:
        definition: The function, which changes.
        lines: Lines that decide by the values of tensors.
    """
    decisions = [
        node for node in ast.walk(definition) if isinstance(node, ast.If | ast.IfExp) and _is_in(node.test, lines)
    ]
    if not decisions:
        return False
    if any(isinstance(part, ast.Return) for node in decisions for part in ast.walk(node)):
        body = _with_one_return(definition.body)
        if body is None:
            return False
        definition.body = [*body, ast.copy_location(ast.Return(variable(_RESULT)), definition.body[-1])]
    body = definition.body
    kept = parameters_in(definition.args) | names_of(body).read
    rewriter = _Statements({}, set(), kept, uses_in(body), _read_names(body))
    decisions_of = _Decisions(lines, rewriter)
    statements = [each for statement in body for each in as_statements(decisions_of.visit(statement))]
    is_idle = ast.copy_location(assigned(IS_IDLE, ast.Constant(None)), body[0])
    definition.body = [is_idle, *rewriter.begun(body[0]), *statements]
    ast.fix_missing_locations(definition)
    return True


def _is_in(node: ast.expr, lines: Collection[int]) -> bool:
    return any(holds(node, line) for line in lines)


def _with_one_return(body: Sequence[ast.stmt]) -> list[ast.stmt] | None:
    """Statements that set a name instead of returning, where each way through them returns; None for others."""
    for place, node in enumerate(body):
        match node:
            case ast.Return(value):
                value = value or ast.Constant(None)
                return [*body[:place], ast.copy_location(assigned(_RESULT, value), node)]
            case ast.If(test, first, other) if any(isinstance(part, ast.Return) for part in ast.walk(node)):
                rest = body[place + 1 :]
                whole = [side if _ends(side) else [*side, *copy.deepcopy(rest)] for side in (first, other)]
                sides = [*map(_with_one_return, whole)]
                if sides[0] is None or sides[1] is None:
                    return None
                return [*body[:place], ast.copy_location(ast.If(test, sides[0], sides[1]), node)]
    return None


def _ends(side: Sequence[ast.stmt]) -> bool:
    return bool(side) and isinstance(side[-1], ast.Return)


class _Decisions(ast.NodeTransformer):
    """Rewrites the statements that decide in some lines as the body of a loop has them."""

    def __init__(self, lines: Collection[int], rewriter: _Statements) -> None:
        self._lines, self._rewriter = lines, rewriter

    def _changed(self, node: Any) -> Any:
        found = [part for part in ast.walk(node) if isinstance(part, ast.If | ast.IfExp)]
        return self._rewriter.visited([node]) if any(_is_in(part.test, self._lines) for part in found) else node

    visit_Assign = visit_AugAssign = visit_AnnAssign = visit_Return = visit_Expr = _changed

    def visit_If(self, node: ast.If) -> Any:
        return self._changed(node) if _is_in(node.test, self._lines) else self.generic_visit(node)


class _Statements(ast.NodeTransformer):
    """Rewrites statements.

    Args:
        added: See `body_statements`.
        targets: The names that the loop sets as its targets.
        kept: See `body_statements`.
        uses: How often the body uses each name.
        read: Names of numbers that are read from tensors.
    """

    def __init__(
        self, added: dict[int, str], targets: set[str], kept: set[str], uses: Counter[str], read: set[str]
    ) -> None:
        self._added, self._targets, self._kept, self._uses, self._read = added, targets, kept, uses, read
        self._compared: bool | None = None  # inside of a comparison of numbers: whether floats take part
        self._unset = set[str]()  # names that one side of a decision sets, and that may not be set before
        self._depth = 0  # of indices
        self._decisions = 0

    def begun(self, place: ast.stmt) -> list[ast.stmt]:
        """Returns what sets such names before the first statement: code that reads them sets them first."""
        names = sorted(self._unset - self._kept - self._targets)
        return [ast.copy_location(assigned(name, ast.Constant(NOTHING)), place) for name in names]

    def _own(self, node: ast.If) -> set[str]:
        """The names that only the sides of a decision use."""
        inside = uses_in([*node.body, *node.orelse])
        return {name for name, count in inside.items() if count == self._uses[name]} - self._kept

    def visited(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        return [each for statement in statements for each in as_statements(self.visit(statement))]

    def visit_If(self, node: ast.If) -> Any:
        return self.generic_visit(node) if is_chosen(node) else self._decided(node, self._own(node))

    def _decided(self, node: ast.If, own: set[str]) -> Any:
        if not is_choice(node):
            for side, passing in ((node.body, False), (node.orelse, True)):
                if only_raises(side):
                    return self._checked(node, passing)
            return self.generic_visit(node)
        self._decisions += 1
        number, original = self._decisions, copy.deepcopy(node)
        self._unset.update(older_names(node, own))
        test = self.visit(with_tensors(node.test, self._targets))
        changed = ast.If(test, self.visited(node.body), self.visited(node.orelse))
        return choosing(original, changed, number, own, self._targets)

    def visit_Assert(self, node: ast.Assert) -> Any:
        return self._checked(node, True)

    def _checked(self, node: ast.Assert | ast.If, passing: bool) -> Any:
        """A check that a graph makes, too: it goes on as if a tensor had passed."""
        test = ast.copy_location(
            call("checked", with_tensors(node.test, self._targets), ast.Constant(passing), variable(IS_IDLE)), node.test
        )
        node.test = test
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        sides = later([node.body, node.orelse], self._targets)
        return self.visit(ast.copy_location(call("one_of_two", with_tensors(node.test, self._targets), *sides), node))

    def visit_Name(self, node: ast.Name) -> Any:
        if self._depth or node.id not in self._targets or not isinstance(node.ctx, ast.Load):
            return node
        return ast.copy_location(call("plain", node), node)

    def _index(self, node: ast.Subscript) -> ast.expr:
        self._depth += 1
        index: ast.expr = self.visit(_index(node))
        self._depth -= 1
        return index

    def visit_Expr(self, node: ast.Expr) -> Any:
        name = self._added.get(id(node))
        self.generic_visit(node)
        if name is None or not isinstance(node.value, ast.Call):
            return node
        return ast.copy_location(assigned(name, node.value.args[-1]), node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        target = node.targets[0]
        match node:
            case ast.Assign([ast.Name()], ast.IfExp(test, first, other)):  # what is an index on one side only
                one, two = (ast.copy_location(ast.Assign(node.targets, value), node) for value in (first, other))
                return self._decided(ast.copy_location(ast.If(test, [one], [two]), node), set())
        if len(node.targets) > 1 or not isinstance(target, ast.Subscript):
            return self.generic_visit(node)
        value, whole = self.visit(node.value), target
        while True:  # a[i][j] = b sets a to a copy in which a[i] is a copy in which the item j is b
            inner = whole.value
            read = self.visit(copy.deepcopy(inner))
            read.ctx = ast.Load()
            value = call("put", read, self._index(whole), value)
            if not isinstance(inner, ast.Subscript):
                break
            whole = inner
        if not isinstance(inner, ast.Name):
            return self.generic_visit(node)
        return ast.copy_location(assigned(inner.id, value), node)

    def visit_Compare(self, node: ast.Compare) -> Any:
        """Leaves the number of an iteration as it is where it is compared with a constant, which may be decided.

        Numbers that are read from tensors are compared in the precision that they have in Python.
        """
        if self._has_read([node.left, *node.comparators]):
            parts = [*ast.walk(node)]
            divides = any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.Div) for part in parts)
            around = self._compared
            self._compared = divides or any(
                isinstance(part, ast.Constant) and isinstance(part.value, float) for part in parts
            )
            node.left, *node.comparators = map(self._wide, [node.left, *node.comparators])
            self._compared = around
            return node
        match node:
            case ast.Compare(ast.Name(name), [_], [ast.Constant()]) if name in self._targets:
                return node
        return self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        plain = ast.Assign([node.target], ast.BinOp(loaded(node.target), node.op, node.value))
        return self.visit(ast.copy_location(plain, node))

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        match node:
            case ast.Call(ast.Attribute(value, "item"), [], []):
                return ast.copy_location(call("number", value), node)
            case ast.Call(ast.Attribute(ast.Name("torch"), name), [ast.Call() as value, *_]) if (
                name in _OF_SLICES and _is_item(value)
            ):  # torch.mean(x[i, :n], 0)
                method = ast.Call(ast.Attribute(value, name, ast.Load()), node.args[1:], node.keywords)
                return ast.copy_location(method, node)
            case ast.Call(ast.Name("int"), [ast.BinOp(left, ast.Div(), right)], []):
                return ast.copy_location(call("quotient", left, right), node)
            case ast.Call(ast.Name("int"), [ast.expr() as value], []):
                return ast.copy_location(call("int", value, ast.Constant(_is_read(value))), node)
            case ast.Call(ast.Attribute(owner, "equal" | "allclose" as name), values):
                changed = call("are_equal", owner, ast.Constant(name), *values)
                changed.keywords = node.keywords
                return ast.copy_location(changed, node)
            case ast.Call(ast.Name("bool"), [ast.expr() as value], []):
                return ast.copy_location(call("boolean", value), node)
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        is_opposite = isinstance(node.op, ast.Not)
        return self.visit(with_tensors(node, self._targets)) if is_opposite else self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        if node.attr not in _VIEWS or not isinstance(node.ctx, ast.Load) or _is_self(node.value):
            return node
        return ast.copy_location(call("view", node.value, ast.Constant(node.attr)), node)

    def _has_read(self, values: Sequence[ast.expr]) -> bool:
        """Whether values are all numbers for Python, and some of them are read from tensors."""
        kinds = {_kind(value, self._read) for value in values}
        return "read" in kinds and None not in kinds

    def _wide(self, value: ast.expr) -> ast.expr:
        changed: ast.expr = self.visit(value)
        if isinstance(value, ast.BinOp | ast.Constant):
            return changed
        facts = ast.Constant(self._compared is not None), ast.Constant(bool(self._compared))
        return ast.copy_location(call("wide", changed, *facts), value)

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        if self._has_read([node.left, node.right]):
            node.left, node.right = self._wide(node.left), self._wide(node.right)
        else:
            self.generic_visit(node)
        name = _HELPERS_OF.get(type(node.op))
        return node if name is None else ast.copy_location(call(name, node.left, node.right), node)

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        if not isinstance(node.ctx, ast.Load):
            return self.generic_visit(node)
        return ast.copy_location(call("item", self.visit(node.value), self._index(node)), node)


def _kind(value: ast.expr, read: set[str]) -> str | None:
    """Whether an expression is a number for Python: one that is read from a tensor, a constant, or neither."""
    match value:
        case ast.Call(ast.Attribute(_, "item"), [], []):
            return "read"
        case ast.Name(name) if name in read:
            return "read"
        case ast.Constant(int() | float()):
            return "constant"
        case ast.UnaryOp(ast.USub() | ast.UAdd(), operand):
            return _kind(operand, read)
        case ast.BinOp(left, _, right):
            kinds = {_kind(left, read), _kind(right, read)}
            return None if None in kinds else "read" if "read" in kinds else "constant"
    return None


def _read_names(body: Sequence[ast.stmt]) -> set[str]:
    """The names that stand for nothing but numbers that are read from tensors."""
    found, others = set[str](), Counter(name for name in _stores(body))
    for node in walk(body):
        match node:
            case ast.Assign([ast.Name(name)], value) if _kind(value, found) == "read":
                found.add(name)
                others[name] -= 1
    return {name for name in found if not others[name]}


def _read_targets(target: ast.expr, iterated: ast.expr) -> set[str]:
    """The names of a loop's target that stand for numbers of ``tensor.tolist()``."""
    match target, iterated:
        case ast.Name(name), ast.Call(ast.Attribute(_, "tolist")):
            return {name}
        case ast.Tuple([_, each]), ast.Call(ast.Name("enumerate"), [inner, *_]):
            return _read_targets(each, inner)
        case ast.Tuple(targets), ast.Call(ast.Name("zip"), several):
            return set[str]().union(*map(_read_targets, targets, several))
    return set()


def _stores(body: Sequence[ast.stmt]) -> list[str]:
    return [node.id for node in walk(body) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def _is_self(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id == "self"


def _is_item(value: ast.Call) -> bool:
    return isinstance(value.func, ast.Attribute) and ast.dump(value.func) == ast.dump(helper("item"))


def _is_read(value: ast.expr) -> bool:
    """Whether a number is an element of a tensor, or what a method returns, not computed from other numbers."""
    match value:
        case ast.Call(ast.Attribute(ast.Name("math"))):
            return False
        case ast.Call(ast.Attribute()):
            return True
    return False


def _index(node: ast.Subscript) -> ast.expr:
    """The index of a subscript as a value: ``slice`` objects in place of colons."""

    def value(part: ast.expr) -> ast.expr:
        if isinstance(part, ast.Tuple):
            return ast.Tuple([value(each) for each in part.elts], ast.Load())
        if not isinstance(part, ast.Slice):
            return part
        limits = [limit or ast.Constant(None) for limit in (part.lower, part.upper, part.step)]
        return call("part", *limits, variable(IS_IDLE))

    return value(node.slice)
