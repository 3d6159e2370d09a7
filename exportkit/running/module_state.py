"""What modules hold besides parameters: attributes, buffers, and what containers and objects in them hold.

Plain values that code sets on the classes of the modules, such as counters, are looked at as well.

exportkit runs and traces models of users, who expect to find them as they were.
"""

from __future__ import annotations

import contextlib
import enum
import operator
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from exportkit._torch_compat.memory import FEW_ELEMENTS, protected_copy, version_of
from exportkit._torch_compat.modules import buffer_table, module_table, parameter_table
from exportkit.overrides import classes_of
from exportkit.running.compare import same_value
from exportkit.trees.caches import ATOMS
from exportkit.trees.structure import path_of

_OF_MODULES = frozenset(vars(torch.nn.Module()))  # attributes of every module: tables of parameters, hooks and so on
_NOT_LOOKED_INTO = ATOMS | {torch.nn.Parameter}
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
_CLOSED = (torch.nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType, enum.Enum)
_LIBRARIES = frozenset({"torch", "builtins", "typing", "abc"})  # whose classes are not looked at
_MOST_OBJECTS = 1000  # an attribute can lead to the whole program
_LONGEST = 1000  # a longer list holds data

# A tensor with its path, its values if they can be kept, and how often it was written.
_Tensor = tuple[str, torch.Tensor, torch.Tensor | None, int | None]


class _MarkedInt(int):
    """An integer that only marking puts somewhere."""


class _MarkedFloat(float):
    """A floating-point number that only marking puts somewhere."""


_MARKED: dict[type, Any] = {int: _MarkedInt, float: _MarkedFloat}


class ModuleState:
    """What the modules of a model hold now, so that changes show, and can be taken back.

    Args:
        model: The model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._tables: list[tuple[str, Any, Any]] = []
        self._tensors: list[_Tensor] = []
        self._seen = set[int]()
        self._waiting = deque[tuple[str, Any]]()
        self._classes = [
            (cls, dict(vars(cls))) for cls in classes_of(model) if cls.__module__.split(".")[0] not in _LIBRARIES
        ]
        for path, module in model.named_modules():
            for table in (vars(module), buffer_table(module), parameter_table(module)):
                if isinstance(table, dict):  # a scripted module shows its buffers otherwise
                    self._keep(path, table)
            if isinstance(modules := module_table(module), dict):
                self._tables.append((path, modules, modules.copy()))
        while self._waiting and len(self._seen) < _MOST_OBJECTS:
            self._look(*self._waiting.popleft())

    def _keep(self, path: str, table: Any) -> None:
        self._tables.append((path, table, table.copy()))
        if len(table) <= _LONGEST:
            for key, value in _entries(table):
                if type(value) not in _NOT_LOOKED_INTO and key not in _OF_MODULES:
                    self._waiting.append((path_of((key,), path), value))

    def _look(self, path: str, value: Any) -> None:
        if id(value) in self._seen or isinstance(value, _CLOSED):
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            self._tensors += [] if isinstance(value, torch.nn.Parameter) else [_kept(path, value)]
        elif type(value) in _CONTAINERS:
            self._keep(path, value)
        elif hasattr(value, "__dict__") and not type(value).__module__.startswith("torch"):
            self._keep(path, vars(value))

    def mark_numbers(self) -> None:
        """Puts equal numbers of other classes in the place of numbers, so that it shows if they are set again."""
        for _, table, entries in self._tables:
            for key, value in [] if isinstance(table, set) else list(_entries(table)):
                if type(value) in _MARKED:
                    table[key] = entries[key] = _MARKED[type(value)](value)

    def changed(self, or_written: bool = False) -> list[str]:
        """Returns the paths of what was replaced, added or written since, with other values.

        Args:
            or_written: Also return what was replaced by equal objects, marked numbers among them, and tensors that were
                written with the same values.
        """
        found: dict[str, None] = {}
        for path, table, entries in self._tables:
            before = dict(_entries(entries))
            for key, value in _entries(table):
                is_kept = key in before and same_value(value, before[key])
                if or_written and type(value) not in ATOMS:
                    is_kept = is_kept and value is before[key]
                if key not in _OF_MODULES and not is_kept:
                    found[path_of((key,), path) if isinstance(table, dict) else path] = None
        for cls, before in self._classes:
            found |= dict.fromkeys(f"{cls.__name__}.{name}" for name in _changed_values(cls, before))
        for path, tensor, values, version in self._tensors:
            is_written = or_written and version_of(tensor) != version
            if is_written or (values is not None and not same_value(tensor, values)):
                found[path] = None
        return [*found]

    def restore(self) -> None:
        """Puts everything back that was replaced, added or removed, and the values of tensors that were written."""
        for _, table, entries in self._tables:
            if not _holds_the_same(table, entries):
                table.clear()
                (table.extend if isinstance(table, list | deque) else table.update)(entries)
        for cls, before in self._classes:
            for name in _changed_values(cls, before):
                if name in before:
                    setattr(cls, name, before[name])
                else:
                    delattr(cls, name)
        _restore_tensors(self._tensors)


def _changed_values(cls: type, before: Mapping[str, Any]) -> list[str]:
    """Names of attributes of a class that code has set since, from or to a plain value."""
    now = vars(cls)
    found = [name for name in now.keys() | before if now.get(name, cls) is not before.get(name, cls)]
    pairs = {name: (now.get(name, cls), before.get(name, cls)) for name in found}
    return sorted(n for n, pair in pairs.items() if ATOMS & {*map(type, pair)} and not same_value(*pair))


def _holds_the_same(table: Any, entries: Any) -> bool:
    if len(table) != len(entries) or not all(map(operator.is_, table, entries)):  # the keys, or the elements
        return False
    return not isinstance(table, dict) or all(map(operator.is_, table.values(), entries.values()))


def _entries(table: Any) -> Iterable[tuple[Any, Any]]:
    return table.items() if isinstance(table, dict) else enumerate(table)


def _kept(path: str, tensor: torch.Tensor) -> _Tensor:
    return path, tensor, protected_copy(tensor.detach()), version_of(tensor)


def _restore_tensors(tensors: Iterable[_Tensor]) -> None:
    for _, tensor, values, version in tensors:
        if values is None or (version_of(tensor) == version is not None and tensor.numel() > FEW_ELEMENTS):
            continue  # kernels of batch norms write without counting it, but few elements
        if not same_value(tensor, values):
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(values)


@contextlib.contextmanager
def modules_kept(model: torch.nn.Module) -> Iterator[None]:
    """Restores what the modules of a model hold, whatever is run in between."""
    state = ModuleState(model)
    try:
        yield
    finally:
        state.restore()


@contextlib.contextmanager
def tensors_kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Restores the values of tensors that are written in between."""
    kept = [_kept("", tensor) for tensor in tensors]
    try:
        yield
    finally:
        _restore_tensors(kept)
