"""Runs an ONNX model once with its values in between as outputs. In come its inputs; out goes a `GraphRun`.

Nodes that ``torch.onnx.export(dynamo=True)`` wrote carry the modules that they belong to: name_scopes, class_hierarchy,
fx_node and stack_trace, each under ``pkg.torch.onnx.``.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from exportkit.divergence.graph_run import GraphNode, GraphRun, NodeScope
from exportkit.errors import InvalidRequestError, InvalidTypeError
from exportkit.running.session import Session

if TYPE_CHECKING:
    import onnx

_PREFIX = "pkg.torch.onnx."
# What onnxruntime cannot hand out: these make sequences and optional values.
_NO_TENSOR = ("Sequence", "SplitToSequence", "Optional")
# What torch writes in place of a module for nodes that it made itself.
_NO_MODULE = "_empty_nn_module_stack"


def read_onnx(source: Any) -> tuple[onnx.ModelProto, Path | None]:
    """Returns an ONNX model without its external weights, and the folder where these are.

    Args:
        source: Path, serialised model, ModelProto, or anything with a ``model_proto``, such as an ONNXProgram.

    Raises:
        InvalidTypeError: if it is none of these.
        InvalidRequestError: if the file is missing, or no ONNX model.
    """
    import onnx

    proto = getattr(source, "model_proto", source)
    if isinstance(proto, onnx.ModelProto):
        return proto, None
    try:
        if isinstance(proto, bytes):
            return onnx.load_from_string(proto), None
        if isinstance(proto, str | Path):
            return onnx.load(str(proto), load_external_data=False), Path(proto).absolute().parent
    except Exception as error:
        raise InvalidRequestError("This is no ONNX model that can be read.", where=_named(proto), got=error) from error
    raise InvalidTypeError(
        "This is no ONNX model.", expected="a path, a ModelProto, an ONNXProgram or an OnnxModel", got=type(source)
    )


def run_onnx(model: onnx.ModelProto, folder: Path | None, inputs: Mapping[str, torch.Tensor]) -> GraphRun:
    """Returns the values of one run, without optimisations, in one session with all of them as outputs.

    Args:
        model: The model; it is left as it is.
        folder: Where its external weights are, if it has any.
        inputs: Tensors by name of the graph's input.

    Raises:
        RuntimeFailure: if onnxruntime refuses the model or the call.
    """
    outputs = tuple(value.name for value in model.graph.output)
    nodes = tuple(_nodes(model.graph))
    wanted = _tensors(model.graph, set(outputs))
    for name in wanted:
        model.graph.output.add().name = name
    try:
        session = Session(model.SerializeToString(), folder, optimised=False)
    finally:
        del model.graph.output[len(outputs) :]
    return GraphRun(nodes, {**inputs, **session.run(inputs)}, tuple(inputs), outputs)


def nodes_of(model: onnx.ModelProto) -> Iterable[GraphNode]:
    """Returns the nodes of an ONNX model, with the modules that they come from."""
    return _nodes(model.graph)


def _nodes(graph: onnx.GraphProto) -> Iterable[GraphNode]:
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


def _tensors(graph: onnx.GraphProto, outputs: set[str]) -> list[str]:
    """Names of the values in between that onnxruntime can hand out."""
    nodes = [node for node in graph.node if not node.op_type.startswith(_NO_TENSOR)]
    return [name for node in nodes for name in node.output if name and name not in outputs]


def _named(source: Any) -> str:
    return str(source) if isinstance(source, str | Path) else "serialised model"


def graph_inputs(model: onnx.ModelProto) -> Sequence[str]:
    """Returns the names of the inputs that are no weights."""
    weights = {value.name for value in model.graph.initializer}
    return [value.name for value in model.graph.input if value.name not in weights]
