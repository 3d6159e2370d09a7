"""Models that process tokens in chunks (state-space mixers): what length of tokens a trace needs.

A trace of fewer tokens than a chunk freezes the number of chunks at one, and one of whole chunks freezes the padding
away; both export without an error and are wrong at other lengths. More tokens than a chunk, and no multiple of it, are
right for all.
"""

from __future__ import annotations

import torch


def chunk_size_of(model: torch.nn.Module) -> int | None:
    """Returns the largest ``chunk_size`` of the modules in the model, or None if none has one."""
    sizes = [getattr(module, "chunk_size", None) for module in model.modules()]
    return max((size for size in sizes if isinstance(size, int) and size > 1), default=None)
