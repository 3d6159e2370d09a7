"""The cost of importing exportkit and of starting its command line, in new processes; part of `make bench`.

Each round starts one process for every variant, in turn, so that a slow phase of the machine affects all of them. The
figures are medians of wall-clock time. The first round warms up the file cache and does not count.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from figures import Figure, publish

ROUNDS = 7
USED = "exportkit.InputObserver, exportkit.export, exportkit.Plan, exportkit.load"
COMMAND = str(Path(sys.executable).with_name("exportkit"))
VARIANTS = {
    "python": [sys.executable, "-c", "pass"],
    "torch": [sys.executable, "-c", "import torch"],
    "exportkit": [sys.executable, "-c", "import torch, exportkit"],
    "observer": [sys.executable, "-c", "import torch, exportkit; exportkit.InputObserver"],
    "all used": [sys.executable, "-c", f"import torch, exportkit; {USED}"],
    "--version": [COMMAND, "--version"],
    "--help": [COMMAND, "--help"],
}


def main() -> None:
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for round_ in range(ROUNDS + 1):
        for name, command in VARIANTS.items():
            started = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            if round_:
                seconds[name].append(time.perf_counter() - started)
    median = {name: statistics.median(times) for name, times in seconds.items()}

    def above_torch(name: str, case: str, target: float) -> Figure:
        values = {"torch": median["torch"], "exportkit": median[name]}
        return Figure(case, values, "s", median[name] - median["torch"], target)

    publish(
        "imports",
        "Importing, in seconds of a new process",
        ("torch", "exportkit"),
        [
            above_torch("exportkit", "import exportkit, beyond torch", 0.1),
            above_torch("observer", "... and use InputObserver, beyond torch", float("inf")),
            above_torch("all used", "... and export, load and Plan, beyond torch", float("inf")),
            Figure("exportkit --version", {"exportkit": median["--version"]}, "s", median["--version"], 0.5),
            Figure("exportkit --help", {"exportkit": median["--help"]}, "s", median["--help"], 0.5),
        ],
    )


if __name__ == "__main__":
    main()
