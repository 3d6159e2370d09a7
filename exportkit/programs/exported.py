"""Exported: a traced program with all that is known of it, on its way to an ONNX file or a folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from exportkit.arguments.build import build_call
from exportkit.calls.observation import Observation
from exportkit.calls.parts import Edge
from exportkit.errors import ExportError
from exportkit.onnx_files.onnx_model import OnnxModel
from exportkit.onnx_files.translate import OnnxFile, check_destination, translate
from exportkit.plan.plan import Plan
from exportkit.probing.missing import MissingDefaults
from exportkit.probing.planning import BoundPlan
from exportkit.programs.failure import Attempt, explained
from exportkit.programs.module_state import WithState
from exportkit.programs.program import Captured
from exportkit.programs.stages import TRANSLATION_PER_TRACE, stage
from exportkit.programs.stateful import onnx_model_of
from exportkit.rewrites.table import LIBRARY_PATCHES
from exportkit.trees import Tree


@dataclass(frozen=True, repr=False)
class Exported:
    """An exported model, before it is written as ONNX.

    Attributes:
        captured: The traced program and the paths behind its inputs and outputs.
        plan: What varies.
        observation: The recorded calls.
        sizes: Sizes of the variables that the export used.
        fills: What stands for missing inputs.
        outputs: Structure of what the model returns.
        model: The model, the truth that the result is compared with.
        method: The exported method.
        joined_outputs: Paths of lists with a tensor for each image or the like, which the graph returns as one tensor.
        member_rows: Rows of each tensor of such a list, by its path, where they are always as many.
        seconds: Duration of each stage, in seconds.
        parts: Exports of what runs before the model and feeds it, such as an image encoder, by name.
        edges: Which outputs of each part are inputs of this one.
    """

    captured: Captured
    plan: Plan
    observation: Observation
    sizes: Mapping[str, int]
    fills: MissingDefaults
    outputs: Tree
    model: torch.nn.Module
    method: str = "forward"
    joined_outputs: tuple[str, ...] = ()
    member_rows: Mapping[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    parts: Mapping[str, Exported] = field(default_factory=dict)
    edges: Mapping[str, tuple[Edge, ...]] = field(default_factory=dict)

    def __repr__(self) -> str:
        names = ", ".join(variable.name for variable in self.plan.variables) or "none"
        where = f"{self.observation.model_name}.{self.method}"
        return f"Exported({where}, {len(self.captured.input_paths)} inputs, variables: {names})"

    @property
    def program(self) -> torch.export.ExportedProgram:
        """The ExportedProgram; call its ``module()`` like the model, without the Python constants."""
        return self.captured.program

    @property
    def stateful(self) -> bool:
        """Whether the model keeps a state on its modules, so that its graph does from call to call."""
        return isinstance(self.model, WithState)

    def baked_constants(self) -> dict[str, Any]:
        """Returns the Python values that are part of the graph, by path."""
        return {constant.path: constant.value for constant in self.plan.constants}

    def to_onnx(self, path: str | os.PathLike[str], opset: int | None = None) -> OnnxModel:
        """Writes the program as ONNX and returns it as something to call like the model.

        Args:
            path: File to write; the weights go beside it, into ``<path>.data``, and parts into ``<stem>.<part>.onnx``.
            opset: ONNX opset; by default torch's own choice.

        Raises:
            DestinationError: if the path cannot be written.
            ExportError: if an operator cannot be translated.
        """
        target = check_destination(path)
        with explained(lambda: self.attempt(onnx=True)):
            exported, file = self.translated(target, opset)
        parts = {
            name: part.to_onnx(target.with_name(f"{target.stem}.{name}{target.suffix}"), opset)
            for name, part in self.parts.items()
        }
        return onnx_model_of(file, exported, parts)

    def translated(self, target: Path, opset: int | None = None) -> tuple[Exported, OnnxFile]:
        """Returns what was translated and its file: where it cannot be, transformers' own patches are tried.

        Args:
            target: Where to write.
            opset: ONNX opset; by default torch's own choice.

        Raises:
            ExportError: if an operator cannot be translated.
        """
        with stage("onnx", self.seconds, TRANSLATION_PER_TRACE * self.seconds.get("export", 0.0) or None):
            try:
                return self, translate(self.captured, self.plan, target, opset)
            except ExportError:
                again = self._with_library_patches()
                if again is None:
                    raise
                return again, translate(again.captured, again.plan, target, opset)

    def _with_library_patches(self) -> Exported | None:
        """The model traced again with transformers' own export patches; None if it was, or cannot be."""
        from exportkit.programs.findings import rule_findings
        from exportkit.programs.make import traced

        if LIBRARY_PATCHES.name in self.captured.rules:
            return None
        try:
            plan = BoundPlan.of(self.plan, self.observation)
            again = traced(self.model, self.method, plan, self.seconds, [LIBRARY_PATCHES])
        except ExportError:
            return None
        found = again.plan.with_findings(rule_findings(again))
        return replace(again, plan=found, parts=self.parts, edges=self.edges)

    def attempt(self, onnx: bool = False) -> Attempt:
        """Returns what was traced, to look for the cause of a failure.

        Args:
            onnx: Whether it is about the translation to ONNX.
        """
        arguments = build_call(self.plan, self.observation, self.sizes)
        return Attempt(self.model, self.method, self.plan, arguments, self.captured.rules, onnx=onnx)

    def repro(self, directory: str | os.PathLike[str]) -> Path:
        """Writes a script that traces the model with torch alone, and returns its path.

        It holds shapes, types, the range of integers, and versions; neither values of tensors nor weights.

        Args:
            directory: Where to write ``repro.py``.

        Raises:
            DestinationError: if it cannot be written.
        """
        return self.attempt().repro(directory)

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        runtime: Literal["genai"] | None = None,
        opset: int | None = None,
        values: bool = True,
        verify: bool = True,
    ) -> OnnxModel:
        """Writes a folder that runs elsewhere, proves it, and returns its graphs as something to call.

        In it are the ONNX files with their weights, the plan, ``manifest.json``, the recorded calls, and the report;
        ``exportkit.load`` reads it. For the clients that know this kind of model there are their configuration files.

        Args:
            directory: A new or empty directory, or one that an export was saved to, which is replaced.
            runtime: "genai" for a graph that onnxruntime-genai can run in any case: a model with sliding windows is
                exported again, with caches that hold every token.
            opset: ONNX opset; by default torch's own choice.
            values: Also write the values of the calls, so that the folder can be proven without the model.
            verify: Prove the graphs, which takes memory for the weights once more; if that fails, a RuntimeWarning says
                so. Without it there is no report, and ``exportkit verify`` proves the folder later.

        Raises:
            DestinationError: if the directory cannot be written, or holds something else.
            ExportError: if an operator cannot be translated.
            InvalidRequestError: if the runtime cannot run the model.
        """
        from exportkit.folder.folder import save_folder

        return save_folder(self, directory, runtime=runtime, opset=opset, values=values, verify=verify)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Writes one HTML page of all that is known of this export, its proof included, and returns its path.

        The graphs are written to a temporary folder and proven there. For a folder that `save` wrote already,
        ``exportkit report`` makes the same page without proving anew.

        Args:
            path: The file to write.

        Raises:
            DestinationError: if it cannot be written.
            ExportError: if an operator cannot be translated.
        """
        from exportkit.report.export import export_page
        from exportkit.report.render import write_page

        check_destination(path)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / self.observation.model_name
            self.save(folder, values=False)
            return write_page(path, export_page(folder))
