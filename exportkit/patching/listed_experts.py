"""Experts kept as modules of their own, each run on the tokens that chose it, in a loop that a trace can follow.

transformers loops over those experts that a token chose, which are values, and casts the router's classifier on the
way. Here all experts are run, each on its tokens, of which there may be none; a cast that changes nothing is left out.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from exportkit.patching.attributes import original_attribute, replaced_attributes

_ARGUMENTS = ["self", "hidden_states", "selected_experts", "routing_weights"]


def has_listed_experts(model: torch.nn.Module, _arguments: Mapping[str, Any]) -> bool:
    """Returns whether the model has dictionaries of experts that are called with a choice of them for each token."""
    return bool(_classes(model))


@contextlib.contextmanager
def traced_listed_experts(model: torch.nn.Module) -> Iterator[None]:
    """Puts the loop over all experts in place, and lets modules stay as they are where a cast would not change them."""
    with contextlib.ExitStack() as stack:
        for experts in _classes(model):
            stack.enter_context(replaced_attributes(experts, {"forward": _all_experts}))
        stack.enter_context(replaced_attributes(torch.nn.Module, {"to": _to}))
        yield


def _classes(model: torch.nn.Module) -> set[type]:
    dictionaries = {type(module) for module in model.modules() if isinstance(module, torch.nn.ModuleDict)}
    return {cls for cls in dictionaries if _arguments(original_attribute(cls, "forward")) == _ARGUMENTS}


def _arguments(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def _all_experts(
    self: Any, hidden_states: torch.Tensor, selected_experts: torch.Tensor, routing_weights: torch.Tensor
) -> torch.Tensor:
    """The sum over slots and experts.

    Args:
        self: The experts, in the order in which they are selected.
        hidden_states: (tokens, hidden size).
        selected_experts: 1 where a token chose an expert, else 0: (tokens, slots, experts).
        routing_weights: (tokens, slots).
    """
    total = torch.zeros_like(hidden_states)
    for expert, chosen in zip(self.values(), selected_experts.unbind(-1), strict=True):
        tokens, slots = chosen.nonzero(as_tuple=True)
        result = expert(hidden_states[tokens]) * routing_weights[tokens, slots, None]
        total = total.index_add(0, tokens, result.to(total.dtype))
    return total


def _to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    is_cast = len(args) == 1 and isinstance(args[0], torch.dtype) and not kwargs
    if is_cast and all(tensor.dtype is args[0] for tensor in (*self.parameters(), *self.buffers())):
        return self
    moved: torch.nn.Module = original_attribute(torch.nn.Module, "to")(self, *args, **kwargs)
    return moved
