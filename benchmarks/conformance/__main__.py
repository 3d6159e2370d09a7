"""Compares exported operators with torch, for the page docs/conformance.rst. Run it with `make conformance`.

Each operator of torch's own database runs in a process of its own, dtype by dtype, and leaves a file in
``results/conformance``: a run that is stopped goes on where it was, and a crash or a time limit costs one operator.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import resource
import time
from pathlib import Path
from typing import Any

import torch
from compared import Journal, RandomError, compare, keep_registry
from samples import Sample, samples_of
from table import printed_totals, table_of
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import SampleInput

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "conformance"
TABLE = HERE.parents[1] / "docs" / "conformance.json"
# A process that ends more often than this is not started again.
_CRASHES = 8
_MEMORY = 8 * 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operators", default="", help="regular expression that the names have to match in full")
    parser.add_argument("--dtypes", default="float32,int64,bool")
    parser.add_argument("--samples", type=int, default=3, help="samples of each operator and dtype")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one operator and dtype")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", type=Path, help="where to write the table; the default is docs/conformance.json")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    dtypes = [getattr(torch, name) for name in options.dtypes.split(",")]
    torch.set_num_threads(1)
    keep_registry()
    compare([Sample.of(torch.neg, SampleInput(torch.ones(2)))], torch.float32, Journal(Path(os.devnull)))  # imports
    waiting = [
        (operator, dtype)
        for dtype in dtypes
        for operator in op_db
        if re.fullmatch(options.operators or ".*", _name(operator))
        if dtype in operator.supported_dtypes("cpu") and not _path(options.results, operator, dtype).exists()
    ]
    _run_all(waiting, options)
    rows = [json.loads(path.read_text()) for path in sorted(options.results.glob("*.json"))]
    table = table_of(rows, options.samples)
    print(printed_totals(table))
    if not options.operators or options.table:
        path = options.table or TABLE
        path.write_text(json.dumps(table, indent=1) + "\n")
        print(f"Written: {path}")


def _name(operator: Any) -> str:
    return operator.name + (f".{operator.variant_test_name}" if operator.variant_test_name else "")


def _path(results: Path, operator: Any, dtype: torch.dtype) -> Path:
    return results / f"{_name(operator)}.{str(dtype).removeprefix('torch.')}.json"


def _run_all(waiting: list[tuple[Any, torch.dtype]], options: argparse.Namespace) -> None:
    """Runs operators, several at a time. Children are forked, since importing torch's database takes ten seconds."""
    context = multiprocessing.get_context("fork")
    todo = [(operator, dtype, 0) for operator, dtype in reversed(waiting)]
    running: dict[Any, tuple[Any, torch.dtype, int, float]] = {}
    total = len(todo)
    while todo or running:
        while todo and len(running) < options.jobs:
            operator, dtype, crashes = todo.pop()
            process = context.Process(target=_run, args=(operator, dtype, options))
            process.start()
            running[process] = operator, dtype, crashes, time.monotonic()
        time.sleep(0.05)
        for process, (operator, dtype, crashes, started) in list(running.items()):
            seconds = time.monotonic() - started
            late = seconds > options.limit
            if late:
                process.kill()
            if process.is_alive() and not late:
                continue
            process.join()
            del running[process]
            path = _path(options.results, operator, dtype)
            if not path.exists() and not late and crashes < _CRASHES:
                todo.append((operator, dtype, crashes + 1))
                continue
            if not path.exists():
                reason = f"took more than {options.limit:g} seconds" if late else "ended the process again and again"
                _write(path, {"operator": _name(operator), "dtype": str(dtype), "problem": reason, "rows": []})
            path.with_suffix(".journal").unlink(missing_ok=True)
            print(f"{total - len(todo) - len(running)}/{total} {path.stem}: {seconds:.1f} s", flush=True)


def _run(operator: Any, dtype: torch.dtype, options: argparse.Namespace) -> None:
    """Compares one operator for one dtype, in a process of its own."""
    torch.set_num_threads(1)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    path = _path(options.results, operator, dtype)
    started = time.monotonic()
    problem = ""
    try:
        rows = compare(samples_of(operator, dtype, options.samples), dtype, Journal(path.with_suffix(".journal")))
    except RandomError:
        rows, problem = [], "draws random numbers"
    except Exception as error:  # torch's own samples fail for some operators
        rows, problem = [], f"{type(error).__name__}: {error}"[:200]
    found = {"operator": _name(operator), "dtype": str(dtype), "problem": problem, "rows": rows}
    _write(path, {**found, "seconds": round(time.monotonic() - started, 2)})


def _write(path: Path, found: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.rename(path)


if __name__ == "__main__":
    main()
