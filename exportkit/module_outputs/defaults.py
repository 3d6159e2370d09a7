"""Defaults from the config of a module. In comes a forward; out comes one whose missing arguments the config fills."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from exportkit.errors import InvalidRequestError
from exportkit.module_outputs.arguments import Parameters, setting

NAMES = ("use_cache", "vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio")
_STRATEGIES = ("default", "full")


def merge_with_config_defaults(func: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward that takes arguments which are None or missing from ``self.config``.

    These are ``use_cache``, ``vision_feature_layer``, ``vision_feature_select_strategy`` and ``vision_aspect_ratio``.
    What a call gives, by position or by name, is left as it is. A module without config runs as before. While it
    trains with gradient checkpointing, ``use_cache`` is False.

    Args:
        func: The forward.

    Raises:
        InvalidRequestError: by the call, if ``vision_feature_select_strategy`` is neither "default" nor "full".
    """
    parameters = Parameters(func)
    names = [name for name in NAMES if parameters.accepts(name)]

    @functools.wraps(func)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = getattr(self, "config", None)
        for name in names:
            given = parameters.given(name, args, kwargs)
            value = _checked(self, name, setting(config, name) if given is None else given)
            if value is not given:
                args, kwargs = parameters.replaced(name, value, args, kwargs)
        return func(self, *args, **kwargs)

    return wrapper


def _checked(module: Any, name: str, value: Any) -> Any:
    if name == "use_cache" and value and module.training and getattr(module, "gradient_checkpointing", False):
        warnings.warn("A cache cannot be used with gradient checkpointing: use_cache is False.", stacklevel=3)
        return False
    if name == "vision_feature_select_strategy" and value is not None and value not in _STRATEGIES:
        raise InvalidRequestError(
            "There is no such way to select vision features.", where=name, expected=" or ".join(_STRATEGIES), got=value
        )
    return value
