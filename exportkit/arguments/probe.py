"""Lets the model itself confirm a plan, by running it in eager mode at small sizes.

Rows repeated must give repeated rows in the outputs: that is the batch. Lengths of tokens that never varied are
changed, and vary where the model accepts that. Axes that had equal sizes in all calls are pulled apart, and stay apart
where the model accepts that in both directions.
"""

from __future__ import annotations

import torch

from exportkit.arguments.ask import AskedModel
from exportkit.arguments.probe_batch import confirm_batch
from exportkit.arguments.probe_sizes import add_relations, extend_tokens, pull_apart
from exportkit.axes import CallTable, Plan
from exportkit.axes.names import name_variables
from exportkit.observe import Observation


def probe_plan(plan: Plan, table: CallTable, observation: Observation, model: torch.nn.Module, method: str) -> Plan:
    """Returns the plan as the model confirms it.

    Args:
        plan: What the sizes suggest.
        table: The seen sizes.
        observation: The calls.
        model: The model.
        method: The observed method.
    """
    asked = AskedModel(model, method, observation, table)
    plan = extend_tokens(confirm_batch(plan, asked), asked)
    if not asked.accepts(plan):
        plan = add_relations(plan, asked)
    return name_variables(pull_apart(plan, asked))
