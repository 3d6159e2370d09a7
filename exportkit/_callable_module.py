"""Makes a module callable, for the public functions that a module of the package is named after."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """A module whose call is a call of its function ``__wrapped__``, which `inspect` and `help` follow."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)


def make_callable(module_name: str, function: Callable[..., Any]) -> None:
    """Lets a loaded module be called like ``function``, and gives it the docstring of the function."""
    module = sys.modules[module_name]
    module.__class__ = _CallableModule
    module.__wrapped__ = function  # type: ignore[attr-defined]
    module.__doc__ = function.__doc__
