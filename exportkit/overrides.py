"""Replaces attributes, items, classes and children temporarily, and restores them in whatever order the blocks end.

Blocks may overlap in any order and in several threads: the latest block that is still open decides, and after the last
one everything is as it was before the first.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any, Protocol

import torch


class Slot(Protocol):
    """A place that holds something; equal slots are the same place."""

    def read(self) -> Any:
        """Returns what the slot holds now."""

    def write(self, value: Any, /) -> None:
        """Puts something else there."""


Replacing = contextlib.AbstractContextManager[None]  # replaces something for the time of a ``with`` block

_lock = threading.RLock()
# For each slot that is replaced: what it held before, then who replaced it and by what, in order.
_values: dict[Slot, list[tuple[object, Any]]] = {}
# Packages whose own imports stay as they are: none of them has code of models. torch computes sizes with sympy's.
_UNCHANGED = {
    *("torch", "sympy", "mpmath", "numpy", "scipy", "onnx", "onnx_ir", "onnxscript", "exportkit"),
    *(sys.stdlib_module_names - {"__main__"}),
}
_MISSING = object()  # held by an attribute or an item that does not exist


class _Named:
    """A slot that is known by the identity of its owner, which need not be hashable, and by a name or key."""

    def __init__(self, owner: Any, name: Any) -> None:
        self.owner = owner
        self.name = name

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Named) or type(other) is not type(self):
            return False
        return self.owner is other.owner and self.name == other.name

    def __hash__(self) -> int:
        return hash((id(self.owner), self.name))


class Attribute(_Named):
    """An attribute of a class, a Python module or another object; attributes that a class inherits are not its own."""

    def read(self) -> Any:
        """Returns what the slot holds now."""
        return vars(self.owner).get(self.name, _MISSING)

    def write(self, value: Any) -> None:
        """Puts something else there."""
        if value is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


class Item(_Named):
    """An item of a mapping."""

    def read(self) -> Any:
        """Returns what the slot holds now."""
        return self.owner.get(self.name, _MISSING)

    def write(self, value: Any) -> None:
        """Puts something else there."""
        if value is _MISSING:
            del self.owner[self.name]
        else:
            self.owner[self.name] = value


@dataclass(frozen=True)
class ClassOf:
    """The class of a live module."""

    module: torch.nn.Module

    def read(self) -> type:
        """Returns what the slot holds now."""
        return type(self.module)

    def write(self, cls: Any) -> None:
        """Puts another class there."""
        object.__setattr__(self.module, "__class__", cls)


@dataclass(frozen=True)
class ChildOf:
    """A child of a module."""

    parent: torch.nn.Module
    name: str

    def read(self) -> Any:
        """Returns what the slot holds now."""
        return self.parent.get_submodule(self.name)

    def write(self, child: Any) -> None:
        """Puts another module there."""
        self.parent.add_module(self.name, child)


@contextlib.contextmanager
def replaced(replacements: Iterable[tuple[Slot, Any]]) -> Iterator[None]:
    """Puts other values into slots for the time of a ``with`` block."""
    with replace(replacements):
        yield


def replace(replacements: Iterable[tuple[Slot, Any]]) -> contextlib.ExitStack:
    """Puts other values into slots, and returns the stack that restores them when it is closed."""
    with contextlib.ExitStack() as stack:
        for slot, value in replacements:
            token = object()
            with _lock:
                entries = _values.get(slot) or [(None, slot.read())]
                slot.write(value)
                _values[slot] = [*entries, (token, value)]
            stack.callback(_restore, slot, token)
        return stack.pop_all()


def _restore(slot: Slot, token: object) -> None:
    with _lock:
        entries = [entry for entry in _values[slot] if entry[0] is not token]
        if len(entries) > 1:
            _values[slot] = entries
        else:
            del _values[slot]
        slot.write(entries[-1][1])


def attribute_slots(owned: Iterable[tuple[Any, Mapping[str, Any]]]) -> list[tuple[Attribute, Any]]:
    """Returns the replacements for attributes of classes, Python modules or other objects, each with its attributes."""
    return [(Attribute(owner, name), value) for owner, attributes in owned for name, value in attributes.items()]


def with_imports(replacements: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Returns replacements with those of the names under which other Python modules have imported the same functions.

    ``from torch.nn.functional import pad`` makes a name of the importing module, which does not change with the
    attribute of ``torch.nn.functional``.

    Args:
        replacements: Slots and what they get. Only functions of Python modules can have been imported.
    """
    replacements = list(replacements)
    values, originals = dict[int, Any](), []
    for slot, value in replacements:
        if isinstance(slot, Attribute) and isinstance(slot.owner, ModuleType) and callable(function := slot.read()):
            values[id(function)] = value
            originals.append(original_in(slot))
    for module, name in _imports.of(originals):
        if (current := id(vars(module).get(name))) in values:
            replacements.append((Attribute(module, name), values[current]))
    return replacements


class _Imports:
    """The names under which Python modules have imported functions.

    Going through all names takes 10 ms, and an export replaces functions some hundred times. So a Python module is
    searched again only when it has another number of names than before; a name that gets a function later is not found.
    """

    def __init__(self) -> None:
        self._functions: dict[int, Any] = {}  # by identity; held here, so that no other object gets it
        self._importers: dict[int, dict[tuple[str, str], None]] = {}
        self._searched: dict[str, tuple[int, int]] = {}  # by Python module: which dict, with how many names

    def of(self, functions: Iterable[Any]) -> list[tuple[ModuleType, str]]:
        """Returns the Python modules that have imported one of the functions, each with the name it has there."""
        wanted = {id(function): function for function in functions}
        with _lock:
            new = wanted.keys() - self._functions.keys()
            self._functions |= wanted
            for name, module in list(sys.modules.items()) if wanted else []:
                if _may_import(name) and isinstance(module, ModuleType):
                    self._search(name, vars(module), new)
            found = dict.fromkeys(place for function in wanted for place in self._importers.get(function, ()))
            return [(sys.modules[module], name) for module, name in found if module in sys.modules]

    def _search(self, module: str, names: Mapping[str, Any], new: Set[int]) -> None:
        if self._searched.get(module) != (id(names), len(names)):
            self._searched[module] = id(names), len(names)
            new = self._functions.keys()
        if new and not new.isdisjoint(map(id, list(names.values()))):
            for name, value in list(names.items()):
                if id(value) in new:
                    self._importers.setdefault(id(value), {})[module, name] = None


_imports = _Imports()


@functools.cache
def _may_import(name: str) -> bool:
    """Whether a Python module of this name may have imported functions that are replaced, and should get others."""
    return name.partition(".")[0] not in _UNCHANGED


def replaced_attributes(owner: Any, attributes: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Gives a class, a Python module or another object other attributes for the time of a ``with`` block."""
    return replaced(attribute_slots([(owner, attributes)]))


def replaced_functions(
    model: torch.nn.Module, functions: Mapping[str, Callable[..., Any]]
) -> contextlib.AbstractContextManager[None]:
    """Replaces functions in the Python modules in which the classes of a model are defined, where there are any.

    A model of transformers looks its kernels up in the Python module of its class.

    Args:
        model: The model.
        functions: By name, the functions that the classes find instead.
    """
    found = [(Attribute(module, name), functions[name]) for module in namespaces(model) for name in functions]
    return replaced([(slot, function) for slot, function in found if callable(slot.read())])


def classes_of(model: torch.nn.Module) -> dict[type, None]:
    """Returns the classes of a model's modules and their base classes, each once, in the order of the modules."""
    return dict.fromkeys(cls for module in model.modules() for cls in type(module).__mro__)


def namespaces(model: torch.nn.Module) -> list[ModuleType]:
    """Returns the Python modules in which the classes of a model's modules are defined."""
    names = {type(module).__module__ for module in model.modules()} & sys.modules.keys()
    return [sys.modules[name] for name in sorted(names)]


def called_namespaces(run: Callable[[], Any]) -> list[ModuleType]:
    """Returns the Python modules whose functions a run calls, whatever it raises.

    Args:
        run: Runs a model.
    """
    names = set[str]()
    before: Any = sys.getprofile()

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            names.add(frame.f_globals.get("__name__", ""))

    sys.setprofile(note)
    try:
        with contextlib.suppress(Exception):
            run()
    finally:
        sys.setprofile(before if callable(before) else None)
        if hasattr(before, "enable"):  # an object of cProfile, which setprofile does not take
            before.enable()
    return [sys.modules[name] for name in sorted(names & sys.modules.keys())]


def original_in(slot: Slot) -> Any:
    """Returns what a slot holds when no block that replaces it is open."""
    with _lock:
        return _values[slot][0][1] if slot in _values else slot.read()


def original_attribute(owner: Any, name: str) -> Any:
    """Returns what an attribute, inherited or not, is when no block that replaces it is open."""
    slot = Attribute(owner, name)
    with _lock:
        if slot not in _values:
            return getattr(owner, name)
        own = original_in(slot)
        return getattr(super(owner, owner), name) if own is _MISSING else own


def original_class(module: torch.nn.Module) -> type:
    """Returns the class of a module when no block that replaces it is open."""
    return original_in(ClassOf(module)) if _values else type(module)


def modules_as_they_were(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, torch.nn.Module]]:
    """Yields the path of each module in a model, the module, and the one in its place when no block is open."""
    for path, module in model.named_modules():
        parent, _, name = path.rpartition(".")
        yield path, module, original_in(ChildOf(model.get_submodule(parent), name)) if path and _values else module


def replaced_classes(model: torch.nn.Module) -> list[tuple[type, type, int]]:
    """Returns the classes in a model that are replaced now: each with its replacement and the number of modules."""
    if not _values:
        return []
    found = Counter((original_class(before), type(module)) for _, module, before in modules_as_they_were(model))
    return [(*classes, count) for classes, count in found.items() if classes[0] is not classes[1]]


def is_replaced(owner: Any, name: str) -> bool:
    """Returns whether a block that replaces an attribute is open."""
    return Attribute(owner, name) in _values
