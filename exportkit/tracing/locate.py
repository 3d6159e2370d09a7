"""Finds where a graph begins to differ from its model: in come a model, its graph and inputs; out goes a `Located`.

The model runs once in eager mode, and the graph once with its values in between as outputs. The stages are looked at
from the end: only where the ONNX model differs is the program that it comes from run as well.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from exportkit.errors import InvalidRequestError, InvalidTypeError, RuntimeFailure
from exportkit.tracing.distance import distance, located
from exportkit.tracing.graph_run import GraphRun, Inside, Node
from exportkit.tracing.judge import JUMP, Compared, Step
from exportkit.tracing.located import Located, Stage, Suspect
from exportkit.tracing.on_graph import OnGraph, compare_with_graph
from exportkit.tracing.record import trace_model
from exportkit.tracing.records import ModuleCall
from exportkit.tracing.trace import Trace
from exportkit.tracing.visible import Padding
from exportkit.tracing.weights import changed_weight
from exportkit.trees import flatten

EXPORT, BEFORE, AFTER, RUNTIME = "torch.export", "ONNX before optimisation", "ONNX after optimisation", "onnxruntime"
_SUSPECTS = 5
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
    args, kwargs = _arguments(inputs)
    return _Search(model, method, args, kwargs, _parts(graph, program), before).result()


_Source = tuple[Any, Path | None]


@dataclass(frozen=True)
class _Parts:
    """What there is of an export: an ONNX model and what it is fed, a program, or both."""

    onnx: Any
    program: torch.export.ExportedProgram | None
    owner: Any


def _parts(graph: Any, program: torch.export.ExportedProgram | None) -> _Parts:
    if isinstance(graph, torch.export.ExportedProgram):
        return _Parts(None, graph, None)
    exported = getattr(graph, "exported", graph)
    known = program or getattr(exported, "program", None) or getattr(graph, "exported_program", None)
    if not isinstance(known, torch.export.ExportedProgram | None):
        raise InvalidTypeError("This is no program.", expected="an ExportedProgram", got=type(known).__name__)
    source = getattr(graph, "path", None) if hasattr(graph, "feeds") else graph
    if source is graph and hasattr(graph, "program"):
        source = None
    return _Parts(source, known, graph if hasattr(graph, "feeds") else None)


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, tuple | list):
        if len(inputs) == 2 and isinstance(inputs[0], tuple) and isinstance(inputs[1], dict):
            return inputs[0], dict(inputs[1])
        return tuple(inputs), {}
    raise InvalidTypeError(
        "These are no arguments of a model.", expected="a tuple, a mapping, or a tensor", got=type(inputs).__name__
    )


class _Search:
    """One search: runs what has to be run, once."""

    def __init__(
        self,
        model: torch.nn.Module,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parts: _Parts,
        before: Any,
    ) -> None:
        self._model, self._method, self._args, self._kwargs = model, method, args, kwargs
        self._parts, self._before = parts, before
        self._trace: Trace
        self._visible = Padding(None)

    def result(self) -> Located:
        self._run_model()
        if self._parts.onnx is None:
            run, found, stage = self._program_stage()
            self._check_paths(found)
            return self._located(stage, (stage,), run, found)
        return self._of_onnx()

    def _of_onnx(self) -> Located:
        from exportkit.tracing.onnx_run import graph_inputs, nodes_of, read_onnx, run_onnx, run_session, session_of

        proto, folder = read_onnx(self._parts.onnx)
        feeds = self._feeds(graph_inputs(proto))
        try:
            run = run_onnx(proto, folder, feeds)
        except RuntimeFailure as error:
            return _refused(error, nodes_of(proto))
        _check_modules(run)
        found = compare_with_graph(self._trace, run, self._visible)
        self._check_paths(found)
        after = _stage(AFTER, found)
        if after.outcome == "agrees":
            results = run_session(session_of(proto.SerializeToString(), folder), feeds)
            return self._of_runtime(run, found, after, results)
        return self._first_of(run, found, after, (proto, folder))

    def _of_runtime(self, run: GraphRun, found: OnGraph, after: Stage, results: Mapping[str, torch.Tensor]) -> Located:
        """What onnxruntime makes of a model that agrees, once it has optimised it."""
        optimised = replace(run, values={**run.values, **results})
        far = max((distance(run.values[name], tensor).rms for name, tensor in results.items()), default=0.0)
        units = [leaf.unit for call in found.calls for leaf in call.outputs]
        if far > _OPTIMISED * max(units, default=0.0):  # then the matching is worth its time
            found = compare_with_graph(self._trace, optimised, self._visible)
        runtime = replace(_stage(RUNTIME, found), error=max(far, after.error))
        skipped = [Stage(name, "not checked", note="what comes of it agrees") for name in (EXPORT, BEFORE)]
        return self._located(runtime, (*skipped, after, runtime), optimised, found)

    def _first_of(self, run: GraphRun, found: OnGraph, after: Stage, source: _Source) -> Located:
        """The first stage that differs, where the ONNX model does."""
        if self._parts.program is None:
            export, program_run = Stage(EXPORT, "not checked", note="the program is not known"), None
        else:
            program_run, on_program, export = self._program_stage()
            if export.outcome == "diverges":
                stages = (export, Stage(BEFORE, "not checked"), after)
                return self._located(export, stages, program_run, on_program)
        before = self._before_stage(run, found, program_run, source)
        stage = before if before.outcome == "diverges" else after
        return self._located(stage, (export, before, after), run, found, program_run)

    def _run_model(self) -> None:
        args, kwargs = _copied(self._args), _copied(self._kwargs)
        tensors = flatten((args, kwargs)).tensors()
        self._visible = Padding.of_tensors((path.rstrip("']"), tensor) for path, tensor in tensors.items())
        with torch.no_grad(), trace_model(self._model, values="all") as trace:
            getattr(self._model, self._method)(*args, **kwargs)
        self._trace = trace

    def _program_stage(self) -> tuple[GraphRun, OnGraph, Stage]:
        from exportkit.tracing.program_run import program_inputs, run_program

        program = self._parts.program
        assert program is not None
        owner = self._parts.owner
        if hasattr(owner, "program_feeds"):
            given = owner.program_feeds(*_copied(self._args), **_copied(self._kwargs))
        else:
            args, kwargs = self._bound(program)
            given = program_inputs(program, args, kwargs)
        run = run_program(program, given)
        found = compare_with_graph(self._trace, run, self._visible)
        return run, found, _stage(EXPORT, found)

    def _bound(self, program: torch.export.ExportedProgram) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as the program takes them: a program with named arguments alone takes all by name."""
        args, kwargs = _copied(self._args), _copied(self._kwargs)
        spec = program.call_spec.in_spec
        names = (spec.children()[1].context or []) if spec is not None else []
        if args and spec is not None and not spec.children()[0].num_children:
            bound = inspect.signature(getattr(self._model, self._method)).bind(*args, **kwargs).arguments
            return (), {name: bound[name] for name in names if name in bound}
        return args, {name: value for name, value in kwargs.items() if name in names}

    def _feeds(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        if self._parts.owner is not None:
            feeds: dict[str, torch.Tensor] = self._parts.owner.feeds(*_copied(self._args), **_copied(self._kwargs))
            return feeds
        bound = inspect.signature(getattr(self._model, self._method)).bind(*self._args, **self._kwargs).arguments
        by_path = flatten(dict(bound)).tensors()
        if set(names) <= set(by_path):
            return {name: by_path[name] for name in names}
        if len(names) != len(by_path):
            raise InvalidRequestError(
                "The arguments do not fit the inputs of the ONNX model.",
                expected=", ".join(names),
                got=", ".join(by_path),
                hint="give a tensor for each input, in the same order or by the same names.",
            )
        return dict(zip(names, by_path.values(), strict=True))

    def _before_stage(self, run: GraphRun, found: OnGraph, program_run: GraphRun | None, source: _Source) -> Stage:
        if self._before is not None:
            from exportkit.tracing.onnx_run import graph_inputs, read_onnx, run_onnx

            proto, folder = read_onnx(self._before)
            before = run_onnx(proto, folder, self._feeds(graph_inputs(proto)))
            return _stage(BEFORE, compare_with_graph(self._trace, before, self._visible))
        first = found.first
        if program_run is None or self._parts.program is None or first is None or first.owner is None:
            return Stage(BEFORE, "not checked", note="give it as before=, to tell it from the next stage")
        call = self._call(first.owner)
        inside, expected = self._inside(run, call), self._inside(program_run, call)
        if inside is not None and expected is not None:
            weight = changed_weight(*source, inside, self._parts.program, expected)
            if weight is not None:
                return Stage(BEFORE, "agrees", note=f"weight {weight} was changed after it")
        return self._translated_again(self._parts.program, program_run, call, first)

    def _translated_again(
        self, program: torch.export.ExportedProgram, run: GraphRun, call: ModuleCall, step: Step
    ) -> Stage:
        """The stage by the module in question alone, which is translated once more."""
        from exportkit.tracing.translate_again import error_of_translation

        inside = self._inside(run, call)
        if inside is None:
            return Stage(BEFORE, "not checked", note=f"the program has no nodes of {call.path or 'the model'}")
        try:
            error = error_of_translation(program, run, inside)
        except Exception as problem:  # a part can be what torch cannot export by itself
            summary = next(iter(str(problem).splitlines()), type(problem).__name__)
            return Stage(BEFORE, "not checked", note=f"{call.path or 'the model'} by itself: {summary[:80]}")
        diverges = error > max(step.error / JUMP, step.base)
        return Stage(BEFORE, "diverges" if diverges else "agrees", error, f"{call.path or 'the model'} by itself")

    def _check_paths(self, found: OnGraph) -> None:
        """Raises InvalidRequestError if the graph is of another model, or of one around this one."""
        known, compared = {call.path for call in self._trace.calls}, {call.path for call in found.calls if call.outputs}
        if not compared or (compared == {""} and len(known) > 1):
            raise InvalidRequestError(
                "The graph has no values of the model's modules.",
                where=type(self._model).__name__,
                expected=", ".join(sorted(path for path in known if path)[:3]),
                got=", ".join(sorted(found.modules)[:3]) or "no module",
                hint="give the module that was exported, with the inputs that it takes.",
            )

    def _call(self, index: int) -> ModuleCall:
        return next(call for call in self._trace.calls if call.index == index)

    def _inside(self, run: GraphRun, call: ModuleCall) -> Inside | None:
        insides = run.calls_of(call.path, sum(other.path == call.path for other in self._trace.calls))
        return insides[call.number] if insides else None

    def _located(
        self, stage: Stage, stages: tuple[Stage, ...], run: GraphRun, found: OnGraph, reference: GraphRun | None = None
    ) -> Located:
        first = found.first
        suspects = suspects_of(found.steps, found.calls)
        if stage.outcome != "diverges" or first is None:
            return Located(None, stages=stages, suspects=suspects)
        calls = {call.index: call for call in found.calls}
        owner = calls[first.owner] if first.owner is not None else None
        leaf, at = first.leaf, calls[first.call]
        assert leaf is not None
        name = found.values.get((first.call, first.side, leaf.path), "")
        node = run.makers.get(name)
        if reference is not None and owner is not None:
            node = self._first_node(run, reference, self._call(owner.index), first) or node
        side = "" if owner is at else f"inputs of {at.path}: "
        return Located(
            stage.name,
            owner.path if owner else None,
            owner.class_name if owner else "",
            owner.number if owner else 0,
            f"{side}{leaf.path}",
            node.name if node else name,
            node.operator if node else "",
            node.line if node else "",
            first.error,
            first.base,
            leaf.distance.largest,
            self._index(first, found, run),
            first.reason,
            stages,
            suspects,
        )

    def _first_node(self, run: GraphRun, reference: GraphRun, call: ModuleCall, step: Step) -> Node | None:
        """The first node of a module whose value is that of no node of the program that computes the same."""
        inside, expected = self._inside(run, call), self._inside(reference, call)
        if inside is None or expected is None:
            return None
        for node in inside.nodes:
            if not node.ends or len(node.outputs) != 1 or node.outputs[0] not in run.values:
                continue
            value = run.values[node.outputs[0]]
            same = [n for n in expected.nodes if n.torch_operator == node.torch_operator and n.name in reference.values]
            errors = [distance(reference.values[n.name], value).rms for n in same]
            errors = [error for error in errors if math.isfinite(error)]
            if errors and min(errors) > max(step.error / JUMP, step.base):
                return node
        return None

    def _index(self, step: Step, found: OnGraph, run: GraphRun) -> tuple[int, ...] | None:
        call = self._call(step.call)
        records = call.inputs if step.side == "inputs" else call.outputs
        record = next(record for record in records if step.leaf is not None and record.path == step.leaf.path)
        tensor = self._trace.tensor(record)
        return located(tensor, run.values[found.values[step.call, step.side, record.path]], self._visible(tensor))


def suspects_of(steps: Sequence[Step], calls: Sequence[Compared]) -> tuple[Suspect, ...]:
    """Returns the modules that add most, those that are wrong first.

    Args:
        steps: Judged steps.
        calls: The calls that they are about.
    """
    by_index = {call.index: call for call in calls}
    worst: dict[int, Step] = {}
    for step in steps:
        if step.owner is not None and step.added > 0:
            known = worst.get(step.owner)
            if known is None or _weight(step) > _weight(known):
                worst[step.owner] = step
    ranked = sorted(worst.items(), key=lambda item: _weight(item[1]), reverse=True)[:_SUSPECTS]
    return tuple(
        Suspect(
            by_index[owner].path,
            by_index[owner].class_name,
            by_index[owner].number,
            step.base,
            step.error,
            step.verdict == "differs",
        )
        for owner, step in ranked
    )


def _weight(step: Step) -> tuple[bool, float]:
    return step.verdict == "differs", step.added


def _stage(name: str, found: OnGraph) -> Stage:
    outputs = [leaf.distance.rms for call in found.calls if call.parent is None for leaf in call.outputs]
    note = f"{found.unmatched} outputs of the model have no counterpart of their shape" if found.unmatched else ""
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


def _copied(value: Any) -> Any:
    """The value with tensors of its own: a model writes into its caches."""
    return flatten(value).map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf).build()
