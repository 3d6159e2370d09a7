"""From calls to a plan: infers from the seen sizes, lets the model confirm the rest, adds what a person should know."""

from __future__ import annotations

from dataclasses import replace

import torch

from exportkit.arguments.table import call_table, constants_of, structure_of
from exportkit.calls.observation import Observation
from exportkit.plan.infer import infer_plan
from exportkit.plan.plan import Plan
from exportkit.probing.audit import audit
from exportkit.probing.probe import probe_plan
from exportkit.probing.simplify import simplify_calls
from exportkit.running.eager import replayed


def plan_calls(observation: Observation, model: torch.nn.Module | None = None, method: str = "forward") -> Plan:
    """Returns the plan for the recorded calls.

    Args:
        observation: The calls.
        model: The model, to confirm by running it what the sizes suggest; None to go by the sizes alone.
        method: The observed method.
    """
    if model is None:
        plan = infer_plan(call_table(observation), constants_of(observation))
    else:
        simple = simplify_calls(replayed(observation, model, method), model, method)
        plan, observation = probe_plan(simple.observation, model, method)
        plan = replace(plan, joined=simple.joined, unused=simple.unused, echoes=simple.echoes)
    restored = observation.restored
    leaves = tuple(replace(leaf, restored=leaf.argument in restored) for leaf in plan.leaves)
    plan = replace(plan, leaves=leaves, calls=observation, structure=structure_of(observation))
    return plan.with_findings(audit(plan, observation))
