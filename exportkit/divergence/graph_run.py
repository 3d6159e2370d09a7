"""A graph and the values of one run of it, whatever runs it.

In come nodes with what torch says of their origin; out go the values that enter and leave each module of the model.
"""

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
_OTHERS = (Path(torch.__file__).parent, Path(__file__).parents[1], Path(sysconfig.get_paths()["stdlib"]))
_LONGEST_LINE = 100


@dataclass(frozen=True)
class Scope:
    """A module that a node belongs to.

    Attributes:
        path: Its path in the model.
        class_name: Its class.
        call: What tells its calls apart; the same for all of them where the graph does not tell.
    """

    path: str
    class_name: str
    call: str = ""


@dataclass(frozen=True)
class Node:
    """A node of a graph.

    Attributes:
        name: Its name; that of its first value, where it has none.
        operator: What it computes.
        scopes: The modules that it belongs to, outermost first; empty where that is not known.
        inputs: Names of the values that it takes.
        outputs: Names of the values that it makes.
        stack: The stack trace of the code that it comes from.
        torch_operator: What the node of the program that it comes from computes, such as ``aten.mul.Tensor``.
        ends: Whether it makes what that node returns, and not a value on the way to it.
    """

    name: str
    operator: str
    scopes: tuple[Scope, ...]
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
        values: Tensors by name; not all values need be there.
        inputs: Names of the graph's inputs.
        outputs: Names of the graph's outputs, in order.
        numbers: Values that are no tensors, such as sizes, by name.
    """

    nodes: tuple[Node, ...]
    values: Mapping[str, torch.Tensor]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    numbers: Mapping[str, Any] = field(default_factory=dict)
    _calls: dict[tuple[str, int], tuple[Inside, ...]] = field(default_factory=dict, init=False, repr=False)

    @functools.cached_property
    def makers(self) -> Mapping[str, Node]:
        """The node that makes each value."""
        return {name: node for node in self.nodes for name in node.outputs}

    @functools.cached_property
    def _nodes_of(self) -> Mapping[str, Mapping[str, list[Node]]]:
        """The nodes of each module, by its path and by what tells its calls apart."""
        found: dict[str, dict[str, list[Node]]] = defaultdict(lambda: defaultdict(list))
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

    def calls_of(self, path: str, count: int) -> tuple[Inside, ...]:
        """Returns what is inside of a module, for each of its calls; nothing if they cannot be told apart.

        Args:
            path: Path of the module.
            count: How many calls there are.
        """
        if (path, count) not in self._calls:
            parts = list(self._nodes_of.get(path, {}).values())
            if len(parts) == 1 and count > 1:
                parts = _told_apart(parts[0], path, count)
            insides = (_inside(nodes, self._users, set(self.outputs)) for nodes in parts)
            self._calls[path, count] = tuple(insides) if len(parts) == count else ()
        return self._calls[path, count]


@dataclass(frozen=True)
class Inside:
    """The part of a graph that is inside of a module.

    Attributes:
        nodes: Its nodes.
        entering: Values that it takes from outside, in the order in which it takes them first.
        leaving: Values that it makes and that are used outside.
    """

    nodes: tuple[Node, ...]
    entering: tuple[str, ...]
    leaving: tuple[str, ...]


def _told_apart(nodes: list[Node], path: str, count: int) -> list[list[Node]]:
    """The nodes of a module by its calls, where the graph does not tell: a module inside of it begins anew in each."""
    runs: dict[str, list[Node]] = defaultdict(list)  # the nodes that begin a run of nodes of the same innermost module
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
    parts: list[list[Node]] = [[] for _ in range(count)]
    turn = 0
    for node in nodes:
        turn = max(turn, turns.get(id(node), turn))
        parts[turn].append(node)
    return parts


def _inside(nodes: list[Node], users: Mapping[str, list[int]], outputs: set[str]) -> Inside:
    own = {id(node) for node in nodes}
    made = {name: None for node in nodes for name in node.outputs}
    entering = {name: None for node in nodes for name in node.inputs if name not in made}
    leaving = [name for name in made if name in outputs or any(user not in own for user in users[name])]
    return Inside(tuple(nodes), tuple(entering), tuple(leaving))


@functools.cache
def source_line(stack: str) -> str:
    """Returns the innermost line of a stack trace that is the model's own, or "" if there is none."""
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
    if path.parts[:1] == ("torch",) or any(path.is_relative_to(folder) for folder in _OTHERS[:2]):
        return False
    return not path.is_relative_to(_OTHERS[2]) or "site-packages" in file or "dist-packages" in file
