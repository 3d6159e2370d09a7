"""What the body of a loop changes: names that one iteration leaves to the next, lists that it adds to, and more.

A body that changes anything else, or that ends an iteration early, keeps its loop from becoming an operator.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from exportkit.rewrites.loop_syntax import is_in_place, names_in, walk

_LEAVES = (ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal, ast.Delete, ast.NamedExpr)
_VIEWS = {
    "view", "view_as", "reshape", "transpose", "permute", "movedim", "squeeze", "unsqueeze", "select", "narrow",
    "expand", "expand_as", "flatten", "unflatten", "diagonal", "chunk", "split", "unbind", "detach", "contiguous", "to",
    "float", "type_as", "t", "swapaxes", "unfold", "get", "real", "imag",
}  # fmt: skip
_CHANGES = {"append", "extend", "insert", "add", "update", "pop", "setdefault", "remove", "clear", "appendleft"}


class Obstacle(NamedTuple):
    """What keeps a loop from becoming an operator.

    Attributes:
        line: Number of the line of the statement.
        text: What the statement does.
        hint: What to do about it.
    """

    line: int
    text: str
    hint: str


def set_first(body: Sequence[ast.stmt]) -> dict[str, bool]:
    """Returns for each name in a body whether an iteration sets it before it reads it."""
    found = dict[str, bool]()
    for node in _in_order(body):
        if isinstance(node, ast.Name):
            found.setdefault(node.id, isinstance(node.ctx, ast.Store))
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(_base(node), ast.Name):
            found.setdefault(_base(node).id, False)  # type: ignore[attr-defined]
    return found


def appended(loop: ast.For) -> dict[str, ast.Expr]:
    """Returns the statements that add an element to a list in every iteration, by the list's name.

    A list that is used in the body otherwise is left out, unless the iteration makes it.
    """
    found, twice = dict[str, ast.Expr](), set[str]()
    for statement in loop.body:
        match statement:
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), "append" | "appendleft"), [_], [])) | ast.Expr(
                ast.Call(ast.Attribute(ast.Name(name), "insert"), [ast.Constant(0), _], [])
            ):
                (twice.add(name) if name in found else found.setdefault(name, statement))
    uses = [node.id for node in walk(loop.body) if isinstance(node, ast.Name)]
    return {name: found[name] for name in found if uses.count(name) == 1}


def obstacle(loop: ast.For, lists: dict[str, ast.Expr]) -> Obstacle | None:
    """Returns what a loop's body changes other than local names and the lists, or where it ends an iteration early."""
    if loop.orelse:
        return Obstacle(loop.orelse[0].lineno, "the loop has an `else`", "put the code after the loop.")
    if grows := _growing(loop):
        name, line = grows
        text = f"`{name}` grows with each iteration, and the loop also reads it"
        return Obstacle(
            line, text, "make it as long as it gets before the loop, and set its parts, with a mask for the rest."
        )
    calls, (own, computed) = {id(statement.value) for statement in lists.values()}, _made_in_iteration(loop)
    for node in walk(loop.body):
        if found := _change(node, loop, own, computed) if id(node) not in calls else None:
            return Obstacle(getattr(node, "lineno", loop.lineno), *found)
    return None


def _change(node: ast.AST, loop: ast.For, own: set[str], computed: set[str]) -> tuple[str, str] | None:
    """What a part of the body does that keeps the loop from becoming an operator, and what to do about it."""
    if isinstance(node, ast.Break | ast.Return) and (isinstance(node, ast.Return) or belongs(node, loop)):
        hint = "run all iterations, and keep the state once it is done: torch.where(done, state, new_state)."
        return "it ends the loop early", hint
    if isinstance(node, ast.Continue) and belongs(node, loop):
        return (
            "it ends an iteration early",
            "write the rest of the body under the opposite condition, or use torch.where.",
        )
    if isinstance(node, _LEAVES):
        return f"`{_text(node)}` cannot be a part of an operator", "write it without this statement."
    if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
        return f"it sets the attribute `{_text(node)}`", "keep the value in a local variable."
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and not isinstance(_base(node), ast.Name):
        return f"it sets an item of `{_text(node.value)}`", "keep the tensor or list in a local variable."
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name, value = node.func.attr, node.func.value
        if name in _CHANGES and not (isinstance(value, ast.Name) and value.id in own):
            text = f"it changes `{_text(value)}` by `{name}`, and reads it in the loop, or not once in every iteration"
            return text, "append exactly one tensor in each iteration, and read the list after the loop."
        is_own = _is_copy(value) or (isinstance(value, ast.Name) and value.id in computed)
        if name not in _CHANGES and is_in_place(name) and not is_own:
            return (
                f"it changes `{_text(value)}` in place (`{name}`)",
                f"assign a new tensor: without the `_` of `{name}`.",
            )
    return None


def _growing(loop: ast.For) -> tuple[str, int] | None:
    """A name that is joined with something else in every iteration, and where."""
    first = set_first(loop.body)
    for node in walk(loop.body):
        match node:
            case ast.Assign(
                [ast.Name(name)],
                ast.Call(ast.Attribute(ast.Name("torch"), "cat" | "concat"), [ast.List(parts) | ast.Tuple(parts), *_]),
            ) if not first[name] and any(isinstance(part, ast.Name) and part.id == name for part in parts):
                return name, node.lineno
    return None


def _made_in_iteration(loop: ast.For) -> tuple[set[str], set[str]]:
    """Names of lists and dicts that each iteration makes anew, and of tensors that it computes, not views of others."""
    lists, tensors, others = set[str](), set[str](), set[str]()
    first = set_first(loop.body)
    for node in walk(loop.body):
        match node:
            case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)) if len(targets) == len(values):
                pairs = [*zip(targets, values, strict=True)]
            case ast.Assign(targets, value):
                pairs = [(target, value) for target in targets]
            case ast.For(target, value):
                pairs = [(target, value)]
            case _:
                pairs = []
        for target, value in pairs:
            match target, value:
                case ast.Name(name), ast.List() | ast.ListComp() | ast.Dict():
                    lists.add(name)
                case ast.Name(name), ast.BinOp():
                    tensors.add(name)
                case ast.Name(name), ast.Call(ast.Attribute(_, method)) if method not in _VIEWS:
                    tensors.add(name)
                case _:
                    others |= names_in(target)
    own = {name for name, is_set in first.items() if is_set} - others
    return lists & own, tensors & own


def _is_copy(value: ast.expr) -> bool:
    """Whether an expression is a tensor that nothing else refers to, changed in place or not."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        if value.func.attr == "clone" or (is_in_place(value.func.attr) and isinstance(value.func.value, ast.Name)):
            return True  # the method of a name is looked at by itself
        value = value.func.value
    return False


def _base(node: ast.expr) -> ast.expr:
    """What a subscript of subscripts is taken of."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node


def _text(node: ast.AST) -> str:
    return ast.unparse(node).partition("\n")[0]


def belongs(node: ast.AST, loop: ast.For | ast.While) -> bool:
    """Returns whether a ``break`` or ``continue`` in a loop's body is one of this loop, not of one inside."""
    inner = [each for each in walk(loop.body) if isinstance(each, ast.For | ast.While)]
    return not any(node in ast.walk(each) for each in inner)


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
    stored, first = dict[str, None](), set_first(loop.body)
    targets = names_in(loop.target)
    for node in _in_order(loop.body):
        name = _base(node) if isinstance(node, ast.Subscript) else node
        is_set = isinstance(node, ast.Name | ast.Subscript) and isinstance(node.ctx, ast.Store)
        if is_set and isinstance(name, ast.Name) and name.id not in targets:
            stored[name.id] = None
    direct = {node.id for statement in loop.body for node in _targets(statement)} | _own_of_inner(loop.body)
    direct |= own_of_branches(loop.body)
    inside = {id(node) for node in ast.walk(original)}
    outer = around[0] if around else None
    after = set(needed)
    for node in ast.walk(definition):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in inside:
            is_later = node.lineno > (original.end_lineno or 0)
            if is_later or (outer is not None and outer.lineno <= node.lineno):
                after.add(node.id)
    # a name that an iteration sets before it reads it is its own, unless the iteration may also leave it as it was
    return [name for name in stored if name in after or not first[name] or name not in direct]


def _own_of_inner(body: Sequence[ast.stmt]) -> set[str]:
    """The names that each iteration of a loop inside sets, and that nothing else uses."""
    found = set[str]()
    for statement in body:
        if isinstance(statement, ast.For):
            others = names_in(*(each for each in body if each is not statement), statement.iter)
            names = {node.id for inner in statement.body for node in _targets(inner)}
            found |= (names | names_in(statement.target) | _own_of_inner(statement.body)) - others
    return found


def read_after(definition: ast.FunctionDef, loop: ast.stmt) -> set[str]:
    """Returns the names that the code after a loop reads before it sets them."""
    found = dict[str, bool]()
    for node in _in_order([definition]):
        if isinstance(node, ast.Name) and getattr(node, "lineno", 0) > (loop.end_lineno or 0):
            found.setdefault(node.id, isinstance(node.ctx, ast.Load))
    return {name for name, is_read in found.items() if is_read}


def own_of_branches(body: Sequence[ast.stmt]) -> set[str]:
    """Returns the names that only the branches of one ``if`` use, each of which sets them before it reads them."""
    found, uses = set[str](), _uses(body)
    for node in walk(body):
        if isinstance(node, ast.If):
            firsts = [set_first(branch) for branch in (node.body, node.orelse)]
            inside = Counter(_uses([node]))
            inside.subtract(_uses([ast.Expr(node.test)]))
            for name, count in inside.items():
                if count == uses[name] and all(first.get(name, True) for first in firsts):
                    found.add(name)
    return found


def _uses(body: Sequence[ast.stmt]) -> Counter[str]:
    return Counter(node.id for node in walk(body) if isinstance(node, ast.Name))


def rebound(loop: ast.For | ast.While) -> set[str]:
    """Returns the names that a loop's body sets as such, not only items of what they stand for."""
    return names_in(*loop.body, context=ast.Store)


def _targets(statement: ast.stmt) -> Iterator[ast.Name]:
    """The names that a statement sets in any case; a loop inside sets its target."""
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.For):
        targets = [statement.target]
    elif isinstance(statement, ast.With):
        for inner in statement.body:
            yield from _targets(inner)
    elif isinstance(statement, ast.If):
        sides = [[each for inner in side for each in _targets(inner)] for side in (statement.body, statement.orelse)]
        yield from (each for each in sides[0] if each.id in {other.id for other in sides[1]})
    for target in targets:
        yield from (node for node in ast.walk(target) if isinstance(node, ast.Name))


def _in_order(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes in the order in which they are evaluated, as far as names are concerned: values before targets."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            yield from _in_order([node.value, *node.targets])
        elif isinstance(node, ast.AugAssign):
            target = node.target
            yield from _in_order([node.value])
            if isinstance(target, ast.Name):
                yield ast.Name(target.id, ast.Load())
            yield from _in_order([target])
        elif isinstance(node, ast.For):
            yield from _in_order([node.iter, node.target, *node.body, *node.orelse])
        else:
            yield node
            yield from _in_order(ast.iter_child_nodes(node))
