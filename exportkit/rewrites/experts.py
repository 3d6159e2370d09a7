"""Mixtures of experts as batched matrix products, which export; the grouped ones of transformers have no ONNX form."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from exportkit._torch_compat.transformers import can_choose_experts
from exportkit.rewrites.slots import replaced_slots

_EXPORTABLE = "batched_mm"


def has_experts(model: torch.nn.Module, _arguments: Mapping[str, Any]) -> bool:
    """Returns whether a module inside the model has experts whose implementation can be chosen."""
    return any(can_choose_experts(module) for module in model.modules())


@dataclass(frozen=True)
class ExpertsOf:
    """The implementation of the experts in a module of transformers, and in those inside it."""

    module: Any

    def read(self) -> Any:
        """Returns what is chosen now."""
        return self.module.get_experts_implementation()

    def write(self, implementation: Any) -> None:
        """Chooses another one."""
        self.module.set_experts_implementation(implementation)


@contextlib.contextmanager
def batched_experts(model: torch.nn.Module) -> Iterator[None]:
    """Chooses the exportable implementation of the experts, and the former one again afterwards."""
    with replaced_slots([(ExpertsOf(module), _EXPORTABLE) for module in model.modules() if can_choose_experts(module)]):
        yield
