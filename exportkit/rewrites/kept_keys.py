"""Attention that keeps only its strongest keys, at any number of them.

transformers picks the top k of the keys where there are more than k, and asks Python whether there are, which a trace
freezes. Here as many as there are, but k at most, are picked in any case: of fewer keys that is all.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from exportkit.rewrites.attributes import original_attribute, replaced_attributes

_METHOD = "prepare_dynamic_mask"


def keeps_strongest_keys(model: torch.nn.Module, _arguments: Mapping[str, Any]) -> bool:
    """Returns whether the model has attention that makes its mask from scores of the keys, and keeps the top k."""
    return bool(_classes(model))


@contextlib.contextmanager
def traced_kept_keys(model: torch.nn.Module) -> Iterator[None]:
    """Puts a mask in place that is made in the same way for few keys and for many."""
    with contextlib.ExitStack() as stack:
        for attention in _classes(model):
            mask = _strongest_of(original_attribute(attention, _METHOD))
            stack.enter_context(replaced_attributes(attention, {_METHOD: mask}))
        yield


def _classes(model: torch.nn.Module) -> set[type]:
    return {type(module) for module in model.modules() if hasattr(module, _METHOD)}


def _strongest_of(scored: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The method, given the one of transformers, which is only asked for the scores of all keys."""

    def mask(
        self: Any,
        hidden_states: torch.Tensor,
        dt_states: torch.Tensor,
        keep_window_size: int = 2048,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        scores = scored(self, hidden_states, dt_states, sys.maxsize, attention_mask)
        count = torch.sym_min(keep_window_size, scores.shape[-1])
        strongest = torch.topk(scores, count, dim=-1, sorted=False).indices
        is_kept = torch.zeros_like(scores).scatter(-1, strongest, 1.0)
        return scores.masked_fill(is_kept == 0.0, torch.finfo(scores.dtype).min)

    return mask
