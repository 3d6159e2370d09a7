"""Snapshots of nested values: what a call was given, as it was at that moment, whatever the model does to it later."""

from __future__ import annotations

from typing import Any

import torch

from exportkit.trees import Tree, flatten


def snapshot(value: Any) -> Tree:
    """Returns the tree of a nested value with copies of its tensors, cut off from autograd and inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        return flatten(value).map(_copy)


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
