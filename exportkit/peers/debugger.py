"""Writes the files of transformers' ``model_addition_debugger_context`` from a trace of the run.

They are two JSON files, the tree of calls with and without values. Names and layout are those of
``transformers.model_debugging_utils``: a node is ``{"module_path", "inputs": {"args", "kwargs"}, "outputs",
"children"}``. Absent inputs are left out except for the model itself, a node with children has no outputs, and one
without has no children. A tensor is ``{"shape", "dtype", "value", "mean", "std", "min", "max"}``, all texts, with
statistics for the usual floating-point dtypes only; its value is the tensor as it is printed, or the name of a file.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from exportkit._torch_compat.memory import scientific_text
from exportkit.errors import TraceError, require_module
from exportkit.module_traces.measure import SAFETENSORS_DTYPES, decompose, named_in_torch
from exportkit.module_traces.trace import ALL, ENDS, Trace, ValueSelection, recording
from exportkit.module_traces.trace_data import ModuleCall, TensorRecord

_PATH_STEP = re.compile(r"""\[('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\]]*)\]|\.?([^.\[]+)""")
_BLOCK = re.compile(r"\.(\d+)$")
_MEASURED = (torch.float16, torch.float32, torch.bfloat16)
_NOT_IN_NAMES = re.compile(r'[/\\:*?"<>|\0\s]')
# Returns the value to show for a tensor: its values or None, its record, the path of the module, the number of the
# call, and the path of the tensor in its steps.
_ShownValue = Callable[[torch.Tensor | None, TensorRecord, str, int, tuple[Any, ...]], Any]


@contextlib.contextmanager
def model_addition_debugger_context(
    model: torch.nn.Module,
    debug_path: str | os.PathLike[str] | None = None,
    do_prune_layers: bool = True,
    use_repr: bool = True,
) -> Iterator[torch.nn.Module]:
    """Writes what the modules of a model were given and returned, as transformers does, for a ``with`` block.

    The files are ``<Class>_debug_tree_FULL_TENSORS.json`` and ``<Class>_debug_tree_SUMMARY.json``, without values. They
    are written when the block ends, also by an exception. Several calls of the model are children of one tree. The
    model runs without gradients; of distributed processes, the first one writes. Beside the files is the folder
    ``<Class>_debug_trace``, the `Trace` of the run, which also has hashes, and the outputs of modules with children.

    Args:
        model: Any module.
        debug_path: Where to write; by default, the current directory.
        do_prune_layers: Leave out the blocks between the first and the last one.
        use_repr: Show values as text. Otherwise each tensor is written into a SafeTensors file, and its name shown.

    Raises:
        InvalidTypeError: if ``model`` is not a module.
        DestinationError: if the directory cannot be written.
    """
    require_module(model, "debugged")
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank():
        with torch.no_grad():
            yield model
        return
    target, name = Path(debug_path or "."), type(model).__name__
    selection = ValueSelection(model, ENDS if do_prune_layers else ALL)
    begun: list[Trace] = []
    try:
        with recording(model, target / f"{name}_debug_trace", selection, without_gradients=True) as trace:
            begun.append(trace)
            yield model
    finally:
        for trace in begun:
            tree = _DebugTree(trace, name, _text_of if use_repr else _TensorFiles(target), do_prune_layers)
            try:
                root = tree.root()
                for end, node in (("FULL_TENSORS", root), ("SUMMARY", _without_values(root))):
                    Path(target / f"{name}_debug_tree_{end}.json").write_text(json.dumps(node, indent=2), "utf-8")
            except (OSError, SafetensorError) as error:  # the run of the model goes on
                warnings.warn(f"exportkit: the files could not be written: {error}", RuntimeWarning, stacklevel=3)


class _DebugTree:
    """Makes the tree of calls.

    Args:
        trace: The trace.
        name: Class of the model.
        shown_value: Returns what is shown as the value of a tensor.
        is_pruned: Leave out the blocks between the first and the last one.
    """

    def __init__(self, trace: Trace, name: str, shown_value: _ShownValue, is_pruned: bool) -> None:
        self._trace, self._name, self._shown_value, self._is_pruned = trace, name, shown_value, is_pruned
        self._children: dict[int | None, list[ModuleCall]] = {}
        for call in trace.calls:
            self._children.setdefault(call.parent, []).append(call)

    def root(self) -> dict[str, Any]:
        """Returns the node of the model's call, or a node that has several calls as its children."""
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
        self, call: ModuleCall, module: str, tensors: tuple[TensorRecord, ...], others: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Lists and dicts, as they were, around descriptions of what is in them."""
        nested: dict[Any, Any] = {}
        empty: dict[str, Any] = {"[]": [], "()": [], "{}": {}}
        for path, value in others.items():
            _put(nested, _steps(path), empty.get(value, value) if isinstance(value, str) else repr(value))
        for record in tensors:
            _put(nested, _steps(record.path), self._described(record, module, call.number))
        return {key: _with_lists(value) for key, value in sorted(nested.items())}

    def _described(self, record: TensorRecord, module: str, number: int) -> _Tensor:
        tensor = None
        with contextlib.suppress(TraceError):  # its values were not stored
            tensor = self._trace.tensor(record)
        shape = torch.Size(record.shape) if tensor is None or tensor.is_nested else tensor.shape
        value = self._shown_value(tensor, record, module, number, _steps(record.path))
        described = _Tensor(shape=repr(shape), dtype=f"torch.{record.dtype}", value=value)
        if named_in_torch(record.dtype, torch.dtype) in _MEASURED:
            described.update({name: _statistic(name, record, tensor) for name in ("mean", "std", "min", "max")})
        return described


class _Tensor(dict[str, Any]):
    """The description of a tensor, as opposed to a dict that the model used."""


def _steps(path: str) -> tuple[Any, ...]:
    return tuple([name or ast.literal_eval(key) for key, name in _PATH_STEP.findall(path)])


def _put(nested: dict[Any, Any], steps: tuple[Any, ...], value: Any) -> None:
    for step in steps[:-1]:
        nested = nested.setdefault(step, {})
    nested[steps[-1]] = value


def _with_lists(value: Any) -> Any:
    """Turns dicts whose keys are 0, 1, 2, ... into lists."""
    if type(value) is not dict:
        return value
    keys = list(value)
    if keys and all(type(key) is int for key in keys) and sorted(keys) == list(range(len(keys))):
        return [_with_lists(value[key]) for key in range(len(keys))]
    return {str(key): _with_lists(item) for key, item in value.items()}


def _without_values(node: Any) -> Any:
    """The tree without the values of its tensors."""
    if isinstance(node, _Tensor):
        return {key: item for key, item in node.items() if key != "value"}
    if isinstance(node, dict):
        return {key: _without_values(item) for key, item in node.items()}
    return [_without_values(item) for item in node] if isinstance(node, list) else node


def _unstored(record: TensorRecord) -> str:
    return f"tensor(..., device='{record.device}', size={record.shape})"


def _text_of(tensor: torch.Tensor | None, record: TensorRecord, *_where: Any) -> list[str]:
    return [_unstored(record)] if tensor is None else scientific_text(tensor).splitlines()


class _TensorFiles:
    """Writes tensors into files, under the key ``data``, and shows the names of these."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: set[str] = set()

    def __call__(
        self, tensor: torch.Tensor | None, record: TensorRecord, module: str, number: int, steps: tuple[Any, ...]
    ) -> str:
        if tensor is None:
            return _unstored(record)
        place = steps if steps[0] == "outputs" else ("inputs", *steps)
        name = _NOT_IN_NAMES.sub("_", "_".join([module, *map(str, place)])) + (f".call_{number}" if number else "")
        others = (f"{name}.{count}" for count in range(2, len(self._names) + 3))
        free = name if name not in self._names else next(other for other in others if other not in self._names)
        self._names.add(free)
        parts = decompose(tensor)  # one for a dense tensor
        details = {key: str(value) for key, value in parts.details.items()}
        content = {f"data.{key}" if key else "data": _writable(part) for key, part in parts.parts.items()}
        save_file(content, self._folder / f"{free}.safetensors", metadata={"dtype": str(tensor.dtype), **details})
        return f"./{free}.safetensors"


def _statistic(name: str, record: TensorRecord, tensor: torch.Tensor | None) -> str:
    """The repr of what a method of the tensor returns; where it has no such method, of the recorded statistic."""
    if tensor is not None and tensor.layout is torch.strided and not tensor.is_nested and tensor.numel() > 1:
        found = getattr(tensor, name)()
    else:
        value = getattr(record, name)
        found = torch.tensor(float("nan") if value is None else value, dtype=named_in_torch(record.dtype, torch.dtype))
    text = scientific_text(found)
    return text if record.device == "cpu" else f"{text[:-1]}, device='{record.device}')"


def _writable(dense: torch.Tensor) -> torch.Tensor:
    """A dense tensor of a dtype that SafeTensors has: pairs for complex numbers, bytes for what it lacks."""
    plain = dense.resolve_conj().resolve_neg().contiguous()
    if plain.dtype in SAFETENSORS_DTYPES:
        return plain
    if plain.dtype.is_complex and plain.dtype is not torch.complex32:
        return torch.view_as_real(plain).contiguous()
    return plain.reshape(-1).view(torch.uint8)
