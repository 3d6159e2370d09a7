"""Locates where a graph begins to differ from its model: `locate_divergence`.

The model runs once in eager mode, and the graph once with its intermediate values as outputs. The stages are examined
from the last one backwards: only where the ONNX model differs is the program that it was translated from run as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from exportkit._torch_compat.random_numbers import fixed_numbers
from exportkit.calls.call import Call, given_arguments
from exportkit.calls.signature import Signature
from exportkit.divergence.diagnosis import Diagnosis, Divergence, Stage, changed_weight, error_of_translation
from exportkit.divergence.graph_run import (
    GraphNode,
    GraphRun,
    graph_inputs,
    nodes_of,
    program_inputs,
    read_onnx,
    run_onnx,
    run_program,
)
from exportkit.divergence.match_values import MatchedCalls, match_values
from exportkit.errors import InvalidRequestError, InvalidTypeError, RuntimeFailure
from exportkit.module_traces.attribution import JUMP
from exportkit.module_traces.trace import trace_model
from exportkit.onnx_files.runner import OnnxRunner
from exportkit.programs.exported import ExportedModel
from exportkit.running.compare import distance
from exportkit.running.eager import kernels_of
from exportkit.running.masks import Padding
from exportkit.running.placement import Placement
from exportkit.running.random_numbers import with_fixed_numbers
from exportkit.running.session import Session
from exportkit.trees import flatten, join

EXPORT, BEFORE, AFTER, RUNTIME = "torch.export", "ONNX before optimisation", "ONNX after optimisation", "onnxruntime"
_NODE_IN_MESSAGE = re.compile(r"running \w+ node[.] Name:'([^']+)'")
# Results with and without optimisation may be this many rounding errors apart before all values are matched again. On
# the models of the tests they are at most three apart.
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
) -> Divergence:
    """Returns the first stage of an export that differs from the model, and the module, line and node where it begins.

    Args:
        model: The model. It runs once, without gradients. If it draws random numbers, the graph gets the same ones.
        graph: An ONNX model (path, ModelProto, ONNXProgram, OnnxModel) or an ExportedProgram.
        inputs: Arguments of the model: a tuple of positional ones, a mapping of named ones, a pair of both, a single
            tensor, or a recorded `Call`.
        program: The ExportedProgram that the ONNX model comes from, if ``graph`` does not contain it.
        before: The ONNX model before optimisation, as ``torch.onnx.export(..., optimize=False)`` returns it. Without
            it, the module that differs is translated again on its own.
        method: The exported method.
        wrong: Paths of outputs that are known to be wrong, such as ``logits``. Other outputs count as wrong if half of
            their digits are wrong.

    Raises:
        InvalidTypeError: if ``graph`` cannot be run.
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
    known = frozenset(join("outputs", path) for path in wrong)
    call = inputs if isinstance(inputs, Call) else _call_of(Signature.of(getattr(model, method)), inputs)
    return _Search(model, method, call, _graphs_of(graph, program), before, known).result()


@dataclass(frozen=True)
class _Graphs:
    """The graphs of an export: an ONNX model, the program that it was translated from, or both.

    Attributes:
        onnx: The ONNX model.
        program: The program.
        onnx_model: The ONNX model, if it knows what its graphs are fed for a call.
        constants: Python values that are part of the graphs, by path.
    """

    onnx: Any
    program: torch.export.ExportedProgram | None
    onnx_model: OnnxRunner | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)

    @property
    def placement(self) -> Placement | None:
        """What computes the ONNX model."""
        return None if self.onnx_model is None else self.onnx_model.graph.placement


def _graphs_of(graph: Any, program: torch.export.ExportedProgram | None) -> _Graphs:
    if not isinstance(program, torch.export.ExportedProgram | None):
        raise InvalidTypeError("Not a program.", expected="an ExportedProgram", got=type(program).__name__)
    if isinstance(graph, torch.export.ExportedProgram):
        return _Graphs(None, graph)
    if isinstance(graph, ExportedModel):
        return _Graphs(None, program or graph.program, None, graph.baked_constants())
    if isinstance(graph, OnnxRunner):
        return _Graphs(graph.path, program or graph.program, graph, graph.domain.constants)
    if isinstance(graph, torch.onnx.ONNXProgram):
        return _Graphs(graph, program or graph.exported_program)
    return _Graphs(graph, program)


class _Search:
    """One search: runs the model, and those of its graphs that have to be run, once."""

    def __init__(
        self, model: torch.nn.Module, method: str, call: Call, graphs: _Graphs, before: Any, wrong: frozenset[str]
    ) -> None:
        self._model, self._call, self._graphs, self._before, self._wrong = model, call, graphs, before, wrong
        self._padding, self._seed = Padding.of_tensors(call.tensors()), call.seed or 0
        args, kwargs = call.signature.unbind(call.copies(), call.named)
        with (
            torch.no_grad(),
            kernels_of(call),
            fixed_numbers(self._seed, call.generators()),
            trace_model(model, values="all") as self._trace,
        ):
            getattr(model, method)(*args, **kwargs, **self._constants())

    def result(self) -> Divergence:
        if self._graphs.onnx is None and self._graphs.program is not None:
            run, matched, stage = self._program_stage(self._graphs.program)
            self._check_paths(matched)
            return self._diagnosis(run, matched).divergence(stage, (stage,))
        proto, folder = self._read(self._graphs.onnx)
        feeds = self._feeds(graph_inputs(proto))
        try:
            run = run_onnx(proto, folder, feeds, self._graphs.placement)
        except RuntimeFailure as error:
            return _refused(error, nodes_of(proto))
        if not any(node.scopes for node in run.nodes):
            raise InvalidRequestError(
                "The nodes of this ONNX model do not say which modules they come from.",
                expected="pkg.torch.onnx.name_scopes in the metadata of nodes",
                hint="export it with torch.onnx.export(..., dynamo=True), and keep the metadata.",
            )
        matched = self._matched(run)
        self._check_paths(matched)
        after = _stage(AFTER, matched)
        if after.outcome == "agrees":
            results = Session(proto.SerializeToString(), folder, placement=self._graphs.placement).run(feeds)
            return self._after_runtime(run, matched, after, results)
        return self._first_of(run, matched, after, proto, folder)

    def _read(self, source: Any) -> tuple[Any, Path | None]:
        """An ONNX model, with fixed numbers in place of random ones as in the runs of torch, and its folder."""
        proto, folder = read_onnx(source)
        return with_fixed_numbers(proto, self._seed), folder

    def _after_runtime(
        self, run: GraphRun, matched: MatchedCalls, after: Stage, results: Mapping[str, torch.Tensor]
    ) -> Divergence:
        """The outcome of a model that agrees, once onnxruntime has optimised it."""
        optimised = replace(run, values={**run.values, **results})
        far = max((distance(run.values[name], tensor).rms for name, tensor in results.items()), default=0.0)
        units = [pair.unit for call in matched.calls for pair in call.outputs]
        if far > _OPTIMISED * max(units, default=0.0):  # otherwise matching again is not worth its time
            matched = self._matched(optimised)
        runtime = replace(_stage(RUNTIME, matched), error=max(far, after.error))
        skipped = [Stage(name, "not checked", note="the ONNX model made from it agrees") for name in (EXPORT, BEFORE)]
        return self._diagnosis(optimised, matched).divergence(runtime, (*skipped, after, runtime))

    def _first_of(
        self, run: GraphRun, matched: MatchedCalls, after: Stage, proto: Any, folder: Path | None
    ) -> Divergence:
        """The first stage that differs, if the ONNX model does."""
        if self._graphs.program is None:
            export, program_run = Stage(EXPORT, "not checked", note="the program is not known"), None
        else:
            program_run, on_program, export = self._program_stage(self._graphs.program)
            if export.outcome == "diverges":
                stages = (export, Stage(BEFORE, "not checked"), after)
                return self._diagnosis(program_run, on_program).divergence(export, stages)
        diagnosis = self._diagnosis(run, matched, program_run)
        before = self._before_stage(diagnosis, proto, folder)
        return diagnosis.divergence(before if before.outcome == "diverges" else after, (export, before, after))

    def _program_stage(self, program: torch.export.ExportedProgram) -> tuple[GraphRun, MatchedCalls, Stage]:
        with fixed_numbers(self._seed):
            run = run_program(program, self._program_feeds(program))
        matched = self._matched(run)
        return run, matched, _stage(EXPORT, matched)

    def _matched(self, run: GraphRun) -> MatchedCalls:
        return match_values(self._trace, run, self._padding, self._wrong)

    def _diagnosis(self, run: GraphRun, matched: MatchedCalls, reference: GraphRun | None = None) -> Diagnosis:
        return Diagnosis(self._trace, self._padding, run, matched, reference)

    def _before_stage(self, diagnosis: Diagnosis, after: Any, folder: Path | None) -> Stage:
        if self._before is not None:
            proto, before_folder = self._read(self._before)
            before = run_onnx(proto, before_folder, self._feeds(graph_inputs(proto)), self._graphs.placement)
            return _stage(BEFORE, self._matched(before))
        first, program, reference = diagnosis.matched.first, self._graphs.program, diagnosis.reference
        if reference is None or program is None or first is None or first.owner is None:
            return Stage(BEFORE, "not checked", note="pass it as before= to distinguish it from the next stage")
        call = diagnosis.call(first.owner)
        name = call.path or "the model"
        nodes, expected = diagnosis.nodes_of(diagnosis.run, call), diagnosis.nodes_of(reference, call)
        if nodes is None or expected is None:
            return Stage(BEFORE, "not checked", note=f"the program has no nodes of {name}")
        weight = changed_weight(after, folder, nodes, program, expected)
        if weight is not None:
            return Stage(BEFORE, "agrees", note=f"weight {weight} was changed after it")
        try:
            error = error_of_translation(program, reference, expected)
        except Exception as problem:  # torch cannot export every module by itself
            summary = next(iter(str(problem).splitlines()), type(problem).__name__)
            return Stage(BEFORE, "not checked", note=f"{name} by itself: {summary[:80]}")
        diverges = error > max(first.error / JUMP, first.base)
        return Stage(BEFORE, "diverges" if diverges else "agrees", error, f"{name} by itself")

    def _check_paths(self, matched: MatchedCalls) -> None:
        """Raises InvalidRequestError if the graph belongs to a different model, or to a model around this one."""
        known = {call.path for call in self._trace.calls}
        compared = {call.path for call in matched.calls if call.outputs}
        if not compared or (compared == {""} and len(known) > 1):
            raise InvalidRequestError(
                "The graph has no values of the model's modules.",
                where=type(self._model).__name__,
                expected=", ".join(sorted(path for path in known if path)[:3]),
                got=", ".join(sorted(matched.modules)[:3]) or "no module",
                hint="give the module that was exported, with the inputs that it takes.",
            )

    def _constants(self) -> dict[str, Any]:
        """The constants of the graphs that the call does not give, by name of the argument."""
        signature, given = self._call.signature, self._call.arguments
        by_name = self._call.args_kwargs()[1] if self._graphs.constants else {}
        constants = {}
        for path, value in self._graphs.constants.items():
            name = path.removeprefix(f"{signature.var_keyword}.")
            known = name.isidentifier() if name != path else name in signature.names
            if known and name not in given and name not in by_name:
                constants[name] = value
        return constants

    def _program_feeds(self, program: torch.export.ExportedProgram) -> dict[str, Any]:
        """What the program is fed, by name of the node for each input."""
        args, kwargs = self._call.args_kwargs()
        if self._graphs.onnx_model is not None:
            return self._graphs.onnx_model.program_feeds(*args, **kwargs, **self._constants())
        spec = program.call_spec.in_spec
        if spec is not None and spec.children()[0].num_children:  # the program takes some by position
            args, kwargs = self._call.signature.unbind(self._call.copies(), self._call.named)
        names = (spec.children()[1].context or []) if spec is not None else []
        return program_inputs(program, args, {name: value for name, value in kwargs.items() if name in names})

    def _feeds(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """What an ONNX model with these inputs is fed, by name of its input."""
        if self._graphs.onnx_model is not None:
            args, kwargs = self._call.args_kwargs()
            return self._graphs.onnx_model.feeds(*args, **kwargs, **self._constants())
        by_path = self._call.tensors()
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


def _call_of(signature: Signature, inputs: Any) -> Call:
    """The call of a method with arguments as a user gives them."""
    args, kwargs = given_arguments(inputs)
    values = signature.bind(args, kwargs)
    bound, named = signature.unbind(values, kwargs)
    if len(bound) < len(args) or len(named) < len(kwargs):
        raise InvalidRequestError(
            "The model does not take these arguments.",
            expected=", ".join(signature.names),
            got=f"{len(args)} positional ones and {', '.join(kwargs) or 'no named one'}",
        )
    return Call({name: flatten(value) for name, value in values.items()}, signature, frozenset(kwargs))


def _stage(name: str, matched: MatchedCalls) -> Stage:
    outputs = [pair.distance.rms for call in matched.calls if call.parent is None for pair in call.outputs]
    note = "; ".join(f"{path}: {step.reason}" for path, step in matched.unmatched.items())
    return Stage(name, "agrees" if matched.first is None else "diverges", max(outputs, default=math.nan), note)


def _refused(error: RuntimeFailure, nodes: Iterable[GraphNode]) -> Divergence:
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
    return Divergence(
        RUNTIME,
        scope.path if scope else None,
        scope.class_name if scope else "",
        node=node.name,
        operator=node.operator,
        line=node.line,
        reason=f"onnxruntime stopped: {reason}",
        stages=(Stage(RUNTIME, "diverges", note="refused the call"),),
    )
