"""Recurrences over tokens as one loop operator, for any number of tokens and from any state.

transformers loops over tokens (or blocks of them) in Python, which a trace unrolls, often with one branch for prompts
and another for single tokens. Here each loop is torch's scan over tokens.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from exportkit._torch_compat.loop_operators import scan
from exportkit._torch_compat.transformers import RECURRENT_SCAN, cache_class
from exportkit.overrides import Attribute, Replacing, replaced, replaced_attributes, replaced_functions

# The selective scan of state-space layers. Gu and Dao, Mamba, 2023 (arXiv:2312.00752), equations 1a and 2.

SELECTIVE_SCAN = "mamba_selective_scan"


@contextlib.contextmanager
def traced_selective_scan(model: torch.nn.Module) -> Iterator[None]:
    """Replaces transformers' function, and starts at the state that the layer read from its cache.

    transformers' function starts at a state of zeros, as the kernels do that it stands for. With the cached state,
    several tokens on a filled cache give the same as one by one.
    """
    cache = cache_class("Cache")
    if cache is None:
        yield
        return
    pending = threading.local()  # the states that a layer has read and not used yet: the function does not get them
    read = cache.get_recurrent_state

    def get_recurrent_state(cache: Any, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        state: torch.Tensor | None = read(cache, *args, **kwargs)
        # (batch, channels, size) is for one scan, (batch, heads, channels, size) for one scan per head
        pending.states = [] if state is None else [state] if state.ndim == 3 else list(state.unbind(1))
        return state

    with (
        replaced_attributes(cache, {"get_recurrent_state": get_recurrent_state}),
        replaced_functions(model, {SELECTIVE_SCAN: functools.partial(_selective_scan, pending)}),
    ):
        yield


def _selective_scan(  # noqa: PLR0917 (transformers' positions)
    pending: threading.local,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_implementation: Any,
) -> Any:
    """The outputs (batch, channels, tokens), with the last state (batch, channels, size) if wanted."""
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = F.softplus(dt)
    states = getattr(pending, "states", [])
    first = states.pop(0) if states else hidden_states.new_zeros(*hidden_states.shape[:2], A.shape[-1])

    def step(state: torch.Tensor, token: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        value, rate, b, c = token
        state = torch.exp(A * rate[..., None]) * state + (rate * value)[..., None] * b[:, None]
        return state, (state * c[:, None]).sum(-1)

    tokens = tuple(tensor.float().permute(2, 0, 1).contiguous() for tensor in (hidden_states, dt, B, C))
    last, outputs = scan(step, first.float().contiguous(), tokens)
    output = outputs.permute(1, 2, 0).to(hidden_states.dtype)
    if D is not None:
        output = output + hidden_states * D[None, :, None]
    if z is not None:
        output = output * F.silu(z)
    return (output, last.to(hidden_states.dtype)) if return_last_state else output


# RWKV's weighted average over all tokens so far. Peng and others, 2023 (arXiv:2305.13048), appendix D. As in
# transformers, numerator and denominator are kept relative to the largest exponent so far.


def weighted_average(
    time_decay: torch.Tensor,
    time_first: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: tuple[torch.Tensor, ...] | None = None,
    return_state: bool = False,
) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
    """Takes and returns the same as transformers' function; keys and values are (batch, tokens, channels).

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
        output = _with_token(carried, token, time_first)
        return _with_token(carried, token, 0.0, decay), output[0] / output[1]

    tokens = tuple(tensor.float().transpose(0, 1).contiguous() for tensor in (key, value))
    last, outputs = scan(step, first, tokens)
    kept = return_state or state is not None
    return outputs.transpose(0, 1).to(key.dtype), list(last) if kept else None


def _with_token(
    carried: tuple[torch.Tensor, ...], token: tuple[torch.Tensor, torch.Tensor], bonus: Any, decay: Any = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numerator, denominator and largest exponent, with one more token."""
    numerator, denominator, largest = carried
    key, value = token
    before, now = largest + decay, key + bonus
    most = torch.maximum(before, now)
    old, new = torch.exp(before - most), torch.exp(now - most)
    return old * numerator + new * value, old * denominator + new, most


# Gated recurrent blocks. De and others, Griffin, 2024 (arXiv:2402.19427), equation 4. transformers starts the
# convolution of a prompt from zeros, and that of a single token from the cached tokens. Here it is always over cached
# and new tokens; for a prompt, the cached ones are zeros.


def traced_gated_recurrence(model: torch.nn.Module) -> Replacing:
    """Replaces the loop by an operator, and both forms of the convolution by one."""
    blocks = recurrent_blocks(model)
    return replaced(
        [
            *((Attribute(cls, "forward"), _recurrent_block) for cls in {type(block) for block in blocks}),
            *((Attribute(cls, RECURRENT_SCAN), _recurrence) for cls in {type(block.rg_lru) for block in blocks}),
        ]
    )


def recurrent_blocks(model: torch.nn.Module) -> list[Any]:
    """Returns the blocks that keep the last inputs of a convolution and a recurrent unit on their modules."""
    return [
        module
        for module in model.modules()
        if "conv1d_state" in vars(module) and hasattr(getattr(module, "rg_lru", None), RECURRENT_SCAN)
    ]


def _recurrent_block(
    self: Any,
    input_states: torch.Tensor,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,  # noqa: ARG001 (transformers' positions)
    use_cache: bool = True,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if not use_cache:
        self.conv1d_state = self.rg_lru.recurrent_states = None
    new = self.linear_x(input_states).transpose(1, 2)
    width = self.conv1d_width - 1
    cached = new.new_zeros(*new.shape[:-1], width) if self.conv1d_state is None else self.conv1d_state
    full = torch.cat([cached, new], dim=-1)
    self.conv1d_state = full[..., -width:] if use_cache else None
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


# Lightning attention. Qin and others, TransNormerLLM, 2023 (arXiv:2307.14995), equation 6; MiniMax-01, 2025
# (arXiv:2501.08313). The sum over tokens is the one that transformers computes in blocks.

LIGHTNING_PARTS = ("slope_rate", "block_size", "qkv_proj", "output_gate", "num_attention_heads", "head_dim")


def traced_lightning_attention(model: torch.nn.Module) -> Replacing:
    """Replaces the loops over blocks and over tokens."""
    modules = [module for module in model.modules() if all(hasattr(module, name) for name in LIGHTNING_PARTS)]
    return replaced([(Attribute(cls, "forward"), _lightning_attention) for cls in {type(module) for module in modules}])


def _lightning_attention(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Any,  # noqa: ARG001 (transformers' positions)
    attention_mask: torch.Tensor | None,
    past_key_values: Any = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, length, _ = hidden_states.shape
    projected = self.act_fn(self.qkv_proj(hidden_states))
    if attention_mask is not None:
        projected = (projected * attention_mask[:, :, None]).to(projected.dtype)
    heads = projected.reshape(batch, length, self.num_attention_heads, 3 * self.head_dim)
    state = None if past_key_values is None else past_key_values.get_linear_cache(self.layer_idx)
    if state is None:
        state = heads.new_zeros(batch, self.num_attention_heads, self.head_dim, self.head_dim)
    decay = torch.exp(-self.slope_rate)

    def step(state: torch.Tensor, token: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = token
        state = decay * state + key[..., None] * value[..., None, :]
        return state, (query[..., None] * state).sum(-2)

    tokens = tuple(tensor.transpose(0, 1).contiguous() for tensor in heads.split(self.head_dim, dim=3))
    last, outputs = scan(step, state.contiguous(), tokens)
    summed = outputs.transpose(0, 1).reshape(batch, length, self.num_attention_heads * self.head_dim)
    if past_key_values is not None:
        past_key_values.set_linear_cache(self.layer_idx, last)
    return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * self.norm(summed)), last
