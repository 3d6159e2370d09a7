"""Fingerprints of Python values: data that is equal for two values if they are the same by type and value.

Values are compared by their fingerprints, and in no other way: ``True`` is not ``1``, ``0.0`` is not ``-0.0``, NaN is
NaN. Containers and objects are described by what they hold; functions by their code and what it is bound to. A value
that cannot be described, such as a lock, equals only itself, and nothing once it is read back from a file.
Fingerprints consist of tuples, strings, integers and booleans, so they can be hashed, and written as JSON.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import itertools
import sys
import types
import uuid
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from exportkit._torch_compat.memory import version_of
from exportkit.trees.caches import ATOMS, is_cache_class, own_state
from exportkit.trees.flatten import open_registered
from exportkit.trees.object_parts import ObjectPart, Skeleton, Unread, is_in_c, name_of, named

Fingerprint = tuple[Any, ...]

NONE: Fingerprint = ("none",)
NOTHING: Fingerprint = ("nothing",)  # of an argument that is not given, and has no default
TENSOR: Fingerprint = ("tensor",)
# Objects with more parts than this are compared by identity: it takes milliseconds to describe them.
_MOST_PARTS = 20_000
# Functions and classes of these packages are what their names say; other functions are described by their code.
_KNOWN_BY_NAME = frozenset({"torch", "transformers", "numpy"} | sys.stdlib_module_names) - {"__main__"}
_SETS = {set: "set", frozenset: "frozenset"}
_SEQUENCES = {list: "list", tuple: "tuple", torch.Size: "size"}
# Identities hold in this process only.
_PROCESS = uuid.uuid4().hex


@dataclass(frozen=True)
class Unwritten:
    """Stands for a value that could not be written, and does nothing.

    Attributes:
        cls: Class of the value.
        text: Its repr.
        fingerprint: Its fingerprint, with which it is compared; None if it was written without one.
    """

    cls: str
    text: str
    fingerprint: Fingerprint | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"<not restored: {self.text}, of {self.cls}>"


def fingerprint(value: Any) -> Fingerprint:
    """Returns the fingerprint of a value.

    Tensors in lists, tuples, dicts and classes registered with torch are all alike, as only their values differ; a
    cache of transformers is its class.

    Example:
        >>> fingerprint([1, True, -0.0])
        ('list', (('int', 1), ('bool', True), ('float', '-0.0')))
    """
    kind = type(value)
    if kind in ATOMS:
        return _atom(value)
    if isinstance(value, torch.Tensor):
        return TENSOR
    try:
        return _Describer().described(value)
    except _TooManyParts:
        return _identity(value)


class _TooManyParts(Exception):
    """An object has more parts than are looked at."""


class _Describer:
    """Describes one value."""

    def __init__(self) -> None:
        self._open: dict[int, int] = {}  # objects that are being described, by identity, with their depth
        self._parts = 0
        self._in_object = 0

    def described(self, value: Any) -> Fingerprint:
        """Returns the fingerprint of a value, or of a part of one."""
        kind: Any = type(value)
        if kind in ATOMS:
            return _atom(value)
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise _TooManyParts
        if id(value) in self._open:
            return ("above", len(self._open) - self._open[id(value)])
        self._open[id(value)] = len(self._open)
        try:
            if isinstance(value, torch.Tensor):
                return self._tensor(value)
            return self._container(value, kind) or self._leaf(value, kind)
        except _TooManyParts:
            raise
        except Exception:  # an object that raises when it is looked at
            return _identity(value)
        finally:
            del self._open[id(value)]

    def _tensor(self, value: torch.Tensor) -> Fingerprint:
        """A tensor; inside an object it is not an input of a graph: the same one, with the values that it has."""
        if not self._in_object:
            return TENSOR
        version = version_of(value)  # torch does not count in inference mode: then it may have changed
        return ("tensor", *_identity(value)[1:], next(_numbers) if version is None else version)

    def _all(self, values: Any) -> Fingerprint:
        return tuple(map(self.described, values))

    def _items(self, pairs: Any) -> Fingerprint:
        return tuple([(self.described(key), self.described(value)) for key, value in pairs])

    def _container(self, value: Any, kind: Any) -> Fingerprint | None:
        if kind in _SEQUENCES:
            return (_SEQUENCES[kind], self._all(value))
        if kind is dict:  # the order of its keys does not matter
            return ("dict", tuple(sorted(self._items(value.items()), key=repr)))
        if kind in _SETS:
            return (_SETS[kind], tuple(sorted(self._all(value), key=repr)))
        if kind is OrderedDict or kind is defaultdict:
            factory = self.described(getattr(value, "default_factory", None))
            return ("mapping", kind.__name__, factory, self._items(value.items()))
        if kind is deque:
            return ("deque", value.maxlen, self._all(value))
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return ("fields", fingerprinted_class(kind), self._all(value))
        return None

    def _leaf(self, value: Any, kind: Any) -> Fingerprint:
        if isinstance(value, Unread):
            return ("unread", fingerprinted_class(value.cls))
        if isinstance(value, Unwritten):
            return value.fingerprint or _identity(value)
        if isinstance(value, torch.layout | torch.memory_format):
            return ("torch", str(value).removeprefix("torch."))
        if isinstance(value, torch.Generator) and not self._in_object:  # a proof finds out whether it is drawn from
            return ("torch", f"Generator({value.device.type})")
        if isinstance(value, enum.Enum):
            return ("enum", fingerprinted_class(kind), value.name or repr(value.value))
        if isinstance(value, type):
            return ("type", fingerprinted_class(value))
        if isinstance(value, slice):
            return ("slice", *self._all((value.start, value.stop, value.step)))
        if isinstance(value, range):
            return ("range", value.start, value.stop, value.step)
        if isinstance(value, types.ModuleType):
            return ("module", value.__name__)
        if callable(value) and not isinstance(value, torch.nn.Module):
            found = self._callable(value, kind)
            if found is not None:
                return found
        if kind.__module__ == "numpy" and hasattr(value, "tobytes"):
            return self._numpy(value)
        if not self._in_object:
            if is_cache_class(kind):
                own = own_state(value)
                return (
                    "cache",
                    fingerprinted_class(kind),
                    tuple([(name, self.described(part)) for name, part in own.items()]),
                )
            opened = open_registered(value)
            if opened is not None:
                _, context, names, children = opened
                items = tuple(zip(map(str, names), self._all(children), strict=True))
                if type(context) is Skeleton:
                    return ("opened", fingerprinted_class(kind), tuple(map(self._opened_part, context.parts)), items)
                fields = None if isinstance(value, dict) else self.described(context)  # there, it is the names
                return ("registered", fingerprinted_class(kind), fields, items)
        return self._object(value, kind)

    def _opened_part(self, part: ObjectPart) -> Fingerprint:
        return (fingerprinted_class(part.cls), part.names, self._all(part.keys), part.refs, self.described(part.extra))

    def _callable(self, value: Any, kind: Any) -> Fingerprint | None:
        if isinstance(value, functools.partial):
            inner = (value.func, value.args, value.keywords)
            return ("partial", fingerprinted_class(kind), *self._inside(lambda: self._all(inner)))
        if isinstance(value, types.MethodType):
            return ("method", *self._inside(lambda: self._all((value.__self__, value.__func__))))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
            owner: Any = value.__self__
            name = f"{getattr(value, '__module__', None)}:{value.__qualname__}"
            return ("builtin", name, self._inside(lambda: self.described(owner)))
        if isinstance(value, types.MethodDescriptorType | types.WrapperDescriptorType):
            return ("builtin", f":{value.__qualname__}", self.described(value.__objclass__))
        if kind.__module__ == "torch._ops":
            return ("builtin", f"torch.ops:{value}")
        return None

    def _function(self, value: types.FunctionType) -> Fingerprint:
        name = f"{value.__module__}:{value.__qualname__}"
        if name.partition(".")[0].partition(":")[0] in _KNOWN_BY_NAME and named(name) is value:
            return ("function", name)
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        known = value.__globals__
        names = sorted({name for code in _codes(value.__code__) for name in code.co_names} & known.keys())
        numbers = {name: known[name] for name in names if type(known[name]) in ATOMS}
        bound = (tuple(cells), value.__defaults__, value.__kwdefaults__, vars(value), numbers)
        digest = hashlib.sha256(repr(_code(value.__code__)).encode()).hexdigest()[:32]
        return ("function", name, digest, *self._inside(lambda: self._all(bound)))

    def _numpy(self, value: Any) -> Fingerprint:
        if value.dtype.hasobject:
            return ("numpy", str(value.dtype), tuple(value.shape), self._inside(lambda: self.described(value.tolist())))
        digest = hashlib.sha256(value.tobytes()).hexdigest()[:32]
        return ("numpy", type(value).__name__, str(value.dtype), tuple(value.shape), digest)

    def _object(self, value: Any, kind: Any) -> Fingerprint:
        """An object by its class, its attributes, and what it holds as a subclass of a number or a container."""
        if kind is object:
            return _identity(value)
        state: list[tuple[str, Any]] = []
        if kind.__module__.partition(".")[0] in sys.stdlib_module_names:  # what it is made with: attributes are caches
            reduced: Any = value.__reduce_ex__(4)
            if isinstance(reduced, str):
                return ("named", fingerprinted_class(kind), reduced)
            state = [(str(number), part) for number, part in enumerate(reduced[:3])]
            state += [(str(number), list(part)) for number, part in enumerate(reduced[3:5], 3) if part is not None]
        else:
            attributes: Any = object.__getstate__(value)
            plain, slots = attributes if isinstance(attributes, tuple) else (attributes, None)
            for name, part in sorted(((plain or {}) | (slots or {})).items()):
                if not isinstance(getattr(kind, name, None), functools.cached_property):
                    state.append((name, part))
            content = next((base for base in (*_CONTENTS, dict) if issubclass(kind, base)), None)
            if content is not None:
                state.append(("", list(value.items()) if content is dict else content(value)))
            elif is_in_c(kind):
                return _identity(value)
        inner = self._inside(lambda: tuple([(name, self.described(part)) for name, part in state]))
        return ("nn" if isinstance(value, torch.nn.Module) else "object", fingerprinted_class(kind), inner)

    def _inside(self, step: Callable[[], Fingerprint]) -> Fingerprint:
        self._in_object += 1
        try:
            return step()
        finally:
            self._in_object -= 1


def fingerprinted_class(cls: type) -> str:
    """Returns the name of a class in fingerprints."""
    return name_of(cls) or f"{cls.__module__}:{cls.__qualname__} {_identity(cls)[2]}"


_CONTENTS = (bool, int, float, complex, str, bytes, list, tuple, set, frozenset)


def _atom(value: Any) -> Fingerprint:
    kind = type(value)
    if kind is bool or kind is int or kind is str:
        return (kind.__name__, value)
    if value is None:
        return NONE
    if kind is torch.dtype:
        return ("torch", str(value).removeprefix("torch."))
    if kind is complex:
        return ("complex", repr(value.real), repr(value.imag))
    return (kind.__name__, value.hex() if kind is bytes else str(value) if kind is torch.device else repr(value))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a code object, and those of the functions that are defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _code(code: types.CodeType) -> Fingerprint:
    """What a function does, without its name and its lines."""
    constants = [_code(each) if isinstance(each, types.CodeType) else fingerprint(each) for each in code.co_consts]
    arguments = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return (*arguments, *names, code.co_code, code.co_exceptiontable, *constants)


# The objects that were compared by identity, by id: a number for each, and what says whether it still exists.
_identities: dict[int, tuple[int, Callable[[], Any]]] = {}
_numbers = itertools.count()


def _identity(value: Any) -> Fingerprint:
    """The class of an object, and a number that no other object of this process has or will have."""
    key = id(value)
    number, exists = _identities.get(key, (0, lambda: _identities))
    if exists() is not value:
        try:
            exists = weakref.ref(value, lambda _: _identities.pop(key, None))
        except TypeError:  # kept, so that no other object takes its place
            exists = functools.partial(lambda kept: kept, value)
        number = next(_numbers)
        _identities[key] = number, exists
    return ("same", f"{type(value).__module__}:{type(value).__qualname__}", f"{_PROCESS}/{number}")
