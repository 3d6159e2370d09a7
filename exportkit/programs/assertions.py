"""Takes the run-time assertions out of a traced program, which ONNX has no form for.

In comes a program; out goes one without the assertions and without what only they read, sharing its weights.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from exportkit import _torch_compat

_ASSERTIONS = (
    "_assert_scalar", "_assert_tensor_metadata", "_assert_async", "sym_constrain_range", "sym_constrain_range_for_size",
)  # fmt: skip


def without_assertions(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program without assertions, or the program itself if it has none."""
    if not any(is_assertion(node) for node in program.graph.nodes):
        return program
    module = copy.deepcopy(program.graph_module)
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            _erase_assertions(part)
    return _torch_compat.with_graph_module(program, module)


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


def is_assertion(node: torch.fx.Node) -> bool:
    """Returns whether a node only asserts something."""
    return node.op == "call_function" and getattr(node.target, "_opname", None) in _ASSERTIONS


def _is_removable(node: torch.fx.Node) -> bool:
    """Whether a node only computes, for nobody. What writes in place has no users either, and must stay.

    Sizes stay as well: torch.fx keeps books on them, and a size that is not used costs nothing.
    """
    if node.op != "call_function" or node.users or node.is_impure():
        return False
    schema = getattr(node.target, "_schema", None)
    return not getattr(schema, "is_mutable", False) and "sym_size" not in str(node.target)
