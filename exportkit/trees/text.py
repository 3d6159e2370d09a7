"""Describes nested values in one line: types, shapes, value ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from exportkit._torch_compat.pytree import registered_node
from exportkit.trees.caches import is_cache_class

# Numbers of the dtypes in ONNX's TensorProto.DataType (onnx.proto), which users of the peers know.
_ONNX_TYPES = {
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
            return f"{device}T{_ONNX_TYPES.get(value.dtype, value.dtype)}{size}{_range(value) if with_min_max else ''}"
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
