"""Lightning attention as one loop operator, over any number of tokens and from any state.

transformers goes through a prompt in blocks and through further tokens one by one, both in Python, which a trace
unrolls. Here both are torch's scan over tokens: what the blocks compute is the same sum.
Recurrence: Qin and others, TransNormerLLM, 2023 (arXiv:2307.14995), equation 6; MiniMax-01, 2025 (arXiv:2501.08313).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from exportkit._torch_compat.graph import scan
from exportkit.rewrites.attributes import replaced_attributes


def has_lightning_attention(model: torch.nn.Module, _arguments: Mapping[str, Any]) -> bool:
    """Returns whether modules in the model sum keys and values up with a decay for each head."""
    return bool(_attentions(model))


@contextlib.contextmanager
def traced_lightning_attention(model: torch.nn.Module) -> Iterator[None]:
    """Puts the loop operator in the place of both Python loops."""
    with contextlib.ExitStack() as stack:
        for attention in {type(module) for module in _attentions(model)}:
            stack.enter_context(replaced_attributes(attention, {"forward": _forward}))
        yield


def _attentions(model: torch.nn.Module) -> list[Any]:
    needed = ("slope_rate", "block_size", "qkv_proj", "output_gate", "num_attention_heads", "head_dim")
    return [module for module in model.modules() if all(hasattr(module, name) for name in needed)]


def _forward(
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
    stored = None if past_key_values is None else past_key_values.get_linear_cache(self.layer_idx)
    last, summed = _scanned(heads.split(self.head_dim, dim=3), torch.exp(-self.slope_rate), stored)
    normed = self.norm(summed.reshape(batch, length, self.num_attention_heads * self.head_dim))
    if past_key_values is not None:
        past_key_values.set_linear_cache(self.layer_idx, last)
    return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * normed), last


def _scanned(
    heads: tuple[torch.Tensor, ...], decay: torch.Tensor, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last state (batch, heads, size, size), and the outputs (batch, seq, heads, size)."""
    query = heads[0]
    if state is None:
        state = query.new_zeros(query.shape[0], *query.shape[2:], query.shape[3])

    def step(state: torch.Tensor, token: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = token
        state = decay * state + key[..., None] * value[..., None, :]
        return state, (query[..., None] * state).sum(-2)

    last, outputs = scan(step, state.contiguous(), tuple(tensor.transpose(0, 1).contiguous() for tensor in heads))
    return last, outputs.transpose(0, 1)
