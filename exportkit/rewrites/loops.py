"""Loops over a length, such as ``for step in x.unbind(1):``, as one loop operator.

A trace unrolls a Python loop, which fixes how often it runs. Under this rewrite, the functions of a model with such
loops are compiled once more from their source: where the loop runs over a symbolic length, its body becomes a function
from what it changes, and one element, to what it has changed. A loop that does something else, such as to end early,
stays as it is.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
import types
from collections.abc import Sequence
from typing import Any

import torch

from exportkit.overrides import Attribute, classes_of, namespaces, replaced
from exportkit.rewrites.loop_helpers import Helpers
from exportkit.rewrites.loop_source import with_loops_as_functions
from exportkit.rewrites.loop_syntax import HELPERS
from exportkit.rewrites.packed_sequences import layers_in_loops


def loops_as_operators(
    model: torch.nn.Module, called: Sequence[types.ModuleType] = ()
) -> contextlib.AbstractContextManager[None]:
    """Replaces the functions with loops where the classes of the model are defined.

    Args:
        model: The model.
        called: Python modules with functions that the model calls.
    """
    classes = classes_of(model)
    modules = dict.fromkeys([*namespaces(model), *called])
    owners = (*classes, *modules, *model.modules())  # a module may hold a function as its attribute
    own = [owner for owner in owners if _package(owner) not in ("torch", "builtins", "exportkit")]
    replacements: list[tuple[Any, Any]] = layers_in_loops()
    for owner in own:
        for name, value in list(vars(owner).items()):
            if isinstance(value, types.FunctionType) and (again := _compiled(value)) is not None:
                replacements.append((Attribute(owner, name), again))
    return replaced(replacements)


def _package(owner: Any) -> str:
    return str(getattr(owner, "__module__", None) or owner.__name__).partition(".")[0]


@functools.lru_cache(maxsize=1024)
def _compiled(function: types.FunctionType) -> types.FunctionType | None:
    """The function, compiled with loop bodies as functions; None if it has no such loop, or no plain source."""
    inner = getattr(function, "__wrapped__", None)
    if isinstance(inner, types.FunctionType):  # decorated, for instance with torch.no_grad()
        return _around(function, inner)
    try:
        lines, first = inspect.getsourcelines(function.__code__)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return None
    definition.decorator_list = []  # this is the function that they were given
    names = function.__code__.co_freevars
    factory = with_loops_as_functions(definition, names)
    if factory is None:
        return None
    ast.increment_lineno(factory, first - 1)
    module = compile(ast.Module([factory], []), function.__code__.co_filename, "exec")
    (made,) = (code for code in module.co_consts if isinstance(code, types.CodeType))
    (code,) = (code for code in made.co_consts if isinstance(code, types.CodeType) and code.co_name == definition.name)
    cells = dict(zip(names, function.__closure__ or (), strict=True)) | {HELPERS: types.CellType(Helpers)}
    closure = tuple(cells[name] for name in code.co_freevars)
    again = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    again.__kwdefaults__, again.__module__ = function.__kwdefaults__, function.__module__
    return again


def _around(function: types.FunctionType, inner: types.FunctionType) -> types.FunctionType | None:
    """What a decorator made of a function, with the function compiled; None if that is not where it is looked up."""
    again, cells = _compiled(inner), list(function.__closure__ or ())
    places = [number for number, cell in enumerate(cells) if _content(cell) is inner]
    if again is None or not places:
        return None
    for place in places:
        cells[place] = types.CellType(again)
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    made.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(made, again)
    return made


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None
