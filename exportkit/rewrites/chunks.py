"""State-space mixers that process tokens in chunks: a traced scan over chunks, and what length of tokens a trace needs.

transformers pads the tokens to whole chunks, so that one token costs a chunk, and decides in Python whether to. Here
the scan is a loop operator over chunks that are never longer than the tokens.

A trace of fewer tokens than a chunk freezes the number of chunks at one, and one of whole chunks freezes the padding
away; both export without an error and are wrong at other lengths. More tokens than a chunk, and no multiple of it, are
right for all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from exportkit.rewrites.chunk_scan import attend_in_chunks
from exportkit.rewrites.functions import has_function, replaced_function

_FUNCTION = "mamba2_chunk_scan"


def chunk_size_of(model: torch.nn.Module) -> int | None:
    """Returns the largest ``chunk_size`` of the modules in the model, or None if none has one."""
    sizes = [getattr(module, "chunk_size", None) for module in model.modules()]
    return max((size for size in sizes if isinstance(size, int) and size > 1), default=None)


def has_chunk_scan(model: torch.nn.Module, _arguments: Mapping[str, Any]) -> bool:
    """Returns whether mixers in the model call transformers' scan over chunks."""
    return has_function(model, _FUNCTION)


@contextlib.contextmanager
def traced_chunk_scan(model: torch.nn.Module) -> Iterator[None]:
    """Puts the loop operator in place of transformers' function."""
    with replaced_function(model, _FUNCTION, chunk_scan):
        yield


def chunk_scan(  # noqa: PLR0917 (transformers' positions)
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_implementation: Any,
) -> Any:
    """Takes and returns what transformers' function does; states are (batch, heads, channels, size)."""
    batch, _, heads, channels = hidden_states.shape
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1]).float()[..., None]
    values = hidden_states.float()
    keys, queries = (
        tensor.float().repeat_interleave(heads // B.shape[2], dim=2, output_size=heads) for tensor in (B, C)
    )
    if initial_states is None:
        initial_states = values.new_zeros(batch, heads, channels, B.shape[-1])
    state = initial_states.transpose(-1, -2)
    decay = A.float()[:, None] * dt
    output, last = attend_in_chunks(queries, keys, values * dt, decay, state, chunk_size=chunk_size)
    if D is not None:
        output = output + D[..., None] * values
    return (output, last.transpose(-1, -2).contiguous()) if return_final_states else output
