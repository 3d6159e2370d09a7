"""Runs a graph once, an ExportedProgram or an ONNX model, and holds its nodes and values: `GraphRun`.

The nodes of ONNX models that ``torch.onnx.export(dynamo=True)`` wrote name the modules that they belong to, in the
metadata ``pkg.torch.onnx.name_scopes``, ``class_hierarchy`` and ``stack_trace``.
"""

from __future__ import annotations

import ast
import functools
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.export.graph_signature import InputKind

from exportkit._torch_compat.graph import schema_of
from exportkit._torch_compat.pytree import tree_leaves
from exportkit.errors import InvalidRequestError, InvalidTypeError
from exportkit.rewrites.model_code import is_model_code, short_name
from exportkit.running.kernels import add_outputs
from exportkit.running.placement import Placement
from exportkit.running.program import run_nodes, tensors_by_node
from exportkit.running.protos import weights_of
from exportkit.running.session import Session
from exportkit.trees import registered_caches

if TYPE_CHECKING:
    import onnx

_STACK_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]+(?:\n(?P<code>[^\n]*))?')
_LONGEST_LINE = 100
_PREFIX = "pkg.torch.onnx."
# What torch writes in place of a module for nodes that it added itself.
_NO_MODULE = "_empty_nn_module_stack"


@dataclass(frozen=True)
class NodeScope:
    """A module that a node belongs to.

    Attributes:
        path: Its path in the model.
        class_name: Its class.
        call: Tells its calls apart; the same for all of them if the graph does not.
    """

    path: str
    class_name: str
    call: str = ""


@dataclass(frozen=True)
class GraphNode:
    """A node of a graph.

    Attributes:
        name: Its name; the name of its first value if it has none.
        operator: What it computes.
        scopes: The modules that it belongs to, outermost first; empty if these are not known.
        inputs: Names of the values that it takes.
        outputs: Names of the values that it returns.
        stack: The stack trace of the code that it comes from.
        torch_operator: The operator of the program's node that it was translated from, such as ``aten.mul.Tensor``.
        ends: Whether it returns what that node returns, and not an intermediate value.
    """

    name: str
    operator: str
    scopes: tuple[NodeScope, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    stack: str = ""
    torch_operator: str = ""
    ends: bool = True

    @property
    def line(self) -> str:
        """The line of the model's code that it comes from, such as ``model.py:12  x = self.linear(x)``, if known."""
        lines = [match for match in _STACK_LINE.finditer(self.stack) if is_model_code(match["file"])]
        if not lines:
            return ""
        last = lines[-1]
        code = (last["code"] or "").strip()[:_LONGEST_LINE]
        return f"{last['file']}:{last['line']}" + (f"  {code}" if code else "")


@dataclass(frozen=True)
class GraphRun:
    """A graph and the values of one run of it.

    Attributes:
        nodes: The nodes in an order in which they can run.
        values: Tensors by name; some may be missing.
        inputs: Names of the graph's inputs.
        outputs: Names of the graph's outputs, in order.
        numbers: Values that are not tensors, such as sizes, by name.
    """

    nodes: tuple[GraphNode, ...]
    values: Mapping[str, torch.Tensor]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    numbers: Mapping[str, Any] = field(default_factory=dict)
    _calls: dict[tuple[str, int], tuple[ModuleNodes, ...]] = field(default_factory=dict, init=False, repr=False)

    @functools.cached_property
    def makers(self) -> Mapping[str, GraphNode]:
        """The node that computes each value."""
        return {name: node for node in self.nodes for name in node.outputs}

    @functools.cached_property
    def _nodes_of(self) -> Mapping[str, Mapping[str, list[GraphNode]]]:
        """The nodes of each module, by its path and by its calls."""
        found: dict[str, dict[str, list[GraphNode]]] = defaultdict(lambda: defaultdict(list))
        for node in self.nodes:
            for scope in node.scopes:
                found[scope.path][scope.call].append(node)
        return found

    @functools.cached_property
    def _users(self) -> Mapping[str, list[int]]:
        users: dict[str, list[int]] = defaultdict(list)
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                users[name].append(id(node))
        return users

    @property
    def paths(self) -> frozenset[str]:
        """Paths of the modules that nodes belong to."""
        return frozenset(self._nodes_of)

    def calls_of(self, path: str, count: int) -> tuple[ModuleNodes, ...]:
        """Returns the nodes of a module for each of its calls; nothing if the calls cannot be told apart.

        Args:
            path: Path of the module.
            count: How many calls there are.
        """
        if (path, count) not in self._calls:
            parts = list(self._nodes_of.get(path, {}).values())
            if len(parts) == 1 and count > 1:
                parts = _told_apart(parts[0], path, count)
            found = [self._module_nodes(nodes) for nodes in parts] if len(parts) == count else []
            self._calls[path, count] = tuple(found)
        return self._calls[path, count]

    def _module_nodes(self, nodes: list[GraphNode]) -> ModuleNodes:
        own = {id(node) for node in nodes}
        made = {name: None for node in nodes for name in node.outputs}
        entering = {name: None for node in nodes for name in node.inputs if name not in made}
        leaving = [name for name in made if name in self.outputs or any(user not in own for user in self._users[name])]
        return ModuleNodes(tuple(nodes), tuple(entering), tuple(leaving))


@dataclass(frozen=True)
class ModuleNodes:
    """The nodes of a graph that a call of a module consists of.

    Attributes:
        nodes: The nodes.
        entering: Values that they take from outside, in the order in which they take them first.
        leaving: Values that they compute and that are used outside.
    """

    nodes: tuple[GraphNode, ...]
    entering: tuple[str, ...]
    leaving: tuple[str, ...]


def _told_apart(nodes: list[GraphNode], path: str, count: int) -> list[list[GraphNode]]:
    """The nodes of a module by its calls, where the graph does not tell: modules inside start over in each call."""
    runs: dict[str, list[GraphNode]] = defaultdict(list)  # the nodes with which runs of an innermost module begin
    before = ""
    for node in nodes:
        inner = node.scopes[-1].path
        if inner != before:
            runs[inner].append(node)
        before = inner
    beginnings = [starts for inner, starts in runs.items() if inner != path and len(starts) == count]
    if not beginnings:
        each, rest = divmod(len(nodes), count)
        return [nodes[i * each : (i + 1) * each] for i in range(count)] if each and not rest else [nodes]
    turns = {id(node): turn for starts in beginnings for turn, node in enumerate(starts)}
    parts: list[list[GraphNode]] = [[] for _ in range(count)]
    turn = 0
    for node in nodes:
        turn = max(turn, turns.get(id(node), turn))
        parts[turn].append(node)
    return parts


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
        for name, value in {**tensors_by_node(program), **inputs}.items()
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
    target, scopes = node.target, []
    for key, (path, cls) in (node.meta.get("nn_module_stack") or {}).items():
        scopes.append(NodeScope(path, short_name(cls), key.rpartition("@")[2] if "@" in key else ""))
    return GraphNode(
        node.name,
        target.__name__ if callable(target) and not hasattr(target, "overloadpacket") else str(target),
        tuple(scopes),
        tuple(source.name for source in node.all_input_nodes),
        (node.name,),
        node.meta.get("stack_trace") or "",
        str(target),
    )


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
        InvalidTypeError: for any other type.
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
        if isinstance(source, str | os.PathLike):
            return onnx.load(os.fspath(source), load_external_data=False), Path(source).absolute().parent
    except Exception as error:
        where = "serialised model" if isinstance(source, bytes) else str(source)
        raise InvalidRequestError("The ONNX model cannot be read.", where=where, got=error) from error
    raise InvalidTypeError(
        "Not an ONNX model.",
        expected="a path, a serialised model, a ModelProto, an ONNXProgram or an OnnxModel",
        got=type(source).__name__,
    )


def graph_inputs(model: onnx.ModelProto) -> list[str]:
    """Returns the names of the inputs that are not weights."""
    weights = weights_of(model.graph)
    return [value.name for value in model.graph.input if value.name not in weights]


def run_onnx(
    model: onnx.ModelProto,
    folder: Path | None,
    inputs: Mapping[str, torch.Tensor],
    placement: Placement | None,
) -> GraphRun:
    """Returns the values of one run, without optimisation, in one session that returns all of them.

    Args:
        model: The model; it is left as it is.
        folder: Where its external weights are, if it has any.
        inputs: Tensors by name of the graph's input.
        placement: What computes it; the CPU by default.

    Raises:
        RuntimeFailure: if onnxruntime refuses the model or the call.
    """
    outputs = tuple(value.name for value in model.graph.output)
    nodes = tuple(nodes_of(model))
    add_outputs(model)
    try:
        session = Session(model.SerializeToString(), folder, optimised=False, placement=placement)
    finally:
        del model.graph.output[len(outputs) :]
    return GraphRun(nodes, {**inputs, **session.run(inputs)}, tuple(inputs), outputs)


def nodes_of(model: onnx.ModelProto) -> Iterator[GraphNode]:
    """Yields the nodes of an ONNX model, with the modules that they come from."""
    graph = model.graph
    fixed = weights_of(graph)
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
