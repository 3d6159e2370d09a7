"""Several new tokens given one at a time: what a model with a state returns that way, for where it forgets the state.

Some state-space models start again from zeros when they get several tokens at once on a filled state (the Mamba kernels
have no argument for it). A graph that goes on from the state is right, and equals the model run token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from exportkit.calls.call import Call
from exportkit.onnx_files.onnx_model import OnnxModel
from exportkit.plan.expression import Expression
from exportkit.plan.plan import Plan
from exportkit.running.eager import run_eager
from exportkit.trees import flatten, join


def stepwise_outputs(
    onnx_model: OnnxModel, arguments: Call, sizes: Mapping[str, int]
) -> dict[str, torch.Tensor] | None:
    """Returns what the model returns for the new tokens one by one, by path, or None if it has no state to go on from.

    Outputs along the tokens are joined; of others, such as the state itself, the last is returned.

    Args:
        onnx_model: Knows the model, and the axes of its outputs.
        arguments: The call.
        sizes: Its sizes.

    Raises:
        Exception: whatever the model raises.
    """
    exported = onnx_model.exported
    new = exported.plan.with_role("sequence")
    if new is None or sizes[new.name] < 2 or not any(leaf.is_optional for leaf in exported.plan.leaves):
        return None
    steps: list[dict[str, torch.Tensor]] = []

    def one_by_one(values: dict[str, Any], call: Callable[[Mapping[str, Any]], Any]) -> None:
        cut = {name for name, value in values.items() if _depends(exported.plan, name, value, new.name)}
        carried = {name: value for name, value in values.items() if name not in cut}
        for step in range(sizes[new.name]):
            token = {n: _token(exported.plan, n, values[n], new.name, sizes, step) for n in cut}
            result = call({name: token.get(name, carried.get(name)) for name in values})
            steps.append({path: tensor.clone() for path, tensor in flatten(result).tensors().items()})
            if isinstance(result, Mapping):
                carried |= {name: result[name] for name in carried if result.get(name) is not None}

    run_eager(exported.model, exported.method, arguments, one_by_one)
    axes = onnx_model.file.output_axes
    return {
        path: torch.cat([step[path] for step in steps], axes[path].index(new.name))
        if new.name in axes.get(path, ())
        else tensor
        for path, tensor in steps[-1].items()
    }


def _depends(plan: Plan, name: str, value: Any, new: str) -> bool:
    paths = [join(name, path) for path in flatten(value).tensors()]
    return any(new in size.variables() for path in paths if path in plan.by_path for size in plan.by_path[path].sizes)


def _token(plan: Plan, name: str, value: Any, new: str, sizes: Mapping[str, int], step: int) -> Any:
    """An argument for one new token: that token, or all up to it where the stored ones come first (a mask)."""

    def cut(path: str, tensor: torch.Tensor) -> torch.Tensor:
        for axis, size in enumerate(plan.by_path[path].sizes):
            if size == Expression.of(new):
                tensor = tensor.narrow(axis, step, 1)
            elif new in size.variables():
                tensor = tensor.narrow(axis, 0, size.evaluate({**sizes, new: step + 1}))
        return tensor

    tree = flatten(value)
    return tree.with_leaves({path: cut(join(name, path), tensor) for path, tensor in tree.tensors().items()}).build()
