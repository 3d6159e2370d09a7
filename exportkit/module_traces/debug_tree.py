"""The tree of calls that transformers' debugger writes. In comes a trace; out comes a node with its children.

A node is ``{"module_path", "inputs": {"args", "kwargs"}, "outputs", "children"}``. As in
``transformers.model_debugging_utils``, inputs that are not there are left out but for the model itself, a node with
children has no outputs, and one without has no children.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from exportkit.module_traces.records import ModuleCall, TensorRecord
from exportkit.module_traces.trace import Trace

_STEP = re.compile(r"""\[('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\]]*)\]|\.?([^.\[]+)""")
_BLOCK = re.compile(r"\.(\d+)$")
# What makes the value of a tensor: its record, the path of the module, the number of the call, and its place.
Values = Callable[[TensorRecord, str, int, tuple[Any, ...]], dict[str, Any]]


class DebugTree:
    """Makes the tree.

    Args:
        trace: The trace.
        model: The model.
        values: Describes a tensor.
        is_pruned: Leave out the blocks between the first and the last one.
    """

    def __init__(self, trace: Trace, model: torch.nn.Module, values: Values, is_pruned: bool) -> None:
        self._name = type(model).__name__
        self._values = values
        self._is_pruned = is_pruned
        self._children: dict[int | None, list[ModuleCall]] = {}
        for call in trace.calls:
            self._children.setdefault(call.parent, []).append(call)

    def root(self) -> dict[str, Any]:
        """Returns the node of the model's call; of several calls, a node that has theirs as its children."""
        calls = self._children.get(None, [])
        if len(calls) == 1 and not calls[0].path:
            return self._node(calls[0])
        return {"module_path": self._name, "children": [self._node(call) for call in calls]}

    def _node(self, call: ModuleCall) -> dict[str, Any]:
        path = f"{self._name}.{call.path}" if call.path else self._name
        inputs = self._nested(call, path, call.inputs, call.other_inputs)
        if not call.path:
            inputs = {"args": [], "kwargs": {}} | inputs
        node: dict[str, Any] = {"module_path": path, "inputs": inputs}
        children = self._kept(self._children.get(call.index, []))
        if children:
            node["children"] = [self._node(child) for child in children]
        else:
            node["outputs"] = self._nested(call, path, call.outputs, call.other_outputs).get("outputs")
        if call.error is not None:
            node["error"] = call.error
        return node

    def _kept(self, calls: list[ModuleCall]) -> list[ModuleCall]:
        """The calls without those of blocks between the first and the last one."""
        blocks = [call for call in calls if self._is_block(call)]
        dropped = {call.index for call in blocks[1:-1]} if self._is_pruned else set()
        return [call for call in calls if call.index not in dropped]

    def _is_block(self, call: ModuleCall) -> bool:
        number = _BLOCK.search(f".{call.path}")
        inside = self._children.get(call.index, [])
        return number is not None and any(f".{number[1]}." in f".{child.path}" for child in inside)

    def _nested(
        self, call: ModuleCall, path: str, tensors: tuple[TensorRecord, ...], others: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Lists and dicts, as they were, around descriptions of what is in them."""
        nested: dict[Any, Any] = {}
        for place, value in others.items():
            _put(nested, _steps(place), _shown(value))
        for record in tensors:
            steps = _steps(record.path)
            _put(nested, steps, _Tensor(self._values(record, path, call.number, steps)))
        return {key: _settled(value) for key, value in sorted(nested.items())}


class _Tensor(dict[str, Any]):
    """The description of a tensor, which is no container."""


def _shown(value: Any) -> Any:
    """A leaf that is no tensor, as its repr; empty containers as themselves."""
    empty: dict[str, Any] = {"[]": [], "()": [], "{}": {}}
    if isinstance(value, str):
        return empty.get(value, value)
    return repr(value)


def _steps(path: str) -> tuple[Any, ...]:
    return tuple([name or ast.literal_eval(key) for key, name in _STEP.findall(path)])


def _put(nested: dict[Any, Any], steps: tuple[Any, ...], value: Any) -> None:
    for step in steps[:-1]:
        nested = nested.setdefault(step, {})
    nested[steps[-1]] = value


def _settled(value: Any) -> Any:
    """A dict whose keys are 0, 1, 2, ... as a list."""
    if type(value) is not dict:
        return value
    keys = list(value)
    if keys and all(type(key) is int for key in keys) and sorted(keys) == list(range(len(keys))):
        return [_settled(value[key]) for key in range(len(keys))]
    return {str(key): _settled(item) for key, item in value.items()}


def without_values(node: Any) -> Any:
    """Returns a tree without the values of its tensors."""
    if isinstance(node, _Tensor):
        return {key: item for key, item in node.items() if key != "value"}
    if isinstance(node, dict):
        return {key: without_values(item) for key, item in node.items()}
    return [without_values(item) for item in node] if isinstance(node, list) else node
