"""Calls at chosen sizes that the model accepts, with what it returns for them, at once or token by token."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from exportkit.arguments.build import build_call, fitted, largest_tensors, resize, with_integers_below
from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.plan.expression import Expression
from exportkit.plan.plan import Plan
from exportkit.probing.missing import MissingDefaults, filled, run_leniently
from exportkit.running.eager import run_eager
from exportkit.trees import flatten, join

_DRAWS = 3  # calls with recorded values at random, besides those with the values of a call


def sized_call(plan: Plan, observation: Observation, defaults: MissingDefaults, sizes: Mapping[str, int]) -> Call:
    """Returns a call at the given sizes, with default values for states that are absent as long as the cache is empty.

    Args:
        plan: The plan.
        observation: The recorded calls.
        defaults: Values for missing inputs.
        sizes: Sizes of all variables.

    Raises:
        ArgumentError: if there is no such call.
    """
    call = replace(build_call(plan, observation, sizes), sizes=sizes)
    past = plan.with_role("past")
    if past is None or sizes[past.name]:
        return call
    first = [index for index, size in enumerate(past.seen) if size == 0]
    tensors, fills = call.tensors(), {}
    for leaf in plan.leaves if first else ():
        if leaf.path in tensors and {leaf.shapes[index] for index in first} == {None}:
            fills[leaf.path] = filled(tensors[leaf.path], defaults.values.get(leaf.path, 0), 0)
    return call.with_tensors(fills)


def calls_with_values(
    plan: Plan,
    observation: Observation,
    defaults: MissingDefaults,
    call: Call,
    tried: Sequence[Mapping[str, int]],
) -> Iterator[Call]:
    """Yields calls at other sizes with the values of a call, again and again, then some with recorded values at random.

    They tell whether a difference is one of values, if it shows there as well, or comes of the sizes of the call.
    Inputs that the call does not have, and token ids with placeholders, are those of any call at these sizes.

    Args:
        plan: The plan.
        observation: The recorded calls.
        defaults: Values for missing inputs.
        call: The call.
        tried: Sizes of all variables, for each call.
    """
    dynamic, recorded, given = plan.dynamic_axes(), largest_tensors(observation), call.tensors()
    counted = (
        {marker.path for marker in plan.markers}
        | {p.tokens for p in plan.placeholders}
        | {grid.path for grid in plan.grids}
    )
    for seed, sizes in [*((None, sizes) for sizes in tried), *((seed, tried[-1]) for seed in range(_DRAWS) if tried)]:
        made, changed = sized_call(plan, observation, defaults, sizes), {}
        shapes = plan.shapes(plan.completed(sizes))
        for path, tensor in made.tensors().items():
            source = (given if seed is None else recorded).get(path)
            if source is None or not source.numel() or path in counted:
                continue
            if seed is not None:
                generator = torch.Generator().manual_seed(seed)
                if tensor.is_floating_point():
                    changed[path] = _drawn(source, shapes[path], dynamic[path], generator)
            elif tensor.is_floating_point():
                changed[path] = _tiled(source, shapes[path])
            else:
                changed[path] = fitted(path, resize(source, shapes[path]), observation, shapes, dynamic)
        yield made.with_tensors(changed)


def _tiled(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor with the values of another one along each axis, again and again."""
    for axis, size in enumerate(shape):
        tensor = tensor.index_select(axis, torch.arange(size, device=tensor.device) % tensor.shape[axis])
    return tensor


def _drawn(
    tensor: torch.Tensor, shape: Sequence[int], dynamic: Sequence[int], generator: torch.Generator
) -> torch.Tensor:
    """A tensor of rows of another one, at random along each axis that varies."""
    for axis in dynamic:
        places = torch.randint(tensor.shape[axis], (shape[axis],), generator=generator)
        tensor = tensor.index_select(axis, places.to(tensor.device))
    return tensor


def run_sized(plan: Plan, model: torch.nn.Module, method: str, call: Call) -> Call:
    """Returns a call for which the model runs, with what it returned.

    If the model raises for the recorded values, integers get smaller: they may be indices. Inputs of no elements are
    left out if it raises for them.

    Args:
        plan: The plan.
        model: The model.
        method: The method.
        call: The call, at known sizes.

    Raises:
        Exception: whatever the model raises for the call as it is.
    """
    limits = [] if plan.placeholders else sorted(set(call.sizes.values()), reverse=True)
    errors: list[Exception] = []
    for limit in (None, *limits):
        started = time.perf_counter()
        try:
            changed = call if limit is None else with_integers_below(call, limit)
            returned, given = run_leniently(plan, model, method, changed)
        except Exception as error:
            errors.append(error)
            continue
        return replace(given, outputs=flatten(returned), latency=time.perf_counter() - started)
    raise errors[0]


def stepwise_outputs(plan: Plan, model: torch.nn.Module, method: str, call: Call) -> dict[str, torch.Tensor] | None:
    """Returns what the model returns for the new tokens one by one, by path; None if it has no state to go on from.

    Some state-space models start again from zeros if they get several tokens at once on a filled state: the Mamba
    kernels have no argument for it. A graph that goes on from the state is right, and equals the model token by token.
    Outputs along the tokens are joined; of others, such as the state itself, the last one is returned.

    Args:
        plan: The plan.
        model: The model.
        method: The method.
        call: The call, at known sizes, with what the model returned for it.

    Raises:
        Exception: whatever the model raises.
    """
    sizes = call.sizes
    new = plan.new_tokens
    if new is None or sizes[new.name] < 2 or not any(leaf.is_optional for leaf in plan.leaves):
        return None
    returned, last = call.outputs.tensors(), dict[str, torch.Tensor]()
    pieces: dict[str, list[torch.Tensor]] = defaultdict(list)  # all outputs of all steps may not fit into memory

    def one_by_one(values: dict[str, Any], run: Callable[[Mapping[str, Any]], Any]) -> None:
        cut = {name for name, value in values.items() if _depends(plan, name, value, new.name)}
        carried = {name: value for name, value in values.items() if name not in cut}
        for step in range(sizes[new.name]):
            token = {n: _token(plan, n, values[n], new.name, sizes, step) for n in cut}
            result = run({name: token.get(name, carried.get(name)) for name in values})
            last.clear()
            last.update({path: tensor.clone() for path, tensor in flatten(result).tensors().items()})
            for path, tensor in last.items():
                if _axis_of_one(tensor, returned.get(path)) is not None:
                    pieces[path].append(tensor)
            if isinstance(result, Mapping):
                carried |= {name: result[name] for name in carried if result.get(name) is not None}

    run_eager(model, method, call, one_by_one)
    axes = {path: _axis_of_one(tensor, returned.get(path)) for path, tensor in last.items()}
    return {path: last[path] if axis is None else torch.cat(pieces[path], axis) for path, axis in axes.items()}


def _axis_of_one(tensor: torch.Tensor, whole: torch.Tensor | None) -> int | None:
    """The axis that has one element here and more for all tokens; None if there is none."""
    sizes = () if whole is None else whole.shape
    return next((axis for axis, size in enumerate(sizes) if size != tensor.shape[axis] == 1), None)


def _depends(plan: Plan, name: str, value: Any, new: str) -> bool:
    paths = [join(name, path) for path in flatten(value).tensors()]
    return any(new in size.variables() for path in paths if path in plan.by_path for size in plan.by_path[path].sizes)


def _token(plan: Plan, name: str, value: Any, new: str, sizes: Mapping[str, int], step: int) -> Any:
    """An argument for one new token: that token, or all tokens up to it if the cached ones come first (a mask)."""

    def cut(path: str, tensor: torch.Tensor) -> torch.Tensor:
        for axis, size in enumerate(plan.by_path[path].sizes):
            if size == Expression.of(new):
                tensor = tensor.narrow(axis, step, 1)
            elif new in size.variables():
                tensor = tensor.narrow(axis, 0, size.evaluate({**sizes, new: step + 1}))
        return tensor

    tree = flatten(value)
    return tree.with_leaves({path: cut(join(name, path), tensor) for path, tensor in tree.tensors().items()}).build()
