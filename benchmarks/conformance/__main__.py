"""Compares exported operators with torch, for the page docs/conformance.rst. Run it with `make conformance`.

Each operator of torch's own database runs in a process of its own, dtype by dtype, and leaves a file in
``results/conformance``: a run that is stopped goes on where it was, and a crash or a time limit costs one operator.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import torch
from compared import Journal, RandomError, compare, keep_registry
from processes import Work, results, run_all
from samples import Sample, samples_of
from table import printed_totals, table_of
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import SampleInput

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "conformance"
TABLE = HERE.parents[1] / "docs" / "conformance.json"
_STARTS = 9  # each crash of a process leaves out one more of its steps
_MEMORY = 8 * 2**30
# Their values are what memory happens to hold.
_NOT_INITIALISED = ("empty", "new_empty", "resize")


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
    pieces = [
        _work(operator, dtype, options)
        for dtype in dtypes
        for operator in op_db
        if re.fullmatch(options.operators or ".*", _name(operator)) and dtype in operator.supported_dtypes("cpu")
    ]
    run_all(pieces, jobs=options.jobs, seconds=options.limit, memory=_MEMORY, starts=_STARTS)
    rows = results(options.results)
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


def _work(operator: Any, dtype: torch.dtype, options: argparse.Namespace) -> Work:
    named = {"operator": _name(operator), "dtype": str(dtype)}
    run = functools.partial(_run, operator, dtype, options)
    return Work(_path(options.results, operator, dtype), run, lambda reason: named | {"problem": reason, "rows": []})


def _run(operator: Any, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, Any]:
    """Compares one operator for one dtype, in a process of its own."""
    torch.set_num_threads(1)
    journal = _path(options.results, operator, dtype).with_suffix(".journal")
    started = time.monotonic()
    problem = ""
    try:
        if operator.name.startswith(_NOT_INITIALISED):
            raise RandomError
        rows = compare(samples_of(operator, dtype, options.samples), dtype, Journal(journal))
    except RandomError:
        rows, problem = [], "draws random numbers, or returns memory that is not initialised"
    except Exception as error:  # torch's own samples fail for some operators
        rows, problem = [], f"{type(error).__name__}: {error}"[:200]
    journal.unlink(missing_ok=True)
    found = {"operator": _name(operator), "dtype": str(dtype), "problem": problem, "rows": rows}
    return {**found, "seconds": round(time.monotonic() - started, 2)}


if __name__ == "__main__":
    main()
