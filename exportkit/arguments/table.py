"""Tabulates what the reasoning needs to know of recorded calls: shapes of all tensors, and the constants."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from exportkit.arguments.build import merged_trees
from exportkit.arguments.shapes import nested_spec
from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.calls.seen import SeenShapes
from exportkit.plan.leaves import CallTable, Constant, Leaf
from exportkit.trees import Growth, Tree, join, joined

_MOST_FURTHER_CALLS = 100  # with other shapes than the stored ones; more of them would tell nothing new


def call_table(observation: Observation, stored_only: bool = False) -> CallTable:
    """Returns the shapes of all input tensors in all calls, and those of the outputs.

    First come the stored calls, then those calls of which only the shapes were kept, where these are new.

    Args:
        observation: The calls.
        stored_only: Leave the latter out.

    Raises:
        NoCallsError: if there is no call.
        PlanError: if an input has different ranks in different calls.
        UnregisteredClassError: if an input is an object that holds tensors out of reach.
    """
    observation.require_calls()
    return observation.remembered(f"table {stored_only}", lambda: _table(observation, stored_only))


def _table(observation: Observation, stored_only: bool) -> CallTable:
    growth = growth_of(observation)
    arguments = {
        join(name, path): name for name, tree in merged_trees(observation).items() for path in tree.tensor_paths
    }
    shapes = [call.shapes() for call in observation.calls]
    further = [] if stored_only else _further(observation, shapes)
    shapes += [{path: tuple(shape) for path, shape in seen.inputs.items()} for seen in further]
    tensors = {path: tensor for call in reversed(observation.calls) for path, tensor in call.tensors().items()}
    leaves = tuple(
        Leaf(
            path,
            argument,
            _dtype(tensors[path]),
            tuple(found.get(path) for found in shapes),
            growth[path].axis if path in growth else None,
            growth[path].limit if path in growth else None,
        )
        for path, argument in arguments.items()
    )
    outputs = tuple(tuple(call.outputs.shapes()) for call in observation.calls)
    return CallTable(leaves, (*outputs, *(tuple(map(tuple, seen.outputs.values())) for seen in further)))


def growth_of(observation: Observation) -> dict[str, Growth]:
    """Returns by full path how the leaves of caches grow."""
    found: dict[str, Growth] = {}
    for name, tree in merged_trees(observation).items():
        found |= zip(joined(name, tuple(tree.growing)), tree.growing.values(), strict=True)
    return found


def shapes_of(observation: Observation) -> dict[str, tuple[tuple[int, ...] | None, ...]]:
    """Returns by full path the shapes of a leaf in the stored calls, None where one lacks it."""
    merged = {name: tree for name, tree in merged_trees(observation).items() if tree.tensor_paths}
    paths = [path for name, tree in merged.items() for path in joined(name, tree.tensor_paths)]
    columns = [_shapes_in(call, merged, paths) for call in observation.calls]
    return dict(zip(paths, zip(*columns, strict=True), strict=True))


def _shapes_in(call: Call, merged: Mapping[str, Tree], paths: list[str]) -> Iterable[tuple[int, ...] | None]:
    """The shape of each leaf in one call; most calls have them all, in the same order."""
    trees = [call.arguments[name] for name in merged if name in call.arguments]
    if [tree.tensor_paths for tree in trees] == [tree.tensor_paths for tree in merged.values()]:
        return itertools.chain.from_iterable(map(Tree.shapes, trees))
    return map(call.shapes().get, paths)


def _further(observation: Observation, stored: Sequence[Mapping[str, tuple[int, ...]]]) -> list[SeenShapes]:
    """Calls of which only the shapes are known, with shapes that no stored call had."""
    known = [set(shapes.items()) for shapes in stored]
    new = [seen for seen in observation.further if not any({*seen.inputs.items()} <= shapes for shapes in known)]
    return new[:_MOST_FURTHER_CALLS]


def constants_of(observation: Observation) -> tuple[Constant, ...]:
    """Returns the inputs that are no tensors, as the merged call has them."""
    return tuple(
        Constant(join(name, path), name, value)
        for name, tree in merged_trees(observation).items()
        for path, value in tree.constants().items()
    )


def structure_of(observation: Observation) -> dict[str, Any]:
    """Returns how the leaves are nested in each argument, in the form of torch's dynamic shapes, as plain data."""
    trees = merged_trees(observation)
    return observation.remembered(
        "structure", lambda: {name: nested_spec(name, tree, lambda path: path) for name, tree in trees.items()}
    )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
