"""Translates layers that are alike once: a program with one layer of each kind, and the ONNX graph with all of them.

Decomposition, translation and optimisation take time for each node, and most nodes of a deep model repeat those of
another layer. `RepeatedLayers` keeps the first layer of each kind. What differs between the layers of a kind (hidden
states, weights, caches) becomes an input of the program, what other nodes read of a layer becomes an output, and what
reads a removed layer gets an input instead. The nodes of the ONNX graph that depend on such inputs are then copied for
every layer, and linked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument

from exportkit._torch_compat.graph import operator_name, program_of
from exportkit._torch_compat.symbolic_shapes import SYMBOL_NAME, traced_expression
from exportkit.onnx_files.like_layers import (
    Layer,
    LayerKind,
    LikeLayers,
    Node,
    NotRepeated,
    require_tensors,
)
from exportkit.programs.copied_layers import SIZE

if TYPE_CHECKING:
    import onnx_ir


class RepeatedLayers:
    """A program whose layers of one kind are translated once.

    Args:
        program: The program, without assertions.
        zeros: The symbols that may be 0 together; layers are of one kind only if theirs may be.

    Attributes:
        program: The program.
        layers: Its layers that are alike.
        reduced: The program with one layer of each kind.
        links: For each node of a layer that nodes outside of layers read, the input of the reduced program for it.
        results: What the reduced program returns, by what it is in the whole program.
        outputs: What the whole program returns.

    Raises:
        NotRepeated: if no two layers are alike, or if a layer writes to a tensor that is read elsewhere.
    """

    def __init__(self, program: torch.export.ExportedProgram, zeros: Sequence[Mapping[Any, int]] | None) -> None:
        signature = program.graph_signature
        outputs: Any = program.graph.output_node().args[0]
        returns_inputs = any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs)
        if returns_inputs or not all(isinstance(node, Node) for node in outputs):
            raise NotRepeated
        self.program, self.layers = program, LikeLayers(program, zeros or ())
        if any("batch_norm" in operator_name(node.target) for node in self.layers.owner):
            raise NotRepeated  # becomes a part of the convolution before it, which takes the values of its weights
        self.specs = {spec.arg.name: spec for spec in signature.input_specs if hasattr(spec.arg, "name")}
        self.outputs: list[Node] = list(outputs)
        reduction = _Reduction(program, self.layers, self.specs)
        self.links, self.results = reduction.links, reduction.results(self.outputs)
        self.reduced = reduction.program(list(self.results.values()))

    def repeat(self, model: onnx_ir.Model) -> None:
        """Expands the ONNX graph of the reduced program to the whole program by copying the layers.

        Raises:
            NotRepeated: if the graph has other inputs or outputs than the program, or layers cannot be told apart.
        """
        names = _inputs_of(self.reduced)
        if len(model.graph.inputs) != len(names) or len(model.graph.outputs) != len(self.results):
            raise NotRepeated
        _Copies(self, model.graph, dict(zip(names, model.graph.inputs, strict=True))).link()
        _finish(model)


class _Reduction:
    """Builds the reduced program."""

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        layers: LikeLayers,
        specs: Mapping[str, InputSpec],
    ) -> None:
        self._program, self._layers = program, layers
        self._graph = torch.fx.Graph()
        self._copies: dict[Any, Node] = {}
        self._specs: dict[Node, InputSpec] = {}
        self.links: dict[Node, Node] = {}  # a node of a layer that nodes outside of layers read, and the input for it
        for node in program.graph.nodes:
            if node.op == "placeholder":
                self._copies[node] = self._graph.node_copy(node)
                self._copies[node].name = node.name  # torch.fx renames what is called like a function of Python
                self._specs[self._copies[node]] = specs[node.name]
        for number, kind in enumerate(layers.kinds):
            for place, nodes in enumerate(zip(*(layer.given for layer in kind.layers), strict=True)):
                if nodes[0] in layers.owner or any(node is not nodes[0] for node in nodes):
                    kind.own[place] = self._input(f"layer_{number}_{place}", nodes[0])
        for node in layers.owner:
            if any(user not in layers.owner and user.op != "output" for user in node.users):
                self.links[node] = self._input(f"link_{len(self.links)}", node)
        first = {node: kind for kind in layers.kinds for node in kind.first.nodes}
        for node in program.graph.nodes:
            if node in first:
                self._copies[node] = self._graph.node_copy(node, self._reader(first[node]))
            elif node not in layers.owner and node.op not in ("placeholder", "output"):
                self._copies[node] = self._graph.node_copy(node, self._read)

    def _input(self, name: str, node: Node) -> Node:
        """An input of the reduced program in place of a node."""
        require_tensors([node])
        value = node.meta["val"]
        made = self._graph.placeholder(name)
        with value.fake_mode:  # memory of its own: inputs that share memory are merged
            shape, stride = value.shape, value.stride()
            made.meta = {"val": torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)}
        self._specs[made] = InputSpec(InputKind.USER_INPUT, TensorArgument(name=made.name), None)
        return made

    def _read(self, node: Node) -> Node:
        return self.links[node] if node in self.links else self._copies[node]

    def _reader(self, kind: LayerKind) -> Callable[[Node], Node]:
        """What the first layer of a kind reads in place of a node."""

        def read(node: Node) -> Node:
            if node in self._layers.sizes:
                return self._size(node, kind)
            if self._layers.layer_of(node) is kind.first:
                return self._copies[node]
            return kind.own.get(kind.first.given.index(node)) or self._copies[node]

        return read

    def _size(self, node: Node, kind: LayerKind) -> Node:
        """A size that a layer reads: computed from its own inputs if it may differ between layers."""
        expression = traced_expression(node.meta["val"])
        if not kind.own_symbols & getattr(expression, "free_symbols", set()):
            return self._copies[node]
        if (kind, node) not in self._copies:
            if node.target is SIZE:
                made = self._graph.call_function(SIZE, self._axis(expression, kind))
            elif node.op == "call_function":
                inputs = torch.fx.map_arg((node.args, node.kwargs), lambda other: self._size(other, kind))
                made = self._graph.call_function(node.target, *inputs)  # type: ignore[arg-type]
            else:
                raise NotRepeated
            made.meta = dict(node.meta)
            self._copies[kind, node] = made
        return self._copies[kind, node]

    def _axis(self, expression: Any, kind: LayerKind) -> tuple[Node, int]:
        for place, made in kind.own.items():
            for axis, size in enumerate(kind.first.given[place].meta["val"].shape):
                if traced_expression(size) == expression:
                    return made, axis
        raise NotRepeated

    def results(self, outputs: Sequence[Node]) -> dict[Node, Node]:
        """Returns what the reduced program returns, by what it is in the whole program."""
        wanted = [node for node in outputs if node not in self._layers.owner]
        for kind in self._layers.kinds:
            wanted += [kind.first.nodes[place] for place in kind.results]
            given = [layer.given[place] for layer in kind.layers for place in kind.own]
            wanted += [node for node in given if node not in self._layers.owner]
        return {node: self._copies[node] for node in wanted if node.op != "placeholder"}

    def program(self, returned: Sequence[Node]) -> torch.export.ExportedProgram:
        """Returns the reduced program, given what it returns."""
        self._graph.output(tuple(returned))
        for node, copy in reversed([*self._copies.items()]):  # what only removed layers read
            if (
                not copy.users
                and isinstance(node, Node)
                and (node in self._layers.sizes or (node.op == "placeholder" and node.users))
            ):
                self._graph.erase_node(copy)
        specs = [self._specs[node] for node in self._graph.nodes if node.op == "placeholder"]
        results = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=n.name), None) for n in returned]
        return program_of(self._program, self._graph, specs, results)


class _Copies:
    """Copies the nodes of the first layers in an ONNX graph for all layers, and links them.

    Args:
        repeated: The program and its layers.
        graph: The graph of the reduced program.
        inputs: Its inputs, by the name of the program's.
    """

    def __init__(self, repeated: RepeatedLayers, graph: onnx_ir.Graph, inputs: Mapping[str, onnx_ir.Value]) -> None:
        self._repeated, self._graph, self._inputs = repeated, graph, dict(inputs)
        self._results = dict(zip(repeated.results, list(graph.outputs), strict=True))
        self._made: dict[Node, onnx_ir.Value] = {}
        self._values: dict[Node, onnx_ir.Value] = {}  # what layers return
        self._links: list[tuple[onnx_ir.Value, Node]] = []  # an input of a copy, and what it has to be
        self._nodes: list[onnx_ir.Node] = []
        self._replaced: list[onnx_ir.Node] = []

    def link(self) -> None:
        """Replaces the first layers by copies of them for all layers, and restores the inputs and outputs."""
        program, graph = self._repeated.program, self._graph
        for name, value in self._inputs.items():
            value.name = name  # an input that is an output, too, was renamed
        graph.outputs.clear()
        for kind in self._repeated.layers.kinds:
            self._copy(kind)
        self._links += [(self._inputs[made.name], node) for node, made in self._repeated.links.items()]
        outputs = [self._value(node) for node in self._repeated.outputs]
        for value, node in self._links:
            value.replace_all_uses_with(self._value(node))
        graph.remove(self._replaced, safe=False)
        graph.extend(self._nodes)
        graph.inputs.clear()
        names = _inputs_of(program)
        graph.inputs.extend(self._value(node) for node in program.graph.nodes if node.name in names)
        graph.outputs.extend(outputs)
        self._require_complete()

    def _require_complete(self) -> None:
        """Raises NotRepeated if a value is missing: nodes outside of layers may read a size off the input of one."""
        graph = self._graph
        known = {*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)}
        read = [*graph.outputs, *(value for node in graph for value in _read_by(node))]
        if not known.issuperset(read):
            raise NotRepeated

    def _copy(self, kind: LayerKind) -> None:
        import onnx_ir

        own = {self._inputs[made.name]: place for place, made in kind.own.items()}
        nodes, inside = [], set(own)
        for node in self._graph:
            if any(value in inside for value in _read_by(node)):
                nodes.append(node)
                inside.update(node.outputs)
        given = list(dict.fromkeys([*own, *(v for node in nodes for v in _read_by(node) if v not in inside)]))
        made_inside = {value for node in nodes for value in node.outputs}
        returned = [self._results[kind.first.nodes[place]] for place in kind.results]
        view = onnx_ir.GraphView(given, [value for value in returned if value in made_inside], nodes=nodes)
        for layer in kind.layers:
            copy = view.clone()
            results = iter(list(copy.outputs))
            for value, place in zip(returned, kind.results, strict=True):
                self._values[layer.nodes[place]] = next(results) if value in made_inside else value
            copied, stubs = list(copy), list(copy.inputs)
            copy.outputs.clear()
            copy.remove(copied, safe=False)
            _rename(copied, kind.first, layer)
            self._nodes += copied
            for value, stub in zip(given, stubs, strict=True):
                if value in own:
                    self._links.append((stub, layer.given[own[value]]))
                else:
                    stub.replace_all_uses_with(value)
        self._replaced += nodes

    def _value(self, node: Node) -> onnx_ir.Value:
        """The value of a node of the whole program."""
        if node in self._values:
            return self._values[node]
        if node.op != "placeholder":
            return self._results[node]
        if node not in self._made:
            self._made[node] = self._inputs.get(node.name) or self._new(node)
        return self._made[node]

    def _new(self, node: Node) -> onnx_ir.Value:
        """An input or a weight that only layers read which are not in the reduced program."""
        import onnx_ir

        spec, value = self._repeated.specs[node.name], node.meta["val"]
        program = self._repeated.program
        shape = onnx_ir.Shape([size if isinstance(size, int) else str(size) for size in value.shape])
        kind = onnx_ir.TensorType(onnx_ir.tensor_adapters.from_torch_dtype(value.dtype))
        if spec.kind is InputKind.USER_INPUT:
            return onnx_ir.Value(name=node.name, shape=shape, type=kind)
        name = str(spec.target)
        if name in self._graph.initializers:
            return self._graph.initializers[name]
        tensor = program.state_dict[name] if name in program.state_dict else program.constants[name]
        weight = onnx_ir.tensor_adapters.TorchTensor(tensor, name=name)
        made = onnx_ir.Value(name=name, shape=shape, type=kind, const_value=weight)
        self._graph.register_initializer(made)
        return made


def _inputs_of(program: torch.export.ExportedProgram) -> list[str]:
    """The names of the inputs that the ONNX graph of a program keeps: all but those that are None."""
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    return [spec.arg.name for spec in specs if getattr(spec.arg, "value", "") is not None]


def _read_by(node: onnx_ir.Node) -> Iterator[onnx_ir.Value]:
    """Yields what a node reads, also in its subgraphs; what these compute themselves may be among it."""
    yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        if attribute.type.name == "GRAPH":
            inner = list(attribute.as_graph().all_nodes())
            made = {value for other in inner for value in other.outputs} | set(attribute.as_graph().inputs)
            yield from (value for other in inner for value in other.inputs if value is not None and value not in made)


def _rename(nodes: Sequence[onnx_ir.Node], first: Layer, layer: Layer) -> None:
    """Gives the copied nodes of the first layer the names, scopes and symbols of another layer."""
    import onnx_ir

    symbols = {str(old): str(new) for old, new in zip(first.symbols, layer.symbols, strict=True) if old != new}
    path = re.compile(rf"(?<![\w.]){re.escape(first.path)}(?!\w)")
    for node in nodes:
        node.name = f"{node.name}.{layer.path}"
        for key, text in node.metadata_props.items():
            node.metadata_props[key] = path.sub(layer.path, text)
        for value in node.outputs:
            value.name = f"{value.name}.{layer.path}"
            if symbols and value.shape is not None:
                value.shape = onnx_ir.Shape(
                    SYMBOL_NAME.sub(lambda m: symbols.get(m[0], m[0]), dim.value)
                    if isinstance(dim, onnx_ir.SymbolicDim) and dim.value
                    else dim
                    for dim in value.shape
                )


def _finish(model: onnx_ir.Model) -> None:
    """Sorts the nodes, folds constants, and merges what several layers compute or hold alike."""
    import onnx_ir.passes.common as passes
    from onnxscript.optimizer import fold_constants_ir

    model.graph.sort()
    fold_constants_ir(model)
    passes.IdentityEliminationPass()(model)
    for graph in model.graph.subgraphs():
        _return_own_values(graph)
    for step in (
        passes.RemoveUnusedNodesPass(),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.OutputFixPass(),
        passes.NameFixPass(),
    ):
        step(model)


def _return_own_values(graph: onnx_ir.Graph) -> None:
    """Makes a branch or the body of a loop return values of its own: onnxruntime refuses those of graphs around it."""
    import onnx_ir

    for place, value in enumerate(graph.outputs):
        if value.graph is not graph:
            identity = onnx_ir.node("Identity", [value])
            identity.outputs[0].type, identity.outputs[0].shape = value.type, value.shape
            graph.append(identity)
            graph.outputs[place] = identity.outputs[0]
