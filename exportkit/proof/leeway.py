"""Measures how far the results of a model move when nothing that matters changes: rounding, ties, padding.

A proof first compares with `rounding_bound`, which costs nothing and is enough for most models. Only where that fails,
the model runs again, and what it shows widens the bound of single elements:

- Rounding: every operator rounds differently. Errors that a model amplifies, cancellation, and decisions that depend
  on the last bit (``argmax``, ``round``, a comparison) show as results that move.
- Ties: operators that choose among equal elements follow the rule of ONNX.
- Padding: what the mask hides gets other values. Positions that it hides are arbitrary only if they move then while
  all others stay; a mask that the model reads in another way hides nothing.
- Half precision: the model computes in float32 as well, which shows how far its own results are off.

docs/proof.rst has the measurements behind the constants.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from exportkit._torch_compat.rounding import rounding_varied
from exportkit.calls.call import Call
from exportkit.onnx_files.graph import MeasuredCall, OnnxGraph
from exportkit.plan.plan import Plan
from exportkit.proof.figures import figures_of, worst
from exportkit.running.bounds import (
    HALF,
    Bound,
    half_bound,
    index_means,
    local_scale,
    magnitudes,
    rounding_bound,
    usual_bound,
)
from exportkit.running.compare import Tensors, compare_tensors, elements_apart, same_value
from exportkit.running.masks import Visible, find_masks, visible_positions, visible_tail
from exportkit.trees.tree import dtype_name, is_inexact

# Runs that round differently, at most. A decision that depends on the last bit goes either way in half of them. In half
# precision there are so many such decisions that four runs do not meet all; and of millions of elements, some move
# little in each of four runs (2 of 3.7 million in the masks of a SAM).
_RUNS, _RUNS_OF_MILLIONS, _RUNS_IN_HALF = 4, 8, 12
# How many times what they moved a result the graph may be off. 8.4 was the most for two kernels of one operator.
_TIMES = 16.0
# Elements that move by more than this part of what is allowed at most are not compared.
_UNKNOWN = 0.25


def measure(graph: OnnxGraph) -> None:
    """Measures ties and padding in all calls of a graph that is saved without a proof, and keeps that in the graph.

    Args:
        graph: The graph, with the model at hand.
    """
    for call in (*graph.observation.calls, *(graph.unseen or ())):
        if call.is_made:
            expected = graph.contract.simplified(call.outputs.tensors())
            for measured in measurements(graph, call, expected, runs=0):
                graph.measured[call_name(call)] = measured


def call_name(call: Call) -> str:
    """Returns the name under which a graph keeps what was measured for a call."""
    return call.label or str(call.index)


def measurements(graph: OnnxGraph, call: Call, expected: Tensors, runs: int | None = None) -> Iterator[MeasuredCall]:
    """Yields what may be compared with the outputs of a graph, more lenient with each further run of the model.

    Args:
        graph: The graph, with the model at hand.
        call: The call.
        expected: What the model returned for it, by path.
        runs: How many runs may round differently; by default four, eight if the model returns a million elements, or
            twelve of a model in half precision.
    """
    run = graph.eager
    if run is None:
        return
    weights = [*run.model.parameters(), *run.model.buffers()]

    def outputs(seed: int, errors: float) -> tuple[Tensors, bool]:
        with rounding_varied(seed, weights, errors) as rounding:
            return graph.contract.simplified(run(call)), rounding.chooses

    most = usual_bound if runs == 0 else most_allowed(graph)
    if runs is None:
        is_many = sum(tensor.numel() for tensor in expected.values()) >= 10**6
        runs = (_RUNS_OF_MILLIONS if is_many else _RUNS) if most is usual_bound else _RUNS_IN_HALF
    with contextlib.suppress(Exception):  # whatever the model raises for values that it was not made for
        found = hidden_by_padding(graph, call)
        if found:
            yield MeasuredCall({}, found)
        base, chooses = outputs(0, 0.0)
        ties: dict[str, torch.Tensor] = {}
        if chooses:
            plain = graph.contract.simplified(run(call))
            ties = {p: t for p, t in base.items() if same_value(expected[p], plain[p]) and not same_value(plain[p], t)}
            if ties:
                yield MeasuredCall(ties, found)
        moved: dict[str, torch.Tensor] = {}
        for seed in range(runs):
            moved = _moved(base, outputs(seed, 1.0)[0], moved)
            allowed = {path: _allowed(base[path], apart, found.get(path), most) for path, apart in moved.items()}
            yield MeasuredCall(ties, allowed)


def hidden_by_padding(graph: OnnxGraph, call: Call) -> dict[str, torch.Tensor]:
    """Returns infinity for elements of outputs that padding decides about, by path, and 0 for all others.

    Args:
        graph: The graph, with the model at hand.
        call: The call, with what the model returned.
    """
    eager, contract, found = graph.eager, graph.contract, dict[str, torch.Tensor]()
    if eager is None:
        return found
    returned = contract.simplified(call.outputs.tensors())
    for mask, visible in _maskings(graph, call):
        changed = _with_other_padding(contract.plan, call, mask, visible)
        if changed is not None:
            hidden = _arbitrary(returned, contract.simplified(eager(changed)), visible)
            found |= {path: torch.maximum(tensor, found.get(path, tensor)) for path, tensor in hidden.items()}
    return found


def _moved(base: Tensors, varied: Tensors, before: Tensors) -> dict[str, torch.Tensor]:
    """How far each element of the outputs moved at most."""
    found = {}
    for path, tensor in base.items():
        other = varied.get(path)
        if other is not None and other.shape == tensor.shape and other.dtype == tensor.dtype:
            apart = elements_apart(tensor, other)
            found[path] = torch.maximum(apart, before[path]) if path in before else apart
    return found


def _allowed(
    base: torch.Tensor, moved: torch.Tensor, found: torch.Tensor | None, most: Bound = usual_bound
) -> torch.Tensor:
    """How far elements may be off that moved so far. Integers may only be what they were in a run.

    Results in half precision move by as much as is usual, or more, throughout. These may then be off by 16 times what
    they moved, within a larger bound, as `farther_from_float32` looks at them together.
    """
    if is_inexact(base):
        # One run moves one element by little, and another one by more, as chance has it: the elements around it count,
        # in numbers and in parts of their scale, without those that moved because a decision was made differently.
        usual = usual_bound(base)
        typical = (moved / usual.clamp_min(torch.finfo(torch.float64).tiny)).median() if moved.numel() else moved.sum()
        limit = torch.minimum(most(base), (_TIMES * typical).clamp_min(1.0) * usual)
        around = torch.minimum(moved, limit / _TIMES)
        parts = around / limit.clamp_min(torch.finfo(torch.float64).tiny)
        around = torch.maximum(local_scale(magnitudes(around)), local_scale(magnitudes(parts)) * limit)
        moved = torch.maximum(around, moved)
        unknown = torch.maximum(_TIMES * moved, 2 * most(base))
        moved = torch.where(moved > _UNKNOWN * limit, unknown, torch.minimum(_TIMES * moved, limit))
    return moved if found is None else torch.maximum(moved, found)


def _arbitrary(base: Tensors, changed: Tensors, visible: Visible) -> dict[str, torch.Tensor]:
    """Infinity for the positions of outputs that a mask hides and that move with other padding, if no others do."""
    found = {}
    for path, tensor in base.items():
        kept = visible(path, tuple(tensor.shape))
        if kept is None or path not in changed or compare_tensors(path, tensor, changed[path], kept).reason is not None:
            continue
        moved = elements_apart(tensor, changed[path]) > rounding_bound(tensor)
        axes = [axis for axis, size in enumerate(kept.shape) if size == 1]
        hidden = ~kept & (moved.any(axes, keepdim=True) if axes else moved)
        found[path] = torch.where(hidden, torch.inf, 0.0).to(torch.float64)
    return found


def _maskings(graph: OnnxGraph, call: Call) -> Iterator[tuple[str, Visible]]:
    """Yields the path of each mask that hides something, and a function for what it leaves visible of a tensor."""
    contract, plan = graph.contract, graph.contract.plan
    past = plan.with_role("past")
    axes = dict(contract.output_axes)
    for leaf in plan.leaves:
        axes[leaf.path] = tuple(map(str, leaf.sizes)) if leaf.growing is None else ()
    for path, mask in find_masks(call.tensors()):
        if path not in plan.by_path or bool(mask.all()):
            continue
        sizes = plan.by_path[path].sizes
        names = tuple(map(str, sizes))
        # a mask that covers all tokens, those in the cache included, and not those of an encoder, hides parts of caches
        caches = contract.structure.growing if past is not None and past.name in sizes[-1].variables() else {}

        def visible(
            path: str,
            shape: tuple[int, ...],
            mask: torch.Tensor = mask,
            names: tuple[str, ...] = names,
            caches: Mapping[str, Any] = caches,
        ) -> torch.Tensor | None:
            if path in caches:  # also where a window has cut it, so that its length has no name
                return visible_tail(mask, caches[path].axis, shape)
            return visible_positions(mask, names, axes.get(path, ()), shape)

        yield path, visible


def _with_other_padding(plan: Plan, call: Call, mask: str, visible: Visible) -> Call | None:
    """The call with other values where a mask hides its inputs; None if it has none there.

    Placeholders of images and the like stay where they are, as there are as many of them as features.
    """
    changed, markers = {}, {marker.path for marker in plan.markers}
    for path, tensor in call.tensors().items():
        kept = None if path == mask or path in markers else visible(path, tuple(tensor.shape))
        if kept is not None and tensor.numel():
            placeholders = [placeholder.value for placeholder in plan.placeholders if placeholder.tokens == path]
            changed[path] = torch.where(kept.to(tensor.device), tensor, _others(tensor, placeholders))
    return call.with_tensors(changed) if changed else None


def _others(tensor: torch.Tensor, placeholders: Sequence[int]) -> torch.Tensor:
    """Values that differ from those of a tensor, except for placeholders, and are among them or close by."""
    if tensor.dtype is torch.bool:
        return ~tensor
    if is_inexact(tensor):
        return torch.where(tensor == 0, 1.0, -tensor).to(tensor.dtype)
    fixed = torch.isin(tensor, torch.tensor(placeholders, dtype=tensor.dtype, device=tensor.device))
    values = tensor[~fixed].unique()
    if not len(values):
        return tensor
    place = torch.searchsorted(values, tensor).clamp_max(len(values) - 1)
    others = values.roll(1)[place] if len(values) > 1 else tensor + 1
    return torch.where(fixed, tensor, others)


# Half precision: what the model computes in float32 tells rounding from a wrong graph
#
# Elements of a result in float16 or bfloat16 move so far from one rounding to the next that few of them say anything by
# themselves. Together they do: rounding errors of a right graph are about as large as those of the model, and both are
# known if the model computes the same in float32.


# The graph's error may be this many times the model's: of all elements, and of those at the worst index of an axis.
# docs/proof.rst has the largest that were measured.
_TIMES_IN_HALF, _TIMES_AT_INDEX = 2.0, 3.0


def distance_from_float32(graph: OnnxGraph) -> Iterator[str]:
    """Yields how far the results of a model in half precision are from those that it has in float32.

    Args:
        graph: The graph; nothing is known if the model is not at hand.
    """
    figures = []
    for call in graph.observation.calls_with_values:
        expected, got = _in_float32(graph, call), call.outputs.tensors()
        figures.append({p: figures_of(t, got[p].to(t.dtype), None, False) for p, t in expected.items() if p in got})
    if any(figures):
        dtypes = [dtype_name(dtype) for dtype in graph.half_dtypes]
        yield (
            f"the model computes in {' and '.join(dtypes)}: its results in the recorded calls are "
            f"{max(worst(found).error for found in figures if found):.2g} away from the results in float32 (relative "
            "root mean square)."
        )


def most_allowed(graph: OnnxGraph) -> Bound:
    """Returns the bound that no measurement exceeds: in half precision, 64 rounding errors of it.

    Args:
        graph: The graph; where its model in float32 is not known, the usual bound has to do.
    """
    dtypes = graph.half_dtypes if graph.eager_in_float32 is not None else []
    return functools.partial(half_bound, dtype=dtypes[-1]) if dtypes else usual_bound


def farther_from_float32(
    graph: OnnxGraph, call: Call, expected: Tensors, got: Tensors, leeway: Tensors
) -> dict[str, str]:
    """Returns what is wrong with outputs that are farther from the model in float32 than rounding explains, by path.

    Args:
        graph: The graph.
        call: The call.
        expected: What the model returned, by path.
        got: What the graph returned, by path.
        leeway: How far the elements of outputs may be off, by path; elements with more than `most_allowed` say nothing.
    """
    found: dict[str, str] = {}
    paths = [path for path in leeway if expected[path].is_floating_point() and expected[path].numel()]
    dtypes, most = graph.half_dtypes, most_allowed(graph)
    if most is usual_bound:
        return found
    whole = {path: tensor.cpu() for path, tensor in _in_float32(graph, call).items()} if paths else {}
    for path in paths:
        true, model, returned = whole.get(path), expected[path].cpu(), got[path].cpu()
        visible = (leeway[path].cpu() <= most(model)).expand(model.shape)
        if true is None or true.shape != model.shape:
            apart = torch.where(visible, elements_apart(model, returned), 0.0)
            if bool((apart > usual_bound(model)).any()):
                found[path] = "its error is larger than usual, and the result of the model in float32 is not known"
            continue
        visible = visible & true.isfinite() & model.isfinite()
        true = torch.where(visible, true, 0.0)
        unit = torch.finfo(dtypes[-1]).eps / 2 * true.square().mean().sqrt().item()
        own, its = (_errors(true, tensor, visible) for tensor in (model, returned))
        for times, error, least in zip((_TIMES_IN_HALF, _TIMES_AT_INDEX), its, own, strict=True):
            if error > times * least + unit:
                relative = f"its error relative to the model in float32 is {error:.2g}"
                found[path] = f"{relative}; the model's own is {least:.2g}"
    return found


def _errors(true: torch.Tensor, got: torch.Tensor, visible: torch.Tensor) -> tuple[float, float]:
    """The root mean square error of all elements, and the largest one of those at an index of an axis."""
    squares = torch.where(visible, elements_apart(true, got.to(true.dtype)), 0.0).square()
    means = [mean.max().item() for mean in index_means(squares)]
    return math.sqrt(squares.mean().item()), math.sqrt(max(means, default=0.0))


def _in_float32(graph: OnnxGraph, call: Call) -> Mapping[str, torch.Tensor]:
    """What the model returns in float32, by path; nothing if that is not known."""
    runner = graph.eager_in_float32
    if runner is None:
        return {}
    given = {path: tensor.float() for path, tensor in call.tensors().items() if tensor.dtype in HALF}
    with contextlib.suppress(Exception):  # the model need not run in float32
        return graph.contract.simplified(runner(call.with_tensors(given)))
    return {}
