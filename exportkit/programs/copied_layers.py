"""Copies what torch traces of a layer to the layers that are like it, so that tracing a deep model takes little longer.

The first layers of a list are traced. If two of them left the same nodes behind, but for the weights and the entries of
caches that they read, a further layer gets copies of these nodes instead of being run. Nothing that its code could
decide by may differ: the attributes of its modules, its arguments, and what is computed with its number.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx.node import map_aggregate

from exportkit._torch_compat.pytree import tree_leaves, tree_map
from exportkit._torch_compat.symbolic_shapes import SYMBOLIC
from exportkit._torch_compat.tracing import in_module, node_of, tensor_of
from exportkit.overrides import replaced_attributes
from exportkit.programs.layer import (
    CopiedLayer,
    LayerCall,
    LayerNumber,
    Steps,
    ValuePlace,
    contents,
    description,
    held,
    holders,
    look_ups_noted,
    marks,
    of_others,
    places_in,
    plain_layer_number,
)
from exportkit.trees import flatten
from exportkit.trees.caches import ATOMS

Node = torch.fx.Node
SIZE = torch.ops.aten.sym_size.int
_MEMBER = re.compile(r"((?:.*\.)?)(\d+)")
_MOST_RUNS = 8  # in Gemma3, every sixth layer is of a different kind


class CopiedLayers:
    """The layers that a trace has run so far.

    Attributes:
        copies: Those that got copies of the nodes of others; the tracer may run one of them several times.
    """

    def __init__(self) -> None:
        self.copies: list[CopiedLayer] = []
        self._runs: dict[Any, list[_LayerRun]] = {}
        self._pairs: dict[Any, list[_LayerPair]] = {}
        self._left: dict[Any, Sequence[Node | None]] = {}  # the nodes of the latest layer

    def call(self, tracer: Any, module: torch.nn.Module, path: str, args: Any, kwargs: Any, forward: Any) -> Any:
        """Returns what a module returns; its nodes are in the graph then.

        Args:
            tracer: What makes the graph.
            module: The module.
            path: Where it is in the model.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            forward: What runs it.
        """
        member = _MEMBER.fullmatch(path)
        if member is None:
            return forward(*args, **kwargs)
        key = tracer.graph, member[1], type(module)
        runs, pairs = self._runs.setdefault(key, []), self._pairs.setdefault(key, [])
        if len(runs) >= _MOST_RUNS and not pairs:
            return forward(*args, **kwargs)
        try:
            layer = LayerCall(tracer, path, int(member[2]), module, (args, kwargs), self._left.get(key, ()))
            found = next((pair for pair in pairs if pair.includes(layer)), None)
            if found is None:
                layer.look()
        except Exception:  # an object that raises when it is looked at: the layer is traced
            return forward(*args, **kwargs)
        if found is not None:
            result = found.copy(layer)
            self._left[key] = layer.left
            self.copies.append(found.copied(layer))
            return result
        run = _LayerRun(layer, forward)
        self._left[key] = list(run.nodes)
        with contextlib.suppress(Exception):
            if run.is_known():
                found = next(
                    (pair for other in reversed(runs[-_MOST_RUNS:]) if (pair := _LayerPair.of(other, run))), None
                )
                pairs += [found] if found is not None else []
                runs.append(run)
        return run.result


class _LayerRun:
    """A layer that was run, and what it left behind.

    Attributes:
        layer: The layer, as it was before.
        result: What it returned.
        nodes: Its nodes, with their positions.
        places: Where the values of the nodes before it were.
        reads: Nodes of others that they read, in order of first use, with the places of their values.
        rows: What each of its nodes computes.
        written: What it wrote, by place.
        changes: The same, described.
        returned: The leaves of what it returned.
        noted: What it computed with its number.
    """

    def __init__(self, layer: LayerCall, forward: Callable[..., Any]) -> None:
        self.layer = layer
        self.noted: list[tuple[Steps, Callable[..., Any], tuple[Any, ...], Any]] = []
        self.reads: dict[Node, set[Steps]] = {}
        self.rows: list[Any] = []
        self.written: dict[Steps, Any] = {}
        self.changes: dict[Steps, Any] = {}
        self.returned: list[Any] = []
        args, kwargs = layer.call
        last, self.places = next(iter(reversed(layer.tracer.graph.nodes))), layer.nodes()
        with contextlib.ExitStack() as stack:
            if layer.numbers:
                stack.enter_context(look_ups_noted(layer.places))
            for name, module in layer.module.named_modules():
                stack.enter_context(replaced_attributes(module, dict(self._numbers(name))))
            self.result = forward(*args, **kwargs)
        self.nodes = {node: number for number, node in enumerate(_read_after(last))}
        if self.noted or layer.numbers:
            self._leave_plain_numbers()

    def _leave_plain_numbers(self) -> None:
        if any(isinstance(leaf, LayerNumber) for leaf in tree_leaves(self.result)):
            self.result = tree_map(plain_layer_number, self.result)
        for node in self.nodes:
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), plain_layer_number)
        for place in places_in(self.layer.call).values():
            if isinstance(place.value, LayerNumber) and not isinstance(place.holder, tuple):
                place.write(int(place.value))

    def is_known(self) -> bool:
        """Returns whether this is all that the layer did, as far as can be told, and describes it."""
        layer, before = self.layer, self.layer.places
        after, (weights, attributes, _) = places_in(layer.call), contents(layer.module)
        arguments = before.keys() - layer.weights.keys()
        if after.keys() != arguments or not all(map(self._is_known, self.nodes)):
            return False
        self.rows = [self._row(node, self.places) for node in self.nodes]
        changed = [steps for steps in arguments if after[steps].value is not before[steps].value]
        self.written = {steps: after[steps].value for steps in changed if steps[-1] is not len}
        self.changes = {steps: self._made(value) for steps, value in self.written.items()}
        self.returned = [self._made(leaf) for leaf in flatten(self.result).leaves]
        kept = arguments - self.written.keys()
        return (
            not layer.has_hooks
            and _are_the_same(attributes, layer.attributes)
            and held(attributes) == layer.held
            and _are_the_same(weights, layer.weights)
            and all(description(after[steps].value) == layer.described[steps] for steps in kept)
            and not any(isinstance(after[steps].holder, tuple) for steps in self.changes)
            and not holders(after).keys() & holders(places_in(self.result)).keys()
            and all(made is not None for made in (*self.changes.values(), *self.returned))
        )

    def _is_known(self, node: Node) -> bool:
        """Whether a node calls an operator, or gets the graph that an operator runs, such as a scan."""
        is_graph = node.op == "get_attr" and _graph_at(self.layer.tracer.root, node) is not None
        return is_graph or node.op == "call_function"

    def _numbers(self, owner: str) -> Iterator[tuple[str, LayerNumber]]:
        for part, attribute in self.layer.numbers:
            if part == owner:
                number = LayerNumber(self.layer.number)
                number.noted, number.name = self.noted, (part, attribute)
                yield attribute, number

    def _row(self, node: Node, places: Mapping[Node, set[Steps]]) -> Any:
        def described(value: Any) -> Any:
            if isinstance(value, Node):
                if value in self.nodes:
                    return Node, self.nodes[value]
                self.reads.setdefault(value, _places_of(value, places))
                return "read", list(self.reads).index(value)
            if isinstance(value, list | tuple):
                return type(value), *map(described, value)
            if isinstance(value, slice):
                return slice, *map(described, (value.start, value.stop, value.step))
            return description(value)

        if node.op == "get_attr":
            return _graph_rows(_graph_at(self.layer.tracer.root, node))
        options = [(name, described(value)) for name, value in node.kwargs.items()]
        return node.target, described(node.args), options, description(node.meta.get("val"))

    def _made(self, value: Any) -> Any:
        """A tensor by the node that made it, or by its place in the arguments; other plain values by themselves."""
        if isinstance(value, torch.Tensor):
            node = node_of(value, self.layer.tracer)
            if node in self.nodes:
                return None if marks(value) else (Node, self.nodes[node])
            return next(
                ((ValuePlace, steps) for steps, place in self.layer.places.items() if place.value is value), None
            )
        return description(value) if type(value) in ATOMS or isinstance(value, SYMBOLIC) else None


def _graph_at(root: torch.nn.Module, node: Node) -> torch.fx.GraphModule | None:
    part = getattr(root, str(node.target), None)
    return part if isinstance(part, torch.fx.GraphModule) else None


def _graph_rows(module: torch.fx.GraphModule | None) -> Any:
    """What each node of a graph computes that an operator runs; something that equals nothing if it is not a graph."""
    if module is None:
        return object()
    numbers: dict[Node, int] = {}
    rows: list[Any] = []

    def described(value: Any) -> Any:
        return (Node, numbers[value]) if isinstance(value, Node) else description(value)

    for node in module.graph.nodes:
        if node.op == "get_attr":
            rows.append(_graph_rows(_graph_at(module, node)))
        else:
            target = node.target if node.op == "call_function" else node.op
            rows.append((target, map_aggregate((node.args, node.kwargs), described), description(node.meta.get("val"))))
        numbers[node] = len(numbers)
    return rows


def _are_the_same(one: Mapping[Steps, Any], other: Mapping[Steps, Any]) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)


def _same_kind(node: Node, other: Node | None) -> bool:
    return other is not None and description(node.meta["val"]) == description(other.meta["val"])


def _places_of(node: Node, places: Mapping[Node, set[Steps]]) -> set[Steps]:
    """The places that hold the value of a node; the size of an axis is placed inside its tensor."""
    if node.target is SIZE and node not in places:
        tensor, axis = node.args
        return {(*steps, SIZE, axis) for steps in places.get(tensor, ())}  # type: ignore[arg-type]
    return places.get(node, set())


def _read_after(last: Node) -> list[Node]:
    """The nodes after a given node, without sizes that nothing reads: torch's caches decide whether they are there."""
    found: list[Node] = []
    while (last := last.next).op != "root":
        found.append(last)
    unread = set[Node]()
    for node in reversed(found):
        if isinstance(node.meta.get("val"), SYMBOLIC) and unread.issuperset(node.users):
            unread.add(node)
    return [node for node in found if node not in unread]


@dataclass(frozen=True, eq=False)
class _LayerPair:
    """Two layers that left the same nodes behind.

    Attributes:
        first: One of them.
        run: A later one, of which copies are made.
        reads: The nodes of others that it reads, with the places of their values; no places if all layers read it.
        own: Places of what belongs to a layer in a list with an item for each.
        fixed: Places of items of such lists that all layers read.
        numbers: The attributes that hold the number of a layer.
    """

    first: _LayerRun
    run: _LayerRun
    reads: Mapping[Node, Iterable[Steps]]
    own: frozenset[Steps]
    fixed: frozenset[Steps]
    numbers: frozenset[Steps]

    @cached_property
    def described(self) -> dict[Steps, Any]:
        """What the later one was called with, apart from what belongs to other layers, by place."""
        is_left_out = of_others(self.own | self.fixed)
        described = self.run.layer.described.items()
        return {s: found for s, found in described if not any(is_left_out(s[:i]) for i in range(1, len(s) + 1))}

    @classmethod
    def of(cls, first: _LayerRun, run: _LayerRun) -> _LayerPair | None:
        """Returns two layers as a pair; None if they are not alike."""
        shift = run.layer.number - first.layer.number
        numbers = first.layer.own_numbers(run.layer)
        if not shift or numbers is None or (first.rows, first.returned) != (run.rows, run.returned):
            return None
        reads: dict[Node, list[Steps]] = {}
        pairs: list[tuple[Steps, Steps]] = []
        for (one, its), (other, own) in zip(first.reads.items(), run.reads.items(), strict=True):
            found = [(a, a) for a in its if a in own] or [(a, b) for a in its for b in own if _corresponds(a, b, shift)]
            if not found and one is not other:
                return None
            reads[other] = [b for _, b in found]
            pairs += found
        for steps, made in run.changes.items():
            found = [(a, steps) for a in first.changes if _corresponds(a, steps, shift)]
            if [first.changes[a] for a, _ in found] != [made]:
                return None
            pairs += found
        if len(first.changes) != len(run.changes):
            return None
        prefixes = {(a[: i + 1], b[: i + 1]) for a, b in pairs for i in range(len(b))}
        own_places = frozenset(b for a, b in prefixes if a[-1] != b[-1])
        fixed = frozenset(b for a, b in prefixes if a == b and of_others(own_places)(b))
        return cls(first, run, reads, own_places, fixed, numbers)

    def includes(self, layer: LayerCall) -> bool:
        """Returns whether a layer leaves the same nodes behind, too."""
        if self.run.layer.own_numbers(layer) != self.numbers:
            return False
        for name, compute, others, result in (*self.first.noted, *self.run.noted):
            if name in self.numbers and (result is NotImplemented or compute(layer.number, *others) != result):
                return False
        copied = self.copied(layer)
        layer.look({*map(copied.moved, self.own), *self.fixed})
        if not copied.is_called_alike(self.described, layer.described):
            return False
        read = [(node, self._nodes_at(places, layer)) for node, places in self.reads.items() if places]
        return all(len(others) == 1 and _same_kind(node, *others) for node, others in read)

    def copy(self, layer: LayerCall) -> Any:
        """Returns what a layer returns, after it was given copies of the nodes."""
        run, tracer, moved = self.run, layer.tracer, self.copied(layer).moved
        copies: dict[Node, Any] = {node: self._nodes_at(at, layer).pop() for node, at in self.reads.items() if at}
        for node in run.nodes:
            copies[node] = copy = tracer.graph.node_copy(node, lambda other: copies.get(other, other))
            in_module(copy, run.layer.path, layer.path)
        layer.left = [copies[node] for node in run.nodes]
        tensors: dict[int, torch.Tensor] = {}

        def copied(made: Any, value: Any) -> Any:
            kind, position = made
            if kind is ValuePlace:
                return layer.places[moved(position)].value
            if kind is not Node:
                return value
            if position not in tensors:
                tensors[position] = tensor_of(layer.left[position], tracer)
            return tensors[position]

        for steps, made in run.changes.items():
            layer.places[moved(steps)].write(copied(made, run.written[steps]))
        made = iter(run.returned)
        return flatten(run.result).map(lambda leaf: copied(next(made), leaf)).build()

    def copied(self, layer: LayerCall) -> CopiedLayer:
        """Returns what describes a layer that gets copies of the nodes."""
        source = self.run.layer
        shift = layer.number - source.number
        return CopiedLayer(layer.path, layer.module, source.path, source.module, self.own, shift)

    def _nodes_at(self, places: Iterable[Steps], layer: LayerCall) -> set[Node | None]:
        found, moved = set[Node | None](), self.copied(layer).moved
        for steps in places:
            *tensor, kind, axis = moved(steps) if SIZE in steps else (*moved(steps), None, None)
            if tensor[0] is LayerCall:
                node = layer.before[tensor[1]] if tensor[1] < len(layer.before) else None
            else:
                node = node_of(layer.places[tuple(tensor)].value, layer.tracer)
            if kind is SIZE and node is not None:
                node = next((user for user in node.users if (user.target, *user.args) == (SIZE, node, axis)), None)
            found.add(node)
        return found


def _corresponds(one: Steps, other: Steps, shift: int) -> bool:
    """Whether two places differ in nothing but the numbers of layers."""
    return len(one) == len(other) and all(
        a == b or (type(a) is type(b) is int and b - a == shift) for a, b in zip(one, other, strict=True)
    )
