"""Arguments of a decorated method and settings of its module: who gave which value."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Parameters:
    """The parameters of a method, without ``self``; of a decorated one, those of the method inside."""

    def __init__(self, method: Callable[..., Any]) -> None:
        parameters = list(inspect.signature(inspect.unwrap(method)).parameters.values())[1:]
        self.names = frozenset(parameter.name for parameter in parameters)
        self.takes_any_name = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        self._positions = {
            parameter.name: position for position, parameter in enumerate(parameters) if parameter.kind in _POSITIONAL
        }

    def accepts(self, name: str) -> bool:
        """Returns whether the method can be called with that name."""
        return name in self.names or self.takes_any_name

    def given(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns the value that a call gives, by position or by name, or None."""
        position = self._positions.get(name, len(args))
        return args[position] if position < len(args) else kwargs.get(name)

    def replaced(
        self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of a call with another value for that name, where the call has it."""
        position = self._positions.get(name, len(args))
        if position < len(args):
            return (*args[:position], value, *args[position + 1 :]), kwargs
        return args, {**kwargs, name: value}


def setting(config: Any, name: str, default: Any = None) -> Any:
    """Returns what a config says, be it an object, a dict, or None."""
    if isinstance(config, Mapping):
        return config.get(name, default)
    return getattr(config, name, default)
