"""Sphinx directives for the page on operators: tables from ``conformance.json``, which `make conformance` writes."""

import json
from pathlib import Path

from sphinx.util.docutils import SphinxDirective
from tables import table

TABLE = Path(__file__).with_name("conformance.json")
EXPORTERS = ("torch.onnx", "exportkit")
OUTCOMES = ("equal", "differs", "refused", "crashed", "not translated", "not traced")


class Totals(SphinxDirective):
    """The number of operators and samples by outcome, for both exporters."""

    def run(self):
        totals = json.loads(TABLE.read_text())["totals"]
        keys = list(totals["exportkit"])
        rows = [[key, *(str(totals[name].get(key, "")) for name in EXPORTERS)] for key in keys]
        return [table(["", "torch.onnx.export", "exportkit"], rows, [50, 25, 25])]


class Operators(SphinxDirective):
    """A row for each operator and dtype."""

    def run(self):
        rows = []
        for row in json.loads(TABLE.read_text())["rows"]:
            outcomes = [_outcome(row[name]) for name in EXPORTERS]
            covered = "" if "differs" not in row["exportkit"] else "none" if row["silent"] else "finding"
            rows.append([row["operator"], row["dtype"], f"{row['samples']} ({row['sets']})", *outcomes, covered])
        head = ["operator", "dtype", "samples (sets of values)", "torch.onnx.export", "exportkit", "said by exportkit"]
        return [table(head, rows, [22, 8, 10, 26, 26, 8])]


def _outcome(found):
    counts = ", ".join(f"{found[name]} {name}" for name in OUTCOMES if name in found)
    where = ", ".join(name for name in found["where"] if name)
    return f"{counts}: {where}" if where else counts


def setup(app):
    app.add_directive("conformance-totals", Totals)
    app.add_directive("conformance-operators", Operators)
    return {"parallel_read_safe": True}
