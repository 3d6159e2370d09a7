"""Mean, standard deviation, extremes and odd numbers of a tensor, from its bytes, in one pass as a rule.

In come the bytes of a contiguous tensor, piece by piece; out come `Statistics`. All is computed by numpy on the bytes:
no operation of torch runs that a mode, a profiler or autograd of the caller could see.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from exportkit._torch_compat.tracing import apart_from_modes

_ROW = 512  # products of rows are added in single precision, rows in double precision
_CANCELLED = 1e-3  # of the mean square: where less is left for the variance, it is computed again from deviations

_Array = npt.NDArray[Any]


class Statistics(NamedTuple):
    """Statistics of the finite elements, None if there is none; and how many are not finite."""

    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    nan: int = 0
    inf: int = 0


class _Sums:
    """What is known of the pieces so far."""

    __slots__ = ("count", "high", "inf", "low", "nan", "squares", "total")

    def __init__(self) -> None:
        self.count = self.nan = self.inf = 0
        self.total = self.squares = 0.0
        self.low, self.high = math.inf, -math.inf

    def add(self, values: _Array) -> None:
        low, high = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))
        if not (math.isfinite(low) and math.isfinite(high)):
            values = self._finite(values)
            if not len(values):
                return
            low, high = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.count += len(values)
        total, squares = _sums(values)
        self.total += total
        self.squares += squares

    def _finite(self, values: _Array) -> _Array:
        nan, finite = np.isnan(values), np.isfinite(values)
        self.nan += int(nan.sum())
        self.inf += int(len(values) - nan.sum() - finite.sum())
        return values[finite]

    def mean(self) -> float:
        return self.total / self.count

    def deviations(self) -> float:
        """The sum of the squares of the deviations from the mean."""
        return self.squares - self.total * self.mean()


class Accumulator:
    """Computes the statistics of a tensor as its bytes come."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._read = _reader(dtype)
        self._sums = _Sums()

    def add(self, piece: memoryview) -> None:
        """Takes the next bytes: whole elements."""
        if self._read is not None and len(piece):
            self._sums.add(self._read(piece))

    def result(self, pieces: Callable[[], Iterable[memoryview]]) -> Statistics:
        """Returns the statistics of all that was given; ``pieces`` gives it once more if need be."""
        sums = self._sums
        if self._read is None or not sums.count:
            return Statistics(nan=sums.nan, inf=sums.inf)
        mean, deviations = sums.mean(), sums.deviations()
        if not deviations > _CANCELLED * sums.squares:
            mean, deviations = _from_deviations(sums, map(self._read, pieces()))
        std = math.sqrt(deviations / (sums.count - 1)) if sums.count > 1 else None
        return Statistics(mean, std, sums.low, sums.high, sums.nan, sums.inf)


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


def _from_deviations(sums: _Sums, pieces: Iterable[_Array]) -> tuple[float, float]:
    """Mean and deviations, computed from the distances to a number that is near the mean."""
    near = sums.mean() if math.isfinite(sums.total) else sums.low / 2 + sums.high / 2
    total = squares = 0.0
    for values in pieces:
        distances = values[np.isfinite(values)].astype(np.float64) - near
        total += float(np.add.reduce(distances))
        squares += float(distances @ distances)
    return near + total / sums.count, max(0.0, squares - total * total / sums.count)


@functools.cache
def _ones() -> _Array:
    return np.ones(_ROW, dtype=np.float32)


_PLAIN = {
    torch.float64: np.float64, torch.float32: np.float32, torch.bool: np.uint8, torch.uint8: np.uint8,
    torch.int8: np.int8, torch.uint16: np.uint16, torch.int16: np.int16, torch.uint32: np.uint32,
    torch.int32: np.int32, torch.uint64: np.uint64, torch.int64: np.int64,
}  # fmt: skip


def _reader(dtype: torch.dtype) -> Callable[[memoryview], _Array] | None:
    """What makes numbers of bytes; None if they have no meaning that is known here."""
    if dtype in _PLAIN:
        return functools.partial(np.frombuffer, dtype=_PLAIN[dtype])
    if dtype is torch.bfloat16:
        return _bfloat16
    if dtype is torch.float16:
        return lambda piece: np.frombuffer(piece, np.float16).astype(np.float32)
    if dtype.is_complex:
        part = {torch.complex32: np.float16, torch.complex64: np.float32}.get(dtype, np.float64)
        return lambda piece: _absolute(np.frombuffer(piece, part))
    if dtype.is_floating_point and dtype.itemsize == 1:
        table = _table(dtype)
        return None if table is None else lambda piece: table[np.frombuffer(piece, np.uint8)]
    return None


def _bfloat16(piece: memoryview) -> _Array:
    """The upper halves of single-precision numbers."""
    return (np.frombuffer(piece, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _absolute(parts: _Array) -> _Array:
    pairs = parts.astype(np.float64).reshape(-1, 2)
    return np.hypot(pairs[:, 0], pairs[:, 1])


@functools.cache
def _table(dtype: torch.dtype) -> _Array | None:
    """The 256 numbers of an 8-bit type, or None if torch does not convert it."""
    with apart_from_modes():
        try:
            return np.array(torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32).tolist(), np.float32)
        except (RuntimeError, NotImplementedError):
            return None
