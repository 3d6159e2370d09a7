"""The gated delta rule of linear-attention layers as one loop operator over chunks of tokens.

transformers loops over the chunks in Python, and over the rows of a chunk where it is exported; a trace unrolls both,
for the number of chunks that it saw.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from exportkit.rewrites.chunk_scan import attend_in_chunks
from exportkit.rewrites.functions import has_function, replaced_function

# The second has one decay for each channel of the keys, where the first has one for each head.
_FUNCTIONS = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")


def has_delta_rule(model: torch.nn.Module, _arguments: Mapping[str, Any]) -> bool:
    """Returns whether layers in the model call one of transformers' chunked delta rules."""
    return any(has_function(model, name) for name in _FUNCTIONS)


@contextlib.contextmanager
def traced_delta_rule(model: torch.nn.Module) -> Iterator[None]:
    """Puts the loop operator in place of the Python loops."""
    with contextlib.ExitStack() as stack:
        for name in _FUNCTIONS:
            stack.enter_context(replaced_function(model, name, delta_rule))
        yield


def delta_rule(  # noqa: PLR0917 (transformers' positions)
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_implementation: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Takes and returns what transformers' functions do; all tensors are (batch, tokens, heads, ...)."""
    dtype = query.dtype
    groups = value.shape[2] // key.shape[2]
    query, key = query.float(), key.float()
    if use_qk_l2norm_in_kernel:
        query, key = _normalised(query), _normalised(key)
    query = query * query.shape[-1] ** -0.5
    if groups > 1:
        query, key = (tensor.repeat_interleave(groups, dim=2) for tensor in (query, key))
    decay = g if g.ndim == 4 else g[..., None]
    if initial_state is None:
        initial_state = value.new_zeros(value.shape[0], value.shape[2], key.shape[-1], value.shape[-1])
    output, last = attend_in_chunks(
        query, key, value, decay, initial_state, chunk_size=chunk_size, beta=beta[..., None]
    )
    return output.to(dtype), last if output_final_state else None


def _normalised(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * torch.rsqrt((tensor * tensor).sum(dim=-1, keepdim=True) + 1e-6)
