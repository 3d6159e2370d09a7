"""Finds layers of a traced program that are alike: those that call the same operators in the same way.

Two layers are alike if they call the same operators with the same constants on tensors of the same dtypes, shapes and
strides, where sizes may have other names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from exportkit._torch_compat.graph import written_tensors
from exportkit._torch_compat.symbolic_shapes import SYMBOLIC, traced_expression
from exportkit.programs.copied_layers import SIZE

Node = torch.fx.Node
_MEMBER = re.compile(r"(?:.*?\.)?\d+")


class NotRepeated(Exception):
    """The program has no layers that can be translated once."""


@dataclass(eq=False)
class Layer:
    """The nodes of one layer.

    Attributes:
        path: The module.
        nodes: Its nodes, in order; sizes that are computed from the sizes of inputs are part of no layer.
        key: What layers of one kind have in common.
        given: Nodes outside of the layer that it reads, in order of first use.
        symbols: The symbols of its sizes, in order of first use.
    """

    path: str
    nodes: list[Node]
    key: tuple[Any, ...] = ()
    given: list[Node] = field(default_factory=list)
    symbols: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class LayerKind:
    """Layers that are alike.

    Attributes:
        layers: The layers; the first one is translated.
        own: Places in `given` of what differs between the layers, with the inputs of the reduced program for them.
        results: Places in `nodes` of what is read outside of a layer.
    """

    layers: list[Layer]
    own: dict[int, Node] = field(default_factory=dict)
    results: list[int] = field(default_factory=list)

    @property
    def first(self) -> Layer:
        """The layer that is translated."""
        return self.layers[0]

    @cached_property
    def own_symbols(self) -> set[Any]:
        """Symbols of the first layer that have different names in another layer."""
        rows = zip(*(layer.symbols for layer in self.layers), strict=True)
        return {row[0] for row in rows if any(symbol != row[0] for symbol in row)}


class LikeLayers:
    """The layers of a program that occur more than once.

    Args:
        program: The program, without assertions.
        zeros: The symbols that may be 0 together; layers are of one kind only if theirs may be.

    Attributes:
        kinds: The kinds, each with at least two layers.
        owner: For each node of these layers its kind, its layer and its place there.
        sizes: The nodes that compute sizes from the sizes of inputs. They are part of no layer, as torch shares them.

    Raises:
        NotRepeated: if no two layers are alike, or if a layer writes to a tensor that is read elsewhere.
    """

    def __init__(self, program: torch.export.ExportedProgram, zeros: Sequence[Mapping[Any, int]]) -> None:
        self.sizes = _sizes_of_inputs(program.graph)
        self.kinds = _kinds(program, self.sizes, zeros)
        self.owner = {
            node: (kind, layer, place)
            for kind in self.kinds
            for layer in kind.layers
            for place, node in enumerate(layer.nodes)
        }
        _require_writes_inside(program.graph, self.layer_of)
        for kind in self.kinds:
            read = {place for layer in kind.layers for place, node in enumerate(layer.nodes) if self._is_result(node)}
            kind.results = sorted(read)
            require_tensors(kind.first.nodes[place] for place in kind.results)

    def layer_of(self, node: Node) -> Layer | None:
        """Returns the layer that a node is part of, if it is one of these layers."""
        return self.owner[node][1] if node in self.owner else None

    def _is_result(self, node: Node) -> bool:
        return any(self.layer_of(user) is not self.layer_of(node) for user in node.users)


def _sizes_of_inputs(graph: torch.fx.Graph) -> set[Node]:
    """Nodes that compute sizes from the sizes of inputs: torch shares them among layers."""
    found: set[Node] = set()
    for node in graph.nodes:
        read = node.all_input_nodes
        if not isinstance(node.meta.get("val"), SYMBOLIC):
            continue
        is_input = node.op == "placeholder" or (node.target is SIZE and read[0].op == "placeholder")
        if is_input or (node.op == "call_function" and read and all(other in found for other in read)):
            found.add(node)
    return found


def require_tensors(nodes: Iterable[Node]) -> None:
    """Checks that nodes are tensors of real numbers: ONNX has nothing else as an input or output of a graph.

    Raises:
        NotRepeated: if one is not.
    """
    values = [node.meta.get("val") for node in nodes]
    if not all(isinstance(value, torch.Tensor) and not value.is_complex() for value in values):
        raise NotRepeated


def _kinds(
    program: torch.export.ExportedProgram, sizes: set[Node], zeros: Sequence[Mapping[Any, int]]
) -> list[LayerKind]:
    layers: dict[str, Layer] = {}
    for node in program.graph.nodes:
        path = _layer_path(node)
        if node.op not in ("placeholder", "output") and node not in sizes and path is not None:
            layers.setdefault(path, Layer(path, [])).nodes.append(node)
    kinds: dict[tuple[Any, ...], list[Layer]] = {}
    for layer in layers.values():
        described = _Description(program.graph_module, layer.nodes, sizes)
        limits = tuple(
            (str(program.range_constraints.get(symbol)), *(symbol in pattern for pattern in zeros))
            for symbol in described.symbols
        )
        layer.key, layer.given = (described.rows, limits), described.given
        layer.symbols = list(described.symbols)
        kinds.setdefault(layer.key, []).append(layer)
    found = [LayerKind(alike) for alike in kinds.values() if len(alike) > 1]
    if not found:
        raise NotRepeated
    return found


def _layer_path(node: Node) -> str | None:
    """The outermost module with a number for its name."""
    paths = (path for path, _ in (node.meta.get("nn_module_stack") or {}).values())
    return next(filter(_MEMBER.fullmatch, paths), None)


class _Description:
    """What nodes compute, without the names of nodes, symbols and what they read.

    Args:
        module: Where the nodes are.
        nodes: The nodes.
        sizes: The nodes that compute sizes from the sizes of inputs.
    """

    def __init__(self, module: torch.fx.GraphModule, nodes: Sequence[Node], sizes: set[Node]) -> None:
        self._sizes, self._places = sizes, {node: place for place, node in enumerate(nodes)}
        self._texts: dict[Any, str] = {}
        self._module = module
        self.given: list[Node] = []
        self.symbols: dict[Any, Any] = {}
        self.rows = tuple(map(self._row, nodes))

    def _row(self, node: Node) -> tuple[Any, ...]:
        target: Any = node.target
        if node.op == "get_attr":
            part = getattr(self._module, str(target), None)
            if not isinstance(part, torch.fx.GraphModule):
                return (node,)  # like no other
            nodes = list(part.graph.nodes)
            inner = _Description(part, nodes, _sizes_of_inputs(part.graph))
            return (inner.rows, tuple(self._text(symbol) for symbol in inner.symbols))
        name = "" if node.op == "placeholder" else str(target)
        return (
            node.op,
            name,
            self._argument(node.args),
            self._argument(node.kwargs),
            self._value(node.meta.get("val")),
        )

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Node):
            if value in self._sizes:
                return ("size", self._value(value.meta["val"]))
            if value in self._places:
                return ("node", self._places[value])
            if value not in self.given:
                self.given.append(value)
            return ("given", self.given.index(value), self._value(value.meta.get("val")))
        if isinstance(value, list | tuple):
            return (type(value).__name__, *map(self._argument, value))
        if isinstance(value, dict):
            return tuple((name, self._argument(item)) for name, item in value.items())
        return (type(value).__name__, value.hex() if isinstance(value, float) else str(value))

    def _value(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            sizes = (tuple(map(self._text, numbers)) for numbers in (value.shape, value.stride()))
            return (str(value.dtype), *sizes)
        if isinstance(value, list | tuple):
            return tuple(map(self._value, value))
        return (type(value).__name__, self._text(value)) if isinstance(value, SYMBOLIC) else repr(value)

    def _text(self, size: Any) -> Any:
        """A size, with symbols numbered in order of first use; the order of terms must not depend on their names."""
        expression = traced_expression(size)
        if expression is None:
            return size
        if expression not in self._texts:
            for symbol in sorted(expression.free_symbols, key=str):
                self.symbols.setdefault(symbol, type(symbol)(f"k{len(self.symbols)}", **symbol.assumptions0))
            self._texts[expression] = str(expression.xreplace(self.symbols))
        return self._texts[expression]


def _require_writes_inside(graph: torch.fx.Graph, layer_of: Callable[[Node], Layer | None]) -> None:
    """Checks that what is written in place is made in the same layer, and read elsewhere only afterwards."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for first, (family, writers) in written_tensors(graph).items():
        places = {layer_of(node) for node in family}
        users = (user for node in family for user in node.users if layer_of(user) not in places)
        if len(places) > 1 or first.op == "placeholder" or any(order[user] < order[writers[-1]] for user in users):
            raise NotRepeated
