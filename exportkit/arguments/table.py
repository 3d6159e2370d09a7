"""Tabulates what the reasoning needs to know of recorded calls: shapes of all tensors, and the constants."""

from __future__ import annotations

from typing import Any

import torch

from exportkit.arguments.build import merged_trees
from exportkit.arguments.shapes import nested_spec
from exportkit.axes import CallTable, Constant, Leaf
from exportkit.observe import Observation
from exportkit.trees import Growth, join


def call_table(observation: Observation) -> CallTable:
    """Returns the shapes of all input tensors in all calls, and those of the outputs.

    Raises:
        NoCallsError: if there is no call.
        PlanError: if an input has different ranks in different calls.
        UnregisteredClassError: if an input is an object that holds tensors out of reach.
    """
    observation.require_calls()
    arguments: dict[str, str] = {}
    growth: dict[str, Growth] = {}
    for name, tree in merged_trees(observation).items():
        for path in tree.tensors():
            arguments[join(name, path)] = name
            if path in tree.growing:
                growth[join(name, path)] = tree.growing[path]
    tensors = [call.tensors() for call in observation.calls]
    leaves = tuple(
        Leaf(
            path,
            argument,
            _dtype(next(found[path] for found in tensors if path in found)),
            tuple(tuple(found[path].shape) if path in found else None for found in tensors),
            growth[path].axis if path in growth else None,
            growth[path].limit if path in growth else None,
        )
        for path, argument in arguments.items()
    )
    outputs = tuple(tuple(tuple(t.shape) for t in call.outputs.tensors().values()) for call in observation.calls)
    return CallTable(leaves, outputs)


def constants_of(observation: Observation) -> tuple[Constant, ...]:
    """Returns the inputs that are no tensors, as the merged call has them."""
    return tuple(
        Constant(join(name, path), name, value)
        for name, tree in merged_trees(observation).items()
        for path, value in tree.constants().items()
    )


def structure_of(observation: Observation) -> dict[str, Any]:
    """Returns how the leaves are nested in each argument, in the form of torch's dynamic shapes, as plain data."""
    return {name: nested_spec(name, tree, lambda path: path) for name, tree in merged_trees(observation).items()}


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
