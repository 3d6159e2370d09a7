"""Holds the nodes of a graph and the values of one run, and finds which values enter and leave each module."""

from __future__ import annotations

import functools
import re
import sysconfig
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_STACK_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]+(?:\n(?P<code>[^\n]*))?')
_TORCH, _EXPORTKIT = Path(torch.__file__).parent, Path(__file__).parents[1]
_STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
_LONGEST_LINE = 100


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
        return source_line(self.stack)


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
    """The nodes of a module by its calls, where the graph does not tell: a module inside it begins anew in each."""
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


@functools.cache
def source_line(stack: str) -> str:
    """Returns the innermost line of a stack trace that is in the model's own code, or "" if there is none."""
    lines = [match for match in _STACK_LINE.finditer(stack) if _is_own(match["file"])]
    if not lines:
        return ""
    last = lines[-1]
    code = (last["code"] or "").strip()[:_LONGEST_LINE]
    return f"{last['file']}:{last['line']}" + (f"  {code}" if code else "")


def _is_own(file: str) -> bool:
    if not file or (file.startswith("<") and not file.startswith(("<stdin>", "<ipython", "<python-input", "<doctest"))):
        return False
    path = Path(file)
    if path.parts[:1] == ("torch",) or path.is_relative_to(_TORCH) or path.is_relative_to(_EXPORTKIT):
        return False
    return not path.is_relative_to(_STANDARD_LIBRARY) or "site-packages" in file or "dist-packages" in file
