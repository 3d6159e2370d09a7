"""Proves an ONNX model on every recorded call and on sizes that nobody has run, with the model itself as the truth."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from exportkit.calls.call import Call
from exportkit.divergence.result import Divergence
from exportkit.errors import ExportkitError
from exportkit.folder.saved import Case, Saved, check_files, unseen_cases
from exportkit.onnx_files.onnx_model import OnnxModel
from exportkit.onnx_files.onnx_programs import OnnxPrograms
from exportkit.plan.plan import Plan
from exportkit.plan.sizes import solve_sizes
from exportkit.probing.simplify import as_simplified
from exportkit.programs.exported import Exported
from exportkit.programs.stages import stage
from exportkit.proof.assembled import assembled_rows
from exportkit.proof.report import Report, Row
from exportkit.proof.stepwise import stepwise_outputs
from exportkit.running.compare import Difference, compare_outputs, find_mask, visible_positions, visible_tail
from exportkit.trees import flatten

_ENOUGH_UNSEEN = 3
STEPWISE = "equals the model token by token, which forgets its state when it gets several at once"


def verify(onnx_model: OnnxModel, unseen: bool = True) -> Report:
    """Returns the proof of an ONNX model.

    Args:
        onnx_model: The model.
        unseen: Also try sizes that were not recorded.
    """
    exported = onnx_model.exported
    notes = check_files(exported.digests) if isinstance(exported, Saved) else ()
    recorded = range(len(exported.observation.calls)) if exported.observation.has_values else ()
    rows = []
    with stage("verify") as tell:
        for index in recorded:
            tell(f"recorded call {index}")
            rows.append(_recorded_row(onnx_model, index))
        further = []
        for case in unseen_cases(exported) if unseen else ():
            tell(f"unseen sizes, {case.label}")
            further.append(_unseen_row(onnx_model, case))
        rows += further
        rows += assembled_rows(onnx_model, lambda *row: _row(onnx_model, *row)) if recorded else ()
    findings = (*(finding.text for finding in exported.plan.findings), *notes)
    parts = {name: verify(part, unseen) for name, part in onnx_model.parts.items()}
    return Report(tuple(rows), min(_ENOUGH_UNSEEN, len(further)), findings, parts)


def verify_programs(programs: OnnxPrograms, unseen: bool = True) -> Report:
    """Returns the proof of several ONNX models for one: that each call reaches the right one, and that of each.

    Args:
        programs: The models.
        unseen: Also try sizes that were not recorded.
    """
    notes = check_files(programs.digests)
    programs = OnnxPrograms({name: program.stateless() for name, program in programs.programs.items()}, programs.split)
    reports = {name: verify(program, unseen) for name, program in programs.programs.items()}
    rows = []
    for name, program in programs.programs.items():
        observation = program.exported.observation
        for index, number in enumerate(programs.split.calls[name] if observation.has_values else ()):
            args, kwargs = observation.calls[index].args_kwargs()
            row = _recorded_row(program, index, lambda args=args, kwargs=kwargs: programs(*args, **kwargs))
            rows.append((number, replace(row, label=f"{number} ({name})")))
    return Report(
        tuple(row for _, row in sorted(rows, key=lambda pair: pair[0])), 0, (programs.split.text, *notes), reports
    )


def _recorded_row(onnx_model: OnnxModel, index: int, run: Callable[[], Any] | None = None) -> Row:
    exported = onnx_model.exported
    call = exported.observation.calls[index]
    shapes = {path: tuple(tensor.shape) for path, tensor in call.tensors().items()}
    row = Row("recorded", str(index), solve_sizes(exported.plan, shapes), "proven")
    return _row(onnx_model, row, call, call.outputs.tensors(), call.latency, run)


def _unseen_row(onnx_model: OnnxModel, case: Case) -> Row:
    blank = Row("unseen", case.label, case.sizes, "no call", where=case.error)
    if case.arguments is None or case.outputs is None:
        return blank
    expected = case.outputs.tensors()
    row = _row(onnx_model, replace(blank, status="proven"), case.arguments, expected, case.seconds)
    return _stepwise_row(onnx_model, row, case.arguments) if row.status == "differs" else row


def _stepwise_row(onnx_model: OnnxModel, row: Row, arguments: Call) -> Row:
    """The row of a call with several new tokens with the model run token by token, if the graph equals that."""
    exported = onnx_model.exported
    if not isinstance(exported, Exported):
        return row
    try:
        expected = stepwise_outputs(onnx_model, arguments, row.sizes)
    except Exception:
        return row
    if expected is None:
        return row
    stepwise = _row(onnx_model, replace(row, status="proven"), arguments, expected, row.eager_seconds)
    return replace(stepwise, where=STEPWISE, locator=None) if stepwise.status == "proven" else row


def _row(
    onnx_model: OnnxModel,
    row: Row,
    arguments: Call,
    expected: Mapping[str, torch.Tensor],
    eager_seconds: float,
    run: Callable[[], Any] | None = None,
) -> Row:
    args, kwargs = arguments.args_kwargs()
    compare = functools.partial(output_differences, onnx_model, arguments)

    def locator(wrong: list[str], where: str) -> Callable[[torch.nn.Module | None], Divergence]:
        from exportkit.divergence.locate_call import locate_call

        return functools.partial(locate_call, onnx_model, arguments, expected, wrong, where)

    started = time.perf_counter()
    try:
        got = flatten(onnx_model(*args, **kwargs) if run is None else run()).tensors()
    except ExportkitError as error:
        where = _short(error)
        return replace(row, status="refused", where=where, locator=locator([], where) if run is None else None)
    onnx_seconds = time.perf_counter() - started
    differences = list(compare(expected, got))
    wrong = [d for d in differences if d.reason is not None]
    where = f"{wrong[0].path or 'output'}: {wrong[0].reason}" if wrong else ""
    return replace(
        row,
        status="differs" if wrong else "proven",
        absolute=max((d.absolute for d in differences), default=0.0),
        where=where,
        eager_seconds=eager_seconds,
        onnx_seconds=onnx_seconds,
        outputs={d.path: d.absolute for d in differences},
        locator=locator([d.path for d in wrong], where) if wrong and run is None else None,
    )


def output_differences(
    onnx_model: OnnxModel, arguments: Call, expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor]
) -> Iterator[Difference]:
    """Returns one difference for each output leaf; positions that the call's attention mask hides are left out."""
    mask = find_mask(arguments.tensors())
    plan, axes = onnx_model.exported.plan, onnx_model.file.output_axes
    names = tuple(map(str, plan.by_path[mask[0]].sizes)) if mask and mask[0] in plan.by_path else ()
    caches = onnx_model.exported.outputs.growing if mask and _covers_past(plan, mask[0]) else {}
    joined = onnx_model.exported.joined_outputs
    expected, got = as_simplified(expected, joined, ()), as_simplified(got, joined, ())

    def visible(path: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if mask is None or not names:
            return None
        if path in caches:  # also where a window has cut it, so that its length has no name
            return visible_tail(mask[1], caches[path].axis, tuple(tensor.shape))
        return visible_positions(mask[1], names, axes.get(path, ()), tuple(tensor.shape))

    return compare_outputs(expected, got, visible, exactly=True)


def _covers_past(plan: Plan, path: str) -> bool:
    """Whether a mask is over all tokens, those in the cache included, and not over what an encoder was given."""
    past = plan.with_role("past")
    leaf = plan.by_path.get(path)
    return past is not None and leaf is not None and past.name in leaf.sizes[-1].variables()


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:240]
