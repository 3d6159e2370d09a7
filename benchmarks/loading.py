"""What it costs to load a saved folder, with and without checking its weights; part of `make bench`.

The files are in the cache of the operating system, so the figures are those of the hash and of copying from the cache;
SHA-256 is measured on the same file. Medians of wall-clock time.
"""

from __future__ import annotations

import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from figures import Figure, publish

import exportkit
from exportkit.files import digest_of

ROUNDS, WIDTH = 7, 8192  # one matrix of 268 MB


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        folder, small = Path(directory) / "large", Path(directory) / "small"
        weights = _save(WIDTH, folder) / "model.onnx.data"
        _save(8, small)
        gigabytes = weights.stat().st_size / 1e9
        seconds = {
            "load": _seconds(lambda: exportkit.load(folder)),
            "without weights": _seconds(lambda: exportkit.load(folder, check_weights=False)),
            "small": _seconds(lambda: exportkit.load(small)),
            "xxh3": _seconds(lambda: digest_of(weights)) / gigabytes,
            "sha256": _seconds(lambda: _sha256(weights)) / gigabytes,
        }
    publish(
        "loading",
        f"Loading a folder with {gigabytes:.2f} GB of weights",
        ("time",),
        [
            _figure("checked", seconds["load"]),
            _figure("without the weights", seconds["without weights"]),
            _figure("a folder of a few kB", seconds["small"]),
            _figure("XXH3, per GB", seconds["xxh3"]),
            _figure("SHA-256, per GB, for comparison", seconds["sha256"]),
        ],
    )


def _figure(case: str, seconds: float) -> Figure:
    return Figure(case, {"time": seconds}, "s", seconds)


def _save(width: int, folder: Path) -> Path:
    model, observer = torch.nn.Linear(width, width), exportkit.InputObserver()
    with observer(model):
        for rows in (2, 3):
            model(torch.rand(rows, width))
    exportkit.export(model, observer).save(folder, verify=False)
    return folder


def _seconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


if __name__ == "__main__":
    main()
