"""One decoder graph for encoder-decoder models: it projects the part of the encoder's states that is not cached yet.

transformers projects the encoder's states to keys and values in the first call, and reads them from the cache in later
ones; a trace freezes one of both. Here the cache is always extended: by all positions in the first call, and by none in
later ones, when the cached part is as long as the states.

An encoder of audio returns fewer states than it was given frames. There the mask over frames is made one over all
states beforehand, as the model would make it as long as the states that it gets.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from exportkit._torch_compat.transformers import REDUCED_MASK
from exportkit.rewrites.attributes import original_attribute, replaced_attributes

STATES, MASK = "encoder_outputs", "attention_mask"


def has_cross_cache(_model: torch.nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Returns whether the arguments hold the encoder's states, and a cache of what was projected from them."""
    return _states(arguments) is not None and any(_cross_layers(value) for value in arguments.values())


@contextlib.contextmanager
def masks_of_states(model: torch.nn.Module) -> Iterator[None]:
    """Lets encoders of audio take the mask that they are given for one of their states."""
    with contextlib.ExitStack() as stack:
        for cls in _classes_that_reduce(model):
            stack.enter_context(
                replaced_attributes(cls, {REDUCED_MASK: lambda _self, _length, mask, *_args, **_kw: mask})
            )
        yield


def with_uncached_states(
    model: torch.nn.Module, arguments: dict[str, Any], names: Collection[str]
) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Returns the arguments with the uncached part of the encoder's states, and what puts the whole in a result.

    Args:
        model: The model.
        arguments: Arguments by name.
        names: Names of all arguments that the method takes. A mask that it takes and was not given is one over all
            states: the model would make one over the uncached part.
    """
    states = _states(arguments)
    caches = [value for value in arguments.values() if _cross_layers(value)]
    if states is None or not caches:
        return arguments, lambda result: result
    cached = _cross_layers(caches[0])[0].keys.shape[2]
    rest = states[:, cached:]
    for cache in caches:
        cache.is_updated = dict.fromkeys(cache.is_updated, False)
    changed = {**arguments, STATES: _with_first(arguments[STATES], rest)}
    if MASK in names and arguments.get(MASK) is None:
        changed[MASK] = states.new_ones(states.shape[:2], dtype=torch.int64)
    elif MASK in names:
        changed[MASK] = _mask_of_states(model, states.shape[1], arguments[MASK])
    return changed, lambda result: _with_states(result, rest, states)


def _mask_of_states(model: torch.nn.Module, length: int, mask: torch.Tensor) -> torch.Tensor:
    """The mask over all states, where an encoder of audio makes one of that over frames; else the mask itself."""
    for cls in _classes_that_reduce(model):
        module = next(module for module in model.modules() if isinstance(module, cls))
        reduced: torch.Tensor = original_attribute(cls, REDUCED_MASK)(module, length, mask)
        return reduced
    return mask


def _classes_that_reduce(model: torch.nn.Module) -> list[type]:
    classes = dict.fromkeys(cls for module in model.modules() for cls in type(module).__mro__)
    return [cls for cls in classes if REDUCED_MASK in vars(cls)]


def _states(arguments: Mapping[str, Any]) -> torch.Tensor | None:
    value = arguments.get(STATES)
    first = (
        value[0] if isinstance(value, list | tuple) and value else next(iter(value.values()), None) if value else None
    )
    return first if isinstance(first, torch.Tensor) and first.ndim == 3 else None


def _with_first(value: Any, states: torch.Tensor) -> Any:
    """What the encoder returned with other states; masks and the like, which are over all positions, stay."""
    if isinstance(value, Mapping):
        changed = copy.copy(value)
        changed[next(iter(value))] = states  # type: ignore[index]  # outputs of transformers can be assigned to
        return changed
    return type(value)((states, *value[1:]))


def _cross_layers(value: Any) -> list[Any]:
    layers = getattr(getattr(value, "cross_attention_cache", None), "layers", [])
    return [layer for layer in layers if isinstance(getattr(layer, "keys", None), torch.Tensor)]


def _with_states(result: Any, rest: torch.Tensor, states: torch.Tensor) -> Any:
    """The result with the whole states where the model returned the part that it was given."""
    if isinstance(result, Mapping):
        for key, value in result.items():
            if value is rest:
                result[key] = states  # type: ignore[index]  # outputs of transformers can be assigned to
        return result
    if type(result) in (list, tuple):
        return type(result)(states if value is rest else value for value in result)
    return result
