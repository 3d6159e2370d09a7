"""RWKV's weighted average over all tokens so far as one loop operator, over any number of tokens and from any state.

transformers loops over the tokens in Python, which a trace unrolls. Numerator and denominator are kept relative to the
largest exponent so far, as there.
Recurrence: Peng and others, RWKV, 2023 (arXiv:2305.13048), appendix D.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from exportkit._torch_compat.graph import scan
from exportkit.rewrites.functions import has_function, replaced_function

_FUNCTION = "rwkv_linear_attention"


def has_weighted_average(model: torch.nn.Module, _arguments: Mapping[str, Any]) -> bool:
    """Returns whether layers in the model call transformers' weighted average."""
    return has_function(model, _FUNCTION)


@contextlib.contextmanager
def traced_weighted_average(model: torch.nn.Module) -> Iterator[None]:
    """Puts the loop operator in place of the Python loop."""
    with replaced_function(model, _FUNCTION, weighted_average):
        yield


def weighted_average(
    time_decay: torch.Tensor,
    time_first: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: tuple[torch.Tensor, ...] | None = None,
    return_state: bool = False,
) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
    """Takes and returns what transformers' function does; keys and values are (batch, tokens, channels).

    The state is numerator, denominator and largest exponent, each (batch, channels).
    """
    first: tuple[torch.Tensor, ...]
    if state is None:
        blank = torch.zeros_like(key[:, 0], dtype=torch.float32)
        first = (blank, blank.clone(), blank - 1e38)
    else:
        first = tuple(part.contiguous() for part in state)
    decay = -torch.exp(time_decay)

    def step(carried: Any, token: Any) -> tuple[Any, torch.Tensor]:
        output = _added(carried, token, time_first)
        return _added(carried, token, 0.0, decay), output[0] / output[1]

    tokens = tuple(tensor.float().transpose(0, 1).contiguous() for tensor in (key, value))
    last, outputs = scan(step, first, tokens)
    kept = return_state or state is not None
    return outputs.transpose(0, 1).to(key.dtype), list(last) if kept else None


def _added(
    carried: tuple[torch.Tensor, ...], token: tuple[torch.Tensor, torch.Tensor], bonus: Any, decay: Any = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numerator, denominator and largest exponent with one token more."""
    numerator, denominator, largest = carried
    key, value = token
    before, now = largest + decay, key + bonus
    most = torch.maximum(before, now)
    old, new = torch.exp(before - most), torch.exp(now - most)
    return old * numerator + new * value, old * denominator + new, most
