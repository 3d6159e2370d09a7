"""Gated recurrent blocks as one loop operator over tokens, after a convolution that goes on from stored tokens.

transformers loops over the tokens in Python, and takes a prompt's convolution from zeros and a single token's from the
stored tokens. Here the loop is torch's scan, and the convolution is always over stored and new tokens: with zeros
stored that is a prompt's.
Recurrence: De and others, Griffin, 2024 (arXiv:2402.19427), equation 4.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from exportkit._torch_compat.graph import scan
from exportkit._torch_compat.transformers import RECURRENT_SCAN
from exportkit.rewrites.attributes import replaced_attributes


def has_gated_recurrence(model: torch.nn.Module, _arguments: Mapping[str, Any]) -> bool:
    """Returns whether blocks in the model keep the last inputs of a convolution, and a state, on their modules."""
    return bool(_blocks(model))


@contextlib.contextmanager
def traced_gated_recurrence(model: torch.nn.Module) -> Iterator[None]:
    """Puts the loop operator and the single form of the convolution in place."""
    with contextlib.ExitStack() as stack:
        for block in {type(module) for module in _blocks(model)}:
            stack.enter_context(replaced_attributes(block, {"forward": _block_forward}))
        for unit in {type(module.rg_lru) for module in _blocks(model)}:
            stack.enter_context(replaced_attributes(unit, {RECURRENT_SCAN: _recurrence}))
        yield


def _blocks(model: torch.nn.Module) -> list[Any]:
    return [
        module
        for module in model.modules()
        if "conv1d_state" in vars(module) and hasattr(getattr(module, "rg_lru", None), RECURRENT_SCAN)
    ]


def _block_forward(
    self: Any, input_states: torch.Tensor, position_ids: torch.Tensor, *_args: Any, **_kwargs: Any
) -> tuple[torch.Tensor, None]:
    new = self.linear_x(input_states).transpose(1, 2)
    width = self.conv1d_width - 1
    stored = new.new_zeros(*new.shape[:-1], width) if self.conv1d_state is None else self.conv1d_state
    full = torch.cat([stored, new], dim=-1)
    self.conv1d_state = full[..., -width:]
    convolved = F.conv1d(full, self.conv_1d.weight, self.conv_1d.bias, groups=self.conv_1d.groups)
    recurrent = self.rg_lru(convolved.transpose(1, 2), position_ids)
    return self.linear_out(recurrent * self.act_fn(self.linear_y(input_states))), None


def _recurrence(
    _self: Any,
    hidden_states: torch.Tensor,
    recurrent_gate: torch.Tensor,
    reset: torch.Tensor,
    recurrent_states: torch.Tensor | None,
    acc_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    gate = (recurrent_gate * ~reset).to(acc_dtype)
    values = hidden_states.to(acc_dtype)
    state = torch.zeros_like(values[:, 0]) if recurrent_states is None else recurrent_states.to(acc_dtype)

    def step(state: torch.Tensor, token: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        state = token[0] * state + token[1]
        return state, state.clone()

    tokens = tuple(tensor.transpose(0, 1).contiguous() for tensor in (gate, values))
    last, outputs = scan(step, state.contiguous(), tokens)
    return outputs.transpose(0, 1).to(hidden_states.dtype), last
