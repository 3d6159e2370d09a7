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

from exportkit.divergence.graph_run import GraphRun, Node, Scope
from exportkit.errors import InvalidRequestError, InvalidTypeError, MissingPackageError, RuntimeFailure

if TYPE_CHECKING:
    import onnx

_PREFIX = "pkg.torch.onnx."
# What onnxruntime cannot hand out: these make sequences and optional values.
_NO_TENSOR = ("Sequence", "SplitToSequence", "Optional")
# What torch writes in place of a module for nodes that it made itself.
_NO_MODULE = "_empty_nn_module_stack"
_FOLDER = "session.model_external_initializers_file_folder_path"
_BFLOAT16 = 16  # TensorProto.BFLOAT16


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
        session = session_of(model.SerializeToString(), folder, optimised=False)
    finally:
        del model.graph.output[len(outputs) :]
    return GraphRun(nodes, {**inputs, **run_session(session, inputs)}, tuple(inputs), outputs)


def nodes_of(model: onnx.ModelProto) -> Iterable[Node]:
    """Returns the nodes of an ONNX model, with the modules that they come from."""
    return _nodes(model.graph)


def session_of(model: bytes, folder: Path | None, optimised: bool = True) -> Any:
    """Returns an onnxruntime session.

    Args:
        model: The serialised model.
        folder: Where its external weights are, if it has any.
        optimised: Whether onnxruntime may rewrite the graph.

    Raises:
        MissingPackageError: if onnxruntime is not installed.
        RuntimeFailure: if it cannot load the model.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingPackageError(
            "onnxruntime is not installed, so an ONNX model cannot be run.", hint='pip install "exportkit[runtime]"'
        ) from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what fails is raised, not printed
    options.intra_op_num_threads = torch.get_num_threads()
    if folder is not None:
        options.add_session_config_entry(_FOLDER, str(folder))
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_prepacking", "1")  # for one run it is not worth its time
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise RuntimeFailure("onnxruntime cannot load the model.", got=_first_line(error)) from error


def run_session(session: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the outputs by name.

    Args:
        session: The session.
        inputs: Tensors by name of the graph's input; others than those are left out.

    Raises:
        InvalidRequestError: if an input is missing.
        RuntimeFailure: if onnxruntime refuses the call.
    """
    names = [value.name for value in session.get_inputs()]
    missing = [name for name in names if name not in inputs]
    if missing:
        raise InvalidRequestError("The ONNX model needs another input.", where=missing[0], got=", ".join(inputs))
    outputs = [value.name for value in session.get_outputs()]
    try:
        results = session.run_with_ort_values(outputs, {name: _to_runtime(inputs[name]) for name in names})
    except Exception as error:
        shapes = ", ".join(f"{name} {tuple(inputs[name].shape)}" for name in names)
        raise RuntimeFailure("onnxruntime refused the call.", where=shapes, got=_first_line(error)) from error
    return {name: _to_torch(value) for name, value in zip(outputs, results, strict=True)}


def _nodes(graph: onnx.GraphProto) -> Iterable[Node]:
    fixed = {value.name for value in graph.initializer}
    metadata = [{entry.key: entry.value for entry in node.metadata_props} for node in graph.node]
    names = [_listed(entries.get(f"{_PREFIX}name_scopes")) for entries in metadata]
    last = {scopes[-1]: place for place, scopes in enumerate(names) if scopes}
    for place, (node, entries, scopes) in enumerate(zip(graph.node, metadata, names, strict=True)):
        classes = _listed(entries.get(f"{_PREFIX}class_hierarchy"))
        pairs = zip(scopes[:-1], classes, strict=False)
        outputs = tuple(name for name in node.output if name)
        yield Node(
            node.name or next(iter(outputs), ""),
            node.op_type,
            tuple(Scope(path, cls.rpartition(".")[2]) for path, cls in pairs if not path.startswith(_NO_MODULE)),
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


def _to_runtime(tensor: torch.Tensor) -> Any:
    import onnxruntime

    plain = tensor.detach().cpu().contiguous()
    if plain.dtype is torch.bfloat16:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(plain.view(torch.uint16).numpy(), _BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(plain.numpy())


def _to_torch(value: Any) -> torch.Tensor:
    if value.data_type() == "tensor(bfloat16)":
        return torch.utils.dlpack.from_dlpack(value).clone()
    return torch.from_numpy(value.numpy())


def _named(source: Any) -> str:
    return str(source) if isinstance(source, str | Path) else "serialised model"


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:500]


def graph_inputs(model: onnx.ModelProto) -> Sequence[str]:
    """Returns the names of the inputs that are no weights."""
    weights = {value.name for value in model.graph.initializer}
    return [value.name for value in model.graph.input if value.name not in weights]
