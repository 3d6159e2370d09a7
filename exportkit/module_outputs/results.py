"""Results of any type, with captured values added. In come a result and values by key; out comes the result with both.

Dicts, the output classes of transformers and dataclasses keep their class. A tensor or a tuple becomes a named tuple:
the outputs first, then the captured values.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import namedtuple
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from exportkit.errors import CaptureError

_LAST_STATES = ("vision_hidden_states", "last_hidden_state")
_classes: dict[str, type] = {}


def last_hidden_state(result: Any) -> Any:
    """Returns what a result calls its last hidden state, or None."""
    for name in _LAST_STATES:
        value = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
        if value is not None:
            return value
    return None


def with_values(result: Any, values: Mapping[str, tuple[Any, ...]]) -> Any:
    """Returns a result with values added under their keys.

    Raises:
        CaptureError: if the result is of a type that nothing can be added to.
    """
    if not values:
        return result
    if type(result) is dict:
        return {**result, **values}
    if isinstance(result, MutableMapping):
        for key, value in values.items():
            result[key] = value
        return result
    if isinstance(result, torch.Tensor):
        return _named({"output": result, **values})
    if isinstance(result, list | tuple):
        names = getattr(result, "_fields", None) or [f"output_{i}" for i in range(len(result))]
        return _named({**dict(zip(names, result, strict=True)), **values})
    if dataclasses.is_dataclass(result):
        return _dataclass(result, values)
    raise CaptureError(
        "The captured values cannot be added to what the model returns.",
        expected="a tensor, tuple, list, dict or dataclass",
        got=type(result).__name__,
        hint="use `with capture(model, ...)`, which leaves the result alone.",
    )


def as_tuple(result: Any) -> Any:
    """Returns what a result holds as a plain tuple, without the Nones of dicts and dataclasses; a tensor as it is."""
    if hasattr(result, "to_tuple"):
        return result.to_tuple()
    if isinstance(result, Mapping):
        return tuple(value for value in result.values() if value is not None)
    if isinstance(result, list | tuple):
        return tuple(result)
    if dataclasses.is_dataclass(result):
        names = [field.name for field in dataclasses.fields(result)]
        names += [name for name in getattr(result, "__dict__", {}) if name not in names]
        found = [getattr(result, name) for name in names]
        return tuple(value for value in found if value is not None)
    return result


def _dataclass(result: Any, values: Mapping[str, Any]) -> Any:
    """A copy: the class may be frozen. Keys that are no field become attributes of the copy."""
    fields = {field.name for field in dataclasses.fields(result) if field.init}
    result = dataclasses.replace(result, **{key: value for key, value in values.items() if key in fields})
    rest = {key: value for key, value in values.items() if key not in fields}
    if rest and not hasattr(result, "__dict__"):
        raise CaptureError(
            f"{type(result).__name__} has no field for {', '.join(map(repr, rest))}.",
            hint="add the field, with None as its default.",
        )
    result = copy.copy(result) if rest else result
    for key, value in rest.items():
        object.__setattr__(result, key, value)
    return result


def _named(values: Mapping[str, Any]) -> Any:
    _prepare_class(*values)
    return _classes[" ".join(values)](*values.values())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _prepare_class(*names: str) -> bool:
    """Makes the class of a result, also while torch traces, which cannot follow this."""
    key = " ".join(names)
    if key not in _classes:
        _classes[key] = namedtuple("CapturedOutput", names, rename=True)
    return True
