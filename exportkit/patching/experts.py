"""Mixtures of experts as batched matrix products, which export; the grouped ones of transformers have no ONNX form."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_EXPORTABLE = "batched_mm"


def has_experts(model: torch.nn.Module, _arguments: Mapping[str, Any]) -> bool:
    """Returns whether a module inside the model has experts whose implementation can be chosen."""
    return any(_can_choose(module) for module in model.modules())


@contextlib.contextmanager
def batched_experts(model: torch.nn.Module) -> Iterator[None]:
    """Chooses the exportable implementation of the experts, and the former one again afterwards."""
    chosen = [module for module in model.modules() if _can_choose(module)]
    before = [(module, module.get_experts_implementation()) for module in chosen]
    try:
        for module in chosen:
            module.set_experts_implementation(_EXPORTABLE)
        yield
    finally:
        for module, implementation in before:
            module.set_experts_implementation(implementation)


def _can_choose(module: Any) -> bool:
    return getattr(module, "_can_set_experts_implementation", bool)()
