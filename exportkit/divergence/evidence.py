"""What is said of a stage that differs: in come the judged steps of a graph, out goes a `Located`.

The node is the one that makes the tensor that differs first; where the program is at hand and agrees, it is the first
of the module whose value none of the program's nodes has that compute the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from exportkit.divergence.choices import reason_of_choice
from exportkit.divergence.graph_run import GraphRun, Inside, Node
from exportkit.divergence.located import Located, Stage, Suspect
from exportkit.divergence.on_graph import OnGraph
from exportkit.module_traces.judge import JUMP
from exportkit.module_traces.records import ModuleCall
from exportkit.module_traces.steps import Compared, Step
from exportkit.module_traces.trace import Trace
from exportkit.module_traces.visible import Padding
from exportkit.running.compare import distance, position_of_largest

_SUSPECTS = 5


@dataclass(frozen=True)
class Evidence:
    """A graph's run beside that of the model.

    Attributes:
        trace: What the model did.
        visible: Which elements of its tensors count.
        run: What the graph did.
        found: Both compared.
        reference: What the program did that the graph was made from, if that is known and agrees.
    """

    trace: Trace
    visible: Padding
    run: GraphRun
    found: OnGraph
    reference: GraphRun | None = None

    def located(self, stage: Stage, stages: tuple[Stage, ...]) -> Located:
        """Returns what there is to say.

        Args:
            stage: The stage that the graph stands for.
            stages: All stages.
        """
        first, suspects = self.found.first, suspects_of(self.found.steps, self.found.calls, self.found.first)
        unmatched = tuple(self.found.unmatched)
        if stage.outcome != "diverges" or first is None or first.leaf is None:
            return Located(None, stages=stages, suspects=suspects, unmatched=unmatched)
        calls = {call.index: call for call in self.found.calls}
        owner, at = calls.get(first.owner if first.owner is not None else -1), calls[first.call]
        name = self.found.values.get((first.call, first.side, first.leaf.path), "")
        node = self._node(first, name)
        return Located(
            stage.name,
            owner.path if owner else None,
            owner.class_name if owner else "",
            owner.number if owner else 0,
            first.leaf.path if owner is at else f"inputs of {at.path}: {first.leaf.path}",
            node.name if node else name,
            node.operator if node else "",
            node.line if node else "",
            first.error,
            first.base,
            first.leaf.distance.largest,
            self._index(first, name),
            self._reason(first, name, node),
            stages,
            suspects,
            unmatched,
        )

    def call(self, index: int) -> ModuleCall:
        """Returns a call by its index."""
        return next(call for call in self.trace.calls if call.index == index)

    def inside(self, run: GraphRun, call: ModuleCall) -> Inside | None:
        """Returns the part of a graph that a call is, or None if it is not known."""
        insides = run.calls_of(call.path, sum(other.path == call.path for other in self.trace.calls))
        return insides[call.number] if insides else None

    def _node(self, step: Step, name: str) -> Node | None:
        """The first node of the module that is wrong, or the one that makes the value, whichever comes before."""
        found = [node for node in (self._first_node(step), self.run.makers.get(name)) if node is not None]
        return min(found, key=self.run.nodes.index, default=None)

    def _first_node(self, step: Step) -> Node | None:
        if self.reference is None or step.owner is None:
            return None
        call = self.call(step.owner)
        inside, expected = self.inside(self.run, call), self.inside(self.reference, call)
        for node in inside.nodes if inside is not None and expected is not None else ():
            if not node.ends or len(node.outputs) != 1 or node.outputs[0] not in self.run.values:
                continue
            errors = self._errors(node, expected.nodes if expected is not None else ())
            if errors and min(errors) > max(step.error / JUMP, step.base):
                return node
        return None

    def _errors(self, node: Node, others: Sequence[Node]) -> list[float]:
        """How far the value of a node is from those of the program's nodes that compute the same."""
        value, known = self.run.values[node.outputs[0]], self.reference.values if self.reference is not None else {}
        same = [other for other in others if other.torch_operator == node.torch_operator and other.name in known]
        errors = [distance(known[other.name], value).rms for other in same]
        return [error for error in errors if math.isfinite(error)]

    def _index(self, step: Step, name: str) -> tuple[int, ...] | None:
        if name not in self.run.values:
            return None
        tensor = self._expected(step)
        return position_of_largest(tensor, self.run.values[name], self.visible(tensor))

    def _reason(self, step: Step, name: str, node: Node | None) -> str:
        if node is None or name not in node.outputs:
            return step.reason
        return reason_of_choice(self.run, node, self._expected(step), self.run.values[name]) or step.reason

    def _expected(self, step: Step) -> torch.Tensor:
        call = self.call(step.call)
        records = call.inputs if step.side == "inputs" else call.outputs
        record = next(record for record in records if step.leaf is not None and record.path == step.leaf.path)
        return self.trace.tensor(record)


def suspects_of(steps: Sequence[Step], calls: Sequence[Compared], first: Step | None) -> tuple[Suspect, ...]:
    """Returns the modules that add most, those that are wrong first.

    Args:
        steps: Judged steps.
        calls: The calls that they are about.
        first: The step that differs first.
    """
    by_index = {call.index: call for call in calls}
    worst: dict[int, Step] = {}
    for step in (*([first] if first is not None else ()), *steps):
        if step.owner is not None and step.added > 0:
            known = worst.get(step.owner)
            if known is None or _weight(step) > _weight(known):
                worst[step.owner] = step
    ranked = sorted(worst.items(), key=lambda item: _weight(item[1]), reverse=True)[:_SUSPECTS]
    return tuple(_suspect(by_index[owner], step) for owner, step in ranked)


def _suspect(call: Compared, step: Step) -> Suspect:
    return Suspect(call.path, call.class_name, call.number, step.base, step.error, step.verdict == "differs")


def _weight(step: Step) -> tuple[bool, float]:
    return step.verdict == "differs", step.added
