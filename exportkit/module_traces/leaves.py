"""Flattens what modules are given and return, quickly enough to do so for every call.

Values of the same structure share their `LeafPaths`, so that paths are made once and not for each call.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
import types
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from exportkit.plan.leaves import is_below
from exportkit.trees import flatten, join
from exportkit.trees.caches import ATOMS
from exportkit.trees.flatten import flattened, holds_tensor
from exportkit.trees.objects import OBJECT, can_open
from exportkit.trees.structure import Closed, Nested, RegisteredObject, Structure, path_of

_LONGEST_TEXT = 500  # characters of a text, which may be a whole prompt
_DEEPEST = 8  # objects inside objects that are opened; deeper ones become texts, as objects can refer to each other
_PLAIN = (dict, list, tuple)
_UNOPENED = (type, torch.nn.Module, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
_SHORT = (slice, range, complex, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum)


@dataclasses.dataclass(frozen=True)
class LeafPaths:
    """Paths of the leaves of values that have the same structure.

    Attributes:
        number: How many structures were seen before.
        tensors: Paths of the tensors.
        others: Paths of the other leaves.
        order: For each path of a tensor, its position among the tensors of a flattened value.
        empty: Arguments without leaves, as a text by path, such as an empty cache.
    """

    number: int
    tensors: tuple[str, ...]
    others: tuple[str, ...]
    order: tuple[int, ...]
    empty: dict[str, str]


class FoundLeaves(NamedTuple):
    """The leaves of a value, in the order of their paths."""

    paths: LeafPaths
    tensors: list[torch.Tensor]
    others: list[Any]


class LeafReader:
    """Flattens values, and remembers the structures that it has seen.

    Caches and classes registered with torch are opened as everywhere in this package; so are mappings, dataclasses, and
    objects that hold tensors.
    """

    def __init__(self) -> None:
        self._known: dict[Any, LeafPaths] = {}

    def read(self, value: dict[str, Any]) -> FoundLeaves:
        """Returns the leaves of a dict of values; those that are not tensors in a form that JSON can hold."""
        path, only = _only_value(value)
        if isinstance(only, torch.Tensor):
            paths = self._known.get(path) or self._new(value, path, (path,), (), (0,))
            return FoundLeaves(paths, [only], [])
        taken = flattened(value)
        others: list[Any] = []
        _add_others(taken.structure.root, others)
        if any(type(other) is Closed and _inside(other.value) is not None for other in others):
            return self._opened(value)
        key = taken.structure.marks
        if key not in self._known and _has_objects(taken.structure.root):  # which list a tensor held twice once
            return self._opened(value)
        paths = self._known.get(key) or self._new(value, key, *_paths(taken.structure))
        return FoundLeaves(paths, [taken.tensors[i] for i in paths.order], [_plain(other) for other in others])

    def _opened(self, value: dict[str, Any]) -> FoundLeaves:
        """The leaves of a value with objects that have to be opened."""
        tensors: dict[str, torch.Tensor] = {}
        others: dict[str, Any] = {}
        _collect(value, "", tensors, others, _DEEPEST)
        key = tuple(tensors), tuple(others)
        paths = self._known.get(key) or self._new(value, key, *key, tuple(range(len(tensors))))
        return FoundLeaves(paths, list(tensors.values()), [_plain(other) for other in others.values()])

    def _new(
        self,
        value: dict[str, Any],
        key: Any,
        tensors: tuple[str, ...],
        others: tuple[str, ...],
        order: tuple[int, ...],
    ) -> LeafPaths:
        self._known[key] = paths = LeafPaths(
            len(self._known), tensors, others, order, _empty(value, {*tensors, *others})
        )
        return paths


def _empty(value: dict[str, Any], paths: set[str]) -> dict[str, str]:
    """Texts of arguments and outputs that have no leaves."""
    given = {f"args[{i}]": item for i, item in enumerate(value.get("args", ()))}
    given |= {path_of([key], "kwargs"): item for key, item in value.get("kwargs", {}).items()}
    given |= {"outputs": value["outputs"]} if "outputs" in value else {}
    leading = {path for path in given for leaf in paths if is_below(leaf, path)}
    return {path: _text(item) for path, item in given.items() if path not in leading}


def _only_value(value: dict[str, Any]) -> tuple[str, Any]:
    """What a module returned, or was given as its only argument: mostly a tensor, which is quick."""
    if "outputs" in value:
        return "outputs", value["outputs"]
    args = value["args"]
    return "args[0]", args[0] if len(args) == 1 and not value["kwargs"] else None


def _add_others(item: Any, others: list[Any]) -> None:
    """Adds the leaves of a structure that are not tensors, in the order of their paths; caches have none."""
    for leaf in item.items:
        kind = type(leaf)
        if kind in ATOMS or kind is Closed:
            others.append(leaf)
        elif kind is Nested or kind is RegisteredObject:
            _add_others(leaf, others)


def _paths(structure: Structure) -> tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]]:
    leaves = structure.listed()
    tensors = leaves.tensors()
    paths, order = tuple([path for path, _ in tensors]), tuple([number for _, number in tensors])
    return paths, tuple(leaves.constants), order


def _collect(value: Any, start: str, tensors: dict[str, torch.Tensor], others: dict[str, Any], depth: int) -> None:
    """Adds the leaves of a value by path, also those of the objects in it."""
    inside = _inside(value) if depth and can_open(type(value)) else None
    items = _items(value if inside is None else inside)
    if items is not None:
        for key, item in items:
            _collect(item, path_of((key,), start), tensors, others, depth - (inside is not None))
        return
    tree = flatten(value)
    for path, leaf in zip(tree.paths, tree.leaves, strict=True):
        place = join(start, path)
        if isinstance(leaf, torch.Tensor):
            tensors[place] = leaf
            continue
        inside = _inside(leaf) if depth else None
        if inside is None:
            others[place] = leaf
        else:
            _collect(inside, place, tensors, others, depth - 1)


def _items(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Keys and values of a plain container; None for anything else."""
    if type(value) not in _PLAIN:
        return None
    return value.items() if isinstance(value, dict) else enumerate(value)


def _has_objects(item: Any) -> bool:
    """Whether a structure has objects that were opened by their attributes."""
    kinds = (Nested, RegisteredObject)
    return getattr(item, "node", None) is OBJECT or any(type(i) in kinds and _has_objects(i) for i in item.items)


def _inside(value: Any) -> dict[Any, Any] | None:
    """The content of an object, by key or attribute; None if it is not opened."""
    if value is None or isinstance(value, _UNOPENED):
        return None
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    state = getattr(value, "__dict__", None)
    return state if isinstance(state, dict) and any(map(holds_tensor, state.values())) else None


def _plain(other: Any) -> Any:
    """A leaf in a form that JSON can hold and that does not differ between runs."""
    value = other.value if type(other) is Closed else other
    if value is None or type(value) in (bool, int):
        return value
    if type(value) is str:
        return value[:_LONGEST_TEXT]
    if isinstance(value, numbers.Number) and hasattr(value, "item"):
        value = value.item()  # of numpy
    if type(value) is float:
        return value if math.isfinite(value) else str(value)
    return _text(value)


def _text(value: Any) -> str:
    if isinstance(value, _SHORT) or (isinstance(value, list | tuple | dict) and not value):
        return repr(value)[:_LONGEST_TEXT]
    cls = value if isinstance(value, type | types.FunctionType) else type(value)
    return f"<{cls.__module__}.{cls.__qualname__}>"
