"""The contract of an ONNX graph: everything needed to call it like the model, without the model.

A translation makes the contract of its file, a saved folder stores and loads it, and `OnnxGraph` runs from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from exportkit.calls.call import Signature
from exportkit.plan.plan import Plan
from exportkit.probing.missing import MissingDefaults, dependent_outputs
from exportkit.programs.audit import domain_of
from exportkit.programs.domain import Domain
from exportkit.programs.program import TracedProgram
from exportkit.trees import Tree


@dataclass(frozen=True)
class Contract:
    """How one ONNX graph is called.

    Attributes:
        path: The file; its weights are beside it in ``<name>.data``.
        inputs: Path of the leaf by name of the graph's input, in order. Inputs that the model ignores are left out.
        outputs: Path of the leaf by name of the graph's output, in order.
        output_axes: Names or sizes of the axes of each output, by path of its leaf.
        opset: The ONNX opset.
        model_name: Class of the model.
        method: The exported method.
        signature: Parameters of the method.
        plan: What varies.
        domain: Where the graph may be used.
        defaults: Values for missing inputs.
        structure: Structure of what the model returns; its tensors mean nothing.
        joined_outputs: Paths of lists that the graph returns as one tensor.
        member_rows: Rows of each tensor of such a list, by its path, if they are always the same.
        dependent: Outputs that are only returned if an input is given, with that input, both by path.
        stateful: Whether the graph takes and returns a state that the model keeps on its modules.
        rules: Names of the rewrites that were in force during the trace.
        sizes: Sizes of the variables during the trace.
        seconds: Duration of each stage.
    """

    path: Path
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    output_axes: Mapping[str, tuple[str | int, ...]]
    opset: int
    model_name: str
    method: str
    signature: Signature
    plan: Plan
    domain: Domain
    defaults: MissingDefaults
    structure: Tree
    joined_outputs: tuple[str, ...] = ()
    member_rows: Mapping[str, int] = field(default_factory=dict)
    dependent: Mapping[str, str] = field(default_factory=dict)
    stateful: bool = False
    rules: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)

    @classmethod
    def of(
        cls,
        traced: TracedProgram,
        path: Path,
        inputs: Mapping[str, str],
        outputs: Mapping[str, str],
        output_axes: Mapping[str, tuple[str | int, ...]],
        opset: int,
    ) -> Contract:
        """Returns the contract of a file that a program was translated to.

        Args:
            traced: The program.
            path: The file.
            inputs: Path of the leaf by name of the graph's input.
            outputs: Path of the leaf by name of the graph's output.
            output_axes: Names or sizes of the axes of each output, by path of its leaf.
            opset: The ONNX opset.
        """
        observation = traced.observation
        return cls(
            path,
            inputs,
            outputs,
            output_axes,
            opset,
            model_name=observation.model_name,
            method=traced.method,
            signature=observation.signature,
            plan=traced.plan,
            domain=domain_of(traced),
            defaults=traced.defaults,
            structure=traced.outputs,
            joined_outputs=traced.joined_outputs,
            member_rows=traced.member_rows,
            dependent=dependent_outputs(observation, traced.joined_outputs),
            stateful=traced.stateful,
            rules=traced.rules,
            sizes=traced.sizes,
            seconds=traced.seconds,
        )
