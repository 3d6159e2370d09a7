"""Measuring tools of the benchmarks: interleaved CPU times, peak memory, and a description of the machine."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

_INVERTED = bytes(range(255, -1, -1))
_STATUS = Path("/proc/self/status")
PACKAGES = ("exportkit", "torch", "transformers", "onnx", "onnxscript", "onnxruntime", "optree")


@dataclass(frozen=True)
class Timing:
    """CPU time of one call in microseconds: median and quartiles over the repetitions."""

    median: float
    low: float
    high: float


def interleaved(blocks: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 5) -> dict[str, Timing]:
    """Runs the blocks in turn, repeatedly, and returns the CPU time of each.

    Measurements that are close in time see the machine in the same state, so their ratio is more stable than either
    figure. Every block starts in the same state: what the block before it left behind is cleaned up outside of the
    measurement.

    Args:
        blocks: Functions by name; each returns the CPU seconds that one call took in it.
        rounds: How often each block runs.
        warm_up: Rounds before those that count.
    """
    for _ in range(warm_up):
        for block in blocks.values():
            block()
    samples: dict[str, list[float]] = {name: [] for name in blocks}
    with collector_off():
        for _ in range(rounds):
            for name, block in blocks.items():
                _clear_away()
                samples[name].append(1e6 * block())
    return {name: _timing(values) for name, values in samples.items()}


def _clear_away() -> None:
    """Lets the garbage collector and the allocator finish their pending work.

    Some observers leave tensors behind in reference cycles, and malloc sorts freed memory when more than a few hundred
    bytes are requested next: 26 to 52 µs after a block of torch's observer with 80 layers.
    """
    gc.collect()
    for size in (1_000, 10_000, 100_000):
        bytearray(size)


def cpu_seconds(step: Callable[[], object], calls: int) -> float:
    """Returns the CPU time of one call of ``step``, averaged over ``calls`` calls."""
    started = time.thread_time()
    for _ in range(calls):
        step()
    return (time.thread_time() - started) / calls


def empty_processor_caches(mib: int = 64) -> None:
    """Writes as much memory as the processor caches hold, so that the next step starts with cold caches."""
    bytearray(mib * 2**20).translate(_INVERTED)


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Disables the garbage collector, and excludes existing objects from later collections."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def peak_mib() -> float:
    """Returns the peak resident memory of this process in MiB, since its start or since `forget_peak`.

    On Linux, ``getrusage`` would start with the peak of the parent process.
    """
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # bytes there, KiB elsewhere


def forget_peak() -> None:
    """Resets the peak, if the system supports it, as Linux does."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def environment() -> dict[str, object]:
    """Returns the versions, platform and date that the figures were measured with."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
    }


def _timing(samples: list[float]) -> Timing:
    low, median, high = statistics.quantiles(samples, n=4)
    return Timing(*(round(value, 3) for value in (median, low, high)))
