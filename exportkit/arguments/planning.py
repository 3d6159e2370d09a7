"""From calls to a plan: tabulates the seen sizes, infers, and lets the model itself confirm the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from exportkit.arguments.build import merged_trees
from exportkit.arguments.shapes import nested_spec
from exportkit.axes import CallTable, Constant, Leaf, Plan, infer_plan
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


def plan_calls(observation: Observation, model: torch.nn.Module | None = None, method: str = "forward") -> Plan:
    """Returns the plan for the recorded calls.

    Args:
        observation: The calls.
        model: The model, to confirm by running it what the sizes suggest; None to go by the sizes alone.
        method: The observed method.
    """
    from exportkit.arguments.probe import probe_plan

    table = call_table(observation)
    plan = infer_plan(table, constants_of(observation))
    if model is not None:
        plan = probe_plan(plan, table, observation, model, method)
    return replace(plan, calls=observation, structure=structure_of(observation))


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


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
