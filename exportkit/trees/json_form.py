"""A nested value as JSON data and back, with its tensors kept apart.

In comes a `Tree`; out go data that ``json.dumps`` takes, in which numbers stand for the tensors. Reading looks classes
up by name, in modules that are loaded or belong to torch, transformers or exportkit. Nothing is unpickled, nothing
evaluated: what JSON cannot hold comes back as a `Placeholder`.
"""

from __future__ import annotations

import enum
import json
import math
import numbers
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch

from exportkit._torch_compat.pytree import Registered, context_writer, registered_node
from exportkit._torch_compat.transformers import cache_bases
from exportkit.errors import ExportkitError, TreeError
from exportkit.trees.lookup import class_name, find_class
from exportkit.trees.objects import dump_part, is_cache_class, load_part, put_together, take_apart
from exportkit.trees.tree import Tree

# What a dict in a cache may make its missing values with.
_DEFAULTS = (bool, int, float, str, list, tuple, dict, set)
_LONGEST_TEXT = 500


@dataclass(frozen=True)
class Placeholder:
    """Stands for a value that could not be written, and does nothing.

    Attributes:
        cls: Class of the value.
        text: Its repr.
    """

    cls: str
    text: str

    def __repr__(self) -> str:
        return f"<not restored: {self.text}, of {self.cls}>"


def dump_tree(tree: Tree) -> Any:
    """Returns the JSON data of a tree; the number n stands for its tensor number n.

    Raises:
        TreeError: if it holds a container that cannot be built again from JSON, such as one of a local class.
    """
    writer = _Writer()
    data = writer.dump(tree.build())
    if len(writer.tensors) != len(tree.tensors()):
        raise TreeError(
            "A value holds tensors in a class that was opened in a way which cannot be written.",
            expected=f"tensors at {', '.join(tree.tensors())}",
            got=f"{len(writer.tensors)} of them",
            hint="register the class with torch.utils._pytree.register_pytree_node.",
        )
    return data


def dump_constant(value: Any) -> Any:
    """Returns the JSON data of a value; its tensors, and containers that cannot be written, become placeholders."""
    writer = _Writer()
    try:
        data = writer.dump(value)
    except TreeError:
        return _dump_placeholder(value)
    return _dump_placeholder(value) if writer.tensors else data


def load_value(data: Any, tensors: Sequence[torch.Tensor] = ()) -> Any:
    """Returns the nested value whose JSON data `dump_tree` or `dump_constant` returned.

    Args:
        data: The data, also after a way through JSON text.
        tensors: The tensors of the tree, in its order.

    Raises:
        TreeError: if the data are damaged, or a class is not there.
    """
    try:
        return _Reader(tensors).load(data)
    except ExportkitError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise TreeError(
            "The layout of a value is damaged.",
            got=f"{type(error).__name__}: {error}",
            hint="the file was written by another version, or changed since.",
        ) from error


class _Writer:
    """Turns values into JSON data and collects their tensors on the way."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def dump(self, value: Any) -> Any:
        cls = type(value)
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return {"tensor": len(self.tensors) - 1}
        if cls is list:
            return self._all(value)
        if cls is tuple:
            return {"tuple": self._all(value)}
        if cls is dict:
            return {"dict": [[_exact(key, "A key of a dict"), self.dump(item)] for key, item in value.items()]}
        if optree.is_namedtuple_class(cls):
            return {"fields": class_name(cls), "items": self._all(value)}
        if is_cache_class(cls):
            return self._cache(value)
        node = registered_node(cls)
        return _dump_leaf(value) if node is None else self._registered(value, node)

    def _all(self, values: Iterable[Any]) -> list[Any]:
        return [self.dump(value) for value in values]

    def _cache(self, cache: Any) -> Any:
        tensors, _, part = take_apart(cache)
        data = {"cache": dump_part(part), "first": len(self.tensors)}
        _check_part(data["cache"])
        self.tensors += tensors
        return data

    def _registered(self, value: Any, node: Registered) -> Any:
        children, context = node.flatten(value)
        data = {"registered": class_name(type(value)), "items": self._all(children)}
        writer = context_writer(type(value))
        if writer is not None:
            return data | {"dumped": _dumped(writer.dump(context))}
        return data | {"context": _exact(context, f"What torch's pytree keeps of class {type(value).__name__}")}


def _dumped(data: Any) -> str:
    """What a registration writes of a context, as text, for it is not ours to look into."""
    try:
        return json.dumps(data, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TreeError(
            "The context of a registered class was written as something else than JSON.", got=error
        ) from error


def _dump_leaf(value: Any) -> Any:
    if isinstance(value, enum.Enum | type):
        return _dump_named(value)
    if isinstance(value, numbers.Number) and hasattr(value, "item"):
        value = value.item()  # a number of numpy comes back as Python's
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if type(value) is complex:
        return {"complex": [_dump_leaf(value.real), _dump_leaf(value.imag)]}
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    return _dump_placeholder(value)


def _dump_named(value: Any) -> Any:
    try:
        if isinstance(value, type):
            return {"type": class_name(value)}
        data = {"enum": class_name(type(value)), "name": value.name}
    except TreeError:  # of a local class
        return _dump_placeholder(value)
    return data if type(value).__members__.get(value.name) is value else _dump_placeholder(value)


def _dump_placeholder(value: Any) -> Any:
    if isinstance(value, Placeholder):
        return {"placeholder": value.cls, "text": value.text}
    try:
        text = repr(value)
    except Exception:  # whatever somebody's own repr does: the name of the class is enough
        text = object.__repr__(value)
    return {"placeholder": f"{type(value).__module__}.{type(value).__qualname__}", "text": text[:_LONGEST_TEXT]}


def _exact(value: Any, what: str) -> Any:
    """JSON data of something that a container cannot be built without."""
    writer = _Writer()
    data = writer.dump(value)
    if writer.tensors or any("placeholder" in part for part in _dicts(data)):
        raise TreeError(
            f"{what} cannot be written as JSON.",
            expected="numbers, strings, dtypes, enums, and lists, tuples and dicts of these",
            got=f"{type(value).__name__} {value!r}"[:_LONGEST_TEXT],
        )
    return data


def _dicts(data: Any) -> Iterator[dict[str, Any]]:
    if isinstance(data, dict):
        yield data
        data = list(data.values())
    if isinstance(data, list):
        for item in data:
            yield from _dicts(item)


class _Reader:
    """Turns JSON data into values around the given tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors

    def load(self, data: Any) -> Any:
        if isinstance(data, list):
            return [self.load(item) for item in data]
        if not isinstance(data, dict):
            return data
        kind = next(iter(data), "nothing")
        return _READERS[kind](self, data[kind], data)

    def fields(self, name: str, items: list[Any]) -> Any:
        return find_class(name, optree.is_namedtuple_class, "a named tuple")(*self.load(items))

    def cache(self, part: Any, first: int) -> Any:
        _check_part(part)
        return put_together(self.tensors[first:], load_part(part))

    def registered(self, name: str, data: Any) -> Any:
        node_class = find_class(name)
        node = registered_node(node_class)
        if node is None:
            raise TreeError(
                f"Class {name.partition(':')[2]} is not registered with torch's pytree.",
                expected=f"{name.replace(':', '.')} registered, as when the value was written",
                hint="torch.utils._pytree.register_pytree_node, or torch.export.register_dataclass, before reading.",
            )
        items = self.load(data["items"])
        try:
            return node.unflatten(items, self._context(node_class, data))
        except Exception as error:
            raise TreeError(
                f"Class {name.partition(':')[2]} cannot be built from what was written.",
                got=f"{type(error).__name__}: {error}",
                hint="the class changed since, or it is registered in another way than then.",
            ) from error

    def _context(self, cls: type, data: Any) -> Any:
        if "dumped" not in data:
            return self.load(data["context"])
        writer = context_writer(cls)
        if writer is None:
            raise TypeError("it was registered with functions that write and read its context, and is not now")
        return writer.load(json.loads(data["dumped"]))


def _load_torch(name: str) -> Any:
    value = getattr(torch, name)
    if not isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        raise TypeError(f"torch.{name} is no dtype")
    return value


def _load_enum(name: str, member: str) -> Any:
    return find_class(name, lambda cls: issubclass(cls, enum.Enum), "an enum").__members__[member]


_READERS: dict[str, Callable[[_Reader, Any, Any], Any]] = {
    "tensor": lambda reader, index, _: reader.tensors[index],
    "tuple": lambda reader, items, _: tuple(reader.load(items)),
    "dict": lambda reader, items, _: {reader.load(key): reader.load(value) for key, value in items},
    "fields": lambda reader, name, data: reader.fields(name, data["items"]),
    "cache": lambda reader, part, data: reader.cache(part, data["first"]),
    "registered": lambda reader, name, data: reader.registered(name, data),
    "enum": lambda _, name, data: _load_enum(name, data["name"]),
    "float": lambda _, text, __: float(text),
    "complex": lambda reader, parts, _: complex(*reader.load(parts)),
    "torch": lambda _, name, __: _load_torch(name),
    "device": lambda _, name, __: torch.device(name),
    "type": lambda _, name, __: find_class(name),
    "placeholder": lambda _, cls, data: Placeholder(cls, data["text"]),
}


def _check_part(data: Any) -> None:
    """Refuses what a cache does not consist of: its classes are built without asking them."""
    for item in _dicts(data):
        name = item.get("class", item.get("type"))
        if name is not None:
            find_class(name, _belongs_to_cache, "a cache, a layer of one, or a plain container")
        if "dtype" in item:
            _load_torch(item["dtype"])


def _belongs_to_cache(cls: type) -> bool:
    if cls in (*_DEFAULTS, OrderedDict, defaultdict) or optree.is_namedtuple_class(cls):
        return True
    return is_cache_class(cls) or issubclass(cls, cache_bases())
