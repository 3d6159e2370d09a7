"""Models that look at token types in the first call of a generation only: one graph for it and for those after it.

Such a model asks its cache whether it holds anything, which a trace freezes. Here the cache always says no, and once
it holds something the token types become ones that mean nothing to the model, as if they were not looked at.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from exportkit.rewrites.attributes import replaced_attributes

_QUESTION = "is_initialized"
_TOKEN_TYPES = "token_type_ids"
_NO_TYPE = -1


def asks_for_first_call(model: torch.nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Returns whether a module asks a cache if it is the first call, and the arguments have token types and a cache."""
    if not _token_types(arguments) or not any(_is_cache(value) for value in arguments.values()):
        return False
    return any(_QUESTION in _names_in(type(module).forward) for module in model.modules())


@contextlib.contextmanager
def always_first(_model: torch.nn.Module) -> Iterator[None]:
    """Lets every cache say that it holds nothing yet."""
    with replaced_attributes(_cache_class(), {_QUESTION: property(lambda _: False)}):
        yield


def with_first_types(
    _model: torch.nn.Module, arguments: dict[str, Any], _names: Collection[str]
) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Returns the arguments with token types that mean nothing once the cache holds something."""
    cache = next((value for value in arguments.values() if _is_cache(value)), None)
    changed = {} if cache is None else {name: _first(arguments[name], cache) for name in _token_types(arguments)}
    return {**arguments, **changed}, lambda result: result


def _first(types: torch.Tensor, cache: Any) -> torch.Tensor:
    stored = types.new_ones(cache.get_seq_length()).sum()  # a sum, as a size alone would not be seen as a value
    return torch.where(stored == 0, types, torch.full_like(types, _NO_TYPE))


def _token_types(arguments: Mapping[str, Any]) -> list[str]:
    return [
        name for name, value in arguments.items() if name.endswith(_TOKEN_TYPES) and isinstance(value, torch.Tensor)
    ]


def _cache_class() -> Any:
    return getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)


def _is_cache(value: Any) -> bool:
    cls = _cache_class()
    return cls is not None and isinstance(value, cls)


def _names_in(function: Any) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return () if code is None else code.co_names
