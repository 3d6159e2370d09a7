"""The source of functions with loops: which loops can become functions, and what their source is then."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

HELPERS = "_exportkit_loops"  # the name under which the source finds `loops.Helpers`
_BODY, _STEPS = "_exportkit_body", "_exportkit_steps"
_ITERATIONS = {"range", "enumerate", "zip", "reversed"}
_LEAVES = (ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal, ast.Delete, ast.NamedExpr)
_CHANGES = {"append", "extend", "insert", "add", "update", "pop", "setdefault", "remove", "clear", "appendleft"}


def with_loops_as_functions(definition: ast.FunctionDef, names: Sequence[str]) -> ast.FunctionDef | None:
    """Returns the source of a factory for the function with loop bodies as functions; None if it has no such loop.

    Args:
        definition: The source of the function.
        names: What it takes from the functions around it.
    """
    definition = _Comprehensions().visit(definition)
    loops = _Loops(definition)
    changed = loops.visit(definition)
    if not loops.found:
        return None
    arguments = [ast.arg(name) for name in (HELPERS, *names)]
    # a function that calls itself finds itself where it did before
    own = [] if definition.name in names else [ast.Global([definition.name])]
    factory = ast.FunctionDef("_exportkit_factory", _arguments(arguments), [*own, changed], [])
    return ast.fix_missing_locations(ast.copy_location(factory, definition))


class _Comprehensions(ast.NodeTransformer):
    """Puts a loop that appends to a list before each statement with a comprehension, such as ``[f(y) for y in x]``."""

    def __init__(self) -> None:
        self._count = 0
        self._before: list[ast.stmt] | None = None  # the loops of the statement that is being visited

    def _hoisted(self, node: Any) -> Any:
        if any(isinstance(each, ast.NamedExpr) for each in ast.walk(node)):  # set before the comprehension, or after it
            return node
        around, self._before = self._before, []
        changed = self.generic_visit(node)
        before, self._before = self._before, around
        return [*before, changed]

    visit_Assign = visit_AnnAssign = visit_AugAssign = visit_Return = visit_Expr = _hoisted

    def visit_ListComp(self, node: ast.ListComp) -> Any:
        return self._as_loop(node, node) if self._before is not None else node

    def visit_Call(self, node: ast.Call) -> Any:
        match node:
            case ast.Call(ast.Name("list" | "tuple"), [ast.GeneratorExp() as given], []) if self._before is not None:
                return self._as_loop(given, node)
            case ast.Call(ast.Name("sum"), [ast.GeneratorExp() | ast.ListComp() as given], []) if (
                self._before is not None
            ):
                return self._as_loop(given, node, is_sum=True)
        return self.generic_visit(node)

    def _as_loop(self, node: ast.ListComp | ast.GeneratorExp, whole: ast.expr, is_sum: bool = False) -> ast.expr:
        """Adds the loop, and returns the name of its result; the whole expression if it is more than a plain loop."""
        generator = node.generators[0]
        if len(node.generators) > 1 or generator.ifs or generator.is_async or _has_scopes(node.elt):
            return whole
        self._count += 1
        name = f"_exportkit_list_{self._count}"
        own = {each.id: f"{name}_{each.id}" for each in ast.walk(generator.target) if isinstance(each, ast.Name)}
        target, element = _Renamed(own).visit(generator.target), _Renamed(own).visit(node.elt)
        result = ast.Name(name, ast.Load())
        add: ast.stmt = ast.Expr(ast.Call(ast.Attribute(result, "append", ast.Load()), [element], []))
        if is_sum:
            add = ast.Assign([ast.Name(name, ast.Store())], ast.BinOp(result, ast.Add(), element))
        first: ast.expr = ast.Constant(0) if is_sum else ast.List([], ast.Load())
        made = ast.Assign([ast.Name(name, ast.Store())], first)
        loop = ast.For(target, generator.iter, [add], [], None)
        places = [ast.fix_missing_locations(ast.copy_location(each, whole)) for each in (made, loop)]
        self._before = [*(self._before or []), *places]
        return ast.copy_location(ast.Name(name, ast.Load()), whole)

    def _left(self, node: Any) -> Any:
        return node  # evaluated later, or perhaps never

    visit_Lambda = visit_IfExp = visit_BoolOp = visit_SetComp = visit_DictComp = _left


class _Renamed(ast.NodeTransformer):
    """Gives names others."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> Any:
        return ast.copy_location(ast.Name(self._names.get(node.id, node.id), node.ctx), node)


def _has_scopes(node: ast.AST) -> bool:
    """Whether something in an expression has names of its own, or sets a name."""
    kinds = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.NamedExpr, ast.Await, ast.Yield)
    return any(isinstance(each, kinds) for each in ast.walk(node))


class _Loops(ast.NodeTransformer):
    """Puts, beside each loop of a function that can become one, a function with the loop's body.

    Args:
        definition: The function.
    """

    def __init__(self, definition: ast.FunctionDef) -> None:
        self._definition = definition
        self._around: list[ast.For] = []
        self.found = 0

    def visit_For(self, node: ast.For) -> Any:
        appended = _appended(node)
        is_simple = appended is not None and not node.orelse and _is_simple(node, appended)
        carried = _carried(self._definition, node, self._around)
        self._around.append(node)
        self.generic_visit(node)
        self._around.pop()
        if not is_simple or appended is None:
            return node
        self.found += 1
        number = self.found
        steps, body = f"{_STEPS}_{number}", f"{_BODY}_{number}"
        again = ast.For(copy.deepcopy(node.target), ast.Name(steps, ast.Load()), copy.deepcopy(node.body), [], None)
        lists = [*appended]
        names = ast.Call(ast.Name("locals", ast.Load()), [], [])
        found = ast.Attribute(names, "get", ast.Load())  # a name may stand for nothing before the loop
        before: list[ast.expr] = [ast.Call(found, [ast.Constant(name)], []) for name in carried]
        added = {id(statement): f"_exportkit_added_{lists.index(name)}" for name, statement in appended.items()}
        inside = _Inside(added, {name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)})
        statements = [inside.visit(statement) for statement in node.body]
        function = ast.FunctionDef(
            body,
            _arguments([ast.arg("_exportkit_carried"), ast.arg("_exportkit_element")]),
            [
                ast.Assign([_names(carried, ast.Store())], ast.Name("_exportkit_carried", ast.Load())),
                ast.Assign([node.target], ast.Name("_exportkit_element", ast.Load())),
                *statements,
                ast.Return(
                    ast.Tuple(
                        [
                            _names(carried, ast.Load()),
                            _names([f"_exportkit_added_{index}" for index in range(len(lists))], ast.Load()),
                        ],
                        ast.Load(),
                    )
                ),
            ],
            [],
        )
        loaded = [ast.Name(steps, ast.Load()), ast.Name(body, ast.Load())]
        in_front = [ast.Constant(not _is_append(statement)) for statement in appended.values()]
        values = [ast.Tuple(before, ast.Load()), _names(lists, ast.Load()), ast.Tuple([*in_front], ast.Load())]
        run = _call("run", *loaded, *values)
        after = ast.Tuple([_names(carried, ast.Store()), _names(lists, ast.Store())], ast.Store())
        new = [
            ast.Assign([ast.Name(steps, ast.Store())], _call("steps", _Iterated().visit(node.iter))),
            ast.If(_call("is_symbolic", ast.Name(steps, ast.Load())), [function, ast.Assign([after], run)], [again]),
        ]
        return [ast.fix_missing_locations(ast.copy_location(statement, node)) for statement in new]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        return self.generic_visit(node) if node is self._definition else node  # a function inside is left alone

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        return node


class _Inside(ast.NodeTransformer):
    """Makes the statements of a loop's body ones that change no object.

    Args:
        added: By the identity of the statement that adds to a list, the name that takes the element.
        targets: The names that the loop sets. Their numbers are tensors wherever they are not in an index.
    """

    def __init__(self, added: dict[int, str], targets: set[str]) -> None:
        self._added, self._targets = added, targets
        self._depth = 0  # of indices

    def visit_Name(self, node: ast.Name) -> Any:
        if self._depth or node.id not in self._targets or not isinstance(node.ctx, ast.Load):
            return node
        return ast.copy_location(_call("plain", node), node)

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
        return ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], node.value.args[-1]), node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        target = node.targets[0]
        if len(node.targets) == 1 and isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            value = self.visit(node.value)
            put = _call("put", ast.Name(target.value.id, ast.Load()), self._index(target), value)
            return ast.copy_location(ast.Assign([ast.Name(target.value.id, ast.Store())], put), node)
        return self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        target: Any = node.target
        read: ast.expr = ast.Name(target.id, ast.Load()) if isinstance(target, ast.Name) else target
        if isinstance(target, ast.Subscript):
            read = ast.Subscript(target.value, target.slice, ast.Load())
        assigned = ast.Assign([target], ast.BinOp(read, node.op, node.value))
        return self.visit(ast.copy_location(assigned, node))

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        match node:
            case ast.Call(ast.Attribute(value, "item"), [], []):
                return ast.copy_location(_call("number", value), node)
            case ast.Call(ast.Name("int"), [ast.expr() as value], []):
                return ast.copy_location(_call("int", value), node)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        if not isinstance(node.ctx, ast.Load):
            return self.generic_visit(node)
        return ast.copy_location(_call("item", self.visit(node.value), self._index(node)), node)


class _Iterated(ast.NodeTransformer):
    """Makes what a loop runs over something that may have a symbolic length."""

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        function = node.func
        if isinstance(function, ast.Name) and function.id in _ITERATIONS:
            node.func = _helper(function.id)
        elif isinstance(function, ast.Attribute) and function.attr == "unbind":
            is_method = not (isinstance(function.value, ast.Name) and function.value.id == "torch")
            node.func, node.args = _helper("unbind"), [function.value, *node.args] if is_method else node.args
        elif isinstance(function, ast.Attribute) and function.attr == "tolist" and not node.args:
            node.func, node.args = _helper("tolist"), [function.value]
        return node


def _appended(loop: ast.For) -> dict[str, ast.Expr] | None:
    """The statements that add an element to a list in every turn, by the list's name; None if it is used otherwise."""
    found: dict[str, ast.Expr] = {}
    for statement in loop.body:
        match statement:
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), "append" | "appendleft"), [_], [])) | ast.Expr(
                ast.Call(ast.Attribute(ast.Name(name), "insert"), [ast.Constant(0), _], [])
            ):
                if name in found:
                    return None
                found[name] = statement
    uses = [node.id for node in _walk(loop.body) if isinstance(node, ast.Name) and node.id in found]
    return found if len(uses) == len(found) else None


def _is_append(statement: ast.Expr) -> bool:
    """Whether a statement adds an element at the end of a list, not in front."""
    return isinstance(statement.value, ast.Call) and getattr(statement.value.func, "attr", "") == "append"


def _is_simple(loop: ast.For, appended: dict[str, ast.Expr]) -> bool:
    """Whether a loop's body ends each turn at its end, and changes nothing but local names and the lists."""
    calls = {id(statement.value) for statement in appended.values()}
    for node in _walk(loop.body):
        if isinstance(node, _LEAVES) or (isinstance(node, ast.Break | ast.Continue) and _belongs(node, loop)):
            return False
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            return False
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and not isinstance(node.value, ast.Name):
            return False
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and id(node) not in calls:
            name = node.func.attr
            if name in _CHANGES or (name.endswith("_") and not name.endswith("__")):
                return False
    return True


def _belongs(node: ast.AST, loop: ast.For) -> bool:
    inner = [each for each in _walk(loop.body) if isinstance(each, ast.For | ast.While)]
    return not any(node in ast.walk(each) for each in inner)


def _carried(definition: ast.FunctionDef, loop: ast.For, around: Sequence[ast.For]) -> list[str]:
    """The names that a turn of a loop leaves to the next one, or to the code after it."""
    stored, first = dict[str, None](), dict[str, bool]()
    targets = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    for node in _in_order(loop.body):
        if isinstance(node, ast.Name):
            first.setdefault(node.id, isinstance(node.ctx, ast.Store))
            if isinstance(node.ctx, ast.Store) and node.id not in targets:
                stored[node.id] = None
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            stored[node.value.id] = None
            first.setdefault(node.value.id, False)
    direct = {node.id for statement in loop.body for node in _targets(statement)}
    inside = {id(node) for node in ast.walk(loop)}
    outer = around[0] if around else None
    after = set()
    for node in ast.walk(definition):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in inside:
            is_later = node.lineno > (loop.end_lineno or 0)
            if is_later or (outer is not None and outer.lineno <= node.lineno):
                after.add(node.id)
    # a name that a turn sets before it reads it is its own, unless the turn may also leave it as it was
    return [name for name in stored if name in after or not first[name] or name not in direct]


def _targets(statement: ast.stmt) -> Iterator[ast.Name]:
    """The names that a statement sets in any case."""
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
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


def _walk(statements: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    for statement in statements:
        yield from ast.walk(statement)


def _index(node: ast.Subscript) -> ast.expr:
    """The index of a subscript as a value: ``slice`` objects in place of colons."""

    def value(part: ast.expr) -> ast.expr:
        if isinstance(part, ast.Tuple):
            return ast.Tuple([value(each) for each in part.elts], ast.Load())
        if not isinstance(part, ast.Slice):
            return part
        limits = [limit or ast.Constant(None) for limit in (part.lower, part.upper, part.step)]
        return _call("part", *limits)

    return value(node.slice)


def _arguments(arguments: list[ast.arg]) -> ast.arguments:
    return ast.arguments(posonlyargs=[], args=arguments, kwonlyargs=[], kw_defaults=[], defaults=[])


def _helper(name: str) -> ast.Attribute:
    return ast.Attribute(ast.Name(HELPERS, ast.Load()), name, ast.Load())


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(_helper(name), [*arguments], [])


def _names(names: Sequence[str], context: ast.expr_context) -> ast.Tuple:
    return ast.Tuple([ast.Name(name, context) for name in names], context)
