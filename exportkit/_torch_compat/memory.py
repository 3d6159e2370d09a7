"""The memory of tensors: copies on write, addresses, version counters, and what special kinds of tensors consist of."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch

from exportkit._torch_compat import require

# Making memory copy-on-write is not safe in two threads at once, and torch releases the GIL.
_copy_on_write_lock = threading.Lock()


def copies_on_write(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Returns copies that share memory until either side is written; None where torch cannot make one.

    The side that is written, or asked for its address, moves to new memory: tests/calls/test_snapshot.py shows what
    that means for other holders of the memory. Seen in torch 2.13.
    """
    clone = getattr(torch, "_lazy_clone", None)
    if clone is None:
        return [None] * len(tensors)
    with _copy_on_write_lock:
        try:
            return list(map(clone, tensors))
        except RuntimeError:  # at least one of them has no copy
            return [_copy_on_write(clone, tensor) for tensor in tensors]


def _copy_on_write(clone: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return clone(tensor)
    except RuntimeError:  # torch did not allocate the memory: it belongs to numpy or a file, is shared or pinned
        return None


FEW_ELEMENTS = 2**16  # smaller tensors are copied: many share one memory, which copy-on-write would copy as a whole


def protected_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns a copy that writes to the tensor leave alone; large ones share memory until then, None if they cannot."""
    return tensor.clone() if tensor.numel() <= FEW_ELEMENTS else copies_on_write([tensor])[0]


def are_copy_on_write(tensors: Iterable[torch.Tensor]) -> list[bool]:
    """Returns for each tensor whether its memory is still copy-on-write, so not written since. Seen in torch 2.13."""
    return list(map(getattr(torch._C, "_is_cow_tensor", lambda _: False), tensors))


def is_only_holder(tensor: torch.Tensor) -> bool:
    """Returns whether this tensor is certainly the only holder of its memory. Seen in torch 2.13.

    False for tensors that numpy or DLPack has seen, for views and their bases, and for torch versions that do not tell.
    """
    storages = getattr(torch._C, "_storage_Use_Count", None)
    if storages is None or not hasattr(tensor, "_use_count"):
        return False
    storage = tensor.untyped_storage()
    # x.numpy() makes the storage not resizable; DLPack holds the tensor; tensor and Python each hold the storage
    return bool(storage.resizable() and tensor._use_count() == 1 and storages(storage._cdata) == 2)


def memory_address(tensor: torch.Tensor) -> int | None:
    """Returns where the memory of a tensor begins, without moving it, or None if unknown. Seen in torch 2.13."""
    address = getattr(torch._C, "_data_address", None)
    return None if address is None else int(address(tensor))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor on the CPU, read-only and valid as long as the tensor exists.

    ``numpy()`` would make the storage impossible to resize, and ``data_ptr()`` would end copy-on-write; this does
    neither. Seen in torch 2.13.
    """
    size = tensor.nbytes
    if not size:
        return memoryview(b"")
    start = memory_address(tensor)
    address = tensor.data_ptr() if start is None else start + int(tensor.storage_offset()) * tensor.itemsize
    view: memoryview = _view_of_memory()(address, size, _READ_ONLY)
    return view


_READ_ONLY = 0x100  # PyBUF_READ


@functools.cache
def _view_of_memory() -> Callable[[int, int, int], memoryview]:
    import ctypes

    made = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
    return cast(Callable[[int, int, int], memoryview], made(("PyMemoryView_FromMemory", ctypes.pythonapi)))


def version_of(tensor: torch.Tensor) -> int | None:
    """Returns how often a tensor was written in place; None in inference mode, where torch does not count.

    Seen in torch 2.13.
    """
    return None if tensor.is_inference() else tensor._version


def memory_state(tensor: torch.Tensor) -> tuple[int, int | None]:
    """Returns a number for the memory of a tensor, and its version. Seen in torch 2.13.

    No other memory has the same number as long as this memory, or a `StorageRef` to it, exists.
    """
    return tensor.untyped_storage()._cdata, version_of(tensor)


class StorageRef:
    """A weak reference to the memory of a tensor, which tells it apart from later memory at the same address.

    Seen in torch 2.13.
    """

    __slots__ = ("_ref",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._ref = _weak_storage()(tensor.untyped_storage())

    def is_gone(self) -> bool:
        """Returns whether the memory was freed."""
        return bool(self._ref.expired())


@functools.cache
def _weak_storage() -> Any:
    from torch.multiprocessing import reductions

    return require(reductions, "StorageWeakRef")


def sparse_parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the indices and values of a sparse COO tensor, which need not be coalesced. Seen in torch 2.13."""
    return {"indices": tensor._indices(), "values": tensor._values()}


def local_part(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the part of a distributed tensor that is on this rank, None for other tensors. Seen in torch 2.13."""
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, torch.Tensor) else None


def make_quantized(values: torch.Tensor, scale: Any, zero_point: Any, axis: int | None) -> torch.Tensor:
    """Returns the quantized tensor with these integer values; with an axis, scales are tensors. Seen in torch 2.13."""
    if axis is None:
        return require(torch, "_make_per_tensor_quantized_tensor")(values, scale, zero_point)  # type: ignore[no-any-return]
    return require(torch, "_make_per_channel_quantized_tensor")(values, scale, zero_point, axis)  # type: ignore[no-any-return]


_printing = threading.Lock()  # the print options belong to the process


def scientific_text(tensor: torch.Tensor) -> str:
    """Returns the repr of a tensor in scientific notation, 120 columns wide. Seen in torch 2.13."""
    import torch._tensor_str

    with _printing, require(torch._tensor_str, "printoptions")(sci_mode=True, linewidth=120):
        return repr(tensor)
