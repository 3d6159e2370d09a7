"""From recorded calls to a plan: sizes suggest it, running the model confirms it, and findings say the rest."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from exportkit.arguments.table import call_table, constants_of, structure_of
from exportkit.calls.observation import Observation
from exportkit.plan.infer import infer_plan
from exportkit.plan.plan import Plan
from exportkit.probing.audit import audit
from exportkit.probing.probe import probe_plan
from exportkit.probing.simplify import simplify_calls
from exportkit.running.eager import replayed


@dataclass(frozen=True, eq=False)
class BoundPlan(Plan):
    """A plan together with the calls it was made from: what `InputObserver.plan` returns and `exportkit.export` takes.

    It prints, compares and is edited like any `Plan`; an edited one is bound to the same calls.

    Attributes:
        observation: The calls, in the form that the plan describes: without tensors that the model never reads, with a
            list of tensors as one, and with an attention mask that was added.
    """

    observation: Observation = field(kw_only=True, repr=False)

    @classmethod
    def of(cls, plan: Plan, observation: Observation) -> BoundPlan:
        """Returns a plan bound to the calls it was made from."""
        return cls(**plan.fields(), observation=observation)

    @property
    def plan(self) -> Plan:
        """The plan by itself, which is plain data."""
        return Plan(**self.fields())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.fields() == other.fields()

    __hash__ = None  # type: ignore[assignment]  # as a plan itself, which holds dictionaries


def plan_calls(observation: Observation, model: torch.nn.Module | None = None, method: str = "forward") -> BoundPlan:
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
        plan = replace(plan, joined=simple.joined, unused=simple.unused, passed_through=simple.echoes)
    leaves = tuple(replace(leaf, restored=leaf.argument in observation.restored) for leaf in plan.leaves)
    plan = replace(plan, leaves=leaves, structure=structure_of(observation))
    return BoundPlan.of(plan.with_findings(audit(plan, observation)), observation)
