"""Loops over a length, such as ``for step in x.unbind(1):``, as one loop operator.

A trace unrolls a Python loop, which fixes how often it runs. Under this rewrite, the functions of a model with such
loops are compiled once more from their source: where the loop runs over a symbolic length, its body becomes a function
from what it changes, and one element, to what it has changed. A loop that does something else stays as it is.
"""

from __future__ import annotations

import ast
import contextlib
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
from exportkit.rewrites.loop_helpers import Helpers
from exportkit.rewrites.loop_source import with_loops_as_functions
from exportkit.rewrites.loop_syntax import HELPERS
from exportkit.rewrites.model_code import Line
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
        deciding: Lines of functions that loops call, which decide by the values of tensors: they compute both sides.
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
