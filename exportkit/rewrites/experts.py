"""Mixtures of experts in a trace: batched matrix products, and Python loops over the chosen experts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from exportkit._torch_compat.transformers import can_choose_experts
from exportkit.overrides import Attribute, original_attribute, replaced

_Context = contextlib.AbstractContextManager[None]


# Experts of transformers: grouped matrix products have no ONNX form, batched ones do.


@dataclass(frozen=True)
class ImplementationOfExperts:
    """The implementation of the experts in a transformers model, and in the models inside it."""

    model: Any

    def read(self) -> Any:
        """Returns the current implementation."""
        return self.model.get_experts_implementation()

    def write(self, implementation: Any) -> None:
        """Chooses an implementation."""
        self.model.set_experts_implementation(implementation)


def has_experts(model: torch.nn.Module, _arguments: Mapping[str, Any]) -> bool:
    """Returns whether the implementation of experts can be chosen somewhere in the model."""
    return any(map(can_choose_experts, model.modules()))


def batched_experts(model: torch.nn.Module) -> _Context:
    """Chooses the implementation that can be exported."""
    return replaced([(ImplementationOfExperts(m), "batched_mm") for m in model.modules() if can_choose_experts(m)])


# Loops over experts
#
# Models without a choice iterate over `mask.nonzero()`, the numbers of the chosen experts. A trace cannot do that: how
# many there are is data. Under this rewrite, such a loop takes all experts. That is right if an expert without tokens
# adds nothing, which the proof shows. Routers of such models cast their classifier on the way, which a trace does not
# allow; a cast that changes nothing is left out.

_COUNT = "_exportkit_count"  # set on the result of nonzero(): the length of the mask


class ExpertNumber(list[int]):
    """The number of an expert in place of a row of ``nonzero()``: used as an index it keeps an axis, as a row does."""

    def item(self) -> int:
        """Returns the number."""
        return self[0]


def loops_over_all(_model: torch.nn.Module, left_out: int = 0) -> _Context:
    """Makes iterations over the nonzero places of a mask of known length go over all of its places.

    Args:
        left_out: How many places at the end of the mask stand for no expert.
    """
    iterate: Callable[[torch.Tensor], Iterator[Any]] = torch.Tensor.__iter__

    def _iter(self: torch.Tensor) -> Iterator[Any]:
        count = vars(self).get(_COUNT)
        return iterate(self) if count is None else iter([ExpertNumber([i]) for i in range(count - left_out)])

    return replaced(
        [
            (Attribute(torch.Tensor, "nonzero"), _counted(torch.Tensor.nonzero)),
            (Attribute(torch.Tensor, "__iter__"), _iter),
            (Attribute(torch, "nonzero"), _counted(torch.nonzero)),
            (Attribute(torch.nn.Module, "to"), _to),
        ]
    )


def _counted(nonzero: Callable[..., Any]) -> Callable[..., Any]:
    """The function, noting the length of the mask on its result."""

    def counted(mask: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = nonzero(mask, *args, **kwargs)
        if isinstance(found, torch.Tensor) and is_mask(mask):
            setattr(found, _COUNT, mask.shape[0])
        return found

    return counted


def is_mask(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has one axis, of known length."""
    return tensor.ndim == 1 and isinstance(tensor.shape[0], int)


def _to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    is_cast = len(args) == 1 and isinstance(args[0], torch.dtype) and not kwargs
    if is_cast and all(tensor.dtype is args[0] for tensor in (*self.parameters(), *self.buffers())):
        return self
    return original_attribute(torch.nn.Module, "to")(self, *args, **kwargs)  # type: ignore[no-any-return]
