"""What stands for an input that a call lacks: nothing along a free axis, else zeros, ones, or minus infinity.

Which of them is right is tried on the recorded calls, not assumed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from exportkit.arguments.build import merged_trees
from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.plan.expression import Expression
from exportkit.plan.plan import Plan
from exportkit.probing.simplify import as_simplified
from exportkit.running.compare import outputs_close
from exportkit.running.eager import run_eager
from exportkit.trees import Tree, flatten, join

_MOST_TRIALS = 64
_FEW_TOKENS = 2
_LOWEST = -1e30  # minus infinity of states that hold a logarithm: the largest exponent of no tokens


@dataclass(frozen=True)
class Fills:
    """Values that missing inputs are filled with, by path, and the calls for which no value was right.

    Attributes:
        values: 0, 1 or -1e30 by path; an input of free length is empty, so that its value does not matter.
        unproven: Numbers of recorded calls that the filled arguments do not reproduce.
    """

    values: Mapping[str, float]
    unproven: tuple[int, ...] = ()


def solve_sizes(plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Returns the size of each variable as the given inputs show it; variables that none of them shows are 0.

    Args:
        plan: The plan.
        shapes: Shapes of the inputs that are given, by path.
    """
    sizes: dict[str, int] = {}
    equations = [
        (size, shapes[leaf.path][axis])
        for leaf in plan.leaves
        if leaf.path in shapes
        for axis, size in enumerate(leaf.sizes)
        if not size.is_static and (size.is_linear or _is_below_cap(size, shapes[leaf.path][axis]))
    ]
    for _ in range(2):  # sums are of plain variables, so two rounds settle them
        for size, value in equations:
            unknown = [(name, factor) for name, factor in size.terms if name not in sizes]
            if len(unknown) == 1:
                name, factor = unknown[0]
                rest = value - size.constant - sum(f * sizes[n] for n, f in size.terms if n != name)
                sizes[name] = max(rest // factor, 0)
    return {variable.name: sizes.get(variable.name, 0) for variable in plan.variables}


def _is_below_cap(size: Expression, value: int) -> bool:
    """Whether a window is not full, so that it shows how much was stored."""
    return size.divisor == 1 and size.cap is not None and value < size.cap


def size_in(plan: Plan, name: str, shapes: Mapping[str, tuple[Any, ...]]) -> Any:
    """Returns the size of a variable in the given shapes, which may be symbolic; None if they do not show it.

    Args:
        plan: The plan.
        name: The variable.
        shapes: Shapes by path, of ints or of a trace's symbols.
    """
    sizes = [
        (size, shapes[leaf.path][axis])
        for leaf in plan.leaves
        if leaf.path in shapes
        for axis, size in enumerate(leaf.sizes)
    ]
    plain = {size.variable: value for size, value in reversed(sizes) if size.variable is not None}
    if name in plain:
        return plain[name]
    for size, value in sizes:
        others = [(other, factor) for other, factor in size.terms if other != name]
        if size.is_linear and (name, 1) in size.terms and all(other in plain for other, _ in others):
            return value - size.constant - sum(factor * plain[other] for other, factor in others)
    return None


def fill_missing(plan: Plan, given: Mapping[str, torch.Tensor], fills: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """Returns tensors for the inputs of a plan that are not given, by path.

    Args:
        plan: The plan.
        given: The inputs that are given.
        fills: Value by path of those that are not empty; 0 by default.
    """
    sizes = solve_sizes(plan, {path: tuple(tensor.shape) for path, tensor in given.items()})
    shapes = plan.shapes(sizes)
    device = next((tensor.device for tensor in given.values()), torch.device("cpu"))
    return {
        leaf.path: torch.full(
            shapes[leaf.path], fills.get(leaf.path, 0), dtype=getattr(torch, leaf.dtype), device=device
        )
        for leaf in plan.leaves
        if leaf.path not in given
    }


def completed_call(plan: Plan, observation: Observation, index: int, fills: Mapping[str, float]) -> Call:
    """Returns the arguments of a recorded call with its missing inputs filled."""
    call = observation.calls[index]
    missing = fill_missing(plan, call.tensors(), fills)
    trees: dict[str, Tree] = {}
    for name, tree in merged_trees(observation).items():
        own = call.arguments.get(name)
        found = {} if own is None else own.tensors()
        leaves: dict[str, Any] = {p: found[p] if p in found else missing[join(name, p)] for p in tree.tensors()}
        trees[name] = tree.with_leaves(leaves)
    past = plan.with_role("past")
    sizes = solve_sizes(plan, {path: tuple(tensor.shape) for path, tensor in call.tensors().items()})
    return Call(trees, call.signature, cached_tokens=None if past is None else sizes[past.name])


def find_fills(plan: Plan, observation: Observation, model: torch.nn.Module, method: str) -> Fills:
    """Returns what missing inputs must be filled with, so that the model returns what it returned without them."""
    optional = [leaf.path for leaf in plan.leaves if leaf.is_optional]
    ones = {leaf.path: 1 for leaf in plan.leaves if leaf.restored}
    calls = [i for i, call in enumerate(observation.calls) if any(path not in call.tensors() for path in optional)]
    if not calls:
        return Fills(ones)
    tried, short = _with_short_calls(plan, observation, calls, model, method)
    best: dict[str, float] = {}
    fewest = [*calls, *short]
    for values in itertools.islice(_choices(plan, observation, calls, optional), _MOST_TRIALS):
        wrong = [index for index in (*calls, *short) if not _reproduces(plan, tried, index, values, model, method)]
        if len(wrong) < len(fewest):
            best, fewest = values, wrong
        if not wrong:
            break
    return Fills({**best, **ones}, tuple(index for index in fewest if index in calls))


def run_leniently(plan: Plan, model: torch.nn.Module, method: str, call: Call) -> tuple[Any, Call]:
    """Returns what the model returns, and for which arguments: without those of no elements, if it refuses these.

    Eager mode has no image where it is given none, and may fail for an image of no rows; in a graph that is the same.

    Args:
        plan: Says which inputs may be left out.
        model: The model.
        method: The method.
        call: The call.

    Raises:
        Exception: whatever the model raises for both.
    """
    optional = {leaf.path for leaf in plan.leaves if leaf.is_optional and leaf.growing is None}
    empty = {
        name
        for name, tree in call.arguments.items()
        if (tensors := tree.tensors())
        and all(tensor.numel() == 0 and join(name, path) in optional for path, tensor in tensors.items())
    }
    try:
        return run_eager(model, method, call), call
    except Exception:
        if not empty:
            raise
    fewer = call.with_arguments({name: tree for name, tree in call.arguments.items() if name not in empty})
    return run_eager(model, method, fewer), fewer


def _with_short_calls(
    plan: Plan, observation: Observation, calls: list[int], model: torch.nn.Module, method: str
) -> tuple[Observation, list[int]]:
    """The calls, and these cut to few tokens, with the numbers of those: a long call may hide what it began with."""
    new = plan.with_role("sequence")
    short = []
    for call in (observation.calls[index] for index in calls):
        sizes = solve_sizes(plan, {path: tuple(tensor.shape) for path, tensor in call.tensors().items()})
        if new is None or sizes[new.name] <= _FEW_TOKENS:
            continue
        shapes = plan.shapes({**sizes, new.name: _FEW_TOKENS})
        trees = {
            name: tree.with_leaves({p: _cut(t, shapes.get(join(name, p))) for p, t in tree.tensors().items()})
            for name, tree in call.arguments.items()
        }
        with contextlib.suppress(Exception):  # a model that refuses so few tokens is not asked
            outputs = flatten(run_eager(model, method, call.with_arguments(trees)))
            short.append(replace(call, arguments=trees, outputs=outputs))
    count = len(observation.calls)
    return replace(observation, calls=(*observation.calls, *short)), [*range(count, count + len(short))]


def _cut(tensor: torch.Tensor, shape: tuple[int, ...] | None) -> torch.Tensor:
    for axis, size in enumerate(shape or ()):
        tensor = tensor.narrow(axis, 0, min(size, tensor.shape[axis]))
    return tensor


def _choices(plan: Plan, observation: Observation, calls: list[int], optional: list[str]) -> Iterator[dict[str, float]]:
    """Values for the inputs that would not be empty: the likely ones, then those with one changed, with two and so on.

    Likely is what an input mostly held where it was given, 1 for a mask: a call that ignores it reproduces with any.
    """
    full = set()
    for index in calls:
        missing = fill_missing(plan, observation.calls[index].tensors(), {})
        full |= {path for path, tensor in missing.items() if tensor.numel()}
    named = [path for path in optional if path in full]
    ordered = {path: _by_likelihood(plan, observation, path) for path in named}
    likely = {path: values[0] for path, values in ordered.items()}
    for changes in range(len(named) + 1):
        for changed in itertools.combinations(named, changes):
            for values in itertools.product(*(ordered[path][1:] for path in changed)):
                yield {**likely, **dict(zip(changed, values, strict=True))}


def _by_likelihood(plan: Plan, observation: Observation, path: str) -> tuple[float, ...]:
    if "float" in plan.by_path[path].dtype:
        return (0, 1, _LOWEST)
    given = [tensors[path] for call in observation.calls if path in (tensors := call.tensors())]
    ones = sum(int((tensor == 1).sum()) for tensor in given)
    return (1, 0) if 2 * ones > sum(tensor.numel() for tensor in given) else (0, 1)


def _reproduces(
    plan: Plan, observation: Observation, index: int, fills: Mapping[str, float], model: torch.nn.Module, method: str
) -> bool:
    try:
        outputs = flatten(run_leniently(plan, model, method, completed_call(plan, observation, index, fills))[0])
    except Exception:
        return False
    # what the model returns because of the filled inputs is left out again when the graph is called without them
    expected, got = observation.calls[index].outputs.tensors(), outputs.tensors()
    return outputs_close(expected, got)


def dependent_outputs(observation: Observation, joined: Iterable[str] = ()) -> dict[str, str]:
    """Returns the outputs that some calls lack, by path, and the input on which they depend.

    That is one which the same calls have and lack: features of an image are returned where they were given.

    Args:
        observation: The calls.
        joined: Paths of lists among the outputs that are one tensor.
    """
    given = [call.tensors() for call in observation.calls]
    returned = [as_simplified(call.outputs.tensors(), joined, ()) for call in observation.calls]
    inputs = {path: [path in tensors for tensors in given] for path in observation.tensor_paths()}
    found: dict[str, str] = {}
    for path in dict.fromkeys(path for tensors in returned for path in tensors):
        pattern = [path in tensors for tensors in returned]
        if not all(pattern):
            source = next((name for name, other in inputs.items() if other == pattern), None)
            found |= {} if source is None else {path: source}
    return found
