"""Proves exported graphs on the recorded calls and at sizes that were never run; the model itself is the reference."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from exportkit.calls.call import Call
from exportkit.errors import ArgumentError, ExportkitError, InvalidRequestError, RuntimeFailure, first_line, short_text
from exportkit.onnx_files.graph import MeasuredCall, OnnxGraph
from exportkit.onnx_files.runner import OnnxRunner
from exportkit.onnx_files.write import write_graphs
from exportkit.plan.small_sizes import small
from exportkit.plan.solved_sizes import solve_sizes
from exportkit.probing.simplify import as_simplified
from exportkit.probing.sized_calls import stepwise_outputs
from exportkit.programs.exported import ExportedModel, require_own
from exportkit.programs.failure import in_one_line
from exportkit.programs.program import TracedProgram
from exportkit.programs.stages import stage
from exportkit.proof.calls import as_made, assembled_calls, small_calls, unseen_calls
from exportkit.proof.differences import lossy_differences, output_differences, value_differences
from exportkit.proof.figures import Figures
from exportkit.proof.leeway import call_name, distance_from_float32
from exportkit.proof.narrow import narrowed, without_pattern
from exportkit.proof.report import Divergence, Report, Row, Status
from exportkit.running.compare import Difference, Tensors
from exportkit.running.eager import answered
from exportkit.running.program import UnrecordedPath
from exportkit.running.runner import Returned, Runner, compare_calls

_ENOUGH_UNSEEN = 3
STEPWISE = "equals the model token by token; with several tokens at once, the model forgets its state"


class Locate(Protocol):
    """Finds where a graph begins to differ from the model in a call; see `exportkit.divergence`."""

    def __call__(
        self,
        runner: OnnxRunner,
        call: Call,
        expected: Tensors,
        wrong: Sequence[str],
        where: str,
        model: torch.nn.Module | None = None,
        /,
    ) -> Divergence:
        """Returns where the graph begins to differ, given the outputs that do; no model means the exported one."""


def prove(
    runner: OnnxRunner,
    unseen: bool = True,
    notes: Sequence[str] = (),
    locate: Locate | None = None,
    given: Sequence[Call] = (),
) -> Report:
    """Returns the proof of an exported model.

    A single graph has a row for each of its calls. With several graphs, there is a row for each recorded call, which
    has to reach the right graph, and a report of each graph. Several modules have a report each, and no rows besides.

    Args:
        runner: The graphs and their parts.
        unseen: Also try sizes that were not recorded.
        notes: What is known about the files.
        locate: Finds where a graph begins to differ, for the rows that are not proven.
        given: Further calls, as `given_calls` returns them.
    """
    with contextlib.ExitStack() as stack:
        for graph in runner.graphs.values():
            graph.forget_float32()
            stack.callback(graph.forget_float32)
        return _proof(runner, unseen, notes, locate, given)


def _proof(
    runner: OnnxRunner, unseen: bool, notes: Sequence[str], locate: Locate | None, given: Sequence[Call]
) -> Report:
    reports = {name: _graph_report(graph, unseen, locate) for name, graph in runner.graphs.items()}
    parts = {name: prove(part, unseen, (), locate) for name, part in runner.parts.items()}
    attempts = tuple(map(str, runner.attempts))
    if not runner.graphs:
        if given:
            require_own(runner.graphs, runner.parts)
        return Report(tuple(_application_rows(runner)), 0, tuple(notes), parts, attempts)
    if runner.split is None:
        (report,) = reports.values()
        rows = list(report.rows)

        def assembled(values: Mapping[str, Any], seed: int | None, _: Call, /) -> Tensors:
            return Returned.of(runner.run((), values, seed))

        for label, call, values in assembled_calls(runner) if runner.graph.observation.has_values else ():
            row = Row("assembled", label, {}, "proven")
            rows.append(
                _row(runner.graph, row, call, call.outputs.tensors(), functools.partial(assembled, values, call.seed))
            )
        findings = (*report.findings, *notes)
        rows += [*_given_rows(runner, given), *_application_rows(runner)]
        return replace(report, rows=tuple(rows), findings=findings, parts=parts, attempts=attempts)
    numbered = []
    for name, graph in runner.graphs.items():
        for number, call in zip(runner.split.calls[name], graph.observation.calls_with_values, strict=False):
            sizes = solve_sizes(graph.contract.plan, call.shapes())
            row = Row("recorded", f"{number} ({name})", sizes, "proven")
            made = as_made(graph.contract.plan, call)
            numbered.append((number, _row(graph, row, made, call.outputs.tensors(), runner.run_call)))
    rows = [row for _, row in sorted(numbered, key=lambda pair: pair[0])]
    rows += [*_given_rows(runner, given), *_application_rows(runner)]
    return Report(tuple(rows), 0, (runner.split.text, *notes), {**reports, **parts}, attempts)


def _given_rows(runner: OnnxRunner, given: Sequence[Call]) -> Iterator[Row]:
    for call in given:
        graph = runner.graph_for(call)
        made = _known(graph, call)
        row = Row("given", call.label.removeprefix("given "), solve_sizes(graph.contract.plan, call.shapes()), "proven")
        yield _row(graph, row, made, made.outputs.tensors(), runner.run_call)


def _known(graph: OnnxGraph, call: Call) -> Call:
    """A given call with what the model returns for the numbers that it gets instead of random ones, if it does."""
    if call.seed is None:
        return call
    if all(recorded.seed is None for recorded in graph.observation.calls):
        return replace(call, seed=None)
    if graph.eager is None:
        raise InvalidRequestError(
            "The model drew random numbers in these calls, and these numbers are not known.",
            where="data",
            hint="verify the graph where the model is available; it then runs the calls again.",
        )
    return answered(graph.eager.model, graph.eager.method, call)


def _application_rows(runner: OnnxRunner) -> Iterator[Row]:
    """Yields the row of the latest run of an application; a quantised graph need not do the same as the model."""
    run = runner.compared
    if run is None:
        return
    is_lossy = any(graph.contract.quantised is not None for graph in runner.all_graphs())
    status: Status = "measured" if is_lossy else "proven" if run.equal else "differs"
    yield Row(
        "application",
        "run",
        {},
        status,
        where=run.text,
        eager_seconds=run.eager_seconds,
        onnx_seconds=run.onnx_seconds,
    )


def problems_of(traced: TracedProgram, unseen: bool) -> tuple[str, ...]:
    """Returns the reasons why nothing is proven of a program as ONNX, one sentence each.

    Args:
        traced: The program; it is translated into a temporary folder.
        unseen: Also try sizes that were not recorded.
    """
    with tempfile.TemporaryDirectory(prefix="exportkit-proof-") as folder:
        try:
            runner = write_graphs(ExportedModel({"": traced}), lambda *_: Path(folder) / "model.onnx")
            return prove(runner, unseen).problems()
        except ExportkitError as error:
            return (in_one_line(error),)


def _graph_report(graph: OnnxGraph, unseen: bool, locate: Locate | None) -> Report:
    rows = []
    with stage("verify") as tell:
        for call in graph.observation.calls_with_values:
            tell(f"recorded call {call.index}")
            sizes = solve_sizes(graph.contract.plan, call.shapes())
            row = Row("recorded", str(call.index), sizes, "proven")
            rows.append(_row(graph, row, as_made(graph.contract.plan, call), call.outputs.tensors(), None, locate))
        further: list[tuple[Row, Call]] = []
        row_of = functools.partial(_unseen_row, graph, locate=locate)
        others: Iterable[Call] = graph.unseen or ()
        if graph.unseen is None and graph.traced is not None:
            others = unseen_calls(graph.traced)
        for call in others if unseen else ():
            tell(f"unseen sizes, {call.label}")
            further.append((row_of(call), call))
        if graph.traced is not None and any(row.is_wrong and small(row.sizes) for row, _ in further):
            # one row no longer speaks for several patterns
            seen = [small(row.sizes) for row in (*rows, *(row for row, _ in further))]
            left = [p.sizes for p in graph.contract.domain.patterns if p.sizes not in seen]
            further += [(row_of(call), call) for call in small_calls(graph.traced, left)]
        unseen_rows = narrowed(graph, rows, further, row_of)
    contract = graph.contract
    findings = (
        *(finding.text for finding in contract.plan.findings),
        *_computed_otherwise(graph),
        *distance_from_float32(graph),
    )
    inside = sum(row.status != "outside" for row in unseen_rows)
    limits = tuple(contract.domain.limits())
    return Report(
        (*rows, *unseen_rows), min(_ENOUGH_UNSEEN, inside), findings, limits=limits, quantised=contract.quantised
    )


def _computed_otherwise(graph: OnnxGraph) -> Iterator[str]:
    """Yields a note if the runtime computes in another precision than the file says."""
    with contextlib.suppress(RuntimeFailure):
        if graph.session.finding:
            yield graph.session.finding


def _unseen_row(graph: OnnxGraph, call: Call, locate: Locate | None) -> Row:
    """The row of a call at unseen sizes; if it differs, several new tokens may have to be given one by one."""
    row = Row("unseen", call.label, call.sizes, "no call", where=call.error)
    given = call.shapes()
    shown = {
        name for leaf in graph.contract.plan.leaves if leaf.path in given for s in leaf.sizes for name in s.variables()
    }
    try:
        graph.contract.domain.check.require_sizes(call.sizes, shown if call.is_made else None)
    except ArgumentError as error:
        return replace(row, status="outside", where=str(error).partition("\n")[0])
    if not call.is_made:
        return row
    plan, domain = graph.contract.plan, graph.contract.domain
    absent = domain.optional.difference(as_simplified(call.tensors(), plan.joined, plan.unused))
    if absent not in domain.absent:
        return replace(row, status="outside", where=f"{domain.names(absent)} may not be left out")
    proven = replace(row, status="proven", where="")
    found = _row(graph, proven, call, call.outputs.tensors(), None, locate)
    if found.status == "differs" and graph.traced is not None:
        with contextlib.suppress(Exception):
            expected = stepwise_outputs(graph.traced.plan, graph.traced.model, graph.traced.method, call)
            stepwise = found if expected is None else _row(graph, proven, call, expected)
            if not stepwise.is_wrong:
                return replace(stepwise, where=STEPWISE)
    if not found.is_wrong:
        return found
    if found.status == "refused" and (reason := _unrecorded_path(graph, call)):
        return replace(row, status="outside", where=reason)
    return without_pattern(graph, call, found, functools.partial(_unseen_row, graph, locate=locate))


def _unrecorded_path(graph: OnnxGraph, call: Call) -> str:
    """Where the model decides by values as in no recorded call, which a graph refuses; empty if it does not."""
    if graph.traced is not None:
        try:
            graph.traced.runner(call)
        except UnrecordedPath as error:
            return first_line(error)
        except Exception:
            return ""
    return ""


def _row(
    graph: OnnxGraph,
    row: Row,
    call: Call,
    expected: Tensors,
    got: Runner | None = None,
    locate: Locate | None = None,
) -> Row:
    """The row of a call with its result; ``got`` is the runner that is compared, by default that of the graph."""
    runner, is_lossy = OnnxRunner({"": graph}), graph.contract.quantised is not None
    figures: dict[str, Figures] = {}

    def locator(wrong: Sequence[str], where: str) -> Callable[[torch.nn.Module | None], Divergence] | None:
        if locate is None or is_lossy:
            return None
        return functools.partial(locate, runner, call, expected, wrong, where)

    def compare(call: Call, expected: Tensors, got: Tensors) -> Iterator[Difference]:
        if is_lossy:
            yield from lossy_differences(graph, call, expected, got, figures)
        else:
            yield from output_differences(graph, call, expected, got)
        if isinstance(got, Returned):
            yield from value_differences(graph, call.outputs, got.tree)

    (outcome,) = compare_calls(lambda _: expected, got or runner.run_call, [call], compare)
    if isinstance(outcome.error, ExportkitError):
        where = short_text(outcome.error)
        return replace(row, status="refused", where=where, locator=locator((), where))
    if outcome.error is not None:
        raise outcome.error
    wrong = outcome.wrong
    where = f"{wrong[0].path or 'output'}: {wrong[0].reason}" if wrong else _arbitrary(graph, call, outcome.differences)
    outputs = {difference.path: difference.absolute for difference in outcome.differences}
    return replace(
        row,
        status="differs" if wrong else "measured" if is_lossy else "proven",
        absolute=max(outputs.values(), default=0.0),
        where=where,
        eager_seconds=call.latency,
        onnx_seconds=outcome.seconds,
        outputs=outputs,
        figures=figures,
        locator=locator([d.path for d in wrong if d.path in expected], where) if wrong else None,
    )


def _arbitrary(graph: OnnxGraph, call: Call, differences: Sequence[Difference]) -> str:
    """What the model leaves open in a call: which of equal values it chooses; values that could not be compared."""
    found = []
    if path := next(iter(graph.measured.get(call_name(call), MeasuredCall()).ties), None):
        found.append(f"{path}: the model chooses among equal values, and returns the same if it chooses as ONNX does")
    most = max(differences, key=lambda difference: difference.left_out, default=None)
    if most is not None and most.left_out:
        count = f"{most.left_out} elements are arbitrary in the model, and were not compared"
        found.append(f"{most.path or 'output'}: {count}")
    return "; ".join(found)
