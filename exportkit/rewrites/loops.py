"""Loops over a length, such as ``for step in x.unbind(1):``, as one loop operator.

A trace unrolls a Python loop, which fixes how often it runs. Under this rewrite, the functions of a model with such
loops are compiled once more from their source: where the loop runs over a symbolic length, its body becomes a function
from what it changes, and one element, to what it has changed. A loop that does something else stays as it is.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import inspect
import textwrap
import types
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exportkit.overrides import Item, classes_of, namespaces, replaced
from exportkit.rewrites.lengths import Cached
from exportkit.rewrites.loop_bodies import appended, obstacle, other_reference
from exportkit.rewrites.loop_comprehensions import SymbolicLists, with_loops_for_comprehensions
from exportkit.rewrites.loop_forms import keep_targets, nested_loops, plain_loop, unbounded_loops
from exportkit.rewrites.loop_growth import without_returns
from exportkit.rewrites.loop_helpers import Helpers
from exportkit.rewrites.loop_names import carried, read_after
from exportkit.rewrites.loop_statements import body_statements, compute_both_sides, value_before
from exportkit.rewrites.loop_syntax import (
    HELPERS,
    IS_IDLE,
    ITERATIONS,
    as_statements,
    assigned,
    call,
    helper,
    holds,
    names_in,
    rebound,
    root_of,
    tuple_of,
    variable,
    variables,
    walk,
)
from exportkit.rewrites.loop_values import NOTHING
from exportkit.rewrites.loop_whiles import PlainLoop
from exportkit.rewrites.model_code import Line, only_raises
from exportkit.rewrites.packed_sequences import layers_in_loops

_LEFT = {"torch", "builtins", "exportkit"}  # packages whose functions stay as they are


@dataclass(frozen=True)
class CodeOf:
    """The code of a function, which every reference to the function runs."""

    function: types.FunctionType

    def read(self) -> types.CodeType:
        """Returns the current code."""
        return self.function.__code__

    def write(self, code: types.CodeType) -> None:
        """Puts other code there."""
        self.function.__code__ = code


def loops_as_operators(
    model: torch.nn.Module, called: Sequence[types.ModuleType] = (), deciding: Collection[Line] = ()
) -> contextlib.AbstractContextManager[None]:
    """Replaces the code of functions with loops where the classes of the model are defined.

    Args:
        model: The model.
        called: Python modules with functions that the model calls.
        deciding: Lines of loops, and of functions that loops call, which decide by the values of tensors.
    """
    owners = (*classes_of(model), *dict.fromkeys([*namespaces(model), *called]), *model.modules())
    own = [owner for owner in owners if _package(owner) not in _LEFT]
    replacements, helpers = layers_in_loops(), dict[Item, type[Helpers]]()
    for function in dict.fromkeys(each for owner in own for each in _functions(owner)):
        lines = frozenset(line for file, line in deciding if file == function.__code__.co_filename)
        if (code := _compiled(function, lines)) is not None:
            replacements.append((CodeOf(function), code))
            helpers[Item(function.__globals__, HELPERS)] = Helpers
    return replaced([*replacements, *helpers.items()])


def _package(owner: Any) -> str:
    return str(getattr(owner, "__module__", None) or owner.__name__).partition(".")[0]


def _functions(owner: Any) -> Iterator[types.FunctionType]:
    """The functions of a class, a Python module, or a module that holds one as its attribute."""
    for held in list(vars(owner).values()):
        is_method = isinstance(held, staticmethod | classmethod | types.MethodType)
        value = held.__func__ if is_method else held.fget if isinstance(held, property) else held
        # it may be decorated, for instance with torch.no_grad()
        function = inspect.unwrap(value) if isinstance(value, types.FunctionType | Cached) else None
        if isinstance(function, types.FunctionType) and _package(function) not in _LEFT:
            yield function


@functools.lru_cache(maxsize=1024)
def _compiled(function: types.FunctionType, lines: frozenset[int]) -> types.CodeType | None:
    """The code of a function with loop bodies as functions; None if it has no such loop, or no plain source."""
    try:
        source, first = inspect.getsourcelines(function.__code__)
        tree = ast.parse(textwrap.dedent("".join(source)))
    except (OSError, TypeError, SyntaxError):
        return None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return None
    definition.decorator_list = []  # this is the function that they were given
    names = function.__code__.co_freevars
    factory = with_loops_as_functions(definition, names, {line - first + 1 for line in lines})
    if factory is None:
        return None
    ast.increment_lineno(factory, first - 1)
    module = compile(ast.Module([factory], []), function.__code__.co_filename, "exec")
    (made,) = (code for code in module.co_consts if isinstance(code, types.CodeType))
    (code,) = (code for code in made.co_consts if isinstance(code, types.CodeType) and code.co_name == definition.name)
    return code.replace(co_qualname=function.__code__.co_qualname) if code.co_freevars == names else None


# The source of functions with loops: which loops can become functions, and what their source is then.


_BODY, _STEPS = "_exportkit_body", "_exportkit_steps"
_PRODUCTS = {"product", "itertools.product", f"{HELPERS}.nested"}


def with_loops_as_functions(
    definition: ast.FunctionDef, names: Sequence[str], deciding: Collection[int]
) -> ast.FunctionDef | None:
    """Returns the source of a factory for the function with loop bodies as functions; None if nothing changes.

    Args:
        definition: The source of the function.
        names: What it takes from the functions around it.
        deciding: Lines that decide by the values of tensors: the function computes both sides, and a ``while`` without
            a limit that has such a line goes on until they end it.
    """
    definition.body = without_returns(definition.body)
    unbounded = {line for line in deciding if any(holds(loop, line) for loop in unbounded_loops(definition))}
    decides = compute_both_sides(definition, {*deciding} - unbounded)
    definition = with_loops_for_comprehensions(definition)
    lists = SymbolicLists(definition)
    definition = ast.fix_missing_locations(lists.visit(definition))
    loops = _Loops(definition, unbounded)
    changed = loops.visit(definition)
    if not loops.found and not lists.found and not decides:
        return None
    arguments = [ast.arg(name) for name in names]
    # a function that calls itself finds itself where it did before
    own = [] if definition.name in names else [ast.Global([definition.name])]
    factory = ast.FunctionDef("_exportkit_factory", _arguments(arguments), [*own, changed], [])
    return ast.fix_missing_locations(ast.copy_location(factory, definition))


class _Loops(ast.NodeTransformer):
    """Puts, beside each loop of a function that can become one, a function with the loop's body.

    Args:
        definition: The function.
        deciding: Lines that decide by the values of tensors whether a loop without a limit goes on.
    """

    def __init__(self, definition: ast.FunctionDef, deciding: Collection[int]) -> None:
        self._definition, self._deciding = definition, deciding
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
        both = ast.If(call("are_symbolic", *limits), as_statements(as_one), as_statements(found))
        return ast.fix_missing_locations(ast.copy_location(both, node))

    def _changed(self, node: ast.For | ast.While, original: ast.For | ast.While | None = None) -> Any:
        original = original or node
        self._count += 1
        number = self._count
        by_values = isinstance(node, ast.While) and any(holds(node, line) for line in self._deciding)
        plain = plain_loop(node, number, by_values)
        lists = {} if plain is None else appended(plain.loop)
        is_simple = plain is not None and obstacle(plain.loop, lists) is None and not (plain.is_unbounded and lists)
        names, reason = [], None
        if plain is not None and is_simple:
            added = {*lists, *plain.elements, *[bunched.name for bunched in plain.bunched]}
            reason = other_reference(self._definition, original, self._around, added)
            keep_targets(plain, read_after(self._definition.body, original) or set(), number)
            needed = {*plain.places, *plain.targets.values(), *[each.count for each in plain.elements.values()]}
            needed |= {name for name in (plain.counter, plain.flag) if name}
            names = carried(self._definition, original, plain.loop, self._around, needed)
        self._around.append(node)
        self.generic_visit(node)
        if plain is not None and is_simple:
            self.generic_visit(plain.loop)
        self._around.pop()
        if plain is None or not is_simple:
            return node
        self.found += 1
        new = _with_body(node, plain, number, names, lists, reason)
        return [ast.fix_missing_locations(ast.copy_location(statement, node)) for statement in new]

    visit_While = visit_For

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        match node:
            case ast.Call(ast.Attribute(ast.Name("torch"), "Tensor") as cls, [ast.Name() as given], []):
                return ast.fix_missing_locations(ast.copy_location(call("tensor", cls, given), node))
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        return self.generic_visit(node) if node is self._definition else node  # a function inside is left alone

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        return node


def _with_body(
    node: ast.For | ast.While,
    plain: PlainLoop,
    number: int,
    names: list[str],
    appended: dict[str, ast.Expr],
    reason: str | None,
) -> list[ast.stmt]:
    """The statements in place of a loop: a function with its body and a call, and the loop for other lengths.

    Args:
        node: The loop.
        plain: Its plain form.
        number: Makes the new names unique.
        names: The names that an iteration leaves to the next one, or to the code after the loop.
        appended: The statements that add an element to a list in every iteration, by the list's name.
        reason: Why the loop raises where it runs over a length; None if it does not.
    """
    loop, lists = plain.loop, [*appended]
    steps, body = f"{_STEPS}_{number}", f"{_BODY}_{number}"
    again: ast.stmt = node
    if isinstance(node, ast.For):
        again = ast.For(node.target, variable(steps), node.body, node.orelse, None)
    before = [_local(name, NOTHING) for name in names]
    added = {id(statement): f"_exportkit_added_{lists.index(name)}" for name, statement in appended.items()}
    targets = names_in(loop.target)
    is_first_apart = _decides_by(targets, loop)
    own = plain.places.keys() | {each.name for each in plain.read}
    kept = {*names} - rebound(*node.body) - (rebound(*loop.body) & own)
    function = _function(body, loop, names, added)
    loaded = [variable(steps), variable(body)]
    in_front = [ast.Constant(not _is_append(statement)) for statement in appended.values()]
    changes: list[ast.expr] = [ast.Constant(name in kept) for name in names]
    facts = tuple_of([tuple_of(in_front), tuple_of(changes), ast.Constant(is_first_apart)])
    run = call("run", *loaded, tuple_of(before), variables(lists), facts)
    after = ast.Tuple([variables(names, ast.Store()), variables(lists, ast.Store())], ast.Store())
    iterated, ends_early = _Iterated().visit(loop.iter), ast.Constant(plain.flag is not None)
    flag = names.index(plain.flag) if plain.flag is not None and not (lists or plain.adds) else None
    symbolic = [*_before(plain), function, ast.Assign([after], run), *_after(plain, loop, steps)]
    if reason is not None:
        symbolic = [ast.Expr(call("refuse", ast.Constant(reason)))]
    return [
        assigned(steps, call("steps", iterated, ends_early, ast.Constant(flag))),
        ast.If(call("are_symbolic", variable(steps)), symbolic, [again]),
    ]


def _function(name: str, loop: ast.For, names: list[str], added: dict[int, str]) -> ast.FunctionDef:
    """A function with the body of a loop, which changes; see `body_statements` for what is added to lists."""
    given = "_exportkit_carried", "_exportkit_element"
    body = [
        assigned(names, variable(given[0])),
        ast.Assign([loop.target], variable(given[1])),
        *body_statements(loop, added, {*names}),
        ast.Return(tuple_of([variables(names), variables([*added.values()])])),
    ]
    return ast.FunctionDef(name, _arguments([ast.arg(each) for each in (*given, IS_IDLE)]), body, [])


def _local(name: str, default: str | None = None) -> ast.expr:
    """What a name stands for, or the default if that is nothing, as it may be before the loop."""
    found = ast.Attribute(ast.Call(variable("locals"), [], []), "get", ast.Load())
    return ast.Call(found, [ast.Constant(name), ast.Constant(default)], [])


def _decides_by(targets: set[str], loop: ast.For) -> bool:
    """Whether a body decides by what the loop sets, as in ``if i == 0``: the first iteration may differ."""
    decisions = [node for node in walk(loop.body) if isinstance(node, ast.If | ast.IfExp)]
    tests = [node.test for node in decisions if isinstance(node, ast.IfExp) or not only_raises(node.body)]
    return any(isinstance(node, ast.Name) and node.id in targets for test in tests for node in ast.walk(test))


def _before(plain: PlainLoop) -> list[ast.stmt]:
    """Gives local names to the attributes and items that a loop changes, and lists to tensors that grow."""
    found: list[ast.stmt] = []
    for name, place in plain.places.items():
        value: ast.expr = place
        if isinstance(place, ast.Attribute):
            root = root_of(place)
            read = {
                node.attr
                for node in walk(plain.loop.body)
                if isinstance(node, ast.Attribute) and ast.dump(node.value) == ast.dump(root)
            }
            names = tuple_of([ast.Constant(each) for each in sorted(read)])
            value = call("attribute", place.value, ast.Constant(place.attr), root, names)
        found.append(assigned(name, value))
    for element in plain.read:
        length = element.length or ast.Constant(None)
        value = call("element", variable(element.items), ast.Constant(element.index), length)
        found.append(assigned(element.name, value))
    for target, name in plain.targets.items():
        found.append(assigned(name, _local(target)))
    for each in plain.elements.values():
        for name, start in ((each.name, ast.Constant(NOTHING)), (each.count, ast.Constant(0))):
            found.append(assigned(name, start))
    if plain.flag is not None and plain.test is not None:
        found += value_before(plain.test, plain.flag)
    elif plain.flag is not None:
        found.append(assigned(plain.flag, ast.Constant(False)))
    for grown in plain.grown:
        found.append(assigned(grown.elements, ast.List([], ast.Load())))
    for bunched in plain.bunched:
        found.append(assigned(bunched.elements, ast.List([], ast.Load())))
    return found


def _after(plain: PlainLoop, loop: ast.For, steps: str) -> list[ast.stmt]:
    """Sets what a loop has changed besides local names and lists."""
    found: list[ast.stmt] = []
    for name, element in plain.elements.items():
        parts = [variable(each) for each in (name, element.count, steps)]
        found.append(assigned(name, call("until", *parts)))
    for grown in plain.grown:
        start = ast.Constant(None) if grown.begins else _local(grown.name)
        elements = variable(grown.elements)
        joined = call("joined", start, elements, grown.dim, ast.Constant(grown.in_front))
        found.append(assigned(grown.name, joined))
    for bunched in plain.bunched:
        longer = call("extended", variable(bunched.name), variable(bunched.elements))
        found.append(assigned(bunched.name, longer))
    for target_name, name in plain.targets.items():
        found.append(assigned(target_name, variable(name)))
    for name, place in plain.places.items():
        target = copy.deepcopy(place)
        target.ctx = ast.Store()  # type: ignore[attr-defined]
        found.append(ast.Assign([target], variable(name)))
    if plain.counter is not None and isinstance(loop.iter, ast.Call):
        limits = [*loop.iter.args]
        found.append(assigned(plain.counter, call("counted", *limits)))
    return found


class _Iterated(ast.NodeTransformer):
    """Makes what a loop runs over something that may have a symbolic length."""

    def visit_Call(self, node: ast.Call) -> Any:
        function = node.func
        is_listing = ast.unparse(function) == f"{HELPERS}.tolist"
        is_product = ast.unparse(function) in _PRODUCTS
        if not (is_listing or is_product or (isinstance(function, ast.Name) and function.id in ITERATIONS)):
            return node  # what it does with what it gets is not known
        self.generic_visit(node)
        if is_listing:
            node.args = [node.args[0], ast.Constant(True)]
        elif is_product:
            node.func, node.args = helper("product"), [function, *node.args]
        elif isinstance(function, ast.Name):
            node.func = helper(function.id)
        return node


def _arguments(arguments: list[ast.arg]) -> ast.arguments:
    return ast.arguments(posonlyargs=[], args=arguments, kwonlyargs=[], kw_defaults=[], defaults=[])


def _is_append(statement: ast.Expr) -> bool:
    """Whether a statement adds an element at the end of a list, not in front."""
    return isinstance(statement.value, ast.Call) and getattr(statement.value.func, "attr", "") == "append"
