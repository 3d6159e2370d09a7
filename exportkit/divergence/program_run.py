"""Runs an ExportedProgram node by node. In come its inputs; out goes a `GraphRun` with the value of every node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export.graph_signature import InputKind

from exportkit._torch_compat.graph import schema_of
from exportkit._torch_compat.pytree import tree_leaves
from exportkit.divergence.graph_run import GraphNode, GraphRun, NodeScope
from exportkit.errors import InvalidRequestError
from exportkit.running.program import run_nodes, state_of
from exportkit.trees import registered_caches


def run_program(program: torch.export.ExportedProgram, inputs: Mapping[str, Any]) -> GraphRun:
    """Returns the values of all nodes.

    Args:
        program: The program.
        inputs: Values by name of the node that stands for the input.

    Raises:
        InvalidRequestError: if an input that the program uses is missing.
    """
    graph = program.graph_module.graph
    given = {name: _copied(value) for name, value in {**state_of(program), **inputs}.items()}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    missing = [node.name for node in placeholders if node.name not in given and node.users]
    if missing:
        raise InvalidRequestError(
            "The program needs an input that was not given.", where=missing[0], got=", ".join(inputs) or "nothing"
        )
    copies = _writes(graph)
    values: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}

    def keep(node: torch.fx.Node, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            values[node.name] = value.clone() if copies else value
        elif isinstance(value, bool | int | float):
            numbers[node.name] = value

    run_nodes(program, given, keep)
    nodes = tuple(_node(node) for node in graph.nodes if node.op in ("call_function", "call_module", "get_attr"))
    return GraphRun(nodes, values, tuple(inputs), _outputs(program), numbers)


def program_inputs(
    program: torch.export.ExportedProgram, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the values of arguments by name of the node that stands for each.

    Args:
        program: The program.
        args: Positional arguments, as the model takes them.
        kwargs: Those by name.

    Raises:
        InvalidRequestError: if the arguments are nested in another way than those that the program was traced with.
    """
    order = program.call_spec.in_spec.children()[1].context or [] if program.call_spec.in_spec else []
    ordered = {name: kwargs[name] for name in order if name in kwargs} if set(order) == set(kwargs) else dict(kwargs)
    with registered_caches():
        leaves = tree_leaves((tuple(args), ordered))
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    if len(leaves) != len(specs):
        raise InvalidRequestError(
            "The arguments do not fit the program.", expected=f"{len(specs)} leaves", got=f"{len(leaves)} leaves",
            hint="give the arguments that the program was traced with, with other values.",
        )  # fmt: skip
    return {spec.arg.name: leaf for spec, leaf in zip(specs, leaves, strict=True)}


def _copied(value: Any) -> Any:
    return (
        value.detach().clone()
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
        else value
    )


def _writes(graph: torch.fx.Graph) -> bool:
    """Whether a node changes a tensor in place, so that values must be copied before that happens."""
    return any(getattr(schema_of(node.target), "is_mutable", False) for node in graph.nodes)


def _outputs(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    return tuple(name for name in program.graph_signature.user_outputs if isinstance(name, str))


def _node(node: torch.fx.Node) -> GraphNode:
    inputs = tuple(source.name for source in node.all_input_nodes)
    stack = node.meta.get("stack_trace") or ""
    return GraphNode(node.name, _operator(node), _scopes(node), inputs, (node.name,), stack, str(node.target))


def _operator(node: torch.fx.Node) -> str:
    return (
        str(node.target)
        if not callable(node.target) or hasattr(node.target, "overloadpacket")
        else node.target.__name__
    )


def _scopes(node: torch.fx.Node) -> tuple[NodeScope, ...]:
    found = (node.meta.get("nn_module_stack") or {}).items()
    return tuple(
        NodeScope(path, _class_name(cls), key.rpartition("@")[2] if "@" in key else "") for key, (path, cls) in found
    )


def _class_name(cls: Any) -> str:
    return cls.__name__ if isinstance(cls, type) else str(cls).rpartition(".")[2]
