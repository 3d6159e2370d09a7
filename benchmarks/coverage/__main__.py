"""Exports models of many libraries, and research code, for the page docs/coverage.rst. Run it with `make coverage`.

Each case runs in a process of its own and leaves a file in ``results/coverage``: a run that is stopped goes on where it
was, and a crash or a limit costs one case.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from cases import CASES, Case
from judged import LOUD, judge, judge_plain
from processes import Work, results, run_all
from table import printed, table_of
from torchvision_operators import define
from transformers_types import cases

HERE = Path(__file__).resolve().parent
TABLE = HERE.parents[1] / "docs" / "coverage.json"
RESULTS = HERE.parent / "results" / "coverage"
_MEMORY = 10 * 2**30


def main() -> None:
    parser = argparse.ArgumentParser(prog="make coverage", description=__doc__)
    parser.add_argument("what", nargs="?", default="libraries", choices=["libraries", "transformers"])
    parser.add_argument("--only", default="", help="regular expression, searched in the family and name of a case")
    parser.add_argument("--again", default="", help="verdicts to repeat, such as loud,silent")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of processor time for a case")
    parser.add_argument("--no-plain", dest="plain", action="store_false", help="leave torch.onnx.export out")
    parser.add_argument("--sample", type=int, help="number of transformers types; default: all that no test names")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--runtime", choices=["onnxruntime"], help="fuse the graphs for this runtime")
    parser.add_argument("--batch-one", action="store_true", help="record generating types with one row")
    parser.add_argument("--without", type=Path, nargs="*", default=[], help="more files that name types to leave out")
    parser.add_argument("--write", action="store_true", help="write the results there are to docs/coverage.json")
    parser.add_argument("--results", type=Path, help="folder; default: one for each of the two")
    options = parser.parse_args()
    options.results = options.results or RESULTS / options.what
    options.results.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    define()
    if options.what == "libraries":
        for path in sorted((HERE / "families").glob("*.py")):
            importlib.import_module(f"families.{path.stem}")
        found = CASES
    else:
        left_out = [HERE.parents[1] / "tests", HERE.parents[1] / "exportkit", *options.without]
        table = json.loads(TABLE.read_text()).get(options.what, {}) if TABLE.exists() else {}
        is_drawn = options.sample and (table.get("sample"), table.get("seed")) == (options.sample, options.seed)
        drawn = [row["name"] for row in table["rows"]] if is_drawn else []
        found = cases(left_out, options.sample, options.seed, options.batch_one, drawn)
    chosen = [case for case in found if re.search(options.only, f"{case.family}: {case.name}")]
    with contextlib.redirect_stdout(io.StringIO()):  # the processes are forked: this imports all for them
        judge(Case("linear", "", _linear, [(2,), (3,)], [(1,)]))
    pieces = [piece for case in chosen for piece in _pieces(case, options)]
    run_all(pieces, jobs=options.jobs, seconds=options.limit, memory=_MEMORY)
    how = {"sample": options.sample, "seed": options.seed} if options.what == "transformers" else {}
    table = table_of(results(options.results), **how)
    print(printed(table))
    if options.write:
        tables = json.loads(TABLE.read_text()) if TABLE.exists() else {}
        TABLE.write_text(json.dumps(tables | {options.what: table}, indent=1, ensure_ascii=False) + "\n")
        print(f"Written: {TABLE}")


def _linear() -> Any:
    model = torch.nn.Linear(4, 2)
    return model, lambda rows: model(torch.ones(rows, 4))


def _pieces(case: Case, options: argparse.Namespace) -> Iterator[Work]:
    """The two exporters, each in a process of its own."""
    for by, judged in (("exportkit", functools.partial(judge, runtime=options.runtime)), ("torch.onnx", judge_plain)):
        if by == "torch.onnx" and not (case.plain and options.plain):
            continue
        path = options.results / f"{case.id}.{by}.json"
        verdict = json.loads(path.read_text())["verdict"] if path.exists() else ""
        again = by == "exportkit" and verdict in options.again.split(",")
        named = {"name": case.name, "family": case.family, "by": by, "seconds": {}}
        run = functools.partial(_run, judged, case, named)
        yield Work(path, run, lambda reason, named=named: named | {"verdict": LOUD, "reason": reason}, again)


def _run(judged: Callable[[Case], dict[str, Any]], case: Case, named: dict[str, Any]) -> dict[str, Any]:
    return named | judged(case)


if __name__ == "__main__":
    main()
