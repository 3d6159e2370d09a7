"""Translates a captured program to an ONNX file whose inputs, outputs and axes carry the names of the plan."""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from exportkit._torch_compat.graph import with_graph_module
from exportkit._torch_compat.onnx import exact_no_ops, quiet_onnx_export
from exportkit._torch_compat.symbolic_shapes import stored_sizes
from exportkit.errors import DestinationError, ExportError
from exportkit.onnx_files.complex_pairs import with_complex_as_pairs
from exportkit.onnx_files.constants import with_constants
from exportkit.onnx_files.names import input_names, output_names
from exportkit.onnx_files.onnx_forms import with_onnx_forms
from exportkit.overrides import replaced_attributes
from exportkit.plan.plan import Plan
from exportkit.programs.assertions import without_assertions
from exportkit.programs.program import Captured, without_gradients
from exportkit.rewrites.library import library_translations, operators_at_any_length
from exportkit.rewrites.table import LIBRARY_PATCHES, applied
from exportkit.running.program import tensor_placeholders
from exportkit.trees import registered_caches

if TYPE_CHECKING:
    import onnx_ir

_SYMBOL = re.compile(r"\b[su]\d+\b")


@dataclass(frozen=True)
class OnnxFile:
    """An ONNX file on disk.

    Attributes:
        path: The file; weights are beside it in ``<name>.data``.
        inputs: Path of the leaf by name of the graph's input, in order. Inputs that the model ignores are not there.
        outputs: Path of the leaf by name of the graph's output, in order.
        output_axes: Names or sizes of the axes of each output, by path of its leaf.
    """

    path: Path
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    output_axes: Mapping[str, tuple[str | int, ...]]


def check_destination(path: str | os.PathLike[str]) -> Path:
    """Returns the path as one that a file can be written to.

    Raises:
        DestinationError: if it cannot.
    """
    target = Path(path)
    if target.is_dir():
        raise DestinationError(
            "An ONNX file cannot be written over a directory.", where=str(target), hint=f"{target / 'model.onnx'}"
        )
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise DestinationError("This path cannot be written to.", where=str(target), got=f"{parent} is a file")
    if not os.access(parent, os.W_OK):
        raise DestinationError("This path cannot be written to.", where=str(target), got=f"{parent} is not writable")
    return target


def translate(captured: Captured, plan: Plan, path: Path, opset: int | None = None) -> OnnxFile:
    """Writes the program as ONNX, weights as external data, and returns what is in the file.

    Args:
        captured: The program.
        plan: Names for the axes.
        path: Where to write.
        opset: ONNX opset; by default torch's own choice.

    Raises:
        ExportError: if an operator cannot be translated.
    """
    try:
        program = _translated(captured, opset, LIBRARY_PATCHES.name in captured.rules)
    except Exception as error:
        raise ExportError(
            "The program could not be translated to ONNX.",
            got=_summary(error),
            hint="the full message of torch.onnx is the cause of this exception (__cause__).",
        ) from error
    if program is None:
        raise ExportError("torch.onnx returned no program.", hint="this is a bug: please report it.")
    _check_opset(program.model, opset)
    inputs, outputs = _name_values(program.model.graph, captured)
    _name_axes(program.model, _axis_names(captured, plan))
    axes = {
        path: tuple(_axis(dim) for dim in value.shape or ())
        for path, value in zip(outputs.values(), program.model.graph.outputs, strict=True)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    program.save(path, external_data=True)
    return OnnxFile(path, inputs, outputs, axes)


def _translated(captured: Captured, opset: int | None, with_library: bool) -> torch.onnx.ONNXProgram | None:
    """The program in ONNX; for one traced with transformers' patches, with its translations too."""
    extra = library_translations() if with_library else None
    parameters = captured.program.parameters()
    with (
        quiet_onnx_export(),
        registered_caches(),
        without_gradients(parameters),
        operators_at_any_length(),
        contextlib.ExitStack() as stack,
    ):
        for constant, exact in exact_no_ops():  # else the epsilon of a norm may be left out
            stack.enter_context(replaced_attributes(constant, exact))
        source = with_onnx_forms(with_complex_as_pairs(with_constants(without_assertions(captured.program))))
        if extra is None:
            return torch.onnx.export(source, (), verbose=False, opset_version=opset)
        stack.enter_context(applied([LIBRARY_PATCHES], torch.nn.Module()))
        source = with_graph_module(source, copy.deepcopy(source.graph_module))
        extra.fix_nodes(source.graph_module)
        program = torch.onnx.export(
            source, (), verbose=False, opset_version=opset, custom_translation_table=dict(extra.table)
        )
        extra.fix_program(program)
        return program


def _check_opset(model: onnx_ir.Model, wanted: int | None) -> None:
    written = model.opset_imports.get("")
    if wanted is not None and written != wanted:
        raise ExportError(
            "torch.onnx cannot write this opset.",
            expected=f"opset {wanted}",
            got=f"opset {written}",
            hint="choose another one, or leave it out: torch then takes the one it knows best.",
        )


def _summary(error: Exception) -> str:
    """The part of torch.onnx's message that names the operator, without its colours and advice."""
    text = re.sub(r"\x1b?\[\d+m", "", str(error))
    cause = text.partition("## Exception summary")[2].partition("(Refer to")[0] or text
    return " ".join(cause.split())[:500]


def _name_values(graph: onnx_ir.Graph, captured: Captured) -> tuple[dict[str, str], dict[str, str]]:
    given = {value.name: value for value in graph.inputs}
    tensors = tensor_placeholders(captured.program)
    names = input_names(captured.input_paths)
    inputs = {}
    for placeholder, path, name in zip(tensors, captured.input_paths, names, strict=True):
        if placeholder in given:
            given[placeholder].name = name
            inputs[name] = path
    if len(graph.outputs) != len(captured.output_paths):
        raise ExportError(
            "The ONNX graph returns another number of tensors than the model.",
            expected=len(captured.output_paths),
            got=len(graph.outputs),
        )
    outputs = dict(zip(output_names(captured.output_paths, inputs), captured.output_paths, strict=True))
    for value, name in zip(graph.outputs, outputs, strict=True):
        value.name = name
    return inputs, outputs


def _axis_names(captured: Captured, plan: Plan) -> dict[str, str]:
    """What torch's symbols (``s27``) are in the plan; plain variables win over sums."""
    sizes = stored_sizes(captured.program)
    names: dict[str, str] = {}
    found = [
        (symbol, size)
        for placeholder, path in zip(tensor_placeholders(captured.program), captured.input_paths, strict=True)
        for symbol, size in zip(sizes[placeholder], plan.by_path[path].sizes, strict=True)
        if isinstance(symbol, str) and _SYMBOL.fullmatch(symbol)
    ]
    for symbol, size in sorted(found, key=lambda pair: pair[1].variable is None):
        names.setdefault(symbol, str(size))
    return names


def _name_axes(model: onnx_ir.Model, names: Mapping[str, str]) -> None:
    import onnx_ir

    for value in _values(model):
        if value.shape is None:
            continue
        dims = [_renamed(dim.value, names) if isinstance(dim, onnx_ir.SymbolicDim) else dim for dim in value.shape]
        if any(isinstance(dim, onnx_ir.SymbolicDim) for dim in value.shape):
            value.shape = onnx_ir.Shape(dims)


def _renamed(expression: str | None, names: Mapping[str, str]) -> str | None:
    if expression is None:
        return None
    if expression in names:
        return names[expression]
    return _SYMBOL.sub(lambda m: f"({n})" if " " in (n := names.get(m[0], m[0])) else n, expression)


def _values(model: onnx_ir.Model) -> Iterator[Any]:
    yield from model.graph.inputs
    for node in model.graph.all_nodes():
        yield from node.outputs


def _axis(dim: Any) -> str | int:
    return dim if isinstance(dim, int) else str(dim.value)
