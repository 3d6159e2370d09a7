"""Exported: an exported model on its way to an ONNX file, a ``.pt2`` file, a folder or a report."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument

from exportkit._torch_compat.graph import copied_module, program_of
from exportkit._torch_compat.symbolic_shapes import input_axes, with_ranges
from exportkit.api.application import RunComparison
from exportkit.api.onnx_model import OnnxModel, observation_of
from exportkit.calls.observation import Observation
from exportkit.calls.observer import Observer
from exportkit.errors import InvalidRequestError, InvalidTypeError
from exportkit.files import as_path, check_file, replacing, write_text
from exportkit.onnx_files.contract import Runtime
from exportkit.onnx_files.preparation import without_assertions
from exportkit.onnx_files.quantised import Bits, Dtype, Quantisation
from exportkit.onnx_files.write import write_graphs
from exportkit.programs.exported import ExportedModel
from exportkit.programs.program import TracedProgram
from exportkit.proof.calls import given_calls
from exportkit.proof.quantise import Accuracy, Lossy, lossy_runner
from exportkit.trees.tree import dtype_name


class Exported(ExportedModel):
    """A model that `export` traced as one program, or as one for each kind of call.

    ``program`` is the ExportedProgram, ``plan`` says what varies, ``domain`` says which calls the graph accepts, and
    ``attempts`` lists the strategies that were tried. ``programs`` contains all programs by name, and ``parts`` the
    exports of the submodules that feed the model. If several modules were exported together, all of them are ``parts``,
    and ``programs`` is empty.
    """

    @classmethod
    def of(cls, exported: ExportedModel) -> Exported:
        """Returns an exported model, and its parts, as public values."""
        parts = {name: cls.of(part) for name, part in exported.parts.items()}
        return cls(exported.programs, parts, exported.edges, exported.split, exported.attempts)

    def to_onnx(
        self,
        path: str | os.PathLike[str],
        opset: int | None = None,
        *,
        runtime: Literal["onnxruntime"] | None = None,
        weights: Bits | Quantisation | None = None,
        dtype: Dtype | torch.dtype | None = None,
        accuracy: Accuracy | None = None,
        data: Observer | Observation | None = None,
    ) -> OnnxModel:
        """Writes the model as ONNX and returns an `OnnxModel`, which is called like the model.

        Args:
            path: File to write. The weights go beside it, into ``<path>.data``, parts and the modules of a pipeline
                into ``<stem>.<part>.onnx``, and each of several programs into ``<stem>.<program>.onnx``.
            opset: ONNX opset; by default torch's own choice.
            runtime: "onnxruntime" for a graph in which attention, norms and rotary embeddings are single operators of
                opset 23, which is faster there; by default, a graph of operators that every runtime has.
            weights: "int4" or "int8" to store weights in fewer bits, or a `Quantisation` with more options. The graph
                is proven before that, and only runs in onnxruntime.
            dtype: "float16" or torch.float16 for a graph that computes in float16, with inputs and outputs in the
                dtypes of the model. Parts whose values are too large stay as they were.
            accuracy: How far the quantised graph may be from the model: the least top-1 agreement, such as 0.99, or a
                dict with limits of ``top1``, ``kl`` and ``error``. Layers are stored in more bits until it holds.
            data: Further calls of the model, recorded by another observer, for which the accuracy also has to hold.

        Raises:
            DestinationError: if the path cannot be written.
            ExportError: if an operator cannot be translated.
            InvalidRequestError: if the runtime is unknown, its graphs cannot have the opset, or the weights cannot be
                quantised like this.
            InvalidTypeError: if the opset is not an integer, or a limit of the accuracy is True or False.
            MissingPackageError: if the installed onnxruntime cannot run such a graph.
        """
        if runtime not in (None, "onnxruntime"):
            raise InvalidRequestError(
                "Unsupported runtime.", where="runtime", expected="'onnxruntime'", got=repr(runtime)
            )
        lossy = Lossy.of(weights, dtype, accuracy, observation_of(data))
        target = check_file(path)
        with replacing(target.parent, "an ONNX file") as folder:

            def file_of(program: str, part: str) -> Path:
                name = ".".join(filter(None, (part, program)))
                return folder / (f"{target.stem}.{name}{target.suffix}" if name else target.name)

            runner = write_graphs(self, file_of, opset, runtime, branches=lossy is None)
            if lossy is not None:
                runner = lossy_runner(runner, lossy)
        runner.move(target.parent)
        return OnnxModel.of(runner)

    def repro(self, directory: str | os.PathLike[str]) -> Path:
        """Writes a script that traces the model with torch alone, and returns its path.

        The script contains shapes, dtypes, the range of integers, and versions, but neither tensor values nor weights.

        Args:
            directory: Where to write ``repro.py``; each of several programs, or modules of a pipeline, goes into a
                folder of its own there, and the path of the directory is returned.

        Raises:
            DestinationError: if it cannot be written.
        """
        if self.split is None and self.programs:
            return self.traced.request().repro(directory)
        for name, part in self.parts.items() if not self.programs else ():
            Exported.of(part).repro(as_path(directory) / name)
        for name, traced in self.programs.items():
            traced.request().repro(as_path(directory) / name)
        return as_path(directory)

    def save_program(self, path: str | os.PathLike[str]) -> Path:
        """Writes the program as a ``.pt2`` file that torch reads without exportkit, and returns its path.

        The program takes and returns tensors alone, in the order of ``inputs`` and ``outputs``, which have the path of
        each tensor in the arguments and in the result of the model. The file contains these paths as well::

            about = {"exportkit.json": ""}
            program = torch.export.load("model.pt2", extra_files=about)  # then json.loads(about["exportkit.json"])

        Every input has to be given. torch checks the ranges of the sizes, but not the rest of the domain.

        Args:
            path: File to write. Parts, and the modules of a pipeline, go into ``<stem>.<part>.pt2``, each of several
                programs into ``<stem>.<program>.pt2``.

        Returns:
            The path; without a program of its own, the folder with the files.

        Raises:
            DestinationError: if it cannot be written.
        """
        target = check_file(path, "model.pt2")
        with replacing(target.parent, "a program") as folder:
            for name, traced in _all_programs(self):
                write_flat_program(traced, folder / (f"{target.stem}.{name}{target.suffix}" if name else target.name))
        return target if "" in self.programs else target.parent

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        runtime: Runtime | None = None,
        opset: int | None = None,
        weights: Bits | Quantisation | None = None,
        dtype: Dtype | torch.dtype | None = None,
        accuracy: Accuracy | None = None,
        data: Observer | Observation | None = None,
        values: bool = True,
        verify: bool = True,
        compared: RunComparison | None = None,
    ) -> OnnxModel:
        """Writes a folder that runs on other machines, proves it, and returns its graphs as an `OnnxModel`.

        The folder contains the ONNX files with their weights, the plan, ``manifest.json``, the recorded calls, and the
        report; ``exportkit.load`` reads it. It also contains configuration files for clients that support this kind of
        model.

        Args:
            directory: A new or empty directory, or one that an export was saved to, which is replaced.
            runtime: "onnxruntime" for graphs that are faster there, as `to_onnx` makes them. "genai" for such a graph
                that onnxruntime-genai can run in any case: a model with sliding windows is exported again, with caches
                that hold every token. By default, graphs of operators that every runtime has.
            opset: ONNX opset; by default torch's own choice.
            weights: "int4" or "int8" to store weights in fewer bits, or a `Quantisation`, as for `to_onnx`.
            dtype: "float16" for graphs that compute in float16, as for `to_onnx`.
            accuracy: How far the quantised graph may be from the model, as for `to_onnx`.
            data: Further calls of the model, recorded by another observer, to include in the report.
            values: Also write the values of the calls, so that the folder can be proven without the model.
            verify: Prove the graphs, which needs memory for a second copy of the weights; a RuntimeWarning says so if
                the proof fails. If False, there is no report, and ``exportkit verify`` can prove the folder later.
            compared: Result of `compare_runs` for graphs of this export, to include as a row of the report.

        Raises:
            DestinationError: if the directory cannot be written, or holds something else.
            ExportError: if an operator cannot be translated.
            InvalidRequestError: if the runtime cannot run the model, its graphs cannot have the opset, or the weights
                cannot be quantised like this.
            InvalidTypeError: if ``compared`` is not a result of `compare_runs`.
            MissingPackageError: if the installed onnxruntime cannot run a graph that is made for it.
        """
        from exportkit.folder.folder import save_folder

        if not isinstance(compared, RunComparison | None):
            raise InvalidTypeError(
                "Expected the result of compare_runs.",
                where="compared",
                expected="the RunComparison that compare_runs returned",
                got=type(compared).__name__,
            )
        return OnnxModel.of(
            save_folder(
                self,
                directory,
                runtime=runtime,
                opset=opset,
                lossy=Lossy.of(weights, dtype, accuracy, observation_of(data)),
                given=given_calls(observation_of(data)),
                values=values,
                verify=verify,
                compared=None if compared is None else compared.row,
            )
        )

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Writes an HTML page with everything that is known about this export, including its proof.

        The graphs are written to a temporary folder and proven there. For a folder that `save` wrote already,
        ``exportkit report`` makes the same page without proving it again.

        Args:
            path: The file to write.

        Returns:
            The path.

        Raises:
            DestinationError: if it cannot be written.
            ExportError: if an operator cannot be translated.
        """
        from exportkit.folder.folder import save_folder
        from exportkit.report.export import export_page  # jinja2 is slow to import

        check_file(path)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / (self.observation.model_name if self.programs else "_".join(self.parts))
            save_folder(self, folder, values=False)
            return write_text(path, export_page(folder), "The page")


def _all_programs(exported: ExportedModel, name: str = "") -> Iterator[tuple[str, TracedProgram]]:
    for program, traced in exported.programs.items():
        yield ".".join(filter(None, (name, program))), traced
    for part, inner in exported.parts.items():
        yield from _all_programs(inner, ".".join(filter(None, (name, part))))


# Programs that travel: a ``.pt2`` file that torch alone reads, with tensors in and tensors out
#
# The program of an export takes the model's own arguments: caches and other classes, whose registration torch needs to
# read the file. Here they are flattened, and the file describes each tensor.


DESCRIPTION = "exportkit.json"  # the file inside of a .pt2 that says what the tensors are


def flat_program(traced: TracedProgram) -> torch.export.ExportedProgram:
    """Returns a program that takes the tensors of ``traced.input_paths``, and returns those of ``traced.output_paths``.

    It has no assertions about sizes: the domain says which there may be.
    """
    program = without_assertions(traced.program, about_values=False)
    module, signature = copied_module(program), program.graph_signature
    inputs, outputs, returned = [], [], []
    nodes = {node.name: node for node in module.graph.nodes}
    for spec in signature.input_specs:
        if spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, ConstantArgument):
            module.graph.erase_node(nodes[spec.arg.name])
        else:
            inputs.append(spec)
    output: Any = module.graph.output_node()
    for value, result in zip(output.args[0], signature.output_specs, strict=True):
        if result.kind is not OutputKind.USER_OUTPUT or isinstance(result.arg, TensorArgument):
            outputs.append(result)
            returned.append(value)
    output.args = (tuple(returned),)
    module.recompile()
    example, shapes = [], traced.plan.shapes(traced.sizes)
    for name, path in traced.paths_by_node.items():
        value = nodes[name].meta["val"]
        example.append(torch.zeros(shapes[path], dtype=value.dtype, device=value.device))
    flat = program_of(program, module.graph, inputs, outputs, example)
    ranges: dict[Any, tuple[int, int | None]] = {}
    axes = input_axes(program)
    for name, path in traced.paths_by_node.items():
        for symbol, size in zip(axes[name], traced.plan.by_path[path].sizes, strict=True):
            if size.variable is not None and symbol in program.range_constraints:
                ranges[symbol] = traced.domain.ranges[size.variable]
    return with_ranges(flat, ranges)


def _description(traced: TracedProgram) -> dict[str, Any]:
    """Returns what the tensors of a flat program are, as JSON data: paths, dtypes, axes, and the domain in words."""
    leaves, outputs = traced.plan.by_path, traced.outputs.tensors()
    inputs = [
        {"path": path, "dtype": leaves[path].dtype, "axes": [str(size) for size in leaves[path].sizes]}
        for path in traced.input_paths
    ]
    returned = [
        {"path": path, "dtype": dtype_name(outputs[path].dtype) if path in outputs else None}
        for path in traced.output_paths
    ]
    return {
        "model": traced.observation.model_name,
        "method": traced.method,
        "inputs": inputs,
        "outputs": returned,
        "constants": {constant.path: str(constant.value) for constant in traced.plan.constants},
        "limits": list(traced.domain.limits()),
    }


def write_flat_program(traced: TracedProgram, file: Path) -> None:
    """Writes a flat program, with its description in it."""
    extra = {DESCRIPTION: json.dumps(_description(traced), indent=1)}
    torch.export.save(flat_program(traced), file, extra_files=extra)
