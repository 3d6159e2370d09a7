"""Computes numbers that depend on nothing but constants, where ONNX has no operator for them.

In comes a program; out goes one with those numbers in the place of the operators, sharing its weights. An example is
the quantile of a normal distribution that a model looks up for a threshold: ``erfinv`` of a constant.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from exportkit._torch_compat.graph import schema_of, with_graph_module

_UNTRANSLATED = (torch.ops.aten.erfinv.default, torch.ops.aten.special_ndtri.default)


def with_constants(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program with such numbers, or the program itself if it has none."""
    if not any(node.target in _UNTRANSLATED for node in program.graph.nodes):
        return program
    module = copy.deepcopy(program.graph_module)
    known = _given(program, module.graph)
    for node in list(module.graph.nodes):
        if node.op == "call_function" and _depends_on(node, known):
            arguments, options = torch.fx.map_arg((node.args, node.kwargs), known.__getitem__)
            value = node.target(*arguments, **options)
            if isinstance(value, torch.Tensor):
                known[node] = value
                if node.target in _UNTRANSLATED and not value.ndim:
                    _put_number(module.graph, node, value)
    module.graph.eliminate_dead_code()
    module.recompile()
    return with_graph_module(program, module)


def _given(program: torch.export.ExportedProgram, graph: torch.fx.Graph) -> dict[torch.fx.Node, torch.Tensor]:
    """The constants that the model made itself, by their placeholder."""
    names = program.graph_signature.inputs_to_lifted_tensor_constants
    placeholders = [node for node in graph.nodes if node.op == "placeholder" and node.name in names]
    return {node: program.constants[names[node.name]] for node in placeholders}


def _depends_on(node: torch.fx.Node, known: dict[torch.fx.Node, Any]) -> bool:
    """Whether a node reads constants and nothing else, and neither writes nor draws random numbers."""
    if not node.all_input_nodes or any(other not in known for other in node.all_input_nodes):
        return False
    target: Any = node.target
    schema = schema_of(target)
    writes = schema is None or (schema.is_mutable and target is not torch.ops.aten.detach_.default)
    return not writes and torch.Tag.nondeterministic_seeded not in target.tags


def _put_number(graph: torch.fx.Graph, node: torch.fx.Node, value: torch.Tensor) -> None:
    with graph.inserting_before(node):
        number = graph.call_function(torch.ops.aten.full.default, ([], value.item()), {"dtype": value.dtype})
    number.meta = dict(node.meta)
    node.replace_all_uses_with(number)
    graph.erase_node(node)
