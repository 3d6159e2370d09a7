"""Takes the run-time assertions out of a traced program, which ONNX has no form for.

In comes a program; out goes one without the assertions and without what only they read, sharing its weights.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from exportkit._torch_compat.graph import is_assertion, schema_of, with_graph_module


def without_assertions(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program without assertions, or the program itself if it has none."""
    if not any(is_assertion(node) for node in program.graph.nodes):
        return program
    module = copy.deepcopy(program.graph_module)
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            _erase_assertions(part)
    return with_graph_module(program, module)


def _erase_assertions(module: torch.fx.GraphModule) -> None:
    feeders = []
    for node in reversed(list(module.graph.nodes)):
        if is_assertion(node):
            feeders += node.all_input_nodes
            module.graph.erase_node(node)
    gone: set[Any] = set()
    while feeders:
        node = feeders.pop()
        if node not in gone and _is_removable(node):
            feeders += node.all_input_nodes
            module.graph.erase_node(node)
            gone.add(node)
    module.recompile()


def _is_removable(node: torch.fx.Node) -> bool:
    """Whether a node only computes, for nobody. What writes in place has no users either, and must stay.

    Sizes stay as well: torch.fx keeps books on them, and a size that is not used costs nothing.
    """
    if node.op != "call_function" or node.users or node.is_impure():
        return False
    return not getattr(schema_of(node.target), "is_mutable", False) and "sym_size" not in str(node.target)
