"""Takes the names and calls of things outside the suite and says what is known of them without running the suite.

Conditions are answered for the interpreter, platform, installed packages and environment variables that the scan itself
runs with, as pytest would answer them if it ran here. Nothing of the suite is imported.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import platform
import re
import shutil
import struct
import sys
from collections.abc import Callable, ItemsView, KeysView, Mapping, ValuesView
from functools import cache
from typing import Any

from exportkit.skips.values import UNKNOWN, External, known

SKIP_CALLS = {"pytest.skip", "_pytest.outcomes.skip"}
SKIP_ERRORS = {"unittest.SkipTest", "unittest.case.SkipTest", "pytest.skip.Exception", "_pytest.outcomes.Skipped"}
UNITTEST_DECORATORS = {"unittest.skip", "unittest.skipIf", "unittest.skipUnless"}
FIXTURES = {"pytest.fixture", "pytest.yield_fixture", "pytest_asyncio.fixture"}
# What a program may do after these is not reached.
EXITS = {"pytest.fail", "pytest.xfail", "pytest.exit", "sys.exit"}

_VALUES: Mapping[str, Any] = {
    "sys.version_info": sys.version_info,
    "sys.version": sys.version,
    "sys.platform": sys.platform,
    "sys.maxsize": sys.maxsize,
    "sys.byteorder": sys.byteorder,
    "sys.hexversion": sys.hexversion,
    "sys.implementation.name": sys.implementation.name,
    "os.name": os.name,
    "os.sep": os.sep,
    "typing.TYPE_CHECKING": False,
}

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{
        f"builtins.{function.__name__}": function
        for function in (all, any, abs, bool, dict, float, frozenset, int, len, list, max, min, range, repr, round)
    },
    **{f"builtins.{function.__name__}": function for function in (set, sorted, str, sum, tuple)},
    "platform.system": platform.system,
    "platform.machine": platform.machine,
    "platform.python_implementation": platform.python_implementation,
    "platform.python_version": platform.python_version,
    "os.getenv": os.getenv,
    "os.environ.get": os.environ.get,
    "os.cpu_count": os.cpu_count,
    "shutil.which": shutil.which,
    "struct.calcsize": struct.calcsize,
}

_METHODS: Mapping[type, set[str]] = {
    str: {"format", "join", "lower", "upper", "strip", "lstrip", "rstrip", "replace", "startswith", "endswith", "split"}
    | {"capitalize", "title", "removeprefix", "removesuffix", "count", "isdigit"},
    dict: {"get", "keys", "values", "items"},
    list: {"count", "index"},
    tuple: {"count", "index"},
}
WIDE = re.compile(r"\d{5}")  # a width in a format that would make a text of some size
_LARGEST = 10_000  # elements: what is larger is not worked out


@cache
def installed(package: str) -> bool:
    """Whether the top-level package of a dotted name is installed; the package is not imported."""
    top = package.partition(".")[0]
    if top in sys.stdlib_module_names or top in sys.builtin_module_names:
        return True
    try:
        return importlib.machinery.PathFinder.find_spec(top) is not None or importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False


def external_value(name: str) -> Any:
    """Returns the value behind a dotted name, or the name itself as an `External`."""
    if name in _VALUES:
        return _VALUES[name]
    parent, _, attribute = name.rpartition(".")
    if parent == "sys.version_info" and attribute in ("major", "minor", "micro"):
        return getattr(sys.version_info, attribute)
    return External(name)


def call_external(name: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Returns what a call of something outside the suite gives, or UNKNOWN."""
    if name == "importlib.util.find_spec" and args and isinstance(args[0], str):
        return UNKNOWN if "." in args[0] else _spec(args[0])
    if name == "builtins.len" and len(args) == 1 and isinstance(args[0], list | tuple):
        return len(args[0])
    function = _FUNCTIONS.get(name)
    return UNKNOWN if function is None else _attempt(function, args, keywords)


def call_method(value: Any, method: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Returns what a method of a known built-in value gives, or UNKNOWN."""
    if (
        not known(value)
        or method not in _METHODS.get(type(value), set())
        or (method == "format" and WIDE.search(value))
    ):
        return UNKNOWN
    return _attempt(getattr(value, method), args, keywords)


def _spec(package: str) -> Any:
    return True if installed(package) else None  # a spec is true, and is not None


def _attempt(function: Callable[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    if not all(known(value) for value in (*args, *keywords.values())):
        return UNKNOWN
    if function is range and any(isinstance(value, int) and abs(value) > _LARGEST for value in args):
        return UNKNOWN
    try:
        value = function(*args, **keywords)
    except Exception:  # the suite would raise here; what comes of it is not ours to say
        return UNKNOWN
    return list(value) if isinstance(value, range | KeysView | ValuesView | ItemsView) else value
