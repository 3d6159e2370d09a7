"""Objects that were opened by their attributes: their parts, and how an object is built again around other leaves."""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from exportkit.errors import ExportError

HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that is not built into the interpreter or an extension
# Containers, and what a class can be derived from besides classes that are written in Python.
BUILT_IN: tuple[Any, ...] = (OrderedDict, defaultdict, dict, list, deque, types.SimpleNamespace, object)


REFS = ("leaf", "part", "weak")


class Path(str):
    """The path of a leaf in an object, such as ``.mean`` or ``.store['x']``, where other steps are one name."""

    __slots__ = ()


class ObjectPart(NamedTuple):
    """An object or a container in an opened object.

    Attributes:
        cls: Its class.
        names: Its attributes.
        keys: Keys of a dict.
        refs: Where the values of its attributes are, then those of its keys or positions: in leaf or part number n; a
            weak reference is to part number n.
        extra: What makes the missing values of a defaultdict, or the greatest length of a deque.
    """

    cls: type
    names: tuple[str, ...]
    keys: tuple[Any, ...]
    refs: tuple[tuple[str, int], ...]
    extra: Any = None


@dataclass(frozen=True, slots=True)
class Skeleton:
    """An opened object without its leaves: its parts, itself first."""

    parts: tuple[ObjectPart, ...]


@dataclass(frozen=True, slots=True)
class Unread:
    """A value of a class that is written in C, which cannot be compared; a model that is traced may not read it."""

    value: Any = field(compare=False)
    cls: type


class Unreadable:
    """Stands for such a value in a trace: whatever a model does with it raises."""

    def __init__(self, cls: type) -> None:
        object.__setattr__(self, "cls", cls)

    def __getattribute__(self, name: str) -> Any:
        """Raises ExportError; torch copies a whole program, with what it was traced with."""
        if name == "__deepcopy__":
            return lambda _: self
        raise ExportError(
            "The model reads a value that cannot be compared between calls, as its class is written in C.",
            where=name,
            hint="give it to the model as tensors and Python values.",
        )

    def __bool__(self) -> bool:
        """Raises ExportError."""
        return bool(self.value)

    def __eq__(self, other: object) -> bool:
        """Raises ExportError."""
        return bool(self.value)

    def __len__(self) -> int:
        """Raises ExportError."""
        return int(self.value)

    def __hash__(self) -> int:
        """Raises ExportError."""
        return int(self.value)

    __iter__ = __getitem__ = __call__ = __bool__


def build_object(leaves: Iterable[Any], skeleton: Skeleton, into: Any = None) -> Any:
    """Returns an object around these leaves.

    Args:
        leaves: The leaves in order.
        skeleton: Everything else.
        into: An object of the same class, which becomes that object, as objects in it become its parts; by default,
            all are new.
    """
    values, parts = list(leaves), skeleton.parts
    values = [leaf.value if type(leaf) is Unread else leaf for leaf in values]
    made: dict[int, Any] = {} if into is None else _counterparts(parts, into)
    for own in made.values():
        _clear(own)
    for number, part in enumerate(parts):
        if number not in made and not issubclass(part.cls, tuple):
            made[number] = _empty(part)

    def found(ref: tuple[str, int]) -> Any:
        kind, number = ref
        if kind == "leaf":
            return values[number]
        if number not in made:  # a tuple, whose items come first
            items = [found(inner) for inner in parts[number].refs]
            cls: Any = parts[number].cls
            made[number] = cls(items) if cls is tuple else tuple.__new__(cls, items)
        return weakref.ref(made[number]) if kind == "weak" else made[number]

    for number, part in enumerate(parts):
        if not issubclass(part.cls, tuple):
            _fill(made[number], part, list(map(found, part.refs)))
    return found(("part", 0))


def _counterparts(parts: Sequence[ObjectPart], into: Any) -> dict[int, Any]:
    """Objects that become parts, by number: each is where the part is, and nowhere else."""
    made, seen = {0: into}, {id(into)}
    for number, part in enumerate(parts):
        if number not in made:  # parts come after those that hold them
            continue
        value, state = made[number], state_of(made[number])
        children = [state.get(name) for name in part.names]
        if isinstance(value, dict):
            children += [dict.get(value, key) for key in part.keys]
        elif isinstance(value, list | deque) and len(value) == len(part.refs) - len(part.names):
            children += value
        for (kind, inner), child in zip(part.refs, children, strict=False):
            is_alike = kind == "part" and type(child) is parts[inner].cls and not isinstance(child, tuple)
            if is_alike and inner not in made and id(child) not in seen:
                made[inner] = child
                seen.add(id(child))
    return made


def _empty(part: ObjectPart) -> Any:
    if issubclass(part.cls, defaultdict) or part.cls is deque:
        cls: Any = part.cls
        built = new_object(cls)
        defaultdict.__init__(built, part.extra) if issubclass(cls, defaultdict) else deque.__init__(
            built, (), part.extra
        )
        return built
    return new_object(part.cls)


def _clear(value: Any) -> None:
    if isinstance(value, dict):
        dict.clear(value)
    elif isinstance(value, list | deque):
        value.clear()
    for name in state_of(value):
        object.__delattr__(value, name)


def _fill(value: Any, part: ObjectPart, values: Sequence[Any]) -> None:
    for name, item in zip(part.names, values, strict=False):
        if name in slots_of(part.cls):
            object.__setattr__(value, name, item)
        else:  # no code of the class runs, which may note what is read
            object.__getattribute__(value, "__dict__")[name] = item
    items = values[len(part.names) :]
    if isinstance(value, dict):
        setter: Any = OrderedDict.__setitem__ if isinstance(value, OrderedDict) else dict.__setitem__
        for key, item in zip(part.keys, items, strict=True):
            setter(value, key, item)
    elif isinstance(value, list | deque):
        (list if isinstance(value, list) else deque).extend(value, items)  # type: ignore[arg-type]


def name_of(cls: type) -> str | None:
    """Returns module and qualified name under which a class is found; None if it is found nowhere.

    A metaclass can make a class in another module than the class says: in that of one of its bases.
    """
    names = (f"{base.__module__}:{cls.__qualname__}" for base in cls.__mro__)
    return next((name for name in names if named(name) is cls), None)


def named(name: str) -> Any:
    """Returns what a name of the form ``module:qualified.name`` stands for in a loaded module, or None."""
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for step in qualified.split("."):
        found = getattr(found, step, None)
    return found


def new_object(cls: Any) -> Any:
    """Returns an object of a class, whose ``__init__`` does not run."""
    return next(base for base in BUILT_IN if issubclass(cls, base)).__new__(cls)


@functools.lru_cache(maxsize=1024)
def is_in_c(cls: type) -> bool:
    """Returns whether a class is written in C: what its objects consist of cannot be seen."""
    try:
        new_object(cls)
    except TypeError:
        return True
    return False


def state_of(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object, without those that are computed when they are needed."""
    cls: Any = type(value)
    state = dict(object.__getattribute__(value, "__dict__")) if cls.__dictoffset__ else {}
    for name in slots_of(cls):
        try:
            state[name] = object.__getattribute__(value, name)
        except AttributeError:  # it was never set
            continue
    return {n: v for n, v in state.items() if not isinstance(getattr(cls, n, None), functools.cached_property)}


@functools.lru_cache(maxsize=1024)
def slots_of(cls: type) -> tuple[str, ...]:
    """Returns the names of the attributes that a class keeps in slots."""
    written = [vars(base) for base in cls.__mro__ if base.__flags__ & HEAP_TYPE]
    return tuple({n: None for found in written for n, v in found.items() if isinstance(v, types.MemberDescriptorType)})
