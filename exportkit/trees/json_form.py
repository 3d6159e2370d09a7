"""Nested values as JSON data and back, with their tensors kept apart: for files that outlive the process.

Numbers stand for the tensors, in the order of their paths. Reading looks up classes by name, in modules that are
loaded or belong to torch, transformers or exportkit. Nothing is unpickled and nothing is evaluated: a constant that
JSON cannot hold comes back as a `Unwritten`.
"""

from __future__ import annotations

import enum
import json
import math
import numbers
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import optree
import torch

from exportkit._torch_compat.pytree import context_writer, registered_node
from exportkit.errors import ExportkitError, TreeError, described
from exportkit.trees.class_names import (
    CACHE_CLASSES,
    COLLECTIONS,
    PART_CLASSES,
    belongs_to_cache,
    class_name,
    find_class,
    has_fields,
)
from exportkit.trees.constants import from_json
from exportkit.trees.fingerprint import Unwritten, fingerprint
from exportkit.trees.flatten import flatten
from exportkit.trees.object_parts import REFS, ObjectPart, Skeleton, build_object
from exportkit.trees.objects import Rest, changing_classes, open_object
from exportkit.trees.structure import (
    COUNT,
    LENGTH,
    TENSOR,
    Container,
    Nested,
    Object,
    RegisteredObject,
    Table,
    build,
    containers,
    unflattened,
)
from exportkit.trees.tree import Tree

_LONGEST_TEXT = 500


def dump_tree(tree: Tree) -> Any:
    """Returns the JSON data of a tree; the number n stands for its tensor number n.

    Raises:
        TreeError: if it holds a container that cannot be built again from JSON, such as one of a local class.
    """
    return _Writer(iter(tree.leaves)).dump(tree.structure)


def dump_constant(value: Any) -> Any:
    """Returns the JSON data of a value; tensors, and containers that cannot be written, become placeholders."""
    try:
        tree = flatten(value)
        data = dump_tree(tree)
    except TreeError:
        return _dump_placeholder(value)
    return _dump_placeholder(value) if tree.tensor_paths else data


def load_value(data: Any, tensors: Sequence[torch.Tensor] = ()) -> Any:
    """Returns the nested value whose JSON data `dump_tree` or `dump_constant` returned.

    Args:
        data: The data, also after a JSON round trip.
        tensors: The tensors of the tree, in its order.

    Raises:
        TreeError: if the data is damaged, or a class does not exist.
    """
    try:
        reader = _Reader(tensors)
        nodes, spec = containers(reader.load(data))
        return build(Nested(spec, tuple(nodes)), iter(reader.leaves))
    except ExportkitError:
        raise
    except Exception as error:  # the data may be anything, and classes of others are built from it
        raise TreeError(
            "The layout of a value is damaged.",
            got=described(error),
            hint="the file was written by another version, or changed since.",
        ) from error


def dump_structure(structure: Object) -> Any:
    """Returns the JSON data of the structure of a cache.

    Raises:
        TreeError: if it holds a value that JSON cannot, such as a CUDA stream.
    """
    return _Writer(None).dump(structure)


def load_structure(data: Any) -> Object:
    """Returns the structure of a cache, which `dump_structure` wrote.

    Raises:
        TreeError: if it names a class that does not exist, or whose module is not loaded.
    """
    structure: Object = _Reader(None).load(data)
    return structure


def dump_rest(rest: Rest) -> Any:
    """Returns the JSON data of what torch's pytree keeps of an opened object.

    Raises:
        TreeError: if a constant in it cannot be written as JSON.
    """
    constants = [[position, _exact(value, "An attribute")] for position, value in rest.constants]
    return {"parts": list(map(_dump_part, rest.skeleton.parts)), "constants": constants}


def load_rest(data: Any) -> Rest:
    """Returns what `dump_rest` wrote."""
    constants = [(position, load_value(value)) for position, value in data["constants"]]
    return Rest.of(Skeleton(tuple(map(_load_part, data["parts"]))), constants)


class _Writer:
    """Writes a structure, and the constants among its leaves.

    Args:
        leaves: All leaves; None for the structure of a cache, whose leaves are tensors.
    """

    def __init__(self, leaves: Iterator[Any] | None) -> None:
        self._leaves, self._tensors = leaves, 0

    def dump(self, node: Any, inside: bool = False) -> Any:
        """Returns the JSON data of a node; ``inside`` a cache, constants are not leaves."""
        kind = type(node)
        if kind is Nested and inside:
            return {"leaf": self._dump_containers(node.around(node.items), False)}
        if kind is Nested or kind is Container:
            return self._dump_containers(node.around(node.items), node.inside)
        if kind is Object:
            state = [[name, self.dump(value, True)] for name, value in zip(node.names, node.items, strict=True)]
            return {"object": class_name(node.cls, *CACHE_CLASSES), "state": state}
        if kind is Table:
            return [self.dump(row) for row in node.items]
        if kind is RegisteredObject:
            return self._dump_registered(node.cls, self.dump(node.children), node.context)
        if node is LENGTH:
            return {"length": "keys"}
        if node is COUNT:
            return {"length": "cache"}
        value = next(self._leaves) if self._leaves is not None and (node is TENSOR or not inside) else node
        if isinstance(value, torch.Tensor) or value is TENSOR:
            self._tensors += 1
            return {"tensor": self._tensors - 1}
        if inside and isinstance(value, type):
            return {"type": class_name(value, *CACHE_CLASSES)}
        data = _dump_leaf(value)
        if inside and type(data) is dict and "placeholder" in data:
            raise TreeError(
                f"A cache holds a value of class {type(value).__name__}, which cannot be written as JSON.",
                got=data["text"][:200],
                hint="save a program whose cache uses neither offloading nor quantisation.",
            )
        return data

    def _dump_containers(self, value: Any, inside: bool) -> Any:
        """The data of plain containers that hold nodes."""
        cls = type(value)
        if cls is dict:
            items = [[_exact(key, "A key of a dict"), self._dump_containers(v, inside)] for key, v in value.items()]
            return {"dict": items}
        if cls in COLLECTIONS:
            node: Any = registered_node(cls)
            children, context = node.flatten(value)
            default = getattr(value, "default_factory", None)
            if inside and default is not None:
                class_name(default, *CACHE_CLASSES)  # refuses any other
            return self._dump_registered(cls, [self._dump_containers(v, inside) for v in children], context)
        if cls is not list and cls is not tuple and not has_fields(cls):
            return self.dump(value, inside)
        data = [self._dump_containers(v, inside) for v in value]
        if cls is list:
            return data
        return {"tuple": data} if cls is tuple else {"fields": class_name(cls), "items": data}

    def _dump_registered(self, cls: type, items: list[Any], context: Any) -> Any:
        if type(context) is Skeleton:
            return {"instance": list(map(_dump_part, context.parts)), "items": items}
        data = {"registered": class_name(cls), "items": items}
        if registered_node(cls) is None:
            raise TreeError(
                f"Class {cls.__name__} was registered with torch's pytree and no longer is.",
                hint="keep the registration active until the value is written.",
            )
        writer = context_writer(cls)
        if writer is None:
            return data | {"context": _exact(context, f"The pytree context of class {cls.__name__}")}
        try:  # the data belongs to the registration: it is kept as text
            return data | {"dumped": json.dumps(writer.dump(context), allow_nan=False)}
        except (TypeError, ValueError) as error:
            raise TreeError("The context of a registered class was not written as JSON.", got=error) from error


def _dump_part(part: ObjectPart) -> Any:
    keys, extra = (
        _exact(list(part.keys), "A key of a dict"),
        _exact(part.extra, "What a dict makes missing values with"),
    )
    refs = list(map(list, part.refs))
    return {"cls": class_name(part.cls, *PART_CLASSES), "names": list(part.names), "keys": keys, "refs": refs} | (
        {} if extra is None else {"extra": extra}
    )


def _load_part(data: Any) -> ObjectPart:
    names, keys, extra = data["names"], load_value(data["keys"]), load_value(data.get("extra"))
    refs = [(kind, _position(number)) for kind, number in data["refs"]]
    if not all(isinstance(name, str) for name in names) or any(kind not in REFS for kind, _ in refs):
        raise TypeError("a part of an object is damaged")
    if extra is not None and type(extra) is not int and not belongs_to_cache(extra):
        raise ValueError(f"a dict in an object makes its missing values with {extra}")
    return ObjectPart(find_class(data["cls"], *PART_CLASSES), tuple(names), tuple(keys), tuple(refs), extra)


def _dump_leaf(value: Any) -> Any:
    if isinstance(value, enum.Enum | type):
        try:
            if isinstance(value, type):
                return {"type": class_name(value)}
            name = class_name(type(value))
        except TreeError:  # of a local class
            return _dump_placeholder(value)
        if type(value).__members__.get(value.name) is value:
            return {"enum": name, "name": value.name}
        return _dump_placeholder(value)
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


def _dump_placeholder(value: Any) -> Any:
    content = {"fingerprint": fingerprint(value)}
    if isinstance(value, Unwritten):
        return {"placeholder": value.cls, "text": value.text, **content}
    try:
        text = repr(value)
    except Exception:  # a broken repr must not stop the writing: the name of the class is enough
        text = object.__repr__(value)
    cls = f"{type(value).__module__}.{type(value).__qualname__}"
    return {"placeholder": cls, "text": text[:_LONGEST_TEXT], **content}


def _exact(value: Any, what: str) -> Any:
    """JSON data of something that a container cannot be built without."""
    if value is None or type(value) in (bool, int, str):
        return value
    tree = flatten(value)
    data = dump_tree(tree)
    if tree.tensor_paths or _holds_placeholder(data):
        raise TreeError(
            f"{what} cannot be written as JSON.",
            expected="numbers, strings, dtypes, enums, and lists, tuples and dicts of these",
            got=f"{type(value).__name__} {value!r}"[:_LONGEST_TEXT],
        )
    return data


def _holds_placeholder(data: Any) -> bool:
    if isinstance(data, dict):
        return "placeholder" in data or any(map(_holds_placeholder, data.values()))
    return isinstance(data, list) and any(map(_holds_placeholder, data))


class _Reader:
    """Reads data into nodes, and lists their leaves in the order in which `build` takes them.

    Args:
        tensors: The tensors; None for the structure of a cache.
    """

    def __init__(self, tensors: Sequence[torch.Tensor] | None) -> None:
        self._tensors = tensors
        self.leaves: list[Any] = []

    def load(self, data: Any, inside: bool = False) -> Any:
        """Returns a node, or plain containers that hold nodes; ``inside`` a cache, constants are not leaves."""
        loaded = self._load(data, inside)
        if not inside or not isinstance(loaded, list | tuple | dict | deque):
            return loaded
        return Container.of(loaded, loaded.values() if isinstance(loaded, dict) else loaded)

    def _load(self, data: Any, inside: bool) -> Any:
        if isinstance(data, list):
            return [self.load(item, inside) for item in data]
        if not isinstance(data, dict):
            return self._leaf(data, inside)
        kind = next(iter(data), "nothing")
        value = data[kind]
        if kind == "tensor":
            return self._leaf(None if self._tensors is None else self._tensors[_position(value)], inside=False)
        if kind == "tuple":
            return tuple([self.load(item, inside) for item in value])
        if kind == "dict":
            loaded = {load_value(key): self.load(item, inside) for key, item in value}
            if len(loaded) < len(value):
                raise ValueError("a dict has a key twice")
            return loaded
        if kind == "fields":
            cls = find_class(value, has_fields, "a named tuple")
            items = [self.load(item, inside) for item in data["items"]]
            return cls(*items) if optree.is_namedtuple_class(cls) else cls(items)
        if kind == "registered":
            return self._load_registered(value, data, inside)
        if kind == "instance":
            skeleton = Skeleton(tuple(map(_load_part, value)))
            built = build_object(load_value(data["items"], self._tensors or ()), skeleton)
            if open_object(built) is None:  # it holds no tensors
                changing_classes.add(type(built))
            return self._leaf(built, inside)
        if kind == "object":
            cls = find_class(value, *CACHE_CLASSES)
            names, values = [name for name, _ in data["state"]], [self.load(item, True) for _, item in data["state"]]
            return Object(cls, tuple(names), tuple(values))
        if kind == "length":
            return COUNT if value == "cache" else LENGTH
        if kind == "leaf":
            return Nested(containers(None)[1], (self.load(value, False),))
        return self._leaf(_load_leaf(kind, value, data, inside), inside)

    def _leaf(self, value: Any, inside: bool) -> Any:
        if inside:
            return value
        self.leaves.append(value)
        return TENSOR

    def _load_registered(self, name: str, data: Any, inside: bool) -> Any:
        cls = find_class(name, *(CACHE_CLASSES if inside else ()))
        node = registered_node(cls)
        if node is None:
            raise TreeError(
                f"Class {name.partition(':')[2]} is not registered with torch's pytree.",
                expected=f"{name.replace(':', '.')} registered, as when the value was written",
                hint="torch.utils._pytree.register_pytree_node, or torch.export.register_dataclass, before reading.",
            )
        if cls in COLLECTIONS:
            items = [self.load(item, inside) for item in data["items"]]
            loaded = node.unflatten(items, load_value(data["context"]))
            default = getattr(loaded, "default_factory", None)
            if inside and default is not None and not belongs_to_cache(default):
                raise ValueError(f"a dict in a cache makes its missing values with {default}")
            return loaded
        items = load_value(data["items"], self._tensors or ())
        try:
            if "dumped" not in data:
                context = load_value(data["context"])
            else:
                writer = context_writer(cls)
                if writer is None:
                    raise TypeError("it was registered with functions that write and read its context, and is not now")
                context = writer.load(json.loads(data["dumped"]))
            return self._leaf(unflattened(cls, node, items, context), inside)
        except Exception as error:
            raise TreeError(
                f"Class {name.partition(':')[2]} cannot be built from the saved data.",
                got=described(error),
                hint="the class changed since, or it was registered in another way then.",
            ) from error


def _position(value: Any) -> int:
    if type(value) is not int or value < 0:  # True and -1 are positions in a list, too
        raise TypeError(f"{value!r} is not the number of a tensor")
    return value


def _load_leaf(kind: str, value: Any, data: Any, inside: bool) -> Any:
    if kind == "enum":
        return find_class(value, lambda cls: issubclass(cls, enum.Enum), "an enum").__members__[data["name"]]
    if kind == "float":
        return float(value)
    if kind == "complex":
        return complex(*[load_value(part) for part in value])
    if kind == "torch":
        found = getattr(torch, value)
        if not isinstance(found, torch.dtype | torch.layout | torch.memory_format):
            raise TypeError(f"torch.{value} is not a dtype")
        return found
    if kind == "device":
        return torch.device(value)
    if kind == "type":
        return find_class(value, *(CACHE_CLASSES if inside else ()))
    if kind == "placeholder":
        return Unwritten(value, data["text"], from_json(data.get("fingerprint")))
    raise KeyError(kind)
