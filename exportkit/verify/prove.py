"""Proves an ONNX model on every recorded call and on sizes that nobody has run, with the model itself as the truth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from exportkit.arguments import (
    Arguments,
    as_simplified,
    build_arguments,
    recorded_call,
    run_eager,
    solve_sizes,
    unseen_sizes,
)
from exportkit.axes import Plan
from exportkit.errors import ExportkitError
from exportkit.export import Exported, OnnxModel
from exportkit.trees import flatten, join
from exportkit.verify.assembled import assembled_rows
from exportkit.verify.compare import Difference, compare_tensors, find_mask, visible_positions, visible_tail
from exportkit.verify.report import Report, Row
from exportkit.verify.stepwise import stepwise_outputs

_ENOUGH_UNSEEN = 3
STEPWISE = "equals the model token by token, which forgets its state when it gets several at once"


def verify(onnx_model: OnnxModel, unseen: bool = True) -> Report:
    """Returns the proof of an ONNX model.

    Args:
        onnx_model: The model.
        unseen: Also try sizes that were not recorded.
    """
    exported = onnx_model.exported
    rows = [_recorded_row(onnx_model, index) for index in range(len(exported.observation.calls))]
    combinations = unseen_sizes(exported.plan, exported.sizes) if unseen else []
    rows += [_unseen_row(onnx_model, item.label, item.sizes) for item in combinations]
    findings = tuple(finding.text for finding in exported.plan.findings)
    rows += assembled_rows(onnx_model, lambda *row: _row(onnx_model, *row))
    parts = {name: verify(part, unseen) for name, part in onnx_model.parts.items()}
    return Report(tuple(rows), min(_ENOUGH_UNSEEN, len(combinations)), findings, parts)


def _recorded_row(onnx_model: OnnxModel, index: int) -> Row:
    exported = onnx_model.exported
    call = exported.observation.calls[index]
    shapes = {path: tuple(tensor.shape) for path, tensor in call.tensors().items()}
    sizes = solve_sizes(exported.plan, shapes)
    arguments = recorded_call(exported.observation, index)
    return _row(
        onnx_model, Row("recorded", str(index), sizes, "proven"), arguments, call.outputs.tensors(), call.latency
    )


def _unseen_row(onnx_model: OnnxModel, label: str, sizes: Mapping[str, int]) -> Row:
    exported = onnx_model.exported
    blank = Row("unseen", label, sizes, "no call")
    try:
        arguments = _without_stored(exported, build_arguments(exported.plan, exported.observation, sizes), sizes)
        started = time.perf_counter()
        outputs = flatten(run_eager(exported.model, exported.method, arguments)).tensors()
    except Exception as error:
        return replace(blank, where=f"the model itself raises {type(error).__name__}: {_short(error)}")
    row = _row(onnx_model, replace(blank, status="proven"), arguments, outputs, time.perf_counter() - started)
    return _stepwise_row(onnx_model, row, arguments) if row.status == "differs" else row


def _without_stored(exported: Exported, arguments: Arguments, sizes: Mapping[str, int]) -> Arguments:
    """The arguments with states of no tokens, where the cache is empty: those that were absent from such calls."""
    past = exported.plan.with_role("past")
    if past is None or sizes[past.name]:
        return arguments
    first = [index for index, size in enumerate(past.seen) if size == 0]
    absent = {leaf.path for leaf in exported.plan.leaves if first and all(leaf.shapes[i] is None for i in first)}
    trees = {}
    for name, tree in arguments.trees.items():
        found = {path: tensor for path, tensor in tree.tensors().items() if join(name, path) in absent}
        fills = exported.fills.values
        trees[name] = tree.with_leaves(
            {path: torch.full_like(tensor, fills.get(join(name, path), 0)) for path, tensor in found.items()}
        )
    return replace(arguments, trees=trees)


def _stepwise_row(onnx_model: OnnxModel, row: Row, arguments: Arguments) -> Row:
    """The row of a call with several new tokens with the model run token by token, if the graph equals that."""
    try:
        expected = stepwise_outputs(onnx_model, arguments, row.sizes)
    except Exception:
        return row
    if expected is None:
        return row
    stepwise = _row(onnx_model, replace(row, status="proven"), arguments, expected, row.eager_seconds)
    return replace(stepwise, where=STEPWISE) if stepwise.status == "proven" else row


def _row(
    onnx_model: OnnxModel,
    row: Row,
    arguments: Arguments,
    expected: Mapping[str, torch.Tensor],
    eager_seconds: float,
    run: Callable[[], Any] | None = None,
) -> Row:
    args, kwargs = arguments.call()
    started = time.perf_counter()
    try:
        got = flatten(onnx_model(*args, **kwargs) if run is None else run()).tensors()
    except ExportkitError as error:
        return replace(row, status="refused", where=_short(error))
    onnx_seconds = time.perf_counter() - started
    differences = list(compare_outputs(onnx_model, arguments, expected, got))
    wrong = next((d for d in differences if d.reason is not None), None)
    return replace(
        row,
        status="differs" if wrong else "proven",
        absolute=max((d.absolute for d in differences), default=0.0),
        where=f"{wrong.path or 'output'}: {wrong.reason}" if wrong else "",
        eager_seconds=eager_seconds,
        onnx_seconds=onnx_seconds,
    )


def compare_outputs(
    onnx_model: OnnxModel, arguments: Arguments, expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor]
) -> Iterator[Difference]:
    """Yields one difference for each output leaf; positions that the call's attention mask hides are left out."""
    mask = find_mask(arguments.tensors())
    plan, axes = onnx_model.exported.plan, onnx_model.file.output_axes
    names = tuple(map(str, plan.by_path[mask[0]].sizes)) if mask and mask[0] in plan.by_path else ()
    caches = onnx_model.exported.outputs.growing if mask and _covers_past(plan, mask[0]) else {}
    joined = onnx_model.exported.joined_outputs
    expected, got = as_simplified(expected, joined, ()), as_simplified(got, joined, ())
    for path in [*expected, *(path for path in got if path not in expected)]:
        if path not in got or path not in expected:
            yield Difference(path, "only the model returns it" if path in expected else "only the graph returns it")
            continue
        visible = None
        if mask is not None and names:
            shape = tuple(expected[path].shape)
            visible = visible_positions(mask[1], names, axes.get(path, ()), shape)
            if path in caches:  # also where a window has cut it, so that its length has no name
                visible = visible_tail(mask[1], caches[path].axis, shape)
        yield compare_tensors(path, expected[path], got[path], visible)


def _covers_past(plan: Plan, path: str) -> bool:
    """Whether a mask is over all tokens, those in the cache included, and not over what an encoder was given."""
    past = plan.with_role("past")
    leaf = plan.by_path.get(path)
    return past is not None and leaf is not None and past.name in leaf.sizes[-1].variables()


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:240]
