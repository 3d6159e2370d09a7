"""Calls at chosen sizes that the model accepts, with what it returns for them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from exportkit.arguments.build import build_call, with_integers_below
from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.plan.plan import Plan
from exportkit.probing.missing import MissingDefaults, run_leniently
from exportkit.trees import flatten


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
    tensors, filled = call.tensors(), {}
    for leaf in plan.leaves if first else ():
        if leaf.path in tensors and {leaf.shapes[index] for index in first} == {None}:
            filled[leaf.path] = torch.full_like(tensors[leaf.path], defaults.values.get(leaf.path, 0))
    return call.with_tensors(filled)


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
