"""Defaults for inputs that a call lacks: an empty tensor if an axis is free, otherwise zeros, ones or minus infinity.

Which of them is right is tried on the recorded calls, not assumed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.plan.plan import Plan
from exportkit.plan.sizes import solve_sizes
from exportkit.probing.simplify import as_simplified
from exportkit.running.eager import run_eager
from exportkit.running.runner import compare_runs, recorded
from exportkit.trees import flatten, join

_MOST_TRIALS = 64
_FEW_TOKENS = 2
_LOWEST = -1e30  # minus infinity of states that hold a logarithm: the largest exponent of no tokens


@dataclass(frozen=True)
class MissingDefaults:
    """Values for missing inputs, by path, and the calls for which no value was right.

    Attributes:
        values: 0, 1 or -1e30 by path; an input of free length is empty, so that its value does not matter.
        unproven: Numbers of recorded calls whose outputs the model does not return with these values.
    """

    values: Mapping[str, float]
    unproven: tuple[int, ...] = ()


def fill_missing(
    plan: Plan, given: Mapping[str, torch.Tensor], defaults: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """Returns tensors for the inputs of a plan that are not given, by path.

    Args:
        plan: The plan.
        given: The inputs that are given.
        defaults: Value by path of inputs that are not empty; 0 if there is none.
    """
    sizes = solve_sizes(plan, {path: tuple(tensor.shape) for path, tensor in given.items()})
    shapes = plan.shapes(sizes)
    device = next((tensor.device for tensor in given.values()), torch.device("cpu"))
    missing = {}
    for leaf in plan.leaves:
        if leaf.path not in given:
            dtype: torch.dtype = getattr(torch, leaf.dtype)
            missing[leaf.path] = torch.full(shapes[leaf.path], defaults.get(leaf.path, 0), dtype=dtype, device=device)
    return missing


def completed_call(plan: Plan, observation: Observation, call: Call, defaults: Mapping[str, float]) -> Call:
    """Returns a recorded call with defaults for its missing inputs, and with what the model returned without them."""
    given = call.tensors()
    past = plan.with_role("past")
    cached = None if past is None else solve_sizes(plan, call.shapes())[past.name]
    merged = Call(observation.merged_arguments, call.signature, cached_tokens=cached)
    completed = merged.with_tensors({**given, **fill_missing(plan, given, defaults)})
    return replace(completed, outputs=call.outputs)


def find_missing_defaults(plan: Plan, observation: Observation, model: torch.nn.Module, method: str) -> MissingDefaults:
    """Returns the defaults for missing inputs with which the model returns what it returned without these inputs."""
    optional, ones = [], {}
    for leaf in plan.leaves:
        if leaf.is_optional:
            optional.append(leaf.path)
        if leaf.restored:
            ones[leaf.path] = 1
    calls, numbers = [], []
    for number, call in enumerate(observation.calls):
        if not call.tensors().keys() >= {*optional}:
            calls.append(call)
            numbers.append(number)
    if not calls:
        return MissingDefaults(ones)
    tried = [*calls, *_cut_calls(plan, calls, model, method)]
    best: dict[str, float] = {}
    fewest = list(range(len(tried)))

    def run(values: Mapping[str, float], call: Call) -> dict[str, torch.Tensor]:
        completed = completed_call(plan, observation, call, values)
        # A graph leaves outputs that exist only because of the defaults out again: more outputs are not a difference.
        return flatten(run_leniently(plan, model, method, completed)[0]).tensors()

    for values in itertools.islice(_choices(plan, observation, calls, optional), _MOST_TRIALS):
        outcomes = compare_runs(recorded, functools.partial(run, values), tried)
        wrong = [position for position, outcome in enumerate(outcomes) if not outcome.agrees]
        if len(wrong) < len(fewest):
            best, fewest = values, wrong
        if not wrong:
            break
    unproven = tuple([numbers[position] for position in fewest if position < len(calls)])
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


def _cut_calls(plan: Plan, calls: Sequence[Call], model: torch.nn.Module, method: str) -> list[Call]:
    """Those of the calls that have many tokens, cut to few: a long call may hide what it began with."""
    new = plan.with_role("sequence")
    found = []
    for call in calls:
        tensors, sizes = call.tensors(), solve_sizes(plan, call.shapes())
        if new is None or sizes[new.name] <= _FEW_TOKENS:
            continue
        for path, shape in plan.shapes({**sizes, new.name: _FEW_TOKENS}).items():
            for axis, size in enumerate(shape if path in tensors else ()):
                tensors[path] = tensors[path].narrow(axis, 0, min(size, tensors[path].shape[axis]))
        cut = call.with_tensors(tensors)
        with contextlib.suppress(Exception):  # a model that raises for so few tokens has no answer to compare with
            found.append(replace(cut, outputs=flatten(run_eager(model, method, cut))))
    return found


def _choices(
    plan: Plan, observation: Observation, calls: Sequence[Call], optional: Sequence[str]
) -> Iterator[dict[str, float]]:
    """Yields values for the inputs that would not be empty: the likely ones, then with one changed, with two and so on.

    A likely value is what an input mostly held where it was given, such as 1 for a mask: if a call ignores the input,
    every value reproduces the call.
    """
    full = set()
    for call in calls:
        for path, tensor in fill_missing(plan, call.tensors(), {}).items():
            if tensor.numel():
                full.add(path)
    likely: dict[str, float] = {}
    others: dict[str, list[float]] = {}
    for path in optional:
        if path in full:
            likely[path], *others[path] = _by_likelihood(plan, observation, path)
    for changes in range(len(others) + 1):
        for changed in itertools.combinations(others, changes):
            for values in itertools.product(*map(others.__getitem__, changed)):
                yield {**likely, **dict(zip(changed, values, strict=True))}


def _by_likelihood(plan: Plan, observation: Observation, path: str) -> tuple[float, ...]:
    if "float" in plan.by_path[path].dtype:
        return (0, 1, _LOWEST)
    ones = total = 0
    for call in observation.calls:
        tensor = call.tensors().get(path)
        if tensor is not None:
            ones, total = ones + int((tensor == 1).sum()), total + tensor.numel()
    return (1, 0) if 2 * ones > total else (0, 1)


def dependent_outputs(observation: Observation, joined: Iterable[str] = ()) -> dict[str, str]:
    """Returns the outputs that some calls lack, by path, and the input on which they depend.

    It is the input that the same calls have and lack: features of an image are returned where they were given.

    Args:
        observation: The calls.
        joined: Paths of lists among the outputs that are one tensor.
    """
    inputs: dict[str, set[int]] = {}  # numbers of the calls that have it
    outputs: dict[str, set[int]] = {}
    for number, call in enumerate(observation.calls):
        for path in call.shapes():
            inputs.setdefault(path, set()).add(number)
        for path in as_simplified(call.outputs.tensors(), joined, ()):
            outputs.setdefault(path, set()).add(number)
    found = {}
    for path, having in outputs.items():
        if len(having) < len(observation.calls):
            for source in observation.tensor_paths():
                if inputs[source] == having:
                    found[path] = source
                    break
    return found
