"""Chooses what a model is traced with: sizes, a call at these sizes, and the rewrites that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from exportkit.arguments.build import build_call
from exportkit.calls.call import Call, shapes_text
from exportkit.errors import ArgumentError
from exportkit.plan.leaves import known
from exportkit.plan.sizes import beyond_recorded, choose_sizes
from exportkit.probing.missing import find_missing_defaults
from exportkit.probing.planning import BoundPlan
from exportkit.probing.simplify import lists_of_many, rows_of_members, with_joined_lists
from exportkit.probing.traits import attributes_read
from exportkit.programs.traced_method import Example
from exportkit.rewrites.chunk_scans import chunk_size_of
from exportkit.rewrites.lists import ListingNoted
from exportkit.rewrites.table import (
    ALL_BUT_NONE,
    ALL_EXPERTS,
    FEATURE_ROWS,
    GRADIENTS,
    LISTS_OF_ONE,
    PACKED_SEQUENCES,
    ZEROS_AT_PADDING,
    Rewrite,
    adapted_call,
    applied,
    matching_rewrites,
)
from exportkit.running.eager import gradients_noted, needs_gradients, run_eager
from exportkit.trees import flatten


def chosen_example(
    model: torch.nn.Module,
    method: str,
    plan: BoundPlan,
    required: Sequence[Rewrite],
    larger: bool = False,
    between: bool = False,
) -> tuple[Example, list[Rewrite]]:
    """Returns what to trace a model with, and the rewrites that its structure asks for.

    Args:
        model: The model.
        method: The method.
        plan: The plan.
        required: Rewrites that are in force in any case.
        larger: Whether all sizes are larger than the recorded ones.
        between: Whether to leave the multiples where only multiples of a number were recorded.

    Raises:
        ArgumentError: if the model raises for the arguments that the plan leads to.
    """
    observation = plan.observation
    values = build_call(plan, observation, choose_sizes(plan, partly_cached=True)).values()
    rules = [*required, *matching_rewrites(model, values)]
    rules += [FEATURE_ROWS] if plan.placeholders else []
    adapting = [rule for rule in rules if rule.adapt is not None]
    raised: ArgumentError | None = None
    # a model may have no more positions than the recorded calls needed
    for limited in (beyond_recorded(plan),) if larger else (plan, _within_recorded(plan)):
        try:
            sizes = choose_sizes(limited, bool(adapting), chunk_size_of(model), between)
            call = build_call(plan, observation, sizes)
            with ListingNoted(sizes) as listing, gradients_noted() as gradients:
                outputs = flatten(_eager_outputs(model, method, call, adapting))
            break
        except ArgumentError as error:
            raised = raised or error
    else:
        raise raised or ArgumentError("There are no sizes to trace with.")
    if gradients:
        rules.append(GRADIENTS)
        call = replace(call, gradients=call.gradients or needs_gradients(model, method, call))
    rules += [LISTS_OF_ONE] if listing.found else []
    rules += [PACKED_SEQUENCES] if listing.packs else []
    rules += [ZEROS_AT_PADDING] if listing.asks_for_padding else []
    if listing.of_places:
        rules.append(_rule_for_experts(model, method, call, adapting))
    returned = [outputs.tensors(), *(call.outputs.tensors() for call in observation.calls)]
    joined = lists_of_many(returned)
    defaults = find_missing_defaults(plan, observation, model, method)
    member_rows = rows_of_members(returned, joined)
    read = attributes_read(model, method, [*observation.calls, call])
    return Example(sizes, call, defaults, with_joined_lists(outputs, joined), joined, member_rows, read), rules


def _within_recorded(plan: BoundPlan) -> BoundPlan:
    """The plan in which no variable is larger than it was in some recorded call."""
    variables = []
    for variable in plan.variables:
        most = max(known(variable.seen), default=0)
        variables.append(replace(variable, maximum=most) if variable.maximum is None and most > 1 else variable)
    return replace(plan, variables=tuple(variables))


def _eager_outputs(model: torch.nn.Module, method: str, call: Call, adapting: Sequence[Rewrite]) -> Any:
    names = call.signature.names

    def around(values: dict[str, Any], run: Callable[[Mapping[str, Any]], Any]) -> Any:
        with applied(adapting, model):
            return adapted_call(adapting, model, values, names, run)

    try:
        return run_eager(model, method, call, around)
    except Exception as error:
        raise ArgumentError(
            "The model raises for the sizes chosen from the plan: they are related in a way that was not found.",
            where=shapes_text(call.tensors()),
            expected="sizes like those recorded",
            got=f"{type(error).__name__}: {str(error)[:300]}",
            hint="observe more sizes, so that the relation shows; print(observer.plan()) shows what was found.",
        ) from error


def _rule_for_experts(model: torch.nn.Module, method: str, call: Call, adapting: Sequence[Rewrite]) -> Rewrite:
    """How loops over experts cover all of them: running the model shows whether the last place means no expert."""
    try:
        with applied([ALL_EXPERTS], model):
            _eager_outputs(model, method, call, adapting)
    except ArgumentError as error:
        if isinstance(error.__cause__, IndexError):
            return ALL_BUT_NONE
        raise
    return ALL_EXPERTS
