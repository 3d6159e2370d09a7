"""Runs a graph once, an ExportedProgram or an ONNX model, and keeps its intermediate values.

The nodes of ONNX models that ``torch.onnx.export(dynamo=True)`` wrote name the modules that they belong to, in the
metadata ``pkg.torch.onnx.name_scopes``, ``class_hierarchy`` and ``stack_trace``.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.export.graph_signature import InputKind

from exportkit._torch_compat.graph import schema_of
from exportkit._torch_compat.pytree import tree_leaves
from exportkit.divergence.graph_run import GraphNode, GraphRun, NodeScope
from exportkit.errors import InvalidRequestError, InvalidTypeError
from exportkit.running.program import run_nodes, state_of
from exportkit.running.session import Session
from exportkit.trees import registered_caches

if TYPE_CHECKING:
    import onnx

_PREFIX = "pkg.torch.onnx."
# Operators whose outputs are sequences and optional values, which onnxruntime cannot return.
_NO_TENSOR = ("Sequence", "SplitToSequence", "Optional")
# What torch writes in place of a module for nodes that it added itself.
_NO_MODULE = "_empty_nn_module_stack"


def run_program(program: torch.export.ExportedProgram, inputs: Mapping[str, Any]) -> GraphRun:
    """Returns the values of all nodes of a program.

    Args:
        program: The program.
        inputs: Values by name of the node that stands for the input.

    Raises:
        InvalidRequestError: if an input that the program uses is missing.
    """
    graph = program.graph_module.graph
    given = {
        # Parameters are not copied: a program writes into buffers and inputs only.
        name: value.detach().clone()
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
        else value
        for name, value in {**state_of(program), **inputs}.items()
    }
    for node in graph.nodes:
        if node.op == "placeholder" and node.name not in given and node.users:
            raise InvalidRequestError(
                "The program needs an input that was not given.", where=node.name, got=", ".join(inputs) or "nothing"
            )
    # Where a node writes into a tensor, values are copied before that happens.
    writes = any(getattr(schema_of(node.target), "is_mutable", False) for node in graph.nodes)
    values: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}

    def keep(node: torch.fx.Node, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            values[node.name] = value.clone() if writes else value
        elif isinstance(value, bool | int | float):
            numbers[node.name] = value

    run_nodes(program, given, keep)
    nodes = tuple(
        _program_node(node) for node in graph.nodes if node.op in ("call_function", "call_module", "get_attr")
    )
    outputs = tuple(name for name in program.graph_signature.user_outputs if isinstance(name, str))
    return GraphRun(nodes, values, tuple(inputs), outputs, numbers)


def _program_node(node: torch.fx.Node) -> GraphNode:
    target, stack = node.target, (node.meta.get("nn_module_stack") or {}).items()
    scopes = [
        NodeScope(path, _class_name(cls), key.rpartition("@")[2] if "@" in key else "") for key, (path, cls) in stack
    ]
    return GraphNode(
        node.name,
        target.__name__ if callable(target) and not hasattr(target, "overloadpacket") else str(target),
        tuple(scopes),
        tuple(source.name for source in node.all_input_nodes),
        (node.name,),
        node.meta.get("stack_trace") or "",
        str(target),
    )


def _class_name(cls: Any) -> str:
    return cls.__name__ if isinstance(cls, type) else str(cls).rpartition(".")[2]


def program_inputs(
    program: torch.export.ExportedProgram, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the values of arguments by name of the node that stands for each.

    Args:
        program: The program.
        args: Positional arguments, as the model takes them.
        kwargs: Named arguments.

    Raises:
        InvalidRequestError: if the arguments are nested differently from those that the program was traced with.
    """
    order = program.call_spec.in_spec.children()[1].context or [] if program.call_spec.in_spec else []
    ordered = {name: kwargs[name] for name in order if name in kwargs} if set(order) == set(kwargs) else dict(kwargs)
    with registered_caches():
        leaves = tree_leaves((tuple(args), ordered))
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    if len(leaves) != len(specs):
        raise InvalidRequestError(
            "The arguments do not fit the program.",
            expected=f"{len(specs)} leaves",
            got=f"{len(leaves)} leaves",
            hint="give the arguments that the program was traced with, with other values.",
        )
    return {spec.arg.name: leaf for spec, leaf in zip(specs, leaves, strict=True)}


def read_onnx(source: Any) -> tuple[onnx.ModelProto, Path | None]:
    """Returns an ONNX model without its external weights, and the folder where these are.

    Args:
        source: Path, serialised model, ModelProto, or ONNXProgram.

    Raises:
        InvalidTypeError: if it is none of these.
        InvalidRequestError: if the file is missing, or not an ONNX model.
    """
    import onnx

    if isinstance(source, torch.onnx.ONNXProgram):
        return source.model_proto, None
    if isinstance(source, onnx.ModelProto):
        return source, None
    try:
        if isinstance(source, bytes):
            return onnx.load_from_string(source), None
        if isinstance(source, str | Path):
            return onnx.load(str(source), load_external_data=False), Path(source).absolute().parent
    except Exception as error:
        where = "serialised model" if isinstance(source, bytes) else str(source)
        raise InvalidRequestError("The ONNX model cannot be read.", where=where, got=error) from error
    raise InvalidTypeError(
        "Not an ONNX model.", expected="a path, a ModelProto, an ONNXProgram or an OnnxModel", got=type(source)
    )


def graph_inputs(model: onnx.ModelProto) -> list[str]:
    """Returns the names of the inputs that are not weights."""
    weights = {value.name for value in model.graph.initializer}
    return [value.name for value in model.graph.input if value.name not in weights]


def run_onnx(model: onnx.ModelProto, folder: Path | None, inputs: Mapping[str, torch.Tensor]) -> GraphRun:
    """Returns the values of one run, without optimisation, in one session that returns all of them.

    Args:
        model: The model; it is left as it is.
        folder: Where its external weights are, if it has any.
        inputs: Tensors by name of the graph's input.

    Raises:
        RuntimeFailure: if onnxruntime refuses the model or the call.
    """
    outputs = tuple(value.name for value in model.graph.output)
    nodes = tuple(nodes_of(model))
    for node in model.graph.node:
        if not node.op_type.startswith(_NO_TENSOR):
            for name in node.output:
                if name and name not in outputs:
                    model.graph.output.add().name = name
    try:
        session = Session(model.SerializeToString(), folder, optimised=False)
    finally:
        del model.graph.output[len(outputs) :]
    return GraphRun(nodes, {**inputs, **session.run(inputs)}, tuple(inputs), outputs)


def nodes_of(model: onnx.ModelProto) -> Iterator[GraphNode]:
    """Yields the nodes of an ONNX model, with the modules that they come from."""
    graph = model.graph
    fixed = {value.name for value in graph.initializer}
    metadata = [{entry.key: entry.value for entry in node.metadata_props} for node in graph.node]
    names = [_listed(entries.get(f"{_PREFIX}name_scopes")) for entries in metadata]
    last = {scopes[-1]: place for place, scopes in enumerate(names) if scopes}
    for place, (node, entries, scopes) in enumerate(zip(graph.node, metadata, names, strict=True)):
        classes = _listed(entries.get(f"{_PREFIX}class_hierarchy"))
        pairs = zip(scopes[:-1], classes, strict=False)
        outputs = tuple(name for name in node.output if name)
        yield GraphNode(
            node.name or next(iter(outputs), ""),
            node.op_type,
            tuple(NodeScope(path, cls.rpartition(".")[2]) for path, cls in pairs if not path.startswith(_NO_MODULE)),
            tuple(name for name in node.input if name and name not in fixed),
            outputs,
            entries.get(f"{_PREFIX}stack_trace", ""),
            classes[-1] if classes else "",
            bool(scopes) and last[scopes[-1]] == place,
        )


@functools.lru_cache(maxsize=4096)  # many nodes are of one module
def _listed(text: str | None) -> tuple[str, ...]:
    try:
        return tuple(ast.literal_eval(text)) if text else ()
    except (ValueError, SyntaxError):
        return ()
