"""Programs that travel: a ``.pt2`` file that torch alone reads, with tensors in and tensors out.

The program of an export takes the model's own arguments: caches and other classes, whose registration torch needs to
read the file. Here they are flat, and what each tensor is is written into the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument

from exportkit._torch_compat.graph import copied_module, program_of
from exportkit._torch_compat.symbolic_shapes import input_axes, with_ranges
from exportkit.onnx_files.preparation import without_assertions
from exportkit.programs.program import TracedProgram
from exportkit.trees.tree import dtype_name

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


def described(traced: TracedProgram) -> dict[str, Any]:
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
    extra = {DESCRIPTION: json.dumps(described(traced), indent=1)}
    torch.export.save(flat_program(traced), file, extra_files=extra)
