"""The rewrites for code that decides by the values of tensors, found by running the model."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from exportkit.calls.call import Call
from exportkit.errors import ExportError
from exportkit.probing.other_values import scaled
from exportkit.rewrites.branches import Decisions, decisions_made, decisions_noted
from exportkit.rewrites.empty_selections import branches_noted, never_empty
from exportkit.rewrites.execution_paths import ExecutionPath, path_noted
from exportkit.rewrites.model_code import Line, Place, is_check
from exportkit.rewrites.recorded_paths import MOST_PATHS, recorded_paths
from exportkit.rewrites.table import CHECKS, EVERY_BRANCH, NEVER_EMPTY, ONE_PATH, RECORDED_PATHS, Rewrite, applied
from exportkit.running.eager import EagerRunner
from exportkit.running.runner import Runner, compare_calls, recorded

# A branch may limit values that no recorded call reaches. Factors for floats, and for integers.
_SCALES = ((1e3, 1), (1e6, 1), (1e38, 1), (-1.0, 1), (1.0, -1), (1.0, 1000))
_DRAWS = 10  # times that a call gets other random numbers, and the step between their seeds


def rules_for_decisions(model: torch.nn.Module, method: str, calls: Sequence[Call]) -> list[Rewrite]:
    """Returns the rewrites for code that decides by values of tensors; none if a recorded result changes."""
    eager = EagerRunner(model, method)
    tried = [*calls, *(scaled(call, *scales) for call in calls[:1] for scales in _SCALES)]
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
    names = [EVERY_BRANCH.name] if checks != made.keys() else []
    names += [f"{CHECKS} ({_lines(checks)})"] if checks else []
    first, *others = (replace(EVERY_BRANCH, name=name, applied=lambda _: contextlib.nullcontext()) for name in names)
    return [*skipping, replace(first, applied=partial(decisions_made, forced=made, checks=checks)), *others]


def rules_for_recorded_paths(
    model: torch.nn.Module, method: str, calls: Sequence[Call], rules: Sequence[Rewrite], of_numbers: set[Place]
) -> list[Rewrite]:
    """Returns the rewrites for code that decides by values of tensors, for the execution paths that the calls take.

    Args:
        model: The model.
        method: The method.
        calls: The recorded calls.
        rules: Rewrites for decisions that a graph need not make.
        of_numbers: The places that decide by numbers read from tensors; a trace adds the ones that it comes to.

    Raises:
        ExportError: if there are too many execution paths.
    """
    eager, paths, outcomes = EagerRunner(model, method), list[ExecutionPath](), defaultdict[Place, set[bool]](set)
    for call in itertools.chain.from_iterable(map(_drawn_again, calls)):
        with path_noted(of_numbers) as path, applied(rules, model):
            eager(call)
        if path not in paths:
            paths.append(path)
        for place, found in path.items():
            outcomes[place].update(found)
    if len(paths) > MOST_PATHS:
        raise ExportError(
            "The recorded calls take too many execution paths, as the model branches on the values of tensors.",
            expected=f"at most {MOST_PATHS}",
            got=len(paths),
        )
    names = []
    for name, count in ((RECORDED_PATHS.name, 2), (ONE_PATH, 1)):
        places = [place for place, found in outcomes.items() if len(found) == count]
        names += [f"{name} ({_lines(places)})"] if places else []
    first, *others = (
        replace(RECORDED_PATHS, name=name, applied=lambda _: contextlib.nullcontext())
        for name in names or [RECORDED_PATHS.name]
    )
    return [replace(first, applied=partial(recorded_paths, method=method, paths=paths, of_numbers=of_numbers)), *others]


def _lines(places: Iterable[Place]) -> str:
    return ", ".join(sorted({f"{Path(file).name}:{line}" for file, line, _ in places}))


def _rules_for_empty_selections(eager: Runner, calls: Sequence[Call]) -> list[Rewrite]:
    """The rewrite for branches that need no case for an empty selection, as the other code does the same; else none.

    Zeros, negative numbers and masks without places are likely to leave a selection empty.
    """
    first = calls[:1]
    tried = [*calls, *(scaled(call, *scales) for call in first for scales in (*_SCALES, (0.0, 1)))]
    tried += map(_unmasked, first)

    def going(places: Collection[Line]) -> Runner:
        def run(call: Call) -> Mapping[str, torch.Tensor]:
            with branches_noted(places):
                return eager(call)

        return run

    with branches_noted() as branches:
        tried = [outcome.call for outcome in compare_calls(eager, eager, tried)]
    places = set[Line]()
    for place in [place for place, for_zero in branches.items() if True in for_zero]:
        if all(outcome.agrees for outcome in compare_calls(eager, going({*places, place}), tried)):
            places.add(place)
    return [replace(NEVER_EMPTY, applied=partial(never_empty, places=places))] if places else []


def _drawn_again(call: Call) -> Iterator[Call]:
    """A call, and the same with other random numbers if the model draws some: it may go by them."""
    yield call
    if call.seed is not None:
        yield from (replace(call, seed=call.seed + more) for more in range(_DRAWS, _DRAWS * _DRAWS, _DRAWS))


def _unmasked(call: Call) -> Call:
    masks = {path: tensor for path, tensor in call.tensors().items() if tensor.dtype is torch.bool}
    return call.with_tensors({path: torch.zeros_like(mask) for path, mask in masks.items()})
