"""Writes the programs of an export, and of its parts, as ONNX files."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from exportkit.errors import ExportError, InvalidTypeError
from exportkit.onnx_files.contract import Contract, Runtime
from exportkit.onnx_files.graph import OnnxGraph
from exportkit.onnx_files.runner import OnnxRunner
from exportkit.onnx_files.translate import fused_opset, translate
from exportkit.programs.exported import ExportedModel
from exportkit.programs.failure import explained
from exportkit.programs.program import TracedProgram
from exportkit.programs.search import after_failed_translation
from exportkit.programs.stages import TRANSLATION_PER_TRACE, stage
from exportkit.programs.strategies import Attempt
from exportkit.running.eager import autocast


def write_graphs(
    exported: ExportedModel,
    file_of: Callable[[str, str], Path],
    opset: int | None = None,
    runtime: Runtime | None = None,
    branches: bool = True,
) -> OnnxRunner:
    """Writes the programs of an export and of its parts as ONNX, and returns them as something to call.

    Args:
        exported: The export.
        file_of: Returns the file for the name of a program and the name of the part that it belongs to; both are empty
            for the usual case.
        opset: ONNX opset; by default torch's own choice.
        runtime: What the graphs are fused for; None for graphs of operators that every runtime has.
        branches: Whether nodes that only one branch needs are moved into an ONNX ``If``, which is not quantised.

    Raises:
        ExportError: if an operator cannot be translated.
        InvalidRequestError: if a fused graph cannot have the opset.
        InvalidTypeError: if the opset is not an integer.
        MissingPackageError: if the installed onnxruntime cannot run fused graphs.
    """
    if opset is not None and type(opset) is not int:
        raise InvalidTypeError("The opset must be an integer.", where="opset", expected="an int", got=repr(opset))
    if runtime is not None:
        opset = fused_opset(opset)
    programs, graphs, attempts = {}, {}, [*exported.attempts]
    for name, traced in exported.programs.items():
        programs[name], contract, more = _written(traced, file_of(name, ""), opset, runtime, branches)
        attempts += more
        graphs[name] = OnnxGraph(contract, programs[name].observation, programs[name])
    runners, parts = {}, {}
    for name, part in exported.parts.items():
        runners[name] = write_graphs(
            part, functools.partial(lambda part, program, _: file_of(program, part), name), opset, runtime, branches
        )
        parts[name] = runners[name].exported or part
    written = replace(exported, programs=programs, parts=parts, attempts=tuple(attempts))
    return OnnxRunner(
        graphs, runners, exported.edges, split=exported.split, attempts=written.attempts, exported=written
    )


def _written(
    traced: TracedProgram, path: Path, opset: int | None, runtime: Runtime | None, branches: bool
) -> tuple[TracedProgram, Contract, tuple[Attempt, ...]]:
    """The program that could be translated, its contract, and what else was tried."""
    about = TRANSLATION_PER_TRACE * traced.seconds.get("export", 0.0) or None
    with explained(lambda: traced.request(onnx=True)), stage("onnx", traced.seconds, about), autocast(()):
        try:
            return traced, translate(traced, path, opset, runtime, branches), ()
        except ExportError:
            again = after_failed_translation(traced)
            if again is not None:
                program, attempts = again
                with contextlib.suppress(ExportError):  # the first error is the one to report
                    return program, translate(program, path, opset, runtime, branches), attempts
            raise
