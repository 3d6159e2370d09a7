"""Features of images and audio put into the embeddings as far as there are any.

Models scatter rows of features to where a placeholder token stands, and onnxruntime refuses that if there are fewer
rows than tokens: a placeholder that the model generated itself, with no image at hand, would end the run. Eager mode
leaves the embedding of such a token alone, and so does what is traced here. That there are as many rows as tokens is
checked by eager models, and no part of what a graph computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from exportkit._torch_compat.symbolic_shapes import depends_on_values
from exportkit.rewrites.attributes import replaced_attributes
from exportkit.rewrites.functions import replaced_function


@contextlib.contextmanager
def guarded_scatter(model: torch.nn.Module) -> Iterator[None]:
    """Puts a masked_scatter in force that leaves alone what it has no source for, and checks no counts in a trace."""
    with (
        replaced_attributes(torch.Tensor, {"masked_scatter": scatter_rows}),
        replaced_function(model, "torch_compilable_check", check_unless_of_values),
    ):
        yield


def check_unless_of_values(condition: Any, *args: Any, **kwargs: Any) -> None:
    """Checks a condition as transformers does; in a trace, none that depends on values, such as a count of tokens.

    Args:
        condition: A bool, a tensor, or what returns one of both.
        *args: The message, and what is raised.
        **kwargs: The same by name.
    """
    from transformers.utils import torch_compilable_check

    if not (torch.compiler.is_exporting() and depends_on_values(condition)):
        torch_compilable_check(condition, *args, **kwargs)


def scatter_rows(self: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Returns ``self.masked_scatter(mask, source)``, with the own values where the source has ended.

    Args:
        self: Embeddings ``(batch, seq, hidden)``, or any other tensor.
        mask: Booleans that broadcast to its shape.
        source: Values in the order in which they are put; those of whole rows where the mask selects whole rows.
    """
    width = self.shape[-1]
    mask = mask.expand(self.shape)
    if mask.stride(-1) != 0:  # single elements: no row is known to be taken as a whole
        return _scattered(self.reshape(-1, 1), mask.reshape(-1), source.reshape(-1, 1)).reshape(self.shape)
    rows = mask[..., 0].reshape(-1)
    return _scattered(self.reshape(-1, width), rows, source.reshape(-1, width)).reshape(self.shape)


def _scattered(target: torch.Tensor, chosen: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    padded = torch.cat([source.to(target.dtype), target.new_zeros(1, target.shape[1])])  # so that it is never empty
    count = padded.shape[0] - 1
    position = chosen.to(torch.int64).cumsum(0) - 1
    wanted = (chosen & (position < count)).unsqueeze(-1)
    return torch.where(wanted, padded[position.clamp(min=0, max=count)], target)
