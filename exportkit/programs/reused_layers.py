"""Answers questions about a program and its model without running all of their layers.

A trace copies the nodes of a layer to the layers that are like it. Nothing but weights makes a difference between them,
so where a question is not about weights, such a layer returns what the other one has just returned, in the program and
in the model. It runs all the same if it is called in another way.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exportkit._torch_compat.memory import version_of
from exportkit._torch_compat.tracing import apart_from_modes
from exportkit.overrides import replaced_attributes
from exportkit.programs.layer import CopiedLayer, Steps, ValuePlace, descriptions, hook_tables, places_in
from exportkit.running.program import tensor_placeholders, values_reused
from exportkit.trees import Tree, cloned, flatten
from exportkit.trees.caches import ATOMS

Node = torch.fx.Node


@dataclass(frozen=True)
class ReusedLayers:
    """The layers of a model, and of the program traced from it, that need not run.

    Attributes:
        layers: The layers.
        nodes: For each of their nodes, the node that it is a copy of.
    """

    layers: tuple[CopiedLayer, ...]
    nodes: Mapping[Node, Node]

    @classmethod
    def of(cls, program: torch.export.ExportedProgram, copies: Sequence[CopiedLayer]) -> ReusedLayers | None:
        """Returns the reused layers of a program; None if it has none.

        Args:
            program: The program.
            copies: The layers that got copies of the nodes of others during the trace.
        """
        inside, times = _nodes_of_modules(program), Counter(id(copy.module) for copy in copies)
        layers, nodes = list[CopiedLayer](), dict[Node, Node]()
        for copy in copies:
            own, others = _inside(inside, copy.path), _inside(inside, copy.source_path)
            if times[id(copy.module)] == 1 and [n.target for n in own] == [n.target for n in others]:
                layers.append(copy)
                nodes |= zip(own, others, strict=True)
        nodes |= dict(_inputs(program, nodes))
        return cls(tuple(layers), nodes) if layers else None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Lets these layers return what others have returned, for the time of a ``with`` block."""
        latest = {id(copy.source): _Latest() for copy in self.layers}
        with contextlib.ExitStack() as stack:
            stack.enter_context(values_reused(self.nodes))
            for copy in self.layers:
                forward = latest[id(copy.source)].reused(copy, copy.module.forward)
                stack.enter_context(replaced_attributes(copy.module, {"forward": forward}))
            for key, copy in {id(copy.source): copy for copy in self.layers}.items():
                forward = latest[key].noted(copy.source.forward, copy.own)
                stack.enter_context(replaced_attributes(copy.source, {"forward": forward}))
            yield


@dataclass(frozen=True)
class _Call:
    """What a layer was called with, and what it did.

    Attributes:
        called: Descriptions of what it was called with, by place.
        written: The values that it put into them, and those in what belongs to it, by place.
        returned: What it returned.
        passed: For each leaf of that, the place among the arguments that it comes from, if any.
    """

    called: Mapping[Steps, Any]
    written: Mapping[Steps, Any]
    returned: Tree
    passed: Sequence[Steps | None]


class _Latest:
    """The latest call of a layer, if another layer can return the same."""

    def __init__(self) -> None:
        self._call: _Call | None = None

    def noted(self, forward: Callable[..., Any], own: frozenset[Steps]) -> Callable[..., Any]:
        """Returns what runs the layer, and takes note of the call."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._call = None
            with apart_from_modes():
                before = places_in((args, kwargs), own)
                called, versions = descriptions(before), _versions(before)
            returned = forward(*args, **kwargs)
            with apart_from_modes():
                after = places_in((args, kwargs), own)
                if None not in versions and versions == _versions(before):
                    self._call = _call(called, before, after, flatten(returned), own)
            return returned

        return run

    def reused(self, layer: CopiedLayer, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what another layer runs: it returns the same if it is called alike."""
        own, hooks = frozenset(map(layer.moved, layer.own)), hook_tables(layer.module)
        done: _Call | None = None

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            call = self._call
            if call is done or call is None or any(hooks):  # the other one was not called in this run of the model
                return forward(*args, **kwargs)
            with apart_from_modes():
                places = places_in((args, kwargs), own)
                if layer.is_called_alike(call.called, descriptions(places)):
                    done = call
                    inside = _holders(places)
                    for steps, value in call.written.items():
                        *holder, name = layer.moved(steps)
                        ValuePlace(None, inside[tuple(holder)], name).write(cloned(value))
                    passed = iter(call.passed)

                    def leaf(value: Any) -> Any:
                        steps = next(passed)
                        return cloned(value) if steps is None else places[layer.moved(steps)].value

                    return call.returned.map(leaf).build()
            return forward(*args, **kwargs)

        return run


def _call(
    called: Mapping[Steps, Any],
    before: Mapping[Steps, ValuePlace],
    after: Mapping[Steps, ValuePlace],
    returned: Tree,
    own: frozenset[Steps],
) -> _Call | None:
    """What came of a call; None if another layer cannot do the same to its own arguments."""
    new = after.keys() - before.keys()
    extended = {steps[:-1] for steps in new}
    if before.keys() - after.keys() or not extended <= _holders(before).keys():
        return None
    written = {}
    for steps, place in after.items():
        if steps[-1:] == (len,):
            (kind, _), (old, _) = place.value, before[steps].value
            if kind is not old or (place.value != before[steps].value and steps[:-1] not in extended):
                return None
        elif steps in new or place.value is not before[steps].value:
            written[steps] = place.value
    given = {id(place.value): steps for steps, place in before.items() if isinstance(place.value, torch.Tensor)}
    made = [*written.values(), *returned.leaves]
    if any(type(value) not in ATOMS and not isinstance(value, torch.Tensor) for value in made):
        return None
    if any(id(value) in given for value in written.values()):
        return None
    for steps, place in after.items():  # the program's other layer has the same, whether it was written or not
        if isinstance(place.value, torch.Tensor) and any(steps[: i + 1] in own for i in range(len(steps))):
            written[steps] = place.value
    return _Call(called, written, returned, [given.get(id(leaf)) for leaf in returned.leaves])


def _holders(places: Mapping[Steps, ValuePlace]) -> dict[Steps, Any]:
    """The dicts, lists and objects that hold values at these places."""
    return {s[:-1]: place.holder for s, place in places.items() if s[-1:] != (len,) and place.holder is not None}


def _versions(places: Mapping[Steps, ValuePlace]) -> list[int | None]:
    """How often each tensor was written."""
    return [version_of(place.value) for place in places.values() if isinstance(place.value, torch.Tensor)]


def _inside(nodes: Mapping[str, list[Node]], path: str) -> list[Node]:
    """The nodes of a module; torch takes the model for a part of another one while it traces."""
    return nodes.get(path) or nodes.get(path.partition(".")[2]) or []


def _inputs(program: torch.export.ExportedProgram, nodes: Mapping[Node, Node]) -> Iterator[tuple[Node, Node]]:
    """Inputs that copies read, such as caches, each with the earlier one that the other node reads."""
    order = {name: place for place, name in enumerate(tensor_placeholders(program))}
    for node, other in nodes.items():
        for own, others in zip(node.all_input_nodes, other.all_input_nodes, strict=False):
            if order.get(others.name, len(order)) < order.get(own.name, -1):
                yield own, others


def _nodes_of_modules(program: torch.export.ExportedProgram) -> dict[str, list[Node]]:
    """The nodes of a program by the path of the module that they come from, in order."""
    found: dict[str, list[Node]] = {}
    for node in program.graph.nodes:
        for path, _ in (node.meta.get("nn_module_stack") or {}).values():
            found.setdefault(path, []).append(node)
    return found
