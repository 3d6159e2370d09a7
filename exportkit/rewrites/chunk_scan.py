"""Linear attention with decay as a loop over chunks of tokens: the common part of state-space and delta-rule kernels.

In come queries, keys, values and decays of any number of tokens, and a state; out come the outputs and the last state.
The loop is one operator, and a chunk is never longer than the tokens, so that decoding one token costs one token.
Algorithms: Dao and Gu, 2024 (arXiv:2405.21060), section 6; Yang, Kautz and Hatamizadeh, 2024 (arXiv:2412.06464),
section 3.3, whose solution of the triangular system is computed here by doubling blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from exportkit._torch_compat.graph import scan


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

    Token by token that is ``state = exp(decay) * state + outer(key, value)`` and ``output = query @ state``. With
    ``beta``, the delta rule, the value is first made ``beta * (value - key @ (exp(decay) * state))``.

    Args:
        query: (batch, tokens, heads, key size).
        key: (batch, tokens, heads, key size).
        value: (batch, tokens, heads, value size).
        decay: Logarithm of the decay, at most 0: (batch, tokens, heads, key size), or 1 as the last size.
        state: (batch, heads, key size, value size).
        chunk_size: Most tokens in a chunk.
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

    The exponent is never positive, as the product of two exponentials would overflow where decays are strong.
    """
    if decayed.shape[-1] == 1:
        exponent = (decayed - decayed.transpose(-1, -2)).clamp(max=0.0)
        return (left @ right.transpose(-1, -2)) * exponent.exp()
    exponent = (decayed.unsqueeze(-2) - decayed.unsqueeze(-3)).clamp(max=0.0)
    return (left.unsqueeze(-2) * right.unsqueeze(-3) * exponent.exp()).sum(-1)


def _levels(most: int, device: torch.device) -> torch.Tensor:
    """For each row and column below ``most``, in which doubling of blocks both come together; 0 above the diagonal."""
    rows = [[(row ^ column).bit_length() if row > column else 0 for column in range(most)] for row in range(most)]
    return torch.tensor(rows, device=device)


def _inverse(system: torch.Tensor, position: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """The inverse of the identity plus the part of a matrix below its diagonal.

    The inverse of diagonal blocks of one size gives that of blocks twice as large, by one more product each side.
    """
    size = system.shape[-1]
    level = levels[:size, :size]
    inverse = torch.eq(position[:, None], position).to(system.dtype).expand(system.shape)
    for doubling in range(1, (levels.shape[0] - 1).bit_length() + 1):
        inverse = inverse - inverse @ torch.where(level == doubling, system, 0.0) @ inverse
    return inverse
