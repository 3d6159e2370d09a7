"""The calls of a proof besides the recorded ones, and what the model returns for them.

These are calls at sizes that were never run, calls with several new tokens given one at a time, and calls that go
through the parts of the model.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from exportkit.arguments.build import build_call, largest_tensors
from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.calls.signature import number_as_tensor, number_in
from exportkit.errors import InvalidRequestError, described, short_text
from exportkit.onnx_files.graph import OnnxGraph
from exportkit.onnx_files.runner import OnnxRunner
from exportkit.plan.plan import Plan
from exportkit.plan.sizes import settled, unseen_sizes
from exportkit.plan.small_sizes import at_pattern, covering, small
from exportkit.plan.solved_sizes import solve_sizes
from exportkit.probing.missing import absent_patterns, call_without
from exportkit.probing.other_values import scaled, with_wide_values
from exportkit.probing.simplify import as_simplified
from exportkit.probing.sized_calls import calls_with_values, run_sized
from exportkit.programs.call_check import SmallSizes
from exportkit.programs.patterns import sizes_of_calls
from exportkit.programs.program import TracedProgram
from exportkit.programs.size_branches import Affordable
from exportkit.running.compare import Tensors, outputs_close
from exportkit.running.eager import run_eager
from exportkit.trees import Tree, cloned, flatten, join
from exportkit.trees.tree import is_inexact, is_integer

_SEEDS = 1000
_SCALES = (0.03, 4.0, -1.0)  # of the values in calls of a program that may decide by them


def as_made(plan: Plan, call: Call) -> Call:
    """Returns a recorded call as the caller made it, without inputs that were restored afterwards."""
    restored = {leaf.argument for leaf in plan.leaves if leaf.restored}
    if restored.isdisjoint(call.arguments):
        return call
    kept = {name: tree for name, tree in call.arguments.items() if name not in restored}
    return replace(call, arguments=kept)


def given_calls(data: Observation | None) -> tuple[Call, ...]:
    """Returns the calls of further data, with the results of the model, by which an export is judged, too.

    Args:
        data: What an observer recorded; None for no data.

    Raises:
        InvalidRequestError: if it has no values.
    """
    if data is None:
        return ()
    if not data.has_values:
        raise InvalidRequestError("The data contain no values, so there is nothing to compare with.", where="data")
    return tuple(replace(call, label=f"given {call.index}") for call in data.calls)


def unseen_calls(traced: TracedProgram) -> Iterator[Call]:
    """Yields calls at sizes that were neither recorded nor exported with.

    There is one for each combination of sizes that callers are likely to use, one at large sizes, and as many as it
    takes for each two variables to be 0, 1 or more together in all the ways that the domain allows. The first ones are
    those in which the program was seen to depart from the model in torch. Each has what the model returned in eager
    mode, or the error that it raised; a call outside of the domain is not run.

    Args:
        traced: The program.
    """
    plan, domain = traced.plan, traced.domain
    yield from traced.suspects
    combinations = [(item.label, item.sizes) for item in unseen_sizes(plan, traced.sizes)]
    large = Affordable(traced).largest(domain, {})
    if large is not None:
        combinations.append(("large sizes", large))
    waived = {condition.text for condition in domain.waived}
    for number, sizes in enumerate(traced.crossings, 1):  # the other side of conditions that change nothing in torch
        broken = {condition.text for condition in domain.waived if not condition.holds(sizes)}
        if waived & broken:
            combinations.append((f"beyond waived condition {number}", sizes))
            waived -= broken
    covered = [small(sizes) for sizes in sizes_of_calls(traced)]
    for label, sizes in combinations:
        if domain.check.contains(sizes):
            call = call_at(traced, sizes, label)
            covered += [small(sizes)] if call.is_made else []
            yield call
        else:
            yield Call({}, traced.observation.signature, label=label, sizes=sizes, error="outside of the domain")
    patterns = [pattern.sizes for pattern in domain.patterns]
    yield from small_calls(traced, covering(patterns, covered, plan.names))
    yield from _short_calls(traced)
    yield from _scaled_calls(traced)
    yield from _longer_calls(traced)
    yield from _absent_calls(traced)
    yield from _repeated_calls(traced)
    yield from _calls_in_a_row(traced)


def small_calls(traced: TracedProgram, patterns: Iterable[Mapping[str, int]]) -> Iterator[Call]:
    """Yields a call for each pattern of variables that are 0 or 1, at other sizes for which the model was seen to run.

    Args:
        traced: The program.
        patterns: The size of each of these variables, for each pattern.
    """
    for pattern in patterns:
        default = at_pattern(traced.plan, traced.sizes, pattern)
        sizes = next((sizes for sizes in traced.samples if small(sizes) == pattern), default)
        yield call_at(traced, sizes, str(SmallSizes(pattern)))


def calls_beside(graph: OnnxGraph, call: Call, tried: Sequence[Mapping[str, int]], label: str) -> Iterator[Call]:
    """Yields calls with the values of a call that are inside the domain, with what the model returns.

    Args:
        graph: The graph, with the model at hand.
        call: A call that has something apart from its values, such as sizes of 1.
        tried: Sizes without it.
        label: What the values are of.
    """
    contract, eager = graph.contract, graph.eager
    if eager is None:
        return
    plan, defaults = contract.plan, contract.defaults
    inside = [sizes for sizes in tried if contract.domain.check.contains(sizes)]
    for other in calls_with_values(plan, graph.observation, defaults, call, inside):
        with contextlib.suppress(Exception):  # the model need not accept these values at these sizes
            yield run_sized(plan, eager.model, eager.method, replace(other, label=f"values of {label}"))


def _short_calls(traced: TracedProgram) -> Iterator[Call]:
    """Yields a call with integers below the sizes that they reached in every recorded call, if the model accepts it."""
    plan, observation, sizes = traced.plan, traced.observation, traced.sizes
    if not any(map(is_integer, largest_tensors(observation).values())):
        return
    usual, short = (build_call(plan, observation, sizes, reaching).tensors() for reaching in (True, False))
    changed = {path: tensor for path, tensor in short.items() if not torch.equal(tensor, usual[path])}
    if changed:
        call = traced.sized_call(sizes).with_tensors(changed)
        with contextlib.suppress(Exception):  # a model may ask for lengths that reach the size
            yield traced.answered(replace(call, label="integers below sizes"))


def _scaled_calls(traced: TracedProgram) -> Iterator[Call]:
    """Yields calls with smaller, larger and opposite values, if values may decide what is computed."""
    call = traced.sized_call(traced.sizes)
    for scale in _SCALES if traced.may_decide_by_values else ():
        other = replace(scaled(call, scale), label=f"values x {scale:g}")
        with contextlib.suppress(Exception):  # the model need not accept them
            yield traced.answered(other)


def _longer_calls(traced: TracedProgram) -> Iterator[Call]:
    """Yields calls with a row more than lengths say, if the model accepts them: it need not look at the number."""
    plan = traced.plan
    for grid in [grid for grid in plan.grids if grid.are_lengths]:
        call, name = traced.sized_call(traced.sizes), plan.by_path[grid.rows].sizes[0].variable or ""
        axes = plan.axes_of(name)
        tensors = {path: call.tensors()[path].movedim(axis, 0) for path, axis in axes}
        longer = {path: torch.cat([tensors[path], tensors[path][:1]]).movedim(0, axis) for path, axis in axes}
        with contextlib.suppress(Exception):
            answered = traced.answered(call.with_tensors(longer))
            sizes = {**traced.sizes, name: traced.sizes[name] + 1}
            yield replace(answered, label=f"more rows than {grid.path} says", sizes=sizes)


def _absent_calls(traced: TracedProgram) -> Iterator[Call]:
    """Yields a call for each set of inputs that may be left out, although no stored call left them out together."""
    plan, observation = traced.plan, traced.observation
    domain, seen = traced.domain, absent_patterns(plan, observation)
    stored = absent_patterns(plan, replace(observation, further=()))
    for pattern in sorted(domain.absent.keys() - stored.keys() - {frozenset()}, key=sorted):
        try:
            sizes = {**traced.sizes, **dict.fromkeys(domain.absent[pattern], 0)}
            call = call_without(plan, observation, settled(plan, sizes), pattern)
            call = replace(call, label=f"without {domain.names(pattern)}")
            started = time.perf_counter()
            outputs = flatten(run_eager(traced.model, traced.method, call))
        except Exception:
            if pattern not in seen:
                raise
            continue  # calls that are not stored left these inputs out, maybe at other sizes only
        yield replace(call, outputs=outputs, latency=time.perf_counter() - started)


def _repeated_calls(traced: TracedProgram) -> Iterator[Call]:
    """Yields recorded calls that are made twice in a row, with both results, if the model does not return the same.

    No graph returns both: the model uses random numbers, or keeps something from one call to the next.
    """
    first, last = traced.observation.calls[0], traced.observation.calls[-1]
    for call in (first,) if first.shapes().keys() == last.shapes().keys() else (first, last):
        try:
            results = _made_in_a_row(traced, (call, 0), (call, 1))
        except Exception:  # the model need not accept the call again
            continue
        if not outputs_close(*(result.tensors() for result in results)):
            sizes = solve_sizes(traced.plan, call.shapes())
            for number, outputs in enumerate(results, start=1):
                label = f"{call.index}, called twice, result {number}: the model is random or keeps state"
                yield replace(call, outputs=outputs, label=label, index=None, sizes=sizes)


def _calls_in_a_row(traced: TracedProgram) -> Iterator[Call]:
    """Yields a call at unseen sizes, made after one with other values, if the model then returns something else.

    It keeps what it computed from values, such as results by shape.
    """
    label = "after a call with other values at these sizes: the model keeps state"
    unseen = [item.sizes for item in unseen_sizes(traced.plan, traced.sizes)]
    # at sizes of 0 or 1, these would be taken for the reason
    tried = [sizes for sizes in unseen if not small(sizes) and traced.domain.check.contains(sizes)]
    made = (call_at(traced, sizes, label) for sizes in (*tried, traced.sizes))
    call = next((call for call in made if call.is_made), None)
    if call is None:
        return
    other = call.with_tensors({path: _other_values(tensor) for path, tensor in call.tensors().items()})
    for before in ((other, with_wide_values(other)), (other,)):
        try:
            (alone,) = _made_in_a_row(traced, (call, 0))
            *_, after = _made_in_a_row(traced, *((one, 1) for one in before), (call, 0))
        except Exception:  # the model need not accept these values
            continue
        if not outputs_close(alone.tensors(), after.tensors()):
            yield replace(call, outputs=after)
        return


def _other_values(tensor: torch.Tensor) -> torch.Tensor:
    if is_inexact(tensor):
        return -tensor
    return tensor.flip(*range(tensor.ndim)) if tensor.ndim else tensor


def _made_in_a_row(traced: TracedProgram, *made: tuple[Call, int]) -> list[Tree]:
    """What the model returns for calls that are made one after the other, each with its seed of random numbers."""
    results: list[Tree] = []

    def in_a_row(_values: dict[str, Any], run: Callable[[Mapping[str, Any]], Any]) -> None:
        for call, seed in made:
            if call.seed is None:  # otherwise it gets the same numbers in any case
                for generator in (torch.default_generator, *call.generators()):
                    generator.manual_seed(seed)
            tree = flatten(run(call.copies()))
            results.append(tree.map(cloned))

    run_eager(traced.model, traced.method, made[0][0], in_a_row)
    return results


def call_at(traced: TracedProgram, sizes: Mapping[str, int], label: str) -> Call:
    """Returns a call at sizes that were not recorded, with what the model returned for it, or the error it raised.

    Args:
        traced: The program.
        sizes: Sizes of the variables.
        label: What the sizes stand for.
    """
    observation = traced.observation
    failed = Call({}, observation.signature, label=label, sizes=sizes)
    try:
        call = _with_other_numbers(traced.sized_call(sizes), observation)
    except Exception as error:
        return replace(failed, error=f"no call can be built: {short_text(error)}")
    if call.seed is not None:
        call = replace(call, seed=zlib.crc32(label.encode()) % _SEEDS)
    try:
        return traced.answered(replace(call, label=label))
    except Exception as error:
        return replace(failed, error=f"the model itself raises {described(error, 240)}")


def _with_other_numbers(call: Call, observation: Observation) -> Call:
    """The call with values that no recorded call had of the Python numbers that a graph calculates with."""
    changed = {}
    for path, kind in observation.signature.numbers.items():
        if kind != "size" and path in call.tensors():
            given = [made.tensors()[path] for made in observation.calls if path in made.tensors()]
            most = max(number_in(tensor, kind) for tensor in given)
            changed[path] = number_as_tensor(2 * most + 1, kind)
    return call.with_tensors(changed)


def assembled_calls(runner: OnnxRunner) -> Iterator[tuple[str, Call, dict[str, Any]]]:
    """Yields, for each call of a part, the first recorded call of the model that it fed.

    Args:
        runner: The model with its parts.

    Yields:
        A label, the recorded call, and its arguments by name with those of the part in place of what the part made.
    """
    plan, calls = runner.contract.plan, runner.graph.observation.calls
    for name, part in runner.parts.items():
        for fed, call in enumerate(part.graph.observation.calls):
            outputs = call.outputs.tensors()
            renamed = {
                to: t for e in runner.edges[name] for p, t in outputs.items() if (to := e.renamed(p)) is not None
            }
            made = as_simplified(renamed, plan.joined, plan.unused)
            whole = next((c for c in calls if _was_given(c.tensors(), made)), None)
            if whole is not None:
                given = {n: value for n, value in call.copies().items() if call.arguments[n].tensor_paths}
                yield f"{whole.index} from {name} {fed}", whole, _without(whole, set(made)) | given


def _was_given(given: Tensors, made: Tensors) -> bool:
    return bool(made) and all(path in given and torch.equal(given[path], tensor) for path, tensor in made.items())


def _without(call: Call, made: set[str]) -> dict[str, Any]:
    """The arguments by name, without those that hold only what a part made."""
    values, caught = call.copies(), call.signature.var_keyword
    kept = {
        name: value
        for name, value in values.items()
        if name != caught and not _is_made(name, call.arguments[name], made)
    }
    return kept | dict(values.get(caught, {}) if caught else {})


def _is_made(name: str, tree: Tree, made: set[str]) -> bool:
    tensors = tree.tensors()
    return bool(tensors) and all(join(name, path) in made for path in tensors)
