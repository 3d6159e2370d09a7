"""Classes by their names in files: what may be named, and finding it without importing code from elsewhere."""

from __future__ import annotations

import importlib
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import optree

from exportkit.errors import TreeError
from exportkit.trees.caches import is_cache_class
from exportkit.trees.object_parts import name_of
from exportkit.trees.objects import CONTAINERS, can_open

# Containers that torch's pytree knows how to build, and that a cache may hold.
COLLECTIONS = (OrderedDict, defaultdict, deque)
# Other classes that a cache may name: what a dict in it makes its missing values with.
_DEFAULTS = (bool, int, float, str, list, tuple, dict, set)
# Packages whose modules are imported when a class of theirs is needed; any other must be loaded already.
_IMPORTED = ("torch", "transformers", "exportkit")


def class_name(cls: type, accepted: Callable[[Any], bool] | None = None, expected: str = "a class") -> str:
    """Returns the name under which `find_class` finds a class.

    Raises:
        TreeError: if it does not, for example because the class is defined in a function.
    """
    name = name_of(cls) or f"{cls.__module__}:{cls.__qualname__}"
    if find_class(name, accepted, expected) is not cls:
        raise TreeError("The name of this class refers to a different class.", got=name.replace(":", "."))
    return name


def find_class(name: str, accepted: Callable[[Any], bool] | None = None, expected: str = "a class") -> Any:
    """Returns the class of that name.

    Args:
        name: Its module, a colon, and its qualified name.
        accepted: Says whether a class is one of those that may be named here.
        expected: What these are, for the message.

    Raises:
        TreeError: if there is no such class, or its module is not loaded.
    """
    module, _, qualified = name.partition(":")
    cause: object = "not imported, and reading a file does not import other modules"
    found: Any = sys.modules.get(module)
    if found is None and module.partition(".")[0] in _IMPORTED:
        try:
            found = importlib.import_module(module)
        except Exception as error:  # whatever a module raises that cannot be imported here
            cause = error
    if found is None:
        raise TreeError(
            f"Class {qualified} belongs to a module that is not available.",
            where=f"module {module}",
            got=cause,
            hint=f"import {module} first, in the version with which the file was written.",
        )
    for step in qualified.split("."):
        found = getattr(found, step, None)
    if not isinstance(found, type) or (accepted is not None and not accepted(found)):
        raise TreeError(
            f"No class was found with the name {qualified}.",
            where=f"module {module}",
            expected=f"{expected}, defined at the top level of its module",
            got=found,
        )
    return found


def has_fields(cls: Any) -> bool:
    """Returns whether a class is a named tuple, or one that is written in C."""
    return optree.is_namedtuple_class(cls) or optree.is_structseq_class(cls)


def belongs_to_cache(cls: Any) -> bool:
    """Returns whether a file may name a class inside a cache."""
    return cls in (*_DEFAULTS, *COLLECTIONS) or optree.is_namedtuple_class(cls) or is_cache_class(cls)


# Classes that a cache may name in a file, as objects of its classes are built without asking them.
CACHE_CLASSES = belongs_to_cache, "a cache, a layer of one, or a plain container"
# Classes of the parts of an opened object.
PART_CLASSES = (
    lambda cls: cls in CONTAINERS or has_fields(cls) or can_open(cls),
    "a class of objects that consist of their attributes",
)
