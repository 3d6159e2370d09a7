"""Finds functions by name in the modules that a model's classes come from, and replaces them there for a while.

A transformers model looks its kernels up in the module of its class, so that is where another one has to stand.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from exportkit.rewrites.attributes import replaced_attributes


def has_function(model: torch.nn.Module, name: str) -> bool:
    """Returns whether a module that a class of the model comes from has a function of that name."""
    return bool(_modules_with(model, name))


@contextlib.contextmanager
def replaced_function(model: torch.nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Lets the classes of a model find another function under a name, for the time of a ``with`` block.

    Args:
        model: The model.
        name: Name of the function in the modules of the model's classes.
        function: What they find there instead.
    """
    with contextlib.ExitStack() as stack:
        for module in _modules_with(model, name):
            stack.enter_context(replaced_attributes(module, {name: function}))
        yield


def _modules_with(model: torch.nn.Module, name: str) -> list[ModuleType]:
    names = sorted({type(part).__module__ for part in model.modules()})
    modules = [sys.modules[module] for module in names if module in sys.modules]
    return [module for module in modules if callable(vars(module).get(name))]
