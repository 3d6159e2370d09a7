"""Decomposes tensors of every storage kind into dense tensors, which have bytes, and puts them together again.

A tensor may be dense, quantised, sparse or nested, on any device. Nothing here changes it, and no mode of the caller
sees the operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from exportkit._torch_compat.memory import local_part, make_quantized, memory_of, sparse_parts
from exportkit._torch_compat.tracing import apart_from_modes

# Bytes that are hashed and measured together: a chunk of 256 KiB is still in the L2 cache when it is read again.
CHUNK = 2**18
# Bytes: a larger tensor that must be copied to be read is copied in parts, so that memory does not double.
_LARGEST_COPY = 2**26

# The dtypes of SafeTensors; complex numbers are stored as pairs, and any other dtype as bytes.
SAFETENSORS_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.uint16: "U16", torch.int16: "I16",
    torch.uint32: "U32", torch.int32: "I32", torch.uint64: "U64", torch.int64: "I64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_PAIRS = {torch.complex32: "F16", torch.complex64: "F32", torch.complex128: "F64"}
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"), torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"), torch.sparse_bsc: ("ccol_indices", "row_indices"),
}  # fmt: skip


@dataclass(frozen=True)
class Decomposition:
    """What a tensor consists of.

    Attributes:
        kind: Its storage kind, which says how `reassemble` puts the parts together.
        parts: Dense tensors by name; a dense tensor has itself as its only part, named "".
        numbers: The tensors that hold its elements, for its statistics.
        details: What else is needed, as JSON data.
    """

    kind: str
    parts: Mapping[str, torch.Tensor]
    numbers: tuple[torch.Tensor, ...]
    details: dict[str, Any] = field(default_factory=dict)


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether the elements of a tensor are contiguous bytes in the memory of the CPU."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and not (tensor.is_nested or tensor.is_quantized)
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_conj())
    )


def decompose(tensor: torch.Tensor) -> Decomposition:
    """Returns what a tensor consists of.

    Raises:
        RuntimeError: or whatever torch raises, for a storage kind whose content it does not expose.
    """
    local = local_part(tensor)  # of a distributed tensor
    if local is not None:
        return decompose(local)
    if tensor.is_meta:
        return Decomposition("none", {}, ())
    tensor = tensor.detach()
    if tensor.is_nested:
        parts = {str(number): part for number, part in enumerate(tensor.unbind())}
        return Decomposition("nested", parts, tuple(parts.values()), {"layout": _layout_name(tensor.layout)})
    if tensor.layout is torch.sparse_coo:
        parts = sparse_parts(tensor)
        details = {"shape": list(tensor.shape), "coalesced": tensor.is_coalesced()}
        return Decomposition("sparse", parts, (parts["values"],), details)
    if tensor.layout in _COMPRESSED:
        first, second = _COMPRESSED[tensor.layout]
        parts = {name: getattr(tensor, name)() for name in (first, second, "values")}
        details = {"shape": list(tensor.shape), "layout": _layout_name(tensor.layout)}
        return Decomposition("compressed", parts, (parts["values"],), details)
    if tensor.is_quantized:
        return _quantized(tensor)
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return Decomposition("dense", {"": dense}, (dense,))


def _quantized(tensor: torch.Tensor) -> Decomposition:
    numbers = (tensor.dequantize(),)
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        details = {"scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
        return Decomposition("quantized", {"": tensor.int_repr()}, numbers, details)
    parts = {
        "": tensor.int_repr(),
        "scales": tensor.q_per_channel_scales(),
        "zero_points": tensor.q_per_channel_zero_points(),
    }
    return Decomposition("quantized", parts, numbers, {"axis": tensor.q_per_channel_axis()})


def chunks_of(dense: torch.Tensor) -> Iterator[memoryview]:
    """Yields the bytes of a dense tensor in the order of its elements, in chunks of `CHUNK` bytes at most."""
    if not is_plain(dense):
        for part in _slices(dense):
            with apart_from_modes():
                copied = part.detach().resolve_conj().resolve_neg().cpu().contiguous()
            yield from chunks_of(copied)
        return
    memory = memory_of(dense)
    if len(memory) <= CHUNK:
        yield memory
    else:
        yield from (memory[start : start + CHUNK] for start in range(0, len(memory), CHUNK))


def _slices(dense: torch.Tensor) -> Iterator[torch.Tensor]:
    """The parts of a tensor that are small enough to be copied."""
    if dense.numel() * dense.itemsize <= _LARGEST_COPY:
        yield dense
        return
    with apart_from_modes():
        length = dense.shape[0]
        parts = dense.unbind() if length < 2 else dense.split(-(-length // 2))
    for part in parts:
        yield from _slices(part)


def safetensors_type(dense: torch.Tensor) -> tuple[str, list[int]]:
    """Returns the dtype and shape under which SafeTensors holds the bytes of a dense tensor."""
    shape = list(dense.shape)
    if dense.dtype in SAFETENSORS_DTYPES:
        return SAFETENSORS_DTYPES[dense.dtype], shape
    if dense.dtype in _PAIRS:
        return _PAIRS[dense.dtype], [*shape, 2]
    return "U8", [dense.numel() * dense.itemsize]


def reassemble(entry: Mapping[str, Any], read: Callable[[int, int], Any]) -> torch.Tensor:
    """Returns a stored tensor.

    Args:
        entry: The line of the index that describes it.
        read: Returns bytes of the data file, given an offset and a size, as a writable buffer.
    """
    parts = {name: _dense(part, read) for name, part in entry["parts"].items()}
    kind, details = entry["kind"], entry["details"]
    if kind == "dense":
        return parts[""]
    if kind == "quantized":
        if "axis" in details:
            return make_quantized(parts[""], parts["scales"], parts["zero_points"], int(details["axis"]))
        return make_quantized(parts[""], float(details["scale"]), int(details["zero_point"]), None)
    if kind == "nested":
        return torch.nested.nested_tensor(list(parts.values()), layout=_layout(details["layout"]))
    shape = tuple(map(int, details["shape"]))
    if kind == "sparse":
        coalesced = bool(details["coalesced"])
        return torch.sparse_coo_tensor(parts["indices"], parts["values"], shape, is_coalesced=coalesced)
    if kind == "compressed":
        layout = _layout(details["layout"])
        first, second = (parts[name] for name in _COMPRESSED[layout])
        return torch.sparse_compressed_tensor(first, second, parts["values"], shape, layout=layout)
    raise ValueError(f"unknown storage kind: {kind!r}")


def _dense(part: Mapping[str, Any], read: Callable[[int, int], Any]) -> torch.Tensor:
    dtype, shape = dtype_of(part["dtype"]), tuple(map(int, part["shape"]))
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    buffer = read(int(part["offset"]), count * dtype.itemsize)
    return torch.frombuffer(buffer, dtype=dtype, count=count).reshape(shape)


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype of that name.

    Raises:
        ValueError: if there is none.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"not a dtype of torch: {name!r}")
    return found


def _layout(name: str) -> torch.layout:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.layout):
        raise ValueError(f"not a layout of torch: {name!r}")
    return found


def _layout_name(layout: torch.layout) -> str:
    return str(layout).removeprefix("torch.")
