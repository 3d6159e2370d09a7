"""What the body of a loop changes besides names and the lists that it adds to.

A body that changes anything else, or that ends an iteration early, keeps its loop from becoming an operator.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence
from typing import NamedTuple

from exportkit.rewrites.loop_names import names_of, read_after, stored_in, uses_in
from exportkit.rewrites.loop_syntax import base, is_in_place, names_in, parameters_in, rebound, walk

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


def appended(loop: ast.For) -> dict[str, ast.Expr]:
    """Returns the statements that add an element to a list in every iteration, by the list's name.

    A list that is used in the body otherwise is left out, unless the iteration makes it.
    """
    found = dict[str, ast.Expr]()
    for statement in loop.body:
        match statement:
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), "append" | "appendleft"), [_], [])) | ast.Expr(
                ast.Call(ast.Attribute(ast.Name(name), "insert"), [ast.Constant(0), _], [])
            ):
                found.setdefault(name, statement)
    uses = uses_in(loop.body)
    return {name: found[name] for name in found if uses[name] == 1}


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


def other_reference(
    definition: ast.FunctionDef, loop: ast.For | ast.While, around: Sequence[ast.stmt], lists: set[str]
) -> str | None:
    """Returns what else refers to something that a loop changes, and would not see the change; None if nothing does.

    Args:
        definition: The function.
        loop: The loop in the function.
        around: The loops around it, outermost first.
        lists: Names of the lists that it adds to.
    """
    inside, end = {id(node) for node in ast.walk(loop)}, getattr([*around, loop][0], "end_lineno", 0)
    outside = [node for node in ast.walk(definition) if id(node) not in inside and node is not definition]
    before = [node for node in outside if getattr(node, "lineno", end) < end]
    parameters = parameters_in(definition.args)
    after = read_after(definition.body, loop) or set()
    used = names_of(loop.body).read | after
    for name in sorted({*stored_in(loop.body), *lists} & _read_in_functions(before, used)):
        return f"the loop sets `{name}`, which a function inside of this one also uses"
    for name in sorted(lists & _named_twice(before, used | parameters)):
        return f"the loop adds to the list `{name}`, which has another name as well"
    for name in sorted((parameters & lists) - after - rebound(*definition.body)):
        return f"the loop adds to the list `{name}`, which belongs to the caller"
    for name in sorted(_changed_while_kept(loop)):
        return f"the loop changes `{name}` in place, which has another name as well"
    return None


def _read_in_functions(nodes: Sequence[ast.AST], used: Collection[str]) -> set[str]:
    """The names that functions among some nodes take from the function around them.

    Args:
        nodes: The nodes.
        used: Names that are read later; functions that no such name stands for are done with by then.
    """
    read = set[str]()
    for node in nodes:
        match node:
            case ast.FunctionDef(name) if name in used:
                read |= names_of([node]).read
            case ast.Assign(targets, value) if names_in(*targets) & {*used} or not names_in(*targets):
                functions = [part for part in ast.walk(value) if isinstance(part, ast.Lambda)]
                read |= names_of([ast.Expr(part) for part in functions]).read
    return read


def _named_twice(nodes: Sequence[ast.AST], used: set[str]) -> set[str]:
    """The names that are assigned to another place, or get its value, where the code uses the other one later."""
    found = set[str]()
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Attribute | ast.Subscript):
            places = [*node.targets, node.value]
            names = {place.id for place in places if isinstance(place, ast.Name)}
            found |= {name for name in names if (names_in(*places) - {name}) & used}
    return found


def _changed_while_kept(loop: ast.For | ast.While) -> set[str]:
    """The names of older tensors that a loop changes in place, and also gives another name or adds to a list."""
    changed, kept = set[str](), set[str]()
    for node in walk(loop.body):
        match node:
            case ast.Assign(_, ast.Name(name)):
                kept.add(name)
            case ast.Call(ast.Attribute(_, method), values) if method in _CHANGES:
                kept |= {value.id for value in values if isinstance(value, ast.Name)}
            case ast.Call(ast.Attribute(ast.Name(name), method)) if is_in_place(method):
                changed.add(name)
    return changed & kept - rebound(*loop.body)


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
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and not isinstance(base(node), ast.Name):
        return f"it sets an item of `{_text(node.value)}`", "keep the tensor or list in a local variable."
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name, value = node.func.attr, node.func.value
        if name in _CHANGES and not (isinstance(value, ast.Name) and value.id in {*own, "torch"}):
            place = _text(value)
            return (
                f"it calls `{name}` on `{place}`, and also reads `{place}` in the loop or does not {name} exactly once "
                "per iteration",
                "append exactly one tensor in each iteration, and read only its last elements in the loop.",
            )
        is_own = _is_copy(value) or (isinstance(value, ast.Name) and value.id in computed)
        if name not in _CHANGES and is_in_place(name) and not is_own:
            return (
                f"it changes `{_text(value)}` in place (`{name}`)",
                f"assign a new tensor: without the `_` of `{name}`.",
            )
    return None


def _growing(loop: ast.For) -> tuple[str, int] | None:
    """A name that is joined with something else in every iteration, and where."""
    older = names_of(loop.body).read
    for node in walk(loop.body):
        match node:
            case ast.Assign(
                [ast.Name(name)],
                ast.Call(ast.Attribute(ast.Name("torch"), "cat" | "concat"), [ast.List(parts) | ast.Tuple(parts), *_]),
            ) if name in older and any(isinstance(part, ast.Name) and part.id == name for part in parts):
                return name, node.lineno
    return None


def _made_in_iteration(loop: ast.For) -> tuple[set[str], set[str]]:
    """Names of lists and dicts that each iteration makes anew, and of tensors that it computes, not views of others."""
    lists, tensors, others = set[str](), set[str](), set[str]()
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
    own = names_in(*loop.body) - names_of(loop.body).read - others
    return lists & own, tensors & own


def _is_copy(value: ast.expr) -> bool:
    """Whether an expression is a tensor that nothing else refers to, changed in place or not."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        if value.func.attr == "clone" or (is_in_place(value.func.attr) and isinstance(value.func.value, ast.Name)):
            return True  # the method of a name is looked at by itself
        value = value.func.value
    return False


def _text(node: ast.AST) -> str:
    return ast.unparse(node).partition("\n")[0]


def belongs(node: ast.AST, loop: ast.For | ast.While) -> bool:
    """Returns whether a ``break`` or ``continue`` in a loop's body is one of this loop, not of one inside.

    What is in the ``else`` of a loop belongs to the loop around it.
    """
    inner = [each for each in walk(loop.body) if isinstance(each, ast.For | ast.While)]
    return not any(node in walk(each.body) for each in inner)
