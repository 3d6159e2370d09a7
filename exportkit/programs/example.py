"""Chooses what a model is traced with: sizes, a call at these sizes, and the rewrites that it needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
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
from exportkit.rewrites.branches import Decisions, Line, Place, decisions_made, decisions_noted, is_check
from exportkit.rewrites.chunk_scans import chunk_size_of
from exportkit.rewrites.empty_selections import never_empty, ways_noted
from exportkit.rewrites.lists import ListingNoted
from exportkit.rewrites.table import (
    ALL_BUT_NONE,
    ALL_EXPERTS,
    CHECKS,
    EVERY_BRANCH,
    FEATURE_ROWS,
    GRADIENTS,
    LISTS_OF_ONE,
    NEVER_EMPTY,
    PACKED_SEQUENCES,
    ZEROS_AT_PADDING,
    Rewrite,
    adapted_call,
    applied,
    matching_rewrites,
)
from exportkit.running.eager import EagerRunner, gradients_noted, needs_gradients, run_eager
from exportkit.running.runner import Runner, compare_calls, recorded
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
                outputs = flatten(_eager_outputs(model, method, call, rules))
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
        rules.append(_rule_for_experts(model, method, call, rules))
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


def _eager_outputs(model: torch.nn.Module, method: str, call: Call, rules: Sequence[Rewrite]) -> Any:
    names = call.signature.names
    adapting = [rule for rule in rules if rule.adapt is not None]

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


def _rule_for_experts(model: torch.nn.Module, method: str, call: Call, rules: Sequence[Rewrite]) -> Rewrite:
    """How loops over experts cover all of them: running the model shows whether the last place means no expert."""
    try:
        with applied([ALL_EXPERTS], model):
            _eager_outputs(model, method, call, rules)
    except ArgumentError as error:
        if isinstance(error.__cause__, IndexError):
            return ALL_BUT_NONE
        raise
    return ALL_EXPERTS


# Decisions by the values of tensors that a graph need not make, found by running the model both ways.

# A branch may limit values that no recorded call reaches. Factors for floats, and for integers.
_SCALES = ((1e3, 1), (1e6, 1), (1e38, 1), (-1.0, 1), (1.0, -1), (1.0, 1000))


def rules_for_decisions(model: torch.nn.Module, method: str, calls: Sequence[Call]) -> list[Rewrite]:
    """Returns the rewrites for code that decides by values of tensors; none if a recorded result changes."""
    eager = EagerRunner(model, method)
    tried = [*calls, *(_scaled(call, *scales) for call in calls[:1] for scales in _SCALES)]
    made: dict[Place, bool] = {}
    checks, seen = set[Place](), set[Place]()

    def deciding(place: Place, decision: bool | None, emptied: Collection[Place] = ()) -> Runner:
        def run(call: Call) -> Mapping[str, torch.Tensor]:
            with decisions_noted(made if decision is None else made | {place: decision}, emptied):
                return eager(call)

        return run

    def is_harmless(place: Place, noted: Decisions) -> bool:
        """Whether a branch changes nothing if its mask has no places, or at least did not where it was skipped."""
        taken = noted.for_some[place]
        runs = deciding(place, None, {place}), deciding(place, taken, {place})
        outcomes = list(compare_calls(*runs, tried))
        if any(outcome.wrong for outcome in outcomes):
            return False
        is_shown = bool(outcomes) and all(outcome.error is None for outcome in outcomes)
        return is_shown or (not taken) in noted.outcomes[place]

    while True:  # a branch that is taken may hold other ones
        with decisions_noted(made) as noted:
            agrees = all(outcome.agrees for outcome in compare_calls(recorded, eager, calls))
        fresh = noted.outcomes.keys() - seen if agrees else set()
        if not fresh:
            break
        seen |= fresh
        for place in fresh:
            outcomes = noted.outcomes[place]
            if len(outcomes) == 1 and is_check(place):
                (outcome,) = outcomes
                if not list(compare_calls(deciding(place, not outcome), recorded, calls[:1])):  # it raises
                    made[place] = outcome
                    checks.add(place)
            elif place in noted.for_some and is_harmless(place, noted):
                made[place] = noted.for_some[place]
    if not agrees:
        return []
    skipping = _rules_for_empty_selections(eager, calls)
    if not made:
        return skipping
    lines = ", ".join(sorted({f"{Path(file).name}:{line}" for file, line, _ in checks}))
    names = ([EVERY_BRANCH.name] if checks != made.keys() else []) + ([f"{CHECKS} ({lines})"] if checks else [])
    first, *others = (replace(EVERY_BRANCH, name=name, applied=lambda _: contextlib.nullcontext()) for name in names)
    return [*skipping, replace(first, applied=partial(decisions_made, forced=made, checks=checks)), *others]


def _rules_for_empty_selections(eager: Runner, calls: Sequence[Call]) -> list[Rewrite]:
    """The rewrite for branches that need no case for an empty selection, as the other code does the same; else none.

    Zeros, negative numbers and masks without places are likely to leave a selection empty.
    """
    first = calls[:1]
    tried = [*calls, *(_scaled(call, *scales) for call in first for scales in (*_SCALES, (0.0, 1)))]
    tried += map(_unmasked, first)

    def going(places: Collection[Line]) -> Runner:
        def run(call: Call) -> Mapping[str, torch.Tensor]:
            with ways_noted(places):
                return eager(call)

        return run

    with ways_noted() as ways:
        tried = [outcome.call for outcome in compare_calls(eager, eager, tried)]
    places = set[Line]()
    for place in [place for place, for_zero in ways.items() if True in for_zero]:
        if all(outcome.agrees for outcome in compare_calls(eager, going({*places, place}), tried)):
            places.add(place)
    return [replace(NEVER_EMPTY, applied=partial(never_empty, places=places))] if places else []


def _unmasked(call: Call) -> Call:
    masks = {path: tensor for path, tensor in call.tensors().items() if tensor.dtype is torch.bool}
    return call.with_tensors({path: torch.zeros_like(mask) for path, mask in masks.items()})


def _scaled(call: Call, scale: float, integer_scale: int = 1) -> Call:
    changed = {}
    for path, tensor in call.tensors().items():
        if tensor.is_floating_point():
            changed[path] = tensor * scale
        elif not tensor.is_complex() and tensor.dtype is not torch.bool:
            changed[path] = tensor * integer_scale
    return call.with_tensors(changed)
