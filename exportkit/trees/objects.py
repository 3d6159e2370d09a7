"""Takes cache objects apart into tensors and a description, and puts them together again.

In comes a cache of any class; out go its tensors with readable paths (``layers[0].keys``) and a `Part` tree that holds
everything else: classes, windows, counters, flags. Rebuilding sets attributes directly, so no tensor is copied and no
``update`` runs, and the new cache behaves as the old one did.
"""

from __future__ import annotations

import functools
import math
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exportkit._torch_compat.transformers import DERIVED_CACHE_TENSORS, cache_bases
from exportkit.errors import TreeError
from exportkit.trees.lookup import find_class

# Values of these types cannot change, and most attributes of a cache are of one: they are passed over quickly.
ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})

# The axis of these attributes grows by one with each token, in layers that do not preallocate it.
GROWING = {"keys": 2, "values": 2, "indexer_keys": 1}


@dataclass(frozen=True)
class Growth:
    """The length of a dynamic cache.

    Attributes:
        axis: The axis that grows by one with each token.
        limit: Its largest size in a layer with a sliding window, or None.
    """

    axis: int
    limit: int | None = None


class PathPart(str):
    """One step of a leaf's path inside a cache, and how its length grows, if it does."""

    __slots__ = ("growth",)
    growth: Growth | None


@dataclass(frozen=True)
class Slot:
    """Stands where the tensor number ``index`` goes."""

    index: int


@dataclass(frozen=True)
class Part:
    """An object, list, tuple or dict in a cache: its class and what it holds, by attribute, position or key."""

    cls: type
    items: tuple[tuple[Any, Any], ...]
    default: Any = None  # of a defaultdict: what makes its missing values


@dataclass(frozen=True)
class Unknown:
    """A counter whose value is symbolic while a graph is traced; on rebuilding it is read from the stored length."""


@dataclass(frozen=True)
class Method:
    """A method bound to the very object that is being taken apart; rebound to the rebuilt one."""

    function: Any


def is_cache_class(cls: type) -> bool:
    """Returns whether ``cls`` is a key-value or state cache: a transformers Cache, or a class named ``...Cache``."""
    known: Any = _is_cache_class  # mypy takes a class for something that cannot be hashed
    return bool(known(cls))


@functools.lru_cache(maxsize=1024)  # asked for every leaf of every call
def _is_cache_class(cls: Any) -> bool:
    if issubclass(cls, torch.nn.Module | torch.Tensor | tuple | list | dict) or not cls.__dictoffset__:
        return False  # without __dict__ there are no attributes to look into
    if cls.__module__.partition(".")[0] == "torch":
        return False
    return issubclass(cls, cache_bases()) or cls.__name__.endswith("Cache")


def take_apart(cache: Any) -> tuple[list[torch.Tensor], list[PathPart], Part]:
    """Returns the tensors of a cache, their paths inside it, and the description that `put_together` needs.

    Args:
        cache: An object of a class for which `is_cache_class` holds.
    """
    tensors: list[torch.Tensor] = []
    paths: list[PathPart] = []

    def visit(value: Any, path: str, growth: Growth | None) -> Any:
        if isinstance(value, torch.Tensor):
            step = PathPart(path)
            step.growth = growth
            tensors.append(value)
            paths.append(step)
            return Slot(len(tensors) - 1)
        if isinstance(value, list | tuple):
            return Part(type(value), tuple((i, visit(v, f"{path}[{i}]", growth)) for i, v in enumerate(value)))
        if isinstance(value, dict):
            items = tuple((k, visit(v, f"{path}[{k!r}]", growth)) for k, v in value.items())
            return Part(type(value), items, getattr(value, "default_factory", None))
        if isinstance(value, torch.SymInt):
            return Unknown()
        if is_opened_class(type(value)):
            return Part(type(value), tuple(_attributes(value, path, visit)))
        return value

    return tensors, paths, visit(cache, "", None)


def is_opened_class(cls: type) -> bool:
    """Returns whether an object of ``cls`` is taken apart where it is found inside a cache: caches and their layers."""
    known: Any = _is_opened  # mypy takes a class for something that cannot be hashed
    opened: bool = known(cls)
    return opened


@functools.lru_cache(maxsize=1024)
def _is_opened(cls: Any) -> bool:
    return issubclass(cls, cache_bases()) or is_cache_class(cls)


def growth_of(name: str, cls: type, state: Mapping[str, Any]) -> Growth | None:
    """Returns how an attribute of a cache layer grows with each token, or None if it does not.

    Args:
        name: The attribute.
        cls: Class of the layer.
        state: Attributes of the layer.
    """
    if name not in GROWING or "max_cache_len" in state or hasattr(cls, "max_cache_len"):
        return None
    window = state["sliding_window"] if "sliding_window" in state else getattr(cls, "sliding_window", None)
    return _growth(GROWING[name], window - 1 if isinstance(window, int) else None)


@functools.lru_cache(maxsize=1024)
def _growth(axis: int, limit: int | None) -> Growth:
    return Growth(axis, limit)


def _attributes(value: Any, path: str, visit: Any) -> Iterator[tuple[str, Any]]:
    state = vars(value)
    for name, attribute in state.items():
        if type(attribute) in ATOMS:
            yield name, attribute
            continue
        if name in DERIVED_CACHE_TENSORS:
            continue
        if isinstance(attribute, types.MethodType) and attribute.__self__ is value:
            yield name, Method(attribute.__func__)
            continue
        growth = growth_of(name, type(value), state)
        yield name, visit(attribute, f"{path}.{name}" if path else name, growth)


def put_together(tensors: Sequence[Any], part: Part) -> Any:
    """Returns the cache that `take_apart` described, holding ``tensors`` themselves."""

    def build(item: Any) -> Any:
        if isinstance(item, Slot):
            return tensors[item.index]
        if not isinstance(item, Part):
            return item
        if issubclass(item.cls, dict):
            return _filled_dict(item, {key: build(value) for key, value in item.items})
        if issubclass(item.cls, list | tuple):
            values = [build(value) for _, value in item.items]
            return item.cls(*values) if hasattr(item.cls, "_fields") else item.cls(values)
        return _build_object(item, build)

    return build(part)


def _filled_dict(part: Part, items: dict[Any, Any]) -> Any:
    make: Any = part.cls
    return make(part.default, items) if issubclass(part.cls, defaultdict) else make(items)


def _build_object(part: Part, build: Any) -> Any:
    value: Any = object.__new__(part.cls)
    state = {name: build(item) for name, item in part.items}
    for name, item in state.items():
        if isinstance(item, Method):
            state[name] = types.MethodType(item.function, value)
        elif isinstance(item, Unknown):
            keys = state.get("keys")
            state[name] = 0 if keys is None else keys.shape[-2]
    for name, source in DERIVED_CACHE_TENSORS.items():
        if source in state:
            state[name] = torch.tensor(state[source], dtype=torch.long)
    value.__dict__.update(state)
    return value


def set_stored_length(cache: Any, length: int) -> None:
    """Sets what Python knows of the stored tokens in a cache, and its tensors need not show.

    That is the counter of a sliding window, whether a layer was ever filled, and whether the encoder's part of an
    encoder-decoder cache is filled.

    Args:
        cache: A cache, changed in place; any other value is left alone. Of an encoder-decoder cache, the part of the
            decoder is meant.
        length: Number of tokens that were stored so far.
    """
    if isinstance(cache, list | tuple):
        for item in cache:
            set_stored_length(item, length)
    elif is_opened_class(type(cache)):
        for name, value in vars(cache).items():
            if name == "cumulative_length" and isinstance(value, int):
                cache.cumulative_length = length
            elif name == "is_initialized" and not length and _is_empty(getattr(cache, "keys", None)):
                cache.is_initialized = False  # as in the first call of a generation, which models ask for
            elif name == "is_updated" and isinstance(value, dict):
                layers = cache.cross_attention_cache.layers
                cache.is_updated = {i: layers[i].get_seq_length() > 0 if i < len(layers) else False for i in value}
            elif name != "cross_attention_cache":
                set_stored_length(value, length)


def stored_length(value: Any) -> int:
    """Returns how many tokens the counters of a cache say were stored, also those that left a window; 0 without any.

    Args:
        value: A cache; of any other value it is 0.
    """
    if isinstance(value, list | tuple):
        return max(map(stored_length, value), default=0)
    if not is_opened_class(type(value)):
        return 0
    inner = (item for name, item in vars(value).items() if name not in ("cumulative_length", "cross_attention_cache"))
    count = getattr(value, "cumulative_length", 0)
    return max([count if isinstance(count, int) else 0, *map(stored_length, inner)])


def _is_empty(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and not tensor.numel()


def dump_part(item: Any) -> Any:
    """Returns a description as plain JSON data, for files that outlive the process.

    Raises:
        TreeError: if it holds a value that JSON cannot, such as a CUDA stream.
    """
    if isinstance(item, float) and not math.isfinite(item):
        return {"float": str(item)}
    if item is None or isinstance(item, bool | int | float | str):
        return item
    if isinstance(item, Slot):
        return {"slot": item.index}
    if isinstance(item, Unknown):
        return {"unknown": True}
    if isinstance(item, Part):
        items = [[dump_part(k), dump_part(v)] for k, v in item.items]
        default = {} if item.default is None else {"default": dump_part(item.default)}
        return {"class": _name(item.cls), "items": items, **default}
    if isinstance(item, type):
        return {"type": _name(item)}
    if isinstance(item, torch.dtype | torch.device):
        return {type(item).__name__: str(item).removeprefix("torch.")}
    raise TreeError(
        f"A cache holds a value of class {type(item).__name__}, which cannot be written as JSON.",
        got=repr(item)[:200],
        hint="use a cache without offloading or quantisation for a program that is saved.",
    )


def load_part(data: Any) -> Any:
    """Returns the description that `dump_part` wrote.

    Raises:
        TreeError: if it names a class that is not there, or is in a module that is not loaded.
    """
    if not isinstance(data, dict):
        return data
    kind, value = next(iter(data.items()))
    if kind == "slot":
        return Slot(value)
    if kind == "unknown":
        return Unknown()
    if kind == "class":
        items = tuple((load_part(k), load_part(v)) for k, v in data["items"])
        return Part(find_class(value), items, load_part(data.get("default")))
    if kind == "type":
        return find_class(value)
    if kind == "float":
        return float(value)
    return torch.device(value) if kind == "device" else getattr(torch, value)


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
