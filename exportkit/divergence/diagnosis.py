"""Where a graph diverges: the stage, module, line and node, the error that is added there, and what is wrong.

The node is the one that computes the tensor that differs first. If the program that the graph was translated from is
known and agrees, it is the first node of the module whose value no node of the program with its operator has.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from exportkit._torch_compat.onnx import quiet_onnx_export
from exportkit.divergence.graph_run import GraphNode, GraphRun, ModuleNodes, read_onnx
from exportkit.divergence.match_values import MatchedCalls
from exportkit.module_traces.attribution import JUMP, PEAK, ROUNDING
from exportkit.module_traces.comparison import (
    PrintedResult,
    call_text,
    error_text,
    headline,
    labelled,
    printed_table,
)
from exportkit.module_traces.error_steps import ErrorStep, added_error, worst_steps
from exportkit.module_traces.trace import Trace
from exportkit.module_traces.trace_data import ModuleCall
from exportkit.running.compare import distance, position_of_largest, unit_of
from exportkit.running.masks import Padding
from exportkit.running.program import tensors_by_node
from exportkit.running.session import Session

if TYPE_CHECKING:
    import onnx
    from rich.console import RenderableType

Outcome = Literal["agrees", "diverges", "not checked"]


@dataclass(frozen=True)
class Stage:
    """A form of the model on its way to onnxruntime.

    Attributes:
        name: ``torch.export``, ``ONNX before optimisation``, ``ONNX after optimisation``, or ``onnxruntime``.
        outcome: Whether it agrees with the model.
        error: The largest relative error of an output; NaN where none was compared.
        note: More about it, such as why it was not checked.
    """

    name: str
    outcome: Outcome
    error: float = math.nan
    note: str = ""


@dataclass(frozen=True)
class Suspect:
    """A module that adds error.

    Attributes:
        module: Its path; "" for the model itself.
        class_name: Its class.
        number: Which of its calls it is.
        base: The relative error of what it computes from.
        error: The relative error of what it computes.
        wrong: Whether that is more than rounding.
    """

    module: str
    class_name: str
    number: int
    base: float
    error: float
    wrong: bool

    @property
    def added(self) -> float:
        """The error that it adds."""
        return added_error(self.base, self.error)


@dataclass(frozen=True)
class Divergence(PrintedResult):
    """Where a graph begins to differ from its model. Prints as a short report.

    Attributes:
        stage: The first stage that diverges, or None if all agree.
        module: Path of the module where it begins; "" for the model itself, None if no module can be named.
        class_name: Its class.
        number: Which of its calls.
        tensor: What differs first, such as ``outputs[0]`` or ``inputs args[0]`` of a module.
        node: The node of the graph that computes it, if known.
        operator: What that node computes.
        line: The line of the model's code that the node comes from.
        error: The relative error there, as a root mean square.
        base: The relative error of the inputs of the step that computes it.
        largest: The largest absolute difference.
        index: Position of the largest difference.
        reason: What is wrong, in words.
        stages: What was checked.
        suspects: The modules that add most.
        unmatched: Paths of outputs of the model whose shape no value of the graph has.
    """

    stage: str | None
    module: str | None = None
    class_name: str = ""
    number: int = 0
    tensor: str = ""
    node: str = ""
    operator: str = ""
    line: str = ""
    error: float = math.nan
    base: float = math.nan
    largest: float = math.nan
    index: tuple[int, ...] | None = None
    reason: str = ""
    stages: tuple[Stage, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    unmatched: tuple[str, ...] = ()

    @property
    def diverges(self) -> bool:
        """Whether any stage does."""
        return self.stage is not None

    def headline(self) -> str:
        """Returns the result in one line."""
        if self.stage is None:
            names = ", ".join(path.removeprefix("outputs").lstrip(".") or "the output" for path in self.unmatched)
            return f"No stage diverges{f', but there is nothing to compare {names} with' if names else ''}."
        if self.module is None:
            return f"{self.stage} diverges."
        class_name = f" ({self.class_name})" if self.class_name else ""
        return f"{self.stage} diverges in {self.module or 'the model itself'}{class_name}"

    def _parts(self) -> Iterator[RenderableType]:
        yield headline(self.headline(), not self.diverges)
        details = {
            "tensor": self.tensor and self.tensor + (f", call {self.number}" if self.number else ""),
            "error": "" if math.isnan(self.error) else error_text(self.error, self.base, self.largest, self.index),
            "reason": self.reason,
            "node": self.node and f"{self.node} ({self.operator})",
            "line": self.line,
        }
        yield from (labelled(label, text) for label, text in details.items() if text and self.diverges)
        yield printed_table(
            ("stage", "outcome", "error", ""),
            [(s.name, s.outcome, "" if math.isnan(s.error) else f"{s.error:.1e}", s.note) for s in self.stages],
        )
        if self.suspects and self.diverges:
            yield printed_table(
                ("module", "class", "error of its inputs", "of its outputs", "verdict"),
                [
                    (
                        call_text(suspect.module, suspect.number),
                        suspect.class_name,
                        f"{suspect.base:.1e}",
                        f"{suspect.error:.1e}",
                        "differs" if suspect.wrong else "",
                    )
                    for suspect in self.suspects
                ],
            )


_SUSPECTS = 5  # modules that are named
# Which of equal elements ``torch.topk`` takes is left open by its documentation, and differs between devices. ONNX TopK
# takes the first: https://onnx.ai/onnx/operators/onnx__TopK.html.
EQUAL = "it chooses among equal values: torch leaves open which of them top-k takes, ONNX takes the first"
CLOSE = "it chooses among values that are equal up to rounding"
_CHOOSING = ("TopK", "topk", "sort")


@dataclass(frozen=True)
class Diagnosis:
    """A graph's run beside the model's.

    Attributes:
        trace: What the model did.
        padding: Which elements of its tensors count.
        run: What the graph did.
        matched: Both compared.
        reference: What the program did that the graph was translated from, if it is known and agrees.
    """

    trace: Trace
    padding: Padding
    run: GraphRun
    matched: MatchedCalls
    reference: GraphRun | None = None

    def divergence(self, stage: Stage, stages: tuple[Stage, ...]) -> Divergence:
        """Returns the result.

        Args:
            stage: The stage that the graph stands for.
            stages: All stages.
        """
        first, suspects, unmatched = self.matched.first, self._suspects(), tuple(self.matched.unmatched)
        if stage.outcome != "diverges" or first is None or first.pair is None:
            return Divergence(None, stages=stages, suspects=suspects, unmatched=unmatched)
        calls = {call.index: call for call in self.matched.calls}
        owner, at = calls.get(first.owner if first.owner is not None else -1), calls[first.call]
        name = self.matched.values.get((first.call, first.side, first.pair.path), "")
        node, index, reason = self._first_node(first, name), None, first.reason
        if name in self.run.values:
            call = self.call(first.call)
            records = call.inputs if first.side == "inputs" else call.outputs
            expected = self.trace.tensor(next(record for record in records if record.path == first.pair.path))
            index = position_of_largest(expected, self.run.values[name], self.padding(expected))
            if node is not None and name in node.outputs:
                reason = _reason_of_choice(self.run, node, expected, self.run.values[name]) or reason
        return Divergence(
            stage=stage.name,
            module=owner.path if owner else None,
            class_name=owner.class_name if owner else "",
            number=owner.number if owner else 0,
            tensor=first.pair.path if owner is at else f"inputs of {at.path}: {first.pair.path}",
            node=node.name if node else name,
            operator=node.operator if node else "",
            line=node.line if node else "",
            error=first.error,
            base=first.base,
            largest=first.pair.distance.largest,
            index=index,
            reason=reason,
            stages=stages,
            suspects=suspects,
            unmatched=unmatched,
        )

    def call(self, index: int) -> ModuleCall:
        """Returns a call by its index."""
        return next(call for call in self.trace.calls if call.index == index)

    def nodes_of(self, run: GraphRun, call: ModuleCall) -> ModuleNodes | None:
        """Returns the nodes of a graph that a call consists of, or None if these are not known."""
        found = run.calls_of(call.path, sum(other.path == call.path for other in self.trace.calls))
        return found[call.number] if found else None

    def _suspects(self) -> tuple[Suspect, ...]:
        """The modules that add most, those that are wrong first."""
        calls = {call.index: call for call in self.matched.calls}
        first = (self.matched.first,) if self.matched.first is not None else ()
        adding = [step for step in (*first, *self.matched.steps) if added_error(step.base, step.error) > 0]
        worst = [(calls[owner], step) for owner, step in worst_steps(adding).items() if owner is not None]
        return tuple(
            Suspect(call.path, call.class_name, call.number, step.base, step.error, step.verdict == "differs")
            for call, step in worst[:_SUSPECTS]
        )

    def _first_node(self, step: ErrorStep, name: str) -> GraphNode | None:
        """The first node of the module that is wrong, or the one that computes the value, whichever comes before."""
        found = [node for node in (self._first_wrong_node(step), self.run.makers.get(name)) if node is not None]
        return min(found, key=self.run.nodes.index, default=None)

    def _first_wrong_node(self, step: ErrorStep) -> GraphNode | None:
        if self.reference is None or step.owner is None:
            return None
        call = self.call(step.owner)
        own, expected = self.nodes_of(self.run, call), self.nodes_of(self.reference, call)
        if own is None or expected is None:
            return None
        known = self.reference.values
        for node in own.nodes:
            if not node.ends or len(node.outputs) != 1 or node.outputs[0] not in self.run.values:
                continue
            value = self.run.values[node.outputs[0]]
            same = [n.name for n in expected.nodes if n.torch_operator == node.torch_operator and n.name in known]
            errors = [error for other in same if math.isfinite(error := distance(known[other], value).rms)]
            if errors and min(errors) > max(step.error / JUMP, step.base):
                return node
        return None


def _reason_of_choice(run: GraphRun, node: GraphNode, expected: torch.Tensor, got: torch.Tensor) -> str | None:
    """How the elements compare that the model and the graph choose; None if they differ, or nothing is chosen."""
    values = run.values.get(node.inputs[0]) if node.inputs else None
    if values is None or not any(name in node.operator for name in _CHOOSING):
        return None
    if expected.dtype != torch.int64 or got.dtype != torch.int64:
        return None
    if values.ndim != expected.ndim or not expected.numel():
        return None
    fewer = [axis for axis in range(values.ndim) if values.shape[axis] != expected.shape[axis]]
    if len(fewer) > 1:
        return None
    axis = fewer[0] if fewer else values.ndim - 1  # the axis that elements are chosen along
    chosen = [values.gather(axis, indices.cpu()).to(torch.float64) for indices in (expected, got)]
    apart = (chosen[0] - chosen[1]).abs().max().item()
    if apart == 0:
        return EQUAL
    scale = values.to(torch.float64).square().mean().sqrt().item()
    return CLOSE if apart <= PEAK * ROUNDING * unit_of(values.dtype) * scale else None


def changed_weight(
    model: onnx.ModelProto,
    folder: Path | None,
    nodes: ModuleNodes,
    program: torch.export.ExportedProgram,
    program_nodes: ModuleNodes,
) -> str | None:
    """Returns the name of a weight of a module that is as large as one in the program, and differs from it.

    Translation writes weights as they are: one that differs was changed afterwards, by an optimisation or in the file.

    Args:
        model: The ONNX model.
        folder: Where its external weights are, if it has any.
        nodes: The nodes of the module in it.
        program: The program.
        program_nodes: The nodes of the module in the program.
    """
    from onnx import numpy_helper

    state = tensors_by_node(program)
    known = [state[name] for name in program_nodes.entering if isinstance(state.get(name), torch.Tensor)]
    own = {name for node in nodes.nodes for name in node.outputs}
    used = {name for node in model.graph.node if own.intersection(node.output) for name in node.input}
    for weight in model.graph.initializer:
        like = [tensor for tensor in known if tensor.numel() == np.prod(weight.dims) and tensor.numel() > 1]
        if weight.name not in used or not like:
            continue
        array = numpy_helper.to_array(weight, str(folder or ""))
        flat = torch.from_numpy(np.ascontiguousarray(array, np.float64)).reshape(-1)
        stored = (form for tensor in like for form in (tensor, tensor.transpose(0, -1)))
        if not any(torch.equal(flat, form.detach().cpu().to(torch.float64).reshape(-1)) for form in stored):
            return str(weight.name)
    return None


def error_of_translation(program: torch.export.ExportedProgram, run: GraphRun, nodes: ModuleNodes) -> float:
    """Returns the largest relative error of an output of a module, translated once more by itself.

    The module is translated without optimisation; translating the whole program would take long.

    Args:
        program: The program.
        run: A run of it.
        nodes: The nodes of the module in it.

    Raises:
        Exception: whatever torch raises if the module cannot be translated by itself.
    """
    inputs, module = _module_of(program, run, nodes)
    with quiet_onnx_export(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        part = torch.export.export(module, tuple(inputs.values()), strict=False)
        translated = torch.onnx.export(part, (), verbose=False, optimize=False)
    proto, folder = read_onnx(translated)
    names = [value.name for value in proto.graph.input]
    session = Session(proto.SerializeToString(), folder, optimised=False)
    results = session.run(dict(zip(names, inputs.values(), strict=True)))
    expected = [run.values[name] for name in nodes.leaving if name in run.values]
    return max((distance(a, b).rms for a, b in zip(expected, results.values(), strict=True)), default=math.nan)


def _module_of(
    program: torch.export.ExportedProgram, run: GraphRun, module: ModuleNodes
) -> tuple[dict[str, torch.Tensor], torch.fx.GraphModule]:
    """The nodes of a module as a graph of their own, and the tensors that it takes."""
    nodes = {node.name: node for node in program.graph_module.graph.nodes}
    graph = torch.fx.Graph()
    inputs: dict[str, torch.Tensor] = {}
    copies: dict[torch.fx.Node, Any] = {}

    def copy_of(node: torch.fx.Node) -> Any:
        if node not in copies:
            value = run.values.get(node.name, run.numbers.get(node.name))
            if isinstance(value, torch.Tensor):
                inputs[node.name] = value.detach()
                copies[node] = graph.placeholder(node.name)
            else:
                copies[node] = value
        return copies[node]

    for name in module.entering:
        copy_of(nodes[name])
    for node in (nodes[node.name] for node in module.nodes):
        if node.users or node.name in module.leaving:
            copies[node] = graph.node_copy(node, copy_of)
    graph.output(tuple(copies[nodes[name]] for name in module.leaving if name in run.values))
    return inputs, torch.fx.GraphModule(program.graph_module, graph)
