"""The source of functions with loops: which loops can become functions, and what their source is then."""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from typing import Any

from exportkit.rewrites.loop_bodies import (
    appended,
    carried,
    names_in,
    obstacle,
    own_of_branches,
    read_after,
    rebound,
    walk,
)
from exportkit.rewrites.loop_bunches import HELPERS
from exportkit.rewrites.loop_choices import NOTHING, choosing, is_choice, later, with_tensors
from exportkit.rewrites.loop_comprehensions import with_loops_for_comprehensions
from exportkit.rewrites.loop_forms import PlainLoop, keep_targets, nested_loops, plain_loop

_BODY, _STEPS = "_exportkit_body", "_exportkit_steps"
_ITERATIONS = {"range", "enumerate", "zip", "reversed"}
_PRODUCTS = {"product", "itertools.product", f"{HELPERS}.nested"}
_OF_SLICES = {"sum", "mean", "amax", "amin", "max"}
_LISTING = {"unbind", "chunk", "split"}
# Operators whose results for numbers are others in single precision, or in 64 bits, by the name of the helper.
_INEXACT = {ast.Pow: "power", ast.LShift: "shifted", ast.FloorDiv: "floored", ast.Mod: "remainder"}


def with_loops_as_functions(definition: ast.FunctionDef, names: Sequence[str]) -> ast.FunctionDef | None:
    """Returns the source of a factory for the function with loop bodies as functions; None if it has no such loop.

    Args:
        definition: The source of the function.
        names: What it takes from the functions around it.
    """
    slices = _ListsOfSlices()
    definition = ast.fix_missing_locations(slices.visit(with_loops_for_comprehensions(definition)))
    loops = _Loops(definition)
    changed = loops.visit(definition)
    if not loops.found and not slices.found:
        return None
    arguments = [ast.arg(name) for name in (HELPERS, *names)]
    # a function that calls itself finds itself where it did before
    own = [] if definition.name in names else [ast.Global([definition.name])]
    factory = ast.FunctionDef("_exportkit_factory", _arguments(arguments), [*own, changed], [])
    return ast.fix_missing_locations(ast.copy_location(factory, definition))


class _Loops(ast.NodeTransformer):
    """Puts, beside each loop of a function that can become one, a function with the loop's body.

    Args:
        definition: The function.
    """

    def __init__(self, definition: ast.FunctionDef) -> None:
        self._definition = definition
        self._around: list[ast.For | ast.While] = []
        self._count = self.found = 0

    def visit_For(self, node: ast.For | ast.While) -> Any:
        """Puts the loop beside one whose body is a function; two nested loops as one where both run over lengths."""
        nested = nested_loops(node) if isinstance(node, ast.For) else None
        found = self._changed(node)
        if nested is None:
            return found
        as_one = self._changed(nested, node)
        limits = [_Iterated().visit(copy.deepcopy(each)) for each in nested.iter.args]  # type: ignore[attr-defined]
        both = ast.If(_call("are_symbolic", *limits), _listed_statements(as_one), _listed_statements(found))
        return ast.fix_missing_locations(ast.copy_location(both, node))

    def _changed(self, node: ast.For | ast.While, original: ast.stmt | None = None) -> Any:
        original = original or node
        self._count += 1
        number = self._count
        plain = plain_loop(node, number)
        lists = {} if plain is None else appended(plain.loop)
        is_simple = plain is not None and obstacle(plain.loop, lists) is None
        names = []
        if plain is not None and is_simple:
            keep_targets(plain, read_after(self._definition, original), number)
            needed = {*plain.places, *plain.targets.values(), *[each.count for each in plain.elements.values()]}
            needed |= {plain.counter} if plain.counter else set()
            names = carried(self._definition, original, plain.loop, self._around, needed)
        self._around.append(node)
        self.generic_visit(node)
        if plain is not None and is_simple:
            self.generic_visit(plain.loop)
        self._around.pop()
        if plain is None or not is_simple:
            return node
        self.found += 1
        new = _with_body(node, plain, number, names, lists)
        return [ast.fix_missing_locations(ast.copy_location(statement, node)) for statement in new]

    visit_While = visit_For

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        match node:
            case ast.Call(ast.Attribute(ast.Name("torch"), "Tensor") as cls, [ast.Name() as given], []):
                return ast.copy_location(_call("tensor", cls, given), node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        return self.generic_visit(node) if node is self._definition else node  # a function inside is left alone

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        return node


def _listed_statements(found: Any) -> list[ast.stmt]:
    return found if isinstance(found, list) else [found]


def _with_body(
    node: ast.For | ast.While, plain: PlainLoop, number: int, names: list[str], appended: dict[str, ast.Expr]
) -> list[ast.stmt]:
    """The statements in place of a loop: a function with its body and a call, and the loop for other lengths.

    Args:
        node: The loop.
        plain: Its plain form.
        number: Makes the new names unique.
        names: The names that a turn leaves to the next one, or to the code after the loop.
        appended: The statements that add an element to a list in every turn, by the list's name.
    """
    loop, lists = plain.loop, [*appended]
    steps, body = f"{_STEPS}_{number}", f"{_BODY}_{number}"
    again: ast.stmt = node
    if isinstance(node, ast.For):
        again = ast.For(node.target, ast.Name(steps, ast.Load()), node.body, node.orelse, None)
    before = [*map(_local, names)]
    added = {id(statement): f"_exportkit_added_{lists.index(name)}" for name, statement in appended.items()}
    targets = names_in(loop.target)
    inside = _Inside(added, targets, own_of_branches(loop.body) - {*names})
    is_first_apart = _decides_by(targets, loop)
    kept = {*names} - rebound(node) - (rebound(loop) & plain.places.keys())
    statements = inside.visited(loop.body)
    function = ast.FunctionDef(
        body,
        _arguments([ast.arg("_exportkit_carried"), ast.arg("_exportkit_element")]),
        [
            ast.Assign([_names(names, ast.Store())], ast.Name("_exportkit_carried", ast.Load())),
            ast.Assign([loop.target], ast.Name("_exportkit_element", ast.Load())),
            *statements,
            ast.Return(
                ast.Tuple(
                    [
                        _names(names, ast.Load()),
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
    changes: list[ast.expr] = [ast.Constant(name in kept) for name in names]
    facts = _tuple([_tuple(in_front), _tuple(changes), ast.Constant(is_first_apart)])
    run = _call("run", *loaded, _tuple(before), _names(lists, ast.Load()), facts)
    after = ast.Tuple([_names(names, ast.Store()), _names(lists, ast.Store())], ast.Store())
    iterated, ends_early = _Iterated().visit(loop.iter), ast.Constant(plain.flag is not None)
    symbolic = [*_before(plain), function, ast.Assign([after], run), *_after(plain, loop, steps)]
    return [
        ast.Assign([ast.Name(steps, ast.Store())], _call("steps", iterated, ends_early)),
        ast.If(_call("is_symbolic", ast.Name(steps, ast.Load())), symbolic, [again]),
    ]


def _local(name: str) -> ast.expr:
    """What a name stands for; None if that is nothing, as before the loop."""
    found = ast.Attribute(ast.Call(ast.Name("locals", ast.Load()), [], []), "get", ast.Load())
    return ast.Call(found, [ast.Constant(name)], [])


def _decides_by(targets: set[str], loop: ast.For) -> bool:
    """Whether a loop's body decides by what the loop sets, as in ``if i == 0``: its first turn may be another one."""
    tests = [node.test for node in walk(loop.body) if isinstance(node, ast.If | ast.IfExp)]
    return any(isinstance(node, ast.Name) and node.id in targets for test in tests for node in ast.walk(test))


def _before(plain: PlainLoop) -> list[ast.stmt]:
    """Gives local names to the attributes and items that a loop changes, and lists to tensors that grow."""
    found: list[ast.stmt] = []
    for name, place in plain.places.items():
        value: ast.expr = place
        if isinstance(place, ast.Attribute):
            root: ast.expr = place
            while isinstance(root, ast.Attribute):
                root = root.value
            read = {
                node.attr
                for node in walk(plain.loop.body)
                if isinstance(node, ast.Attribute) and ast.dump(node.value) == ast.dump(root)
            }
            names = _tuple([ast.Constant(each) for each in sorted(read)])
            value = _call("attribute", place.value, ast.Constant(place.attr), root, names)
        found.append(ast.Assign([ast.Name(name, ast.Store())], value))
    for target, name in plain.targets.items():
        found.append(ast.Assign([ast.Name(name, ast.Store())], _local(target)))
    for element in plain.elements.values():
        for name, start in ((element.name, ast.Constant(NOTHING)), (element.count, ast.Constant(0))):
            found.append(ast.Assign([ast.Name(name, ast.Store())], start))
    if plain.flag is not None:
        found.append(ast.Assign([ast.Name(plain.flag, ast.Store())], ast.Constant(False)))
    for grown in plain.grown:
        found.append(ast.Assign([ast.Name(grown.elements, ast.Store())], ast.List([], ast.Load())))
    for bunched in plain.bunched:
        found.append(ast.Assign([ast.Name(bunched.elements, ast.Store())], ast.List([], ast.Load())))
    return found


def _after(plain: PlainLoop, loop: ast.For, steps: str) -> list[ast.stmt]:
    """Sets what a loop has changed besides local names and lists."""
    found: list[ast.stmt] = []
    for name, element in plain.elements.items():
        parts = [ast.Name(each, ast.Load()) for each in (name, element.count, steps)]
        found.append(ast.Assign([ast.Name(name, ast.Store())], _call("until", *parts)))
    for grown in plain.grown:
        start = ast.Constant(None) if grown.begins else _local(grown.name)
        elements = ast.Name(grown.elements, ast.Load())
        joined = _call("joined", start, elements, grown.dim, ast.Constant(grown.in_front))
        found.append(ast.Assign([ast.Name(grown.name, ast.Store())], joined))
    for bunched in plain.bunched:
        longer = _call("extended", ast.Name(bunched.name, ast.Load()), ast.Name(bunched.elements, ast.Load()))
        found.append(ast.Assign([ast.Name(bunched.name, ast.Store())], longer))
    for target_name, name in plain.targets.items():
        found.append(ast.Assign([ast.Name(target_name, ast.Store())], ast.Name(name, ast.Load())))
    for name, place in plain.places.items():
        target = copy.deepcopy(place)
        target.ctx = ast.Store()  # type: ignore[attr-defined]
        found.append(ast.Assign([target], ast.Name(name, ast.Load())))
    if plain.counter is not None and isinstance(loop.iter, ast.Call):
        limits = [*loop.iter.args]
        found.append(ast.Assign([ast.Name(plain.counter, ast.Store())], _call("counted", *limits)))
    return found


class _Inside(ast.NodeTransformer):
    """Makes the statements of a loop's body ones that change no object.

    Args:
        added: By the identity of the statement that adds to a list, the name that takes the element.
        targets: The names that the loop sets. Their numbers are tensors wherever they are not in an index.
        own: Names that only the sides of one decision use.
    """

    def __init__(self, added: dict[int, str], targets: set[str], own: set[str]) -> None:
        self._added, self._targets, self._own = added, targets, own
        self._depth = 0  # of indices
        self._decisions = 0

    def visited(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Returns what stands for some statements."""
        return [each for statement in statements for each in _listed_statements(self.visit(statement))]

    def visit_If(self, node: ast.If) -> Any:
        if not is_choice(node):
            return self.generic_visit(node)
        self._decisions += 1
        number, original = self._decisions, copy.deepcopy(node)
        test = self.visit(with_tensors(node.test, self._targets))
        changed = ast.If(test, self.visited(node.body), self.visited(node.orelse))
        return choosing(original, changed, number, self._own, self._targets)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        sides = later([node.body, node.orelse], self._targets)
        return self.visit(ast.copy_location(_call("one_of_two", with_tensors(node.test, self._targets), *sides), node))

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
        match node:
            case ast.Assign([ast.Name()], ast.IfExp(test, first, other)):  # what is an index on one side only
                one, two = (ast.copy_location(ast.Assign(node.targets, value), node) for value in (first, other))
                return self.visit(ast.copy_location(ast.If(test, [one], [two]), node))
        if len(node.targets) > 1 or not isinstance(target, ast.Subscript):
            return self.generic_visit(node)
        value, whole = self.visit(node.value), target
        while True:  # a[i][j] = b sets a to a copy in which a[i] is a copy in which the item j is b
            inner = whole.value
            read = self.visit(copy.deepcopy(inner))
            read.ctx = ast.Load()
            value = _call("put", read, self._index(whole), value)
            if not isinstance(inner, ast.Subscript):
                break
            whole = inner
        if not isinstance(inner, ast.Name):
            return self.generic_visit(node)
        return ast.copy_location(ast.Assign([ast.Name(inner.id, ast.Store())], value), node)

    def visit_Compare(self, node: ast.Compare) -> Any:
        """Leaves the number of a turn as it is where it is compared with a constant, which may be decided."""
        match node:
            case ast.Compare(ast.Name(name), [_], [ast.Constant()]) if name in self._targets:
                return node
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
            case ast.Call(ast.Attribute(ast.Name("torch"), name), [ast.Call() as value, *_]) if (
                name in _OF_SLICES and _is_item(value)
            ):  # torch.mean(x[i, :n], 0)
                method = ast.Call(ast.Attribute(value, name, ast.Load()), node.args[1:], node.keywords)
                return ast.copy_location(method, node)
            case ast.Call(ast.Name("int"), [ast.BinOp(left, ast.Div(), right)], []):
                return ast.copy_location(_call("quotient", left, right), node)
            case ast.Call(ast.Name("int"), [ast.expr() as value], []):
                return ast.copy_location(_call("int", value, ast.Constant(_is_read(value))), node)
            case ast.Call(ast.Name("bool"), [ast.expr() as value], []):
                return ast.copy_location(_call("boolean", value), node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        is_data = node.attr == "data" and isinstance(node.ctx, ast.Load)
        return ast.copy_location(_call("data", node.value), node) if is_data else node

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        name = _INEXACT.get(type(node.op))
        return node if name is None else ast.copy_location(_call(name, node.left, node.right), node)

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        if not isinstance(node.ctx, ast.Load):
            return self.generic_visit(node)
        return ast.copy_location(_call("item", self.visit(node.value), self._index(node)), node)


def _is_item(value: ast.Call) -> bool:
    return isinstance(value.func, ast.Attribute) and ast.dump(value.func) == ast.dump(_helper("item"))


def _is_read(value: ast.expr) -> bool:
    """Whether a number is an element of a tensor, or what a method returns, not computed from other numbers."""
    match value:
        case ast.Call(ast.Attribute(ast.Name("math"))):
            return False
        case ast.Call(ast.Attribute()):
            return True
    return False


class _ListsOfSlices(ast.NodeTransformer):
    """Makes ``x.unbind(1)`` a list that may have a symbolic length, wherever it stands."""

    def __init__(self) -> None:
        self.found = 0

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in _LISTING:
            return node
        self.found += 1
        return _listed(node, node.func)

    def visit_Assign(self, node: ast.Assign) -> Any:
        """Makes ``first, *rest = items`` an assignment of a part, which may have a symbolic length."""
        self.generic_visit(node)
        targets = getattr(node.targets[0], "elts", [])
        for place, target in enumerate(targets):
            if isinstance(target, ast.Starred) and len(node.targets) == 1:
                targets[place] = target.value
                counts = [ast.Constant(place), ast.Constant(len(targets) - place - 1)]
                node.value = ast.copy_location(_call("starred", node.value, *counts), node.value)
                self.found += 1
        return node


def _listed(node: ast.Call, function: ast.Attribute) -> ast.Call:
    """Returns a call of `unbind` and the like as one that may return a list of symbolic length."""
    is_method = not (isinstance(function.value, ast.Name) and function.value.id == "torch")
    tensor = [function.value] if is_method else []
    return ast.copy_location(ast.Call(_helper(function.attr), [*tensor, *node.args], node.keywords), node)


class _Iterated(ast.NodeTransformer):
    """Makes what a loop runs over something that may have a symbolic length."""

    def visit_Call(self, node: ast.Call) -> Any:
        function = node.func
        is_listing = isinstance(function, ast.Attribute) and function.attr == "tolist"
        is_product = ast.unparse(function) in _PRODUCTS
        if not (is_listing or is_product or (isinstance(function, ast.Name) and function.id in _ITERATIONS)):
            return node  # what it does with what it gets is not known
        self.generic_visit(node)
        if is_product:
            node.func, node.args = _helper("product"), [function, *node.args]
        elif isinstance(function, ast.Name):
            node.func = _helper(function.id)
        elif isinstance(function, ast.Attribute) and function.attr == "tolist" and not node.args:
            node.func, node.args = _helper("tolist"), [function.value]
        return node


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


def _is_append(statement: ast.Expr) -> bool:
    """Whether a statement adds an element at the end of a list, not in front."""
    return isinstance(statement.value, ast.Call) and getattr(statement.value.func, "attr", "") == "append"


def _tuple(values: Sequence[ast.expr]) -> ast.Tuple:
    return ast.Tuple([*values], ast.Load())


def _helper(name: str) -> ast.Attribute:
    return ast.Attribute(ast.Name(HELPERS, ast.Load()), name, ast.Load())


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(_helper(name), [*arguments], [])


def _names(names: Sequence[str], context: ast.expr_context) -> ast.Tuple:
    return ast.Tuple([ast.Name(name, context) for name in names], context)
