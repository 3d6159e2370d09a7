"""The tensors of an observation in its safetensors file: each kept once, and read when it is needed.

In come tensors, or keys; out go keys, or tensors. Where only shapes were written, values are made up.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from exportkit.errors import DestinationError, ObservationError
from exportkit.trees import join

JSON, TENSORS = "observation.json", "tensors.safetensors"
# What a safetensors file holds; complex numbers are in it as pairs of real ones.
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
        torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
        torch.complex128, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    )
}  # fmt: skip


class KeptTensors:
    """The tensors of an observation by their key in the file; one that several calls share is kept once."""

    def __init__(self, values: bool) -> None:
        self._values = values
        self.tensors: dict[str, torch.Tensor] = {}
        self._known: dict[int, tuple[str, torch.Tensor]] = {}

    def key_of(self, tensor: torch.Tensor, wanted: str) -> str | None:
        """Returns the key of a tensor, which is kept from now on; None for one whose values are not written."""
        if tensor.layout is not torch.strided or tensor.dtype not in DTYPES.values():
            raise ObservationError(
                "A tensor of this kind cannot be written.",
                where=wanted,
                expected="a dense tensor of booleans, or of whole, real or complex numbers",
                got=f"{tensor.dtype}, {tensor.layout}",
                hint="leave the input out: observer.remove_inputs([...]).",
            )
        if tensor.is_meta or not self._values:
            return None
        if id(tensor) not in self._known:
            self._known[id(tensor)] = wanted, tensor
            self.tensors[wanted] = _copied(tensor)
        return self._known[id(tensor)][0]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A dense copy on the CPU: safetensors refuses shared memory, and asking for addresses ends copy-on-write."""
    plain = _as_real(tensor.detach().resolve_conj().resolve_neg())
    return plain.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class StoredTensors:
    """Reads the tensors of an observation, or invents them where only their shapes were written."""

    def __init__(self, file: Path, content: Any = None) -> None:
        self._file, self._content = file, content
        self._read: dict[str, torch.Tensor] = {}

    def tensor(self, leaf: Mapping[str, Any], place: str) -> torch.Tensor:
        """Returns the tensor of a leaf."""
        key, shape, dtype = leaf["tensor"], torch.Size(leaf["shape"]), DTYPES[leaf["dtype"]]
        if self._content is None:
            return _invented(shape, dtype, join(place, leaf["path"]))
        if key is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        if key not in self._read:
            self._read[key] = self._checked(key, shape, dtype)
        return self._read[key]

    def _checked(self, key: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        try:
            tensor = self._content.get_tensor(key).clone()  # cut off from the file
        except SafetensorError as error:
            raise damaged(self._file, error) from error
        wanted = _as_real(torch.empty(shape, dtype=dtype, device="meta"))
        if (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype):
            raise ObservationError(
                "A tensor is another one than the observation says.",
                where=f"{key} in {self._file}",
                expected=f"{wanted.dtype} {tuple(wanted.shape)}",
                got=f"{tensor.dtype} {tuple(tensor.shape)}",
                hint=f"keep {JSON} and {TENSORS} of one save together.",
            )
        return torch.view_as_complex(tensor) if dtype.is_complex else tensor


@contextlib.contextmanager
def opened_tensors(file: Path, data: Mapping[str, Any]) -> Iterator[StoredTensors]:
    """Opens the file of an observation, whose JSON data are given, if it has one."""
    if not data["values"]:
        yield StoredTensors(file)
        return
    try:
        opened = safe_open(file, framework="pt")
    except OSError as error:
        raise DestinationError(
            "The values of an observation are missing.",
            where=str(file),
            expected=f"the file that was written with {JSON}",
            got=error,
            hint="copy the whole directory, or save with values=False.",
        ) from error
    except SafetensorError as error:
        raise damaged(file, error) from error
    with opened as content:
        stamp = (content.metadata() or {}).get("stamp")
        if stamp != data["stamp"]:
            raise ObservationError(
                "The two files of an observation are not of one save.",
                where=str(file),
                expected=f"stamp {data['stamp']}, as in {JSON}",
                got=f"stamp {stamp}",
                hint="the last save did not end: save again.",
            )
        yield StoredTensors(file, content)


def _invented(shape: torch.Size, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Ones, or numbers between 0.1 and 1 that are the same wherever and whenever the leaf of that name is read."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.ones(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    pair = (2,) if dtype.is_complex else ()
    values = torch.randn((*shape, *pair), generator=generator, dtype=torch.float64).sigmoid() * 0.9 + 0.1
    return (torch.view_as_complex(values) if pair else values).to(dtype)


def damaged(file: Path, cause: object) -> ObservationError:
    """Returns the error for a file that is not what was written."""
    return ObservationError(
        "This observation is damaged.",
        where=str(file),
        got=cause,
        hint="the file was changed or cut short: observe the model again, and save that.",
    )
