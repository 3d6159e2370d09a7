"""Measures tensors: statistics and a hash, or the place where their values are stored.

The bytes are read once: a chunk is hashed and measured while it is in the processor's cache. Where values are stored,
they are only written; statistics and hash are computed from them when a trace is read. All is computed by numpy on the
bytes, so that no operation of torch runs that a mode, a profiler or autograd of the caller could see.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from exportkit._torch_compat.memory import memory_of
from exportkit._torch_compat.tracing import apart_from_modes
from exportkit.module_traces.decomposition import Decomposition, chunks_of, decompose, is_plain, safetensors_type
from exportkit.module_traces.files import TraceFiles, encode, quoted

_ORDINARY = (torch.Tensor, torch.nn.Parameter)
# Products of rows of so many elements are added in single precision, in one vectorised call, and the rows in double
# precision: the sums are within 2e-7 of the exact ones (200 draws of normal numbers with means 0, 1 and 100).
_ROW = 512
# So a variance of less than this part of the mean square may be off by more than 2e-4: then it is computed again, from
# deviations.
_CANCELLED = 1e-3

_Array = npt.NDArray[Any]


class Statistics(NamedTuple):
    """Statistics of the finite elements, None if there are none; and how many elements are not finite."""

    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    nan: int = 0
    inf: int = 0


class Measured(NamedTuple):
    """What was found out about a tensor.

    Attributes:
        statistics: Its statistics.
        hash: XXH3 of its bytes, in 64 bits: against faults, not against attacks. Empty if it has no values.
    """

    statistics: Statistics
    hash: str

    def text(self) -> str:
        """Returns the statistics and the hash as part of a line of the index."""
        numbers = [f'"{name}":{_json_number(value)}' for name, value in self.statistics._asdict().items()]
        return f'{",".join(numbers)},"hash":"{self.hash}"'


def _json_number(value: float | None) -> str:
    """A number as JSON writes it; one that JSON lacks as text."""
    if value is None:
        return "null"
    return repr(value) if math.isfinite(value) else f'"{value}"'


def measure(tensor: torch.Tensor) -> Measured:
    """Returns statistics and hash of a tensor.

    Raises:
        RuntimeError: or whatever torch raises, if it does not expose the content of the tensor.
    """
    form = _decomposed(tensor)
    accumulator = _Accumulator(form.numbers[0].dtype if form.numbers else torch.float32)
    numbers, parts = [id(dense) for dense in form.numbers], [id(dense) for dense in form.parts.values()]
    hashes = []
    with np.errstate(all="ignore"):
        for dense in form.parts.values():
            digest, is_number = xxhash.xxh3_64(), id(dense) in numbers
            for chunk in chunks_of(dense):
                digest.update(chunk)
                if is_number:
                    accumulator.add(chunk)
            hashes.append(digest.hexdigest())
        for dense in form.numbers:
            if id(dense) not in parts:
                for chunk in chunks_of(dense):
                    accumulator.add(chunk)
        joined = hashes[0] if len(hashes) == 1 else xxhash.xxh3_64_hexdigest("".join(hashes).encode()) if hashes else ""
        return Measured(accumulator.result(form), joined)


def store(tensor: torch.Tensor, files: TraceFiles, key: str) -> str:
    """Writes the values of a tensor, and returns the part of a line of the index that says where they are.

    Raises:
        OSError: if they cannot be written.
        RuntimeError: or whatever torch raises, if it does not expose the content of the tensor.
    """
    if _is_simple(tensor):
        part = _store_part(tensor, [memory_of(tensor)], files, key)
        return f'"key":{quoted(key)},"kind":"dense","parts":{{"":{part}}},"details":{{}}'
    form, parts = _decomposed(tensor), []
    for name, dense in form.parts.items():
        part = _store_part(dense, chunks_of(dense), files, f"{key}.{name}" if name else key)
        parts.append(f'"{name}":{part}')
    return f'"key":{quoted(key)},"kind":"{form.kind}","parts":{{{",".join(parts)}}},"details":{encode(form.details)}'


def _store_part(dense: torch.Tensor, chunks: Iterable[memoryview], files: TraceFiles, name: str) -> str:
    """Writes the bytes of a dense tensor under a name, and returns where they are."""
    offset = files.offset
    for chunk in chunks:
        files.write_data(chunk)
    dtype, shape = safetensors_type(dense)
    files.name_data(name, dtype, shape, offset)
    return f'{{"dtype":"{dtype_name(dense)}","shape":{list(dense.shape)},"offset":{offset}}}'


def _is_simple(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of no subclass, and its bytes can be read as they are."""
    return type(tensor) in _ORDINARY and is_plain(tensor)


def _decomposed(tensor: torch.Tensor) -> Decomposition:
    if _is_simple(tensor):
        return Decomposition("dense", {"": tensor}, (tensor,))
    with apart_from_modes():
        return decompose(tensor)


def dtype_name(tensor: torch.Tensor) -> str:
    """Returns the dtype of a tensor as a name, such as ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


class _Accumulator:
    """Computes the statistics of a tensor, chunk by chunk."""

    __slots__ = ("_as_numbers", "_count", "_high", "_inf", "_low", "_nan", "_squares", "_total")

    def __init__(self, dtype: torch.dtype) -> None:
        self._as_numbers = _reader(dtype)
        self._count = self._nan = self._inf = 0
        self._total = self._squares = 0.0
        self._low, self._high = math.inf, -math.inf

    def add(self, chunk: memoryview) -> None:
        """Takes the next bytes: whole elements."""
        if self._as_numbers is None or not len(chunk):
            return
        values = self._as_numbers(chunk)
        low, high = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))
        if not (math.isfinite(low) and math.isfinite(high)):
            nan, finite = np.isnan(values), np.isfinite(values)
            self._nan += int(nan.sum())
            self._inf += int(len(values) - nan.sum() - finite.sum())
            values = values[finite]
            if not len(values):
                return
            low, high = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))
        self._low, self._high = min(self._low, low), max(self._high, high)
        self._count += len(values)
        total, squares = _sums(values)
        self._total += total
        self._squares += squares

    def result(self, form: Decomposition) -> Statistics:
        """Returns the statistics of all chunks; they are read from the tensor once more where digits were lost."""
        if self._as_numbers is None or not self._count:
            return Statistics(nan=self._nan, inf=self._inf)
        mean = self._total / self._count
        deviations = self._squares - self._total * mean
        if not deviations > _CANCELLED * self._squares:
            # Mean and deviations from the distances to a number that is near the mean.
            near = mean if math.isfinite(self._total) else self._low / 2 + self._high / 2
            total = squares = 0.0
            for chunk in (chunk for dense in form.numbers for chunk in chunks_of(dense)):
                values = self._as_numbers(chunk)
                distances = values[np.isfinite(values)].astype(np.float64) - near
                total += float(np.add.reduce(distances))
                squares += float(distances @ distances)
            mean, deviations = near + total / self._count, max(0.0, squares - total * total / self._count)
        std = math.sqrt(deviations / (self._count - 1)) if self._count > 1 else None
        return Statistics(mean, std, self._low, self._high, self._nan, self._inf)


def _sums(values: _Array) -> tuple[float, float]:
    """The sum, and the sum of squares."""
    whole = len(values) // _ROW * _ROW if values.dtype == np.float32 else 0
    total = squares = 0.0
    if whole < len(values):
        exact = values[whole:].astype(np.float64)
        total, squares = float(np.add.reduce(exact)), float(exact @ exact)
    if whole:
        rows = values[:whole].reshape(-1, _ROW)
        total += float(np.add.reduce(np.vecdot(rows, _ones()), dtype=np.float64))
        squares += float(np.add.reduce(np.vecdot(rows, rows), dtype=np.float64))
        if not (math.isfinite(total) and math.isfinite(squares)):
            return _sums(values.astype(np.float64))
    return total, squares


@functools.cache
def _ones() -> _Array:
    return np.ones(_ROW, dtype=np.float32)


_SAME_IN_NUMPY = {
    torch.float64: np.float64, torch.float32: np.float32, torch.bool: np.uint8, torch.uint8: np.uint8,
    torch.int8: np.int8, torch.uint16: np.uint16, torch.int16: np.int16, torch.uint32: np.uint32,
    torch.int32: np.int32, torch.uint64: np.uint64, torch.int64: np.int64,
}  # fmt: skip


def _reader(dtype: torch.dtype) -> Callable[[memoryview], _Array] | None:
    """The function that makes numbers from bytes; None for a dtype whose bytes have no known meaning."""
    if dtype in _SAME_IN_NUMPY:
        return functools.partial(np.frombuffer, dtype=_SAME_IN_NUMPY[dtype])
    if dtype is torch.bfloat16:  # the upper halves of single-precision numbers
        return lambda chunk: (np.frombuffer(chunk, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype is torch.float16:
        return lambda chunk: np.frombuffer(chunk, np.float16).astype(np.float32)
    if dtype.is_complex:
        part = {torch.complex32: np.float16, torch.complex64: np.float32}.get(dtype, np.float64)
        return lambda chunk: np.hypot(*np.frombuffer(chunk, part).astype(np.float64).reshape(-1, 2).T)
    if dtype.is_floating_point and dtype.itemsize == 1:
        table = _table(dtype)
        return None if table is None else lambda chunk: table[np.frombuffer(chunk, np.uint8)]
    return None


@functools.cache
def _table(dtype: torch.dtype) -> _Array | None:
    """The 256 numbers of an 8-bit dtype, or None if torch does not convert it."""
    with apart_from_modes():
        try:
            return np.array(torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32).tolist(), np.float32)
        except (RuntimeError, NotImplementedError):
            return None
