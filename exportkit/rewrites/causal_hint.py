"""torch's own Transformer without a look at the values of its masks.

``TransformerEncoder`` and ``TransformerDecoder`` compare a mask to the causal one, to choose a quicker kernel, which a
trace cannot decide. The mask is applied in any case, so that the answer changes nothing but the kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from exportkit._torch_compat.modules import causal_mask_detection
from exportkit.rewrites.attributes import replaced_attributes


def has_torch_transformer(model: torch.nn.Module, _arguments: Mapping[str, Any]) -> bool:
    """Returns whether the model has stacks of torch's own Transformer layers."""
    stacks = (torch.nn.TransformerEncoder, torch.nn.TransformerDecoder)
    return any(isinstance(module, stacks) for module in model.modules())


@contextlib.contextmanager
def masks_as_they_are(_model: torch.nn.Module) -> Iterator[None]:
    """Takes no mask for causal unless the caller says that it is."""
    owner, name = causal_mask_detection()

    def detect(_mask: Any, is_causal: bool | None = None, _size: Any = None) -> bool:
        return is_causal is True

    with replaced_attributes(owner, {name: detect}):
        yield
