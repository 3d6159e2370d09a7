"""Defaults for inputs that a call lacks: empty if an axis is free, otherwise zeros, ones, minus infinity or positions.

Which of them is right is tried on the recorded calls, not assumed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import torch

from exportkit._torch_compat.rounding import rounding_varied
from exportkit.arguments.build import build_call
from exportkit.calls.call import Call, shapes_of
from exportkit.calls.observation import Observation
from exportkit.errors import ArgumentError
from exportkit.plan.plan import Plan
from exportkit.plan.solved_sizes import solve_sizes
from exportkit.probing.cached_tokens import hidden_past
from exportkit.probing.other_values import with_wide_values
from exportkit.probing.simplify import as_simplified
from exportkit.probing.unpadded import MASK, without_padding
from exportkit.running.bounds import rounding_bound
from exportkit.running.compare import Difference, Tensors, compare_outputs, compare_tensors
from exportkit.running.eager import EagerRunner, answered, run_eager, sampled_answer
from exportkit.running.masks import Padding
from exportkit.running.runner import Compare, Runner, compare_calls, recorded
from exportkit.trees import flatten, join, stored_length

_MOST_TRIALS = 64
_FEW_TOKENS = 2
_ROUNDINGS = 16.0  # what a run that rounds differently changes in the outputs, times this, counts as equal
POSITIONS: Final = "positions"  # of the new tokens: they count on from the cached ones
_LOWEST = -1e30  # minus infinity of states that hold a logarithm: the largest exponent of no tokens


Fill = float | Literal["positions"]


@dataclass(frozen=True)
class MissingDefaults:
    """Values for missing inputs, by path, and the calls for which no value was right.

    Attributes:
        values: 0, 1, -1e30 or "positions" by path; an input of free length is empty, so that its value does not matter.
        unproven: Numbers of recorded calls whose outputs the model does not return with these values.
    """

    values: Mapping[str, Fill]
    unproven: tuple[int, ...] = ()


@dataclass(frozen=True)
class Absences:
    """The sets of inputs that may be left out together, by path.

    Attributes:
        allowed: The sets, each with the variables that have to be 0 where these inputs are left out.
        refused: Sets that recorded calls left out, and that no defaults stand for, each with the reason.
    """

    allowed: Mapping[frozenset[str], tuple[str, ...]] = field(default_factory=lambda: {frozenset(): ()})
    refused: Mapping[frozenset[str], str] = field(default_factory=dict)


def fill_missing(
    plan: Plan, given: Mapping[str, torch.Tensor], defaults: Mapping[str, Fill], cached: int | None = None
) -> dict[str, torch.Tensor]:
    """Returns tensors for the inputs of a plan that are not given, by path.

    Args:
        plan: The plan.
        given: The inputs that are given.
        defaults: Value by path of inputs that are not empty; 0 if there is none.
        cached: Number of cached tokens, if the inputs that are given do not show it.
    """
    sizes = solve_sizes(plan, shapes_of(given))
    past = plan.with_role("past")
    if past is not None and cached is not None:
        sizes[past.name] = cached
    for grid in plan.grids:
        rows = plan.by_path[grid.rows].sizes[grid.axis].variables()
        shown = [size.variables() for leaf in plan.leaves if leaf.path in given for size in leaf.sizes]
        if not any(rows & names for names in shown):  # they follow from the grids
            sizes |= dict.fromkeys(rows, grid.count(plan.by_path[grid.path].sizes[0].evaluate(sizes)))
    shapes = plan.shapes(sizes)
    device = next((tensor.device for tensor in given.values()), torch.device("cpu"))
    missing = {}
    for leaf in plan.leaves:
        if leaf.path not in given:
            tensor = torch.empty(shapes[leaf.path], dtype=getattr(torch, leaf.dtype), device=device)
            missing[leaf.path] = filled(tensor, defaults.get(leaf.path, 0), 0 if past is None else sizes[past.name])
    return missing


def filled(tensor: torch.Tensor, fill: Fill, cached: int) -> torch.Tensor:
    """Returns a tensor like another one with the default for a missing input.

    Args:
        tensor: The other one.
        fill: The default.
        cached: How many tokens came before.
    """
    if fill == POSITIONS:
        return torch.arange(cached, cached + tensor.shape[-1]).to(tensor).expand_as(tensor).clone()
    return torch.full_like(tensor, fill)


def completed_call(plan: Plan, observation: Observation, call: Call, defaults: Mapping[str, Fill]) -> Call:
    """Returns a call with defaults for its missing inputs, and with what the model returned without them."""
    given = call.tensors()
    past, hidden = plan.with_role("past"), hidden_past(plan, given, stored_length(call.values()))
    cached = hidden if past is None or hidden is not None else solve_sizes(plan, call.shapes())[past.name]
    merged = replace(observation.merged_call, cached_tokens=cached)
    completed = merged.with_tensors({**given, **fill_missing(plan, given, defaults, hidden)})
    return replace(completed, outputs=call.outputs)


def find_missing_defaults(plan: Plan, observation: Observation, model: torch.nn.Module, method: str) -> MissingDefaults:
    """Returns the defaults for missing inputs with which the model returns what it returned without these inputs."""
    optional, ones = [], {}
    for leaf in plan.leaves:
        if leaf.is_optional:
            optional.append(leaf.path)
        if leaf.restored or leaf.ones_if_missing:
            ones[leaf.path] = 1
    calls, numbers = [], []
    for number, call in enumerate(observation.calls):
        if not call.tensors().keys() >= {*optional}:
            calls.append(call)
            numbers.append(number)
    unstored = _calls_like_further(plan, observation)
    if not calls and not unstored:
        return MissingDefaults(ones)

    def run(values: Mapping[str, Fill], call: Call) -> dict[str, torch.Tensor]:
        completed = completed_call(plan, observation, call, values)
        # A graph leaves outputs that exist only because of the defaults out again: more outputs are not a difference.
        return flatten(run_leniently(plan, model, method, completed)[0]).tensors()

    def best_of(calls: Sequence[Call]) -> tuple[dict[str, Fill], list[int]]:
        """The values that are right for most calls, and the positions of the others."""
        every = [*calls, *unstored]
        tried = [*calls, *_answered([*unstored, *_other_calls(plan, every)], model, method)]
        best: dict[str, Fill] = {}
        fewest = list(range(len(tried)))
        for values in itertools.islice(_choices(plan, observation, every, optional), _MOST_TRIALS):
            outcomes = compare_calls(recorded, functools.partial(run, values), tried, compare)
            wrong = [position for position, outcome in enumerate(outcomes) if not outcome.agrees]
            if len(wrong) < len(fewest):
                best, fewest = values, wrong
            if not wrong:
                break
        return best, fewest

    def best_of_answered() -> tuple[dict[str, Fill], list[int]]:
        answered = _answered(calls, model, method)  # what was recorded came of whole products
        return best_of(answered) if len(answered) == len(calls) else ({}, numbers)

    compare = beyond_rounding(EagerRunner(model, method), model)
    best, wrong = sampled_answer(model, best_of_answered, lambda found: not found[1], lambda: best_of(calls))
    unproven = tuple([numbers[position] for position in wrong if position < len(calls)])
    return MissingDefaults({**best, **ones}, unproven)


def run_leniently(plan: Plan, model: torch.nn.Module, method: str, call: Call) -> tuple[Any, Call]:
    """Returns what the model returns, and for which call: without arguments of no elements if it raises for them.

    In eager mode, no image means that the argument is absent, and a model may raise for an image of no rows; for a
    graph both are the same.

    Args:
        plan: Says which inputs may be left out.
        model: The model.
        method: The method.
        call: The call.

    Raises:
        Exception: whatever the model raises for both.
    """
    try:
        return run_eager(model, method, call), call
    except Exception:
        optional = {leaf.path for leaf in plan.leaves if leaf.is_optional and leaf.growing is None}
        kept = {}
        for name, tree in call.arguments.items():
            tensors = tree.tensors()
            if not tensors or any(t.numel() or join(name, path) not in optional for path, t in tensors.items()):
                kept[name] = tree
        if len(kept) == len(call.arguments):
            raise
    fewer = call.with_arguments(kept)
    return run_eager(model, method, fewer), fewer


def absent_patterns(plan: Plan, observation: Observation) -> dict[frozenset[str], list[int]]:
    """Returns the sets of inputs that recorded calls left out together, by path, and the numbers of these calls.

    An input that no call gave, and that was restored, was left out by all of them; with it, they return the same.
    """
    optional = frozenset(leaf.path for leaf in plan.leaves if leaf.is_optional)
    restored = frozenset(leaf.path for leaf in plan.leaves if leaf.restored)
    found: dict[frozenset[str], list[int]] = {}
    for number, shapes in enumerate(
        [*map(Call.shapes, observation.calls), *(seen.inputs for seen in observation.further)]
    ):
        absent = optional.difference(shapes)
        for pattern in {absent, absent | restored}:
            found.setdefault(pattern, []).append(number)
    return found


def _calls_like_further(plan: Plan, observation: Observation) -> list[Call]:
    """Calls, not made, that leave out the inputs which only calls that are not stored left out together."""
    if not observation.calls:
        return []
    stored = absent_patterns(plan, replace(observation, further=()))
    sizes, found = solve_sizes(plan, observation.calls[-1].shapes()), []
    for pattern in sorted(absent_patterns(plan, observation).keys() - stored.keys(), key=sorted)[:_MOST_TRIALS]:
        with contextlib.suppress(ArgumentError):
            found.append(call_without(plan, observation, sizes, pattern))
    return found


def call_without(plan: Plan, observation: Observation, sizes: Mapping[str, int], absent: frozenset[str]) -> Call:
    """Returns a call that leaves inputs out, in the form in which recorded calls left them out.

    Without an attention mask, the positions are those of tokens without padding.

    Args:
        plan: The plan.
        observation: The calls.
        sizes: Sizes of the variables; those that only the inputs left out have become 0.
        absent: Paths of the inputs.

    Raises:
        ArgumentError: if there is no such call.
    """
    own: set[str | None] = set()
    shown: set[str | None] = set()
    for leaf in plan.leaves:
        (own if leaf.path in absent else shown).update(size.variable for size in leaf.sizes)
    sizes = plan.completed({name: 0 if name in own - shown else size for name, size in sizes.items()})
    call = build_call(plan, observation, sizes)
    if MASK in absent:
        call = without_padding(observation, call)
    arguments = {}
    for name, tree in call.with_tensors(dict.fromkeys(absent)).arguments.items():
        paths = {leaf.path for leaf in plan.leaves if leaf.argument == name}
        if paths.isdisjoint(absent):
            arguments[name] = tree
            continue
        forms = [made for made in observation.calls if paths.difference(made.shapes()) == paths & absent]
        form = next((made.arguments.get(name) for made in forms), tree)
        if form is not None and name not in observation.restored:
            arguments[name] = form.with_leaves(tree.tensors())
    return replace(call.with_arguments(arguments), sizes=sizes)


def beyond_rounding(run: Runner, model: torch.nn.Module, padding: Padding | None = None) -> Compare:
    """Returns a comparison in which a difference counts if it exceeds what rounding makes of a result.

    Args:
        run: Runs the model; it runs again, rounding differently, where something differs. What it does not return
            differs.
        model: The model.
        padding: What of an output does not count.
    """
    weights = [*model.parameters(), *model.buffers()]

    def compare(call: Call, expected: Tensors, got: Tensors) -> Iterator[Difference]:
        changed: Tensors | None = None
        for difference in compare_outputs(expected, got, bound=rounding_bound):
            path = difference.path
            if difference.reason is None or path not in got or not difference.absolute < math.inf:
                yield difference
                continue
            shown = None if padding is None else padding(expected[path])
            found = compare_tensors(path, expected[path], got[path], shown, bound=rounding_bound)
            if found.reason is not None:
                if changed is None:
                    with rounding_varied(0, weights, 1.0):
                        changed = run(call)
                if path in changed:
                    noise = compare_tensors(path, expected[path], changed[path], shown)
                    found = replace(found, reason=None) if found.absolute <= _ROUNDINGS * noise.absolute else found
            yield found

    return compare


def _other_calls(plan: Plan, calls: Sequence[Call]) -> list[Call]:
    """The calls cut to few tokens, as a long call may hide what it began with, and with values of all magnitudes."""
    new = plan.new_tokens
    changed = []
    for call in calls:
        tensors, sizes = call.tensors(), solve_sizes(plan, call.shapes())
        if new is not None and sizes[new.name] > _FEW_TOKENS:
            for path, shape in plan.shapes({**sizes, new.name: _FEW_TOKENS}).items():
                for axis, size in enumerate(shape if path in tensors else ()):
                    tensors[path] = tensors[path].narrow(axis, 0, min(size, tensors[path].shape[axis]))
            changed.append(call.with_tensors(tensors))
        changed.append(with_wide_values(call))
    return changed


def _answered(calls: Sequence[Call], model: torch.nn.Module, method: str) -> list[Call]:
    """The calls with what the model returns for them, without those for which it raises."""
    found = []
    for call in calls:
        with contextlib.suppress(Exception):
            found.append(answered(model, method, call))
    return found


def _choices(
    plan: Plan, observation: Observation, calls: Sequence[Call], optional: Sequence[str]
) -> Iterator[dict[str, Fill]]:
    """Yields values for the inputs that would not be empty: the likely ones, then with one changed, with two and so on.

    A likely value is what an input mostly held where it was given, such as 1 for a mask: if a call ignores the input,
    every value reproduces the call.
    """
    full = set()
    for call in calls:
        for path, tensor in fill_missing(plan, call.tensors(), {}).items():
            if tensor.numel():
                full.add(path)
    likely: dict[str, Fill] = {}
    others: dict[str, list[Fill]] = {}
    for path in optional:
        if path in full:
            likely[path], *others[path] = _by_likelihood(plan, observation, path)
    for changes in range(len(others) + 1):
        for changed in itertools.combinations(others, changes):
            for values in itertools.product(*map(others.__getitem__, changed)):
                yield {**likely, **dict(zip(changed, values, strict=True))}


def _by_likelihood(plan: Plan, observation: Observation, path: str) -> tuple[Fill, ...]:
    if "float" in plan.by_path[path].dtype:
        return (0, 1, _LOWEST)
    given = [tensor for call in observation.calls if (tensor := call.tensors().get(path)) is not None]
    sizes, new = plan.by_path[path].sizes, plan.new_tokens
    if new is not None and sizes and sizes[-1].variable == new.name and any(bool((t > 1).any()) for t in given):
        return (POSITIONS, 0, 1)
    ones = sum(int((tensor == 1).sum()) for tensor in given)
    return (1, 0) if 2 * ones > sum(tensor.numel() for tensor in given) else (0, 1)


def dependent_outputs(observation: Observation, returned: Iterable[str], joined: Iterable[str]) -> dict[str, str]:
    """Returns the outputs that some calls lack, by path, and the input on which they depend.

    It is the input that the same calls have and lack: features of an image are returned where they were given. What no
    call returned depends on an input that no call gave, such as an attention mask that was added afterwards.

    Args:
        observation: The calls.
        returned: Paths of the outputs of the program.
        joined: Paths of lists among the outputs that are one tensor.
    """
    inputs: dict[str, set[int]] = {}  # numbers of the calls that have it
    outputs: dict[str, set[int]] = {}
    for number, call in enumerate(observation.calls):
        for path in call.shapes():
            inputs.setdefault(path, set()).add(number)
        for path in as_simplified(call.outputs.tensors(), joined):
            outputs.setdefault(path, set()).add(number)
    found = {}
    for path, having in outputs.items():
        if len(having) < len(observation.calls):
            for source in observation.tensor_paths():
                if inputs[source] == having:
                    found[path] = source
                    break
    for path in returned if observation.restored else ():
        if path not in outputs:
            found[path] = min(observation.restored)
    return found
