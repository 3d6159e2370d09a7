"""Lets the model itself confirm a plan, by running it in eager mode at small sizes.

Rows repeated must give repeated rows in the outputs: that is the batch. Lengths of tokens that never varied are
changed, and vary where the model accepts that. Axes that had equal sizes in all calls are pulled apart, and stay apart
where the model accepts that in both directions. An attention mask that no call had is restored if it changes nothing.
"""

from __future__ import annotations

import torch

from exportkit.arguments.table import constants_of
from exportkit.calls.observation import Observation
from exportkit.plan.infer import infer_plan, name_variables
from exportkit.plan.plan import Plan
from exportkit.probing.ask import AskedModel
from exportkit.probing.placeholders import ValueRelations, find_relations
from exportkit.probing.probe_batch import confirm_batch
from exportkit.probing.probe_sizes import add_relations, extend_tokens, pull_apart
from exportkit.probing.restore import restore_mask, restored_finding


def probe_plan(observation: Observation, model: torch.nn.Module, method: str) -> tuple[Plan, Observation]:
    """Returns the plan as the model confirms it, and the calls it is for, with an attention mask if that was restored.

    Args:
        observation: The calls.
        model: The model.
        method: The observed method.
    """
    asked = AskedModel(model, method, observation)
    relations = find_relations(asked)
    plan = _confirmed(asked, relations)
    masked = restore_mask(plan, asked)
    if masked is None:
        return plan, observation
    plan = _confirmed(AskedModel(model, method, masked), relations)
    return plan.with_findings([restored_finding()]), masked


def _confirmed(asked: AskedModel, relations: ValueRelations) -> Plan:
    plan = relations.added_to(infer_plan(asked.table, constants_of(asked.observation)))
    plan = extend_tokens(confirm_batch(plan, asked), asked)
    if not asked.accepts_lengths(plan):
        plan = add_relations(plan, asked)
    return name_variables(pull_apart(plan, asked))
