"""Nested values with their leaves, known by path: what the later stages see of them, and how they are described."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from exportkit._torch_compat.pytree import registered_node
from exportkit.trees.caches import Growth, is_cache_class
from exportkit.trees.object_parts import Skeleton
from exportkit.trees.structure import Argument, Leaves, Nested, Object, RegisteredObject, build, joined_parts


class TensorSource(Protocol):
    """The tensors of a value, or copies of them, in the order in which the flattener found them."""

    def tensors(self) -> Sequence[torch.Tensor]:
        """Returns the tensors."""

    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Returns their shapes, without making the tensors."""


class Tree:
    """A nested value by its leaves.

    Args:
        structure: How the leaves are put together: the root of a structure.
        listed: What is known about the leaves.
        source: Gives the tensors when they are needed.

    Attributes:
        paths: Path of each leaf inside the value; the path of a value that is itself a leaf is "".
        structure: How the leaves are put together.
    """

    def __init__(self, structure: Any, listed: Leaves, source: TensorSource) -> None:
        self.paths: tuple[str, ...] = tuple(listed.paths)
        self.structure, self._listed, self._source = structure, listed, source
        # Made when asked for, and not by functools.cached_property: Dynamo does not trace its lock (Python 3.11).
        self._leaves: tuple[Any, ...] | None = None
        self._tensor_paths: tuple[str, ...] | None = None
        self._growing: dict[str, Growth] | None = None

    def __repr__(self) -> str:
        return f"Tree(paths={self.paths!r})"

    @property
    def cls(self) -> type:
        """The class of the value; ``object`` if it is a leaf."""
        found = self.structure
        if type(found) is Nested:
            if found.spec.type is not None:
                return found.spec.type
            found = found.items[0]
        return found.cls if type(found) in (Object, RegisteredObject) else object

    @property
    def has_objects(self) -> bool:
        """Whether it holds objects that were opened by their attributes."""
        return bool(self.object_classes())

    def object_classes(self) -> set[type]:
        """Returns the classes of the objects in it that were opened by their attributes, and of their parts."""
        nodes, found = [self.structure], set()
        for node in nodes:
            if type(node) is RegisteredObject and type(node.context) is Skeleton:
                found |= {part.cls for part in node.context.parts}
            nodes += node.items if type(node) in (Nested, RegisteredObject) else ()
        return found

    @property
    def leaves(self) -> tuple[Any, ...]:
        """The leaves: tensors, and constants (numbers, strings, None, ...)."""
        if self._leaves is None:
            tensors, constants = self._source.tensors(), self._listed.constants
            pairs = zip(self.paths, self._listed.numbers, strict=True)
            self._leaves = tuple([constants[path] if number is None else tensors[number] for path, number in pairs])
        return self._leaves

    @property
    def growing(self) -> Mapping[str, Growth]:
        """By path, the axis that grows by one with each token, in dynamic caches, and its limit."""
        if self._growing is None:
            self._growing = {path: growth for found in self._listed.growing for path, growth in found.items()}
        return self._growing

    @property
    def tensor_paths(self) -> tuple[str, ...]:
        """Paths of the leaves that are tensors."""
        if self._tensor_paths is None:
            constants = self._listed.constants
            self._tensor_paths = tuple([p for p in self.paths if p not in constants] if constants else self.paths)
        return self._tensor_paths

    def by_path(self) -> dict[str, Any]:
        """Returns the leaves by path."""
        return dict(zip(self.paths, self.leaves, strict=True))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the leaves that are tensors, by path."""
        constants = self._listed.constants
        return {path: leaf for path, leaf in zip(self.paths, self.leaves, strict=True) if path not in constants}

    def shapes(self) -> list[tuple[int, ...]]:
        """Returns the shapes of the tensors, in the order of `tensor_paths`, without making the tensors."""
        shapes = self._source.shapes()
        return [shapes[number] for number in self._listed.numbers if number is not None]

    def constants(self) -> dict[str, Any]:
        """Returns the leaves that are not tensors, by path."""
        return dict(self._listed.constants)

    def map(self, change: Callable[[Any], Any]) -> Tree:
        """Returns the same tree with ``change(leaf)`` for each leaf."""
        return self._holding(map(change, self.leaves))

    def with_leaves(self, leaves: Mapping[str, Any]) -> Tree:
        """Returns the same tree with the leaves of the given paths replaced."""
        return self._holding(map(leaves.get, self.paths, self.leaves))

    def _holding(self, leaves: Iterable[Any]) -> Tree:
        tensors: list[torch.Tensor] = []
        listed = Leaves(self._listed.paths, growing=self._listed.growing)
        for path, leaf in zip(self.paths, leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                listed.numbers.append(len(tensors))
                tensors.append(leaf)
            else:
                listed.numbers.append(None)
                listed.constants[path] = leaf
        return Tree(self.structure, listed, HeldTensors(tensors))

    def build(self) -> Any:
        """Returns the nested value, holding the leaves themselves; containers and caches are new objects."""
        return build(self.structure, iter(self.leaves))


def cloned(leaf: Any) -> Any:
    """Returns a copy of a tensor, and any other leaf as it is."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


class HeldTensors:
    """Tensors at hand: see `TensorSource`."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors

    def tensors(self) -> list[torch.Tensor]:
        """Returns the tensors."""
        return self._tensors

    def shapes(self) -> list[tuple[int, ...]]:
        """Returns their shapes."""
        return list(map(shape_of, self._tensors))


def lazy_tree(parts: Any, source: TensorSource) -> Tree:
    """Returns the tree of a part of a recorded call; its tensors are read when its leaves are.

    Args:
        parts: A `Argument`, or a tuple or dict of parts.
        source: Copies of the tensors of the whole call.
    """
    part: Argument = joined_parts(parts)
    return Tree(part.node, part.leaves, source)


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape of a tensor, or () for a nested tensor, which has no shape."""
    return () if tensor.is_nested else tuple(tensor.shape)


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def is_inexact(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has floating-point or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_integer(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has integers, booleans excepted."""
    return tensor.dtype is not torch.bool and not is_inexact(tensor)


# Numbers of the dtypes in ONNX's TensorProto.DataType (onnx.proto), which users of the peers know.
ONNX_DTYPES = {
    torch.float32: 1, torch.uint8: 2, torch.int8: 3, torch.uint16: 4, torch.int16: 5, torch.int32: 6, torch.int64: 7,
    torch.bool: 9, torch.float16: 10, torch.float64: 11, torch.uint32: 12, torch.uint64: 13, torch.complex64: 14,
    torch.complex128: 15, torch.bfloat16: 16, torch.float8_e4m3fn: 17, torch.float8_e4m3fnuz: 18,
    torch.float8_e5m2: 19, torch.float8_e5m2fnuz: 20,
}  # fmt: skip


def string_type(
    value: Any, with_shape: bool = False, with_min_max: bool = False, with_device: bool = False, limit: int = 20
) -> str:
    """Returns a one-line description of a nested value.

    A tensor is ``T`` and the number of its ONNX data type (1 float32, 7 int64, ...), then ``r`` and its rank, or
    ``s`` and its shape. ``#2[...]`` is a list of two. Caches are shown by their keys and values.

    Args:
        value: Any nested value.
        with_shape: Show shapes instead of ranks.
        with_min_max: Show the smallest and largest value of each tensor, as ``[min,max]``.
        with_device: Prefix each tensor with ``C`` (CPU), ``G`` and the index (CUDA), or the name of its device.
        limit: Longest list that is written out; for longer ones, only the length is shown.

    Example:
        >>> string_type((torch.ones(2, 6), {"mask": torch.ones(2, 7, dtype=torch.int64)}), with_shape=True)
        '(T1s2x6,dict(mask:T7s2x7))'
    """

    def describe(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            device = _device(value.device) if with_device else ""
            size = f"s{'x'.join(map(str, value.shape))}" if with_shape else f"r{value.ndim}"
            return f"{device}T{ONNX_DTYPES.get(value.dtype, value.dtype)}{size}{_range(value) if with_min_max else ''}"
        name = type(value).__name__
        if value is None or isinstance(value, bool | int | float | complex | str):
            return "None" if value is None else name
        if isinstance(value, tuple):
            return f"({listed(value)})"
        if isinstance(value, list):
            return f"#{len(value)}[{listed(value)}]"
        if is_cache_class(type(value)):
            return f"{name}({', '.join([f'{key}={describe(item)}' for key, item in _cache_fields(value).items()])})"
        if isinstance(value, Mapping):
            return f"{name}({','.join([f'{key}:{describe(item)}' for key, item in value.items()])})"
        node = registered_node(type(value))
        return name if node is None else f"{name}({listed(list(node.flatten(value)[0]))})"

    def listed(items: Sequence[Any]) -> str:
        return "..." if len(items) > limit else ",".join(map(describe, items))

    return describe(value)


def _cache_fields(cache: Any) -> dict[str, Any]:
    """What a cache holds, by the names under which older versions of transformers held it."""
    if not hasattr(cache, "layers"):
        return {k: v for k, v in vars(cache).items() if isinstance(v, torch.Tensor) or is_cache_class(type(v))}
    full = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    fields = {"key_cache": [layer.keys for layer in full], "value_cache": [layer.values for layer in full]}
    for states in ("conv_states", "recurrent_states"):
        found = [s for layer in cache.layers for s in getattr(layer, states, {}).values() if s is not None]
        fields |= {states: found} if found else {}
    return fields


def _device(device: torch.device) -> str:
    if device.type == "cpu":
        return "C"
    return f"G{device.index or 0}" if device.type == "cuda" else str(device)


def _range(leaf: torch.Tensor) -> str:
    if leaf.numel() == 0:
        return "[empty]"
    if leaf.is_complex():
        return "[complex]"
    if leaf.is_meta or leaf.layout is not torch.strided:
        return "[?]"
    values = leaf.detach().to(torch.float64)  # not every dtype has a minimum, for example unsigned integers
    return f"[{values.min().item():.6g},{values.max().item():.6g}]"
