"""The cost of all stages. Prints tables and writes ``results/line.json``; part of `make bench`.

Recording is compared with ``torch.onnx.InputObserver`` in one interleaved run and given as ratios, because absolute
times say more about the machine than about the code. Stages are in wall-clock seconds, from one run each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from measure import environment, peak_mib
from observing import Overhead, measure_observing
from rich.console import Console
from rich.table import Table
from stages import STAGES, StageTimes, measure_stages

RESULTS = Path(__file__).parent / "results" / "line.json"
WIDTH = 120  # a table that is piped into a file is not squeezed


def main() -> None:
    console = Console()
    console.width = max(console.width, WIDTH)
    before = peak_mib()
    overheads = measure_observing()
    console.print(observing_table(overheads))
    stages = measure_stages()
    console.print(stages_table(stages, before))
    write(environment(), overheads, stages)
    console.print(f"Written: {RESULTS.relative_to(Path.cwd()) if RESULTS.is_relative_to(Path.cwd()) else RESULTS}")


def observing_table(overheads: list[Overhead]) -> Table:
    table = Table(
        title="Observing: median CPU time of one call",
        caption="ratio: what exportkit adds to a call, divided by what torch.onnx.InputObserver adds; "
        "below 1 exportkit is cheaper",
        caption_justify="left",
    )
    table.add_column("case")
    for name in ("unobserved", "exportkit", "torch", "ratio"):
        table.add_column(name, justify="right")
    for overhead in overheads:
        times = [f"{t.median:.2f} µs" for t in (overhead.plain, overhead.exportkit, overhead.torch)]
        table.add_row(overhead.case, *times, f"{overhead.ratio:.2f}")
    return table


def stages_table(stages: list[StageTimes], before: float) -> Table:
    table = Table(
        title="Stages: seconds",
        caption=f"peak: largest resident memory of the process up to then; {before:.0f} MiB after the imports",
        caption_justify="left",
    )
    table.add_column("model")
    for name in (*STAGES, "total", "peak", "verdict"):
        table.add_column(name, justify="right")
    for row in stages:
        seconds = [f"{row.seconds[stage]:.2f}" for stage in STAGES]
        verdict = f"proven, {row.rows} calls" if row.proven else "NOT PROVEN"
        table.add_row(row.model, *seconds, f"{sum(row.seconds.values()):.2f}", f"{row.peak_mib:.0f} MiB", verdict)
    return table


def write(environment: dict[str, Any], overheads: list[Overhead], stages: list[StageTimes]) -> None:
    result = {
        "environment": environment,
        "observing_cpu_microseconds": [overhead.as_json() for overhead in overheads],
        "stages_seconds": [row.as_json() for row in stages],
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
