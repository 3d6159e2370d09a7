"""Objects of unregistered classes: which of them are opened by their attributes, and what they hold.

An object is opened if it holds tensors, and if an indistinguishable object can be built around other tensors: of the
same class, with the same attributes, and with the same references between its parts. Neither its ``__init__`` nor any
other method of its class runs. Every other object stays closed.
"""

from __future__ import annotations

import argparse
import enum
import functools
import sys
import types
import weakref
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from exportkit._torch_compat.pytree import Registration, registered_node
from exportkit.trees.caches import ATOMS, is_cache_class
from exportkit.trees.object_parts import (
    BUILT_IN,
    HEAP_TYPE,
    ObjectPart,
    Path,
    Skeleton,
    Unread,
    Unreadable,
    build_object,
    is_in_c,
    name_of,
    state_of,
)

# Objects with more parts than this stay closed.
_MOST_PARTS = 20_000
CONTAINERS = frozenset({list, tuple, dict, OrderedDict, defaultdict, deque})
# Classes of the standard library that hold nothing but what they are given.
_PLAIN = frozenset({types.SimpleNamespace, argparse.Namespace, UserDict, UserList})
_NEVER: tuple[Any, ...] = (
    *(torch.nn.Module, torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool),
    *(type, enum.Enum, BaseException, tuple, set, frozenset, str, bytes, int, float),
)


class Opened(NamedTuple):
    """What is in an opened object: leaves with their paths, and everything else."""

    leaves: list[Any]
    paths: tuple[Path, ...]
    skeleton: Skeleton


# Classes of the objects that were opened; torch's pytree has to know them where it is given such objects.
opened_classes: weakref.WeakSet[type] = weakref.WeakSet()
# Those of objects that calls changed, such as caches: they are opened without tensors, too.
changing_classes: weakref.WeakSet[type] = weakref.WeakSet()


class _NotFaithful(Exception):
    """An object cannot be built again, and why."""


def open_object(value: Any, may_be_empty: bool = False) -> Opened | None:
    """Returns what is in an object; None if it holds no tensors, or cannot be built again.

    Args:
        value: The object.
        may_be_empty: Open it without tensors too, as is done if a call has changed an object of its class.
    """
    if not can_open(type(value)):
        return None
    try:
        return _opened(value, may_be_empty)
    except Exception:  # an object that raises when it is looked at
        return None


def why_closed(value: Any) -> str:
    """Returns why an object that holds tensors was not opened; an empty string if nothing is known."""
    try:
        _opened(value)
    except Exception as error:
        return str(error)
    return ""


def _opened(value: Any, may_be_empty: bool = False) -> Opened | None:
    walk = _Walk()
    walk.ref(value, Path())
    if walk.links or type(value) in changing_classes:
        opened_classes.add(type(value))
    elif not may_be_empty:
        return None
    return Opened(walk.leaves, tuple(walk.paths), Skeleton(tuple(walk.parts)))


class _Walk:
    """Lists leaves and parts; tensors and parts that are met again are the same ones."""

    def __init__(self) -> None:
        self.leaves: list[Any] = []
        self.paths: list[Path] = []
        self.parts: list[Any] = []
        self.links = 0  # how many tensors were found so far
        self._back: list[int] = []  # numbers of the parts that were found again
        self._numbers: dict[int, int] = {}  # of leaves that are tensors, by identity
        self._seen: dict[int, int] = {}  # numbers of the parts by identity

    def ref(self, value: Any, path: Path) -> tuple[str, int]:
        """Returns where a value is, which is a leaf or a part."""
        if type(value) in ATOMS:
            return self._leaf(value, path)
        if type(value) is Unreadable:
            return self._leaf(Unread(value, object.__getattribute__(value, "cls")), path)
        if id(value) in self._seen:
            self._back.append(self._seen[id(value)])
            return ("part", self._back[-1])
        if isinstance(value, torch.Tensor):
            if id(value) not in self._numbers:
                self._numbers[id(value)] = self._leaf(value, path)[1]
            self.links += 1
            return ("leaf", self._numbers[id(value)])
        if isinstance(value, weakref.ReferenceType):
            number = self._seen.get(id(value()))
            if number is None or type(value) is not weakref.ReferenceType:
                raise _NotFaithful(f"{path.lstrip('.')} is a weak reference to another object")
            self._back.append(number)
            return ("weak", number)
        if _is_tied(value):
            raise _NotFaithful(f"{path.lstrip('.') or 'it'} is a {type(value).__qualname__}, which cannot be copied")
        foreign = _foreign(value)
        if foreign is not None:
            return self._leaf(Unread(value, foreign), path)
        if type(value) in CONTAINERS or hasattr(type(value), "_fields") or can_open(type(value)):
            return self._part(value, path)
        if _nests(value):
            self.links += type(value) is not torch.Size  # opened by the flattener
        return self._leaf(value, path)

    def _leaf(self, value: Any, path: Path) -> tuple[str, int]:
        self.leaves.append(value)
        self.paths.append(path)
        return ("leaf", len(self.leaves) - 1)

    def _part(self, value: Any, path: Path) -> tuple[str, int]:
        """A part; an object that holds neither tensors nor other parts of this one is a leaf after all."""
        cls, number, before = type(value), len(self.parts), (len(self.leaves), self.links, len(self._back))
        if number > _MOST_PARTS:
            raise _NotFaithful("it has too many parts")
        self.parts.append(None)
        if not isinstance(value, tuple):
            self._seen[id(value)] = number
        state = state_of(value) if cls not in CONTAINERS and not isinstance(value, tuple) else {}
        keys, items, extra = _content_of(value)
        steps = ["" if _holds_items(value, name, state) else f".{name}" for name in state]
        for key in keys if isinstance(value, dict) else range(len(items)):
            is_name = isinstance(key, str) and key.isidentifier() and key not in state
            steps.append(f".{key}" if is_name else f"[{key!r}]")
        values = [*state.values(), *items]
        refs = [self.ref(item, Path(path + step)) for item, step in zip(values, steps, strict=True)]
        linked = self.links > before[1] or any(other < number for other in self._back[before[2] :])
        if number and not linked and can_open(cls) and cls not in changing_classes:
            for name in [name for name, position in self._seen.items() if position >= number]:
                del self._seen[name]
            del self.parts[number:], self.leaves[before[0] :], self.paths[before[0] :]
            return self._leaf(value, path)
        self.parts[number] = ObjectPart(cls, tuple(state), keys, tuple(refs), extra)
        return ("part", number)


def _holds_items(value: Any, name: str, state: Mapping[str, Any]) -> bool:
    """Whether an attribute has the items of a mapping or a list, whose paths are those in the object itself."""
    if name != "data" or not isinstance(value, UserDict | UserList):
        return False
    return isinstance(value, UserList) or not state.keys() & state[name].keys() - {name}


def _content_of(value: Any) -> tuple[tuple[Any, ...], list[Any], Any]:
    """What an object holds as a container: keys, items, and what a new one is made with."""
    if isinstance(value, dict):
        keys = tuple(dict.keys(value))
        if any(type(key) not in ATOMS for key in keys):
            raise _NotFaithful("a key of a dict is an object")
        return keys, list(dict.values(value)), getattr(value, "default_factory", None)
    if isinstance(value, list | deque):
        items: Any = list.__iter__(value) if isinstance(value, list) else deque.__iter__(value)
        return (), list(items), getattr(value, "maxlen", None)
    if isinstance(value, tuple):
        return (), list(tuple.__iter__(value)), None
    return (), [], None


def can_open(cls: type) -> bool:
    """Returns whether objects of a class can be opened by their attributes."""
    node = registered_node(cls)
    return (node is None or node.flatten is flatten_tensors) and _is_plain(cls)


@functools.lru_cache(maxsize=1024)
def _is_plain(cls: Any) -> bool:
    """Whether objects of a class consist of their attributes, and of what they hold as a container."""
    if issubclass(cls, _NEVER) or is_cache_class(cls) or hasattr(cls, "__del__"):
        return False
    if cls not in _PLAIN and _in_standard_library(cls):
        return False
    return all(base.__flags__ & HEAP_TYPE or base in BUILT_IN for base in cls.__mro__) and not is_in_c(cls)


def _in_standard_library(cls: type) -> bool:
    """Whether the standard library defines a class; classes that ``abc`` makes for other packages claim so, too."""
    home = (name_of(cls) or "").partition(":")[0]
    return home == cls.__module__ and home.partition(".")[0] in sys.stdlib_module_names - {"__main__"}


def _foreign(value: Any) -> type | None:
    """The class of a value that is written in C, neither by Python nor by torch; a list of such values is like one."""
    cls: Any = type(value)
    if cls in (list, tuple) and value:
        found = {_foreign(item) for item in value}
        return found.pop() if len(found) == 1 else None
    home = cls.__module__.partition(".")[0]
    if callable(value) or home in sys.stdlib_module_names or home in ("torch", "numpy"):
        return None
    known = isinstance(value, _NEVER) or registered_node(cls) is not None or not is_in_c(cls)
    return None if known else cls


def _is_tied(value: Any) -> bool:
    """Whether a value belongs to something outside of Python, as a lock and a file do."""
    cls: Any = type(value)
    if cls in CONTAINERS or callable(value) or isinstance(value, _NEVER) or not is_in_c(cls):
        return False
    try:
        value.__reduce_ex__(4)
    except TypeError:
        return True
    return False


@dataclass(frozen=True, slots=True)
class Rest:
    """What torch's pytree keeps of an object, apart from its tensors; the other leaves by their positions."""

    skeleton: Skeleton
    constants: tuple[tuple[int, Any], ...] = field(compare=False)
    plain: tuple[Any, ...]  # the constants that can be compared by type and value

    @classmethod
    def of(cls, skeleton: Skeleton, constants: Sequence[tuple[int, Any]]) -> Rest:
        """Returns what is kept of an object with this skeleton and these constants."""
        plain = [(position, type(value), value) for position, value in constants if type(value) in ATOMS]
        return cls(skeleton, tuple(constants), tuple(plain))


def tensor_names(value: Any) -> list[str]:
    """Returns the paths of what `flatten_tensors` returns."""
    opened = _opened(value)
    return (
        []
        if opened is None
        else [p.lstrip(".") for p, leaf in zip(opened.paths, opened.leaves, strict=True) if _nests(leaf)]
    )


def flatten_tensors(value: Any) -> tuple[list[Any], Rest]:
    """Returns what holds the tensors of an object, and everything else: its registration with torch's pytree.

    Raises:
        TypeError: if it cannot be opened.
    """
    opened = open_object(value)
    if opened is None:
        raise TypeError(
            f"an object of class {type(value).__qualname__} that holds no tensors, or cannot be built again"
        )
    tensors, constants = [], []
    for position, leaf in enumerate(opened.leaves):
        if _nests(leaf):
            tensors.append(leaf)
        else:
            constants.append((position, leaf))
    return tensors, Rest.of(opened.skeleton, constants)


def _nests(leaf: Any) -> bool:
    cls = type(leaf)
    return isinstance(leaf, torch.Tensor) or is_cache_class(cls) or registered_node(cls) is not None


def unflatten_tensors(tensors: Iterable[Any], rest: Rest) -> Any:
    """Returns the object around other tensors."""
    leaves = list(tensors)
    for position, constant in rest.constants:
        leaves.insert(position, constant)
    return build_object(leaves, rest.skeleton)


# How the flattener opens and builds objects.
OBJECT = Registration(lambda value: (_opened(value).leaves, None), build_object, None)  # type: ignore[union-attr]
