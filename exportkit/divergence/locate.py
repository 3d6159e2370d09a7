"""Finds where a graph begins to differ from its model: in come a model, its graph and inputs; out goes a `Located`.

The model runs once in eager mode, and the graph once with its values in between as outputs. The stages are looked at
from the end: only where the ONNX model differs is the program that it comes from run as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from exportkit.divergence.calling import Calling
from exportkit.divergence.evidence import Evidence
from exportkit.divergence.graph_run import GraphRun, Node
from exportkit.divergence.located import Located, Stage
from exportkit.divergence.on_graph import OnGraph, compare_with_graph
from exportkit.divergence.translate_again import error_of_translation
from exportkit.divergence.weights import changed_weight
from exportkit.errors import InvalidRequestError, InvalidTypeError, RuntimeFailure
from exportkit.module_traces.judge import JUMP
from exportkit.running.compare import distance
from exportkit.running.session import Session
from exportkit.trees import join

EXPORT, BEFORE, AFTER, RUNTIME = "torch.export", "ONNX before optimisation", "ONNX after optimisation", "onnxruntime"
_NODE_IN_MESSAGE = re.compile(r"running \w+ node[.] Name:'([^']+)'")
# Optimised and not, results may be this many rounding errors apart before it is looked at more closely.
_OPTIMISED = 16


def locate_divergence(
    model: torch.nn.Module,
    graph: Any,
    inputs: Any,
    *,
    program: torch.export.ExportedProgram | None = None,
    before: Any = None,
    method: str = "forward",
    wrong: Iterable[str] = (),
) -> Located:
    """Returns the first stage of an export that differs from the model, and the module, line and node where it begins.

    Args:
        model: The model. It runs once, without gradients.
        graph: An ONNX model (path, ModelProto, ONNXProgram, OnnxModel) or an ExportedProgram.
        inputs: Arguments of the model: a tuple of positional ones, a mapping of named ones, or a single tensor.
        program: The ExportedProgram that the ONNX model comes from, where ``graph`` does not know it.
        before: The ONNX model before optimisation, as ``torch.onnx.export(..., optimize=False)`` returns it. Without
            it, the module that differs is translated once more by itself.
        method: The exported method.
        wrong: Paths of outputs that are known to be wrong, such as ``logits``. Others are taken for wrong where half of
            their digits are.

    Raises:
        InvalidTypeError: if ``graph`` is nothing that can be run.
        InvalidRequestError: if the inputs do not fit it.
        RuntimeFailure: if onnxruntime refuses the ONNX model or the inputs.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
        >>> program = torch.export.export(model, (torch.ones(3, 4),))
        >>> with torch.no_grad():
        ...     _ = model[2].weight.mul_(1.02)  # the program shares the weights: both change
        >>> print(locate_divergence(model, program, torch.ones(3, 4)).headline())
        No stage diverges.
    """
    parts = _parts(graph, program)
    known = frozenset(join("outputs", path) for path in wrong)
    return _Search(Calling(model, method, inputs, parts.owner, parts.constants), parts, before, known).result()


_Source = tuple[Any, Path | None]


@dataclass(frozen=True)
class _Parts:
    """What there is of an export: an ONNX model and what it is fed, a program, or both."""

    onnx: Any
    program: torch.export.ExportedProgram | None
    owner: Any
    constants: Mapping[str, Any]


def _parts(graph: Any, program: torch.export.ExportedProgram | None) -> _Parts:
    if isinstance(graph, torch.export.ExportedProgram):
        return _Parts(None, graph, None, {})
    exported = getattr(graph, "exported", graph)
    known = program or getattr(exported, "program", None) or getattr(graph, "exported_program", None)
    if not isinstance(known, torch.export.ExportedProgram | None):
        raise InvalidTypeError("This is no program.", expected="an ExportedProgram", got=type(known).__name__)
    source = getattr(graph, "path", None) if hasattr(graph, "feeds") else graph
    if source is graph and hasattr(graph, "program"):
        source = None
    constants = exported.baked_constants() if hasattr(exported, "baked_constants") else {}
    return _Parts(source, known, graph if hasattr(graph, "feeds") else None, constants)


class _Search:
    """One search: runs what has to be run, once."""

    def __init__(self, calling: Calling, parts: _Parts, before: Any, wrong: frozenset[str]) -> None:
        self._calling, self._parts, self._before, self._wrong = calling, parts, before, wrong
        self._trace, self._visible = calling.trace()

    def result(self) -> Located:
        if self._parts.onnx is None and self._parts.program is not None:
            run, found, stage = self._program_stage(self._parts.program)
            self._check_paths(found)
            return self._evidence(run, found).located(stage, (stage,))
        return self._of_onnx()

    def _of_onnx(self) -> Located:
        from exportkit.divergence.onnx_run import graph_inputs, nodes_of, read_onnx, run_onnx

        proto, folder = read_onnx(self._parts.onnx)
        feeds = self._calling.feeds(graph_inputs(proto))
        try:
            run = run_onnx(proto, folder, feeds)
        except RuntimeFailure as error:
            return _refused(error, nodes_of(proto))
        _check_modules(run)
        found = self._compared(run)
        self._check_paths(found)
        after = _stage(AFTER, found)
        if after.outcome == "agrees":
            results = Session(proto.SerializeToString(), folder).run(feeds)
            return self._of_runtime(run, found, after, results)
        return self._first_of(run, found, after, (proto, folder))

    def _of_runtime(self, run: GraphRun, found: OnGraph, after: Stage, results: Mapping[str, torch.Tensor]) -> Located:
        """What onnxruntime makes of a model that agrees, once it has optimised it."""
        optimised = replace(run, values={**run.values, **results})
        far = max((distance(run.values[name], tensor).rms for name, tensor in results.items()), default=0.0)
        units = [leaf.unit for call in found.calls for leaf in call.outputs]
        if far > _OPTIMISED * max(units, default=0.0):  # then the matching is worth its time
            found = self._compared(optimised)
        runtime = replace(_stage(RUNTIME, found), error=max(far, after.error))
        skipped = [Stage(name, "not checked", note="what comes of it agrees") for name in (EXPORT, BEFORE)]
        return self._evidence(optimised, found).located(runtime, (*skipped, after, runtime))

    def _first_of(self, run: GraphRun, found: OnGraph, after: Stage, source: _Source) -> Located:
        """The first stage that differs, where the ONNX model does."""
        if self._parts.program is None:
            export, program_run = Stage(EXPORT, "not checked", note="the program is not known"), None
        else:
            program_run, on_program, export = self._program_stage(self._parts.program)
            if export.outcome == "diverges":
                stages = (export, Stage(BEFORE, "not checked"), after)
                return self._evidence(program_run, on_program).located(export, stages)
        evidence = self._evidence(run, found, program_run)
        before = self._before_stage(evidence, source)
        return evidence.located(before if before.outcome == "diverges" else after, (export, before, after))

    def _program_stage(self, program: torch.export.ExportedProgram) -> tuple[GraphRun, OnGraph, Stage]:
        from exportkit.divergence.program_run import run_program

        run = run_program(program, self._calling.program_inputs(program))
        found = self._compared(run)
        return run, found, _stage(EXPORT, found)

    def _compared(self, run: GraphRun) -> OnGraph:
        return compare_with_graph(self._trace, run, self._visible, self._wrong)

    def _evidence(self, run: GraphRun, found: OnGraph, reference: GraphRun | None = None) -> Evidence:
        return Evidence(self._trace, self._visible, run, found, reference)

    def _before_stage(self, evidence: Evidence, source: _Source) -> Stage:
        if self._before is not None:
            from exportkit.divergence.onnx_run import graph_inputs, read_onnx, run_onnx

            proto, folder = read_onnx(self._before)
            before = run_onnx(proto, folder, self._calling.feeds(graph_inputs(proto)))
            return _stage(BEFORE, self._compared(before))
        first, program, reference = evidence.found.first, self._parts.program, evidence.reference
        if reference is None or program is None or first is None or first.owner is None:
            return Stage(BEFORE, "not checked", note="give it as before=, to tell it from the next stage")
        call = evidence.call(first.owner)
        name = call.path or "the model"
        inside, expected = evidence.inside(evidence.run, call), evidence.inside(reference, call)
        if inside is None or expected is None:
            return Stage(BEFORE, "not checked", note=f"the program has no nodes of {name}")
        weight = changed_weight(*source, inside, program, expected)
        if weight is not None:
            return Stage(BEFORE, "agrees", note=f"weight {weight} was changed after it")
        try:
            error = error_of_translation(program, reference, expected)
        except Exception as problem:  # a part can be what torch cannot export by itself
            summary = next(iter(str(problem).splitlines()), type(problem).__name__)
            return Stage(BEFORE, "not checked", note=f"{name} by itself: {summary[:80]}")
        diverges = error > max(first.error / JUMP, first.base)
        return Stage(BEFORE, "diverges" if diverges else "agrees", error, f"{name} by itself")

    def _check_paths(self, found: OnGraph) -> None:
        """Raises InvalidRequestError if the graph is of another model, or of one around this one."""
        known, compared = {call.path for call in self._trace.calls}, {call.path for call in found.calls if call.outputs}
        if not compared or (compared == {""} and len(known) > 1):
            raise InvalidRequestError(
                "The graph has no values of the model's modules.",
                where=type(self._calling.model).__name__,
                expected=", ".join(sorted(path for path in known if path)[:3]),
                got=", ".join(sorted(found.modules)[:3]) or "no module",
                hint="give the module that was exported, with the inputs that it takes.",
            )


def _stage(name: str, found: OnGraph) -> Stage:
    outputs = [leaf.distance.rms for call in found.calls if call.parent is None for leaf in call.outputs]
    note = "; ".join(f"{path}: {step.reason}" for path, step in found.unmatched.items())
    return Stage(name, "agrees" if found.first is None else "diverges", max(outputs, default=math.nan), note)


def _refused(error: RuntimeFailure, nodes: Iterable[Node]) -> Located:
    """Where onnxruntime stopped, if its message names a node.

    Raises:
        RuntimeFailure: if it does not.
    """
    found = _NODE_IN_MESSAGE.search(str(error))
    node = next((node for node in nodes if found is not None and node.name == found[1]), None)
    if node is None:
        raise error
    scope = node.scopes[-1] if node.scopes else None
    reason = str(error).rpartition("Status Message: ")[2] or str(error)
    return Located(
        RUNTIME,
        scope.path if scope else None,
        scope.class_name if scope else "",
        node=node.name,
        operator=node.operator,
        line=node.line,
        reason=f"onnxruntime stopped: {reason}",
        stages=(Stage(RUNTIME, "diverges", note="refused the call"),),
    )


def _check_modules(run: GraphRun) -> None:
    if not any(node.scopes for node in run.nodes):
        raise InvalidRequestError(
            "The nodes of this ONNX model do not say which modules they come from.",
            expected="pkg.torch.onnx.name_scopes in the metadata of nodes",
            hint="export it with torch.onnx.export(..., dynamo=True), and keep the metadata.",
        )
