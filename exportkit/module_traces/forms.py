"""What tensors of every kind consist of: dense tensors, which have bytes, and a few numbers.

In comes a tensor: dense, quantised, sparse, nested, on any device; out comes a `Form`, or from the index entry of one
the tensor again. Nothing here changes the tensor, and no mode of the caller sees the operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from exportkit._torch_compat.memory import local_part, make_quantized, memory_of, sparse_parts
from exportkit._torch_compat.tracing import apart_from_modes

PIECE = 2**18  # bytes that are hashed and measured while they are in the cache of the processor
_COPIED = 2**26  # bytes; what is larger, and must be copied to be read, is copied in parts

# What SafeTensors calls these types; complex numbers are in a file as pairs, what is not in here as bytes.
NAMES = {
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
class Form:
    """What a tensor consists of.

    Attributes:
        kind: What puts the parts together: see `as_tensor`.
        parts: Dense tensors by name; that of a dense tensor is itself, named "".
        numbers: The tensors whose elements are those of the tensor, for its statistics.
        details: What else is needed, as JSON data.
    """

    kind: str
    parts: Mapping[str, torch.Tensor]
    numbers: tuple[torch.Tensor, ...]
    details: dict[str, Any] = field(default_factory=dict)


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether the bytes of a tensor are its elements, in order, in the memory of the CPU."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and not (tensor.is_nested or tensor.is_quantized)
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_conj())
    )


def form_of(tensor: torch.Tensor) -> Form:
    """Returns what a tensor consists of.

    Raises:
        RuntimeError: or whatever torch raises, for a kind that it does not let one look into.
    """
    local = local_part(tensor)
    if local is not None:
        return form_of(local)
    if tensor.is_meta:
        return Form("none", {}, ())
    tensor = tensor.detach()
    if tensor.is_nested:
        parts = {str(number): part for number, part in enumerate(tensor.unbind())}
        return Form("nested", parts, tuple(parts.values()), {"layout": _name(tensor.layout)})
    if tensor.layout is torch.sparse_coo:
        parts = sparse_parts(tensor)
        details = {"shape": list(tensor.shape), "coalesced": tensor.is_coalesced()}
        return Form("sparse", parts, (parts["values"],), details)
    if tensor.layout in _COMPRESSED:
        first, second = _COMPRESSED[tensor.layout]
        parts = {name: getattr(tensor, name)() for name in (first, second, "values")}
        return Form(
            "compressed", parts, (parts["values"],), {"shape": list(tensor.shape), "layout": _name(tensor.layout)}
        )
    if tensor.is_quantized:
        return _quantized(tensor)
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return Form("dense", {"": dense}, (dense,))


def _quantized(tensor: torch.Tensor) -> Form:
    numbers = (tensor.dequantize(),)
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        details = {"scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
        return Form("quantized", {"": tensor.int_repr()}, numbers, details)
    parts = {
        "": tensor.int_repr(),
        "scales": tensor.q_per_channel_scales(),
        "zero_points": tensor.q_per_channel_zero_points(),
    }
    return Form("quantized", parts, numbers, {"axis": tensor.q_per_channel_axis()})


def pieces_of(dense: torch.Tensor) -> Iterator[memoryview]:
    """Yields the bytes of a dense tensor in the order of its elements: pieces of `PIECE` bytes, and what is left."""
    if is_plain(dense):
        memory = memory_of(dense)
        if len(memory) <= PIECE:
            yield memory
        else:
            yield from (memory[start : start + PIECE] for start in range(0, len(memory), PIECE))
    elif dense.numel() * dense.itemsize <= _COPIED:
        yield from pieces_of(_copied(dense))
    else:
        yield from _gathered(dense)


def _copied(dense: torch.Tensor) -> torch.Tensor:
    with apart_from_modes():
        return dense.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _gathered(dense: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor that is never copied as a whole."""
    waiting = bytearray()
    for part in _slices(dense):
        copied = _copied(part)  # held while its memory is read
        waiting += memory_of(copied)
        whole = len(waiting) // PIECE * PIECE
        if whole:
            done, waiting = waiting[:whole], waiting[whole:]
            yield from (memoryview(done)[start : start + PIECE] for start in range(0, whole, PIECE))
    if waiting:
        yield memoryview(waiting)


def _slices(dense: torch.Tensor) -> Iterator[torch.Tensor]:
    if dense.numel() * dense.itemsize <= _COPIED:
        yield dense
        return
    with apart_from_modes():
        length = dense.shape[0]
        parts = dense.unbind() if length < 2 else dense.split(-(-length // 2))
    for part in parts:
        yield from _slices(part)


def stored_type(dense: torch.Tensor) -> tuple[str, list[int]]:
    """Returns type and shape under which SafeTensors holds the bytes of a dense tensor."""
    shape = list(dense.shape)
    if dense.dtype in NAMES:
        return NAMES[dense.dtype], shape
    if dense.dtype in _PAIRS:
        return _PAIRS[dense.dtype], [*shape, 2]
    return "U8", [dense.numel() * dense.itemsize]


def as_tensor(entry: Mapping[str, Any], read: Callable[[int, int], Any]) -> torch.Tensor:
    """Returns the tensor that was stored.

    Args:
        entry: What the index says about it.
        read: Returns the bytes of the data file from an offset on, as a buffer that may be written to.
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
    raise ValueError(f"a tensor of an unknown kind: {kind!r}")


def _dense(part: Mapping[str, Any], read: Callable[[int, int], Any]) -> torch.Tensor:
    dtype, shape = dtype_of(part["dtype"]), tuple(map(int, part["shape"]))
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    buffer = read(int(part["offset"]), count * dtype.itemsize)
    return torch.frombuffer(buffer, dtype=dtype, count=count).reshape(shape)


def dtype_of(name: str) -> torch.dtype:
    """Returns the type of that name.

    Raises:
        ValueError: if there is none.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no type of torch: {name!r}")
    return found


def _layout(name: str) -> torch.layout:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.layout):
        raise ValueError(f"no layout of torch: {name!r}")
    return found


def _name(layout: torch.layout) -> str:
    return str(layout).removeprefix("torch.")
