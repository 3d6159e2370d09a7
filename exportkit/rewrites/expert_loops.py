"""Loops over the experts that tokens were sent to, as loops over all experts.

Mixtures of experts without a replaceable implementation go through ``mask.nonzero()``, the numbers of the experts that
were chosen, which a trace cannot do: their count is data. While this rule is in force, such a loop takes all of them.
That is right as far as an expert that nothing was sent to adds nothing, which the proof shows. Routers of such models
cast their classifier on the way, which a trace does not allow; a cast that changes nothing is left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from exportkit.rewrites.attributes import original_attribute, replaced_attributes

_COUNT = "_exportkit_count"  # on what nonzero() returns: the length of the mask


class Number(list[int]):
    """The number of an expert in the place of a row of ``nonzero()``: as an index it keeps an axis, as a row does."""

    def item(self) -> int:
        """Returns the number."""
        return self[0]


@contextlib.contextmanager
def loops_over_all(_model: torch.nn.Module, left_out: int = 0) -> Iterator[None]:
    """Lets iterations over the places where a mask of known length is not zero go over all of its places.

    Args:
        left_out: How many places at the end stand for no expert.
    """
    iterate = torch.Tensor.__iter__

    def _iter(self: torch.Tensor) -> Iterator[Any]:
        count = vars(self).get(_COUNT)
        return iterate(self) if count is None else iter([Number([i]) for i in range(count - left_out)])

    with (
        replaced_attributes(torch.Tensor, {"nonzero": _counted(torch.Tensor.nonzero), "__iter__": _iter}),
        replaced_attributes(torch, {"nonzero": _counted(torch.nonzero)}),
        replaced_attributes(torch.nn.Module, {"to": _to}),
    ):
        yield


def _counted(nonzero: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with a note on its result how long the mask was."""

    def counted(mask: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = nonzero(mask, *args, **kwargs)
        if isinstance(found, torch.Tensor) and is_mask(mask):
            setattr(found, _COUNT, mask.shape[0])
        return found

    return counted


def is_mask(tensor: torch.Tensor) -> bool:
    """Returns whether it has one axis, of known length."""
    return tensor.ndim == 1 and isinstance(tensor.shape[0], int)


def _to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    is_cast = len(args) == 1 and isinstance(args[0], torch.dtype) and not kwargs
    if is_cast and all(tensor.dtype is args[0] for tensor in (*self.parameters(), *self.buffers())):
        return self
    moved: torch.nn.Module = original_attribute(torch.nn.Module, "to")(self, *args, **kwargs)
    return moved
