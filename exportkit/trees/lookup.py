"""Classes by name, and back: for files, which name classes and must not get anything else loaded by that.

In comes a name such as ``torch:Tensor``; out comes the class, from modules that are loaded already, or that belong to
packages whose caches and outputs exportkit knows.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from exportkit.errors import TreeError

# Packages whose modules are imported when a class of theirs is needed; any other must be loaded already.
_IMPORTED = ("torch", "transformers", "exportkit")


def class_name(cls: type) -> str:
    """Returns the name under which `find_class` finds a class.

    Raises:
        TreeError: if it does not, as for a class that is defined in a function.
    """
    name = f"{cls.__module__}:{cls.__qualname__}"
    if find_class(name) is not cls:
        raise TreeError("A class has the name of another one.", got=name.replace(":", "."))
    return name


def find_class(name: str, accepted: Callable[[Any], bool] | None = None, expected: str = "a class") -> Any:
    """Returns the class of that name.

    Args:
        name: Its module, a colon, and its qualified name.
        accepted: Says whether a class is one of those that may be named here.
        expected: What these are, for the message.

    Raises:
        TreeError: if there is no such class, or its module is not there.
    """
    module, _, qualified = name.partition(":")
    found: Any = _find_module(module, qualified)
    for step in qualified.split("."):
        found = getattr(found, step, None)
    if not isinstance(found, type) or (accepted is not None and not accepted(found)):
        raise TreeError(
            f"No such class can be found by its name: {qualified}.",
            where=f"module {module}",
            expected=f"{expected}, defined at the top level of its module",
            got=found,
        )
    return found


def _find_module(module: str, qualified: str) -> Any:
    cause: object = "not loaded, and reading a file loads no module from elsewhere"
    if module in sys.modules or module.partition(".")[0] in _IMPORTED:
        try:
            return importlib.import_module(module)
        except ImportError as error:
            cause = error
    raise TreeError(
        f"Class {qualified} belongs to a module that is not there.",
        where=f"module {module}",
        got=cause,
        hint=f"import {module} first, in the version that was there when the file was written.",
    )
