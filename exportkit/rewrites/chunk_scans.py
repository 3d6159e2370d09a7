"""Linear attention with decay as one loop operator over chunks of tokens: state-space and delta-rule layers.

transformers pads the tokens to whole chunks, so that decoding one token costs a chunk, decides in Python whether to,
and loops over the chunks in Python. A trace unrolls the loop for the number of chunks that it saw. Here the loop is
torch's scan, and a chunk is never longer than the tokens, so that one token costs one token.

Algorithms: Dao and Gu, 2024 (arXiv:2405.21060), section 6; Yang, Kautz and Hatamizadeh, 2024 (arXiv:2412.06464),
section 3.3, whose solution of the triangular system is computed here by doubling blocks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from exportkit._torch_compat.loop_operators import scan


def chunk_size_of(model: torch.nn.Module) -> int | None:
    """Returns the largest ``chunk_size`` of the modules in the model, or None if none has one.

    A trace of fewer tokens than a chunk freezes the number of chunks at one, and a trace of whole chunks freezes the
    padding away. Both export without an error and are wrong at other lengths. More tokens than a chunk that are not a
    multiple of it are right for all lengths.
    """
    largest = 1
    for module in model.modules():
        size = getattr(module, "chunk_size", None)
        largest = max(largest, size) if isinstance(size, int) else largest
    return largest if largest > 1 else None


def state_space_scan(  # noqa: PLR0917 (transformers' positions)
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
    """Takes and returns the same as transformers' ``mamba2_chunk_scan``; states are (batch, heads, channels, size)."""
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
    """Takes and returns the same as transformers' chunked delta rules; all tensors are (batch, tokens, heads, ...).

    One of them has a decay for each head, the other one for each channel of the keys.
    """
    dtype = query.dtype
    groups = value.shape[2] // key.shape[2]
    query, key = query.float(), key.float()
    if use_qk_l2norm_in_kernel:
        query, key = (t * torch.rsqrt((t * t).sum(dim=-1, keepdim=True) + 1e-6) for t in (query, key))
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


def attend_in_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    state: torch.Tensor,
    *,
    chunk_size: int,
    beta: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the outputs (batch, tokens, heads, value size), and the last state.

    Token by token, this is ``state = exp(decay) * state + outer(key, value)`` and ``output = query @ state``. With
    ``beta``, the delta rule, the value is first replaced by ``beta * (value - key @ (exp(decay) * state))``.

    Args:
        query: (batch, tokens, heads, key size).
        key: (batch, tokens, heads, key size).
        value: (batch, tokens, heads, value size).
        decay: Logarithm of the decay, at most 0: (batch, tokens, heads, key size), or 1 as the last size.
        state: (batch, heads, key size, value size).
        chunk_size: The largest number of tokens in a chunk.
        beta: (batch, tokens, heads, 1), or None.
    """
    batch, length, heads, _ = key.shape
    size = torch.sym_min(chunk_size, length)
    count = (length + size - 1) // size

    def chunked(tensor: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, heads, size) as (chunks, batch, heads, chunk, size), with zeros after the last token."""
        padded = F.pad(tensor.float(), (0, 0, 0, 0, 0, count * size - length))
        return padded.reshape(batch, count, size, heads, tensor.shape[-1]).permute(1, 0, 3, 2, 4).contiguous()

    levels = None if beta is None else _levels(chunk_size, key.device)

    def step(state: torch.Tensor, chunk: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        return _one_chunk(state, *chunk, levels=levels)

    tensors = (query, key, value, decay) if beta is None else (query, key, value, decay, beta)
    last, outputs = scan(step, state.float().contiguous(), tuple(chunked(tensor) for tensor in tensors))
    joined = outputs.permute(1, 0, 3, 2, 4).reshape(batch, count * size, heads, value.shape[-1])
    return joined[:, :length], last


def _one_chunk(
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None = None,
    *,
    levels: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state after a chunk, and its outputs; tensors are (batch, heads, chunk, size)."""
    decayed = decay.cumsum(-2)
    position = torch.arange(key.shape[-2], device=key.device)
    if beta is not None and levels is not None:
        inverse = _inverse(_pairs(key * beta, key, decayed), position, levels)
        value = inverse @ (value * beta) - (inverse @ (key * beta * decayed.exp())) @ state
    within = torch.where(position[:, None] >= position, _pairs(query, key, decayed), 0.0)
    output = (query * decayed.exp()) @ state + within @ value
    total = decayed[..., -1:, :]
    kept = total.exp().transpose(-1, -2) * state
    return kept + (key * (total - decayed).exp()).transpose(-1, -2) @ value, output


def _pairs(left: torch.Tensor, right: torch.Tensor, decayed: torch.Tensor) -> torch.Tensor:
    """Products of rows i of ``left`` and j of ``right``, decayed from j to i; meaningful for j up to i.

    The exponent is never positive: a product of two exponentials would overflow where decays are strong.
    """
    if decayed.shape[-1] == 1:
        exponent = (decayed - decayed.transpose(-1, -2)).clamp(max=0.0)
        return (left @ right.transpose(-1, -2)) * exponent.exp()
    exponent = (decayed.unsqueeze(-2) - decayed.unsqueeze(-3)).clamp(max=0.0)
    return (left.unsqueeze(-2) * right.unsqueeze(-3) * exponent.exp()).sum(-1)


def _levels(most: int, device: torch.device) -> torch.Tensor:
    """For each row and column below ``most``, the doubling of blocks that joins them; 0 above the diagonal."""
    rows = [[(row ^ column).bit_length() if row > column else 0 for column in range(most)] for row in range(most)]
    return torch.tensor(rows, device=device)


def _inverse(system: torch.Tensor, position: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """The inverse of the identity plus the part of a matrix below its diagonal.

    The inverses of diagonal blocks of one size give those of blocks twice as large, by one more product on each side.
    """
    size = system.shape[-1]
    level = levels[:size, :size]
    inverse = torch.eq(position[:, None], position).to(system.dtype).expand(system.shape)
    for doubling in range(1, (levels.shape[0] - 1).bit_length() + 1):
        inverse = inverse - inverse @ torch.where(level == doubling, system, 0.0) @ inverse
    return inverse
