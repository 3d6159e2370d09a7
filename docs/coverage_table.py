"""Sphinx directives for the page on coverage: tables from ``coverage.json``, which `make coverage` writes."""

import json
from pathlib import Path

from sphinx.util.docutils import SphinxDirective
from tables import table

TABLE = Path(__file__).with_name("coverage.json")


class Totals(SphinxDirective):
    """The number of cases by verdict, for each family of cases."""

    required_arguments = 1

    def run(self):
        totals = _found(self.arguments[0])["totals"]
        keys = [key for key, count in totals["all"].items() if count]
        rows = [[family, *(str(counts[key] or "") for key in keys)] for family, counts in totals.items()]
        return [table(["", *keys], rows, [30, *([10] * len(keys))])]


class Cases(SphinxDirective):
    """A row for each case."""

    required_arguments = 1

    def run(self):
        rows = _found(self.arguments[0])["rows"]
        keys = ["family", "name", "verdict", *(["torch.onnx"] if "torch.onnx" in rows[0] else []), "reason"]
        cells = [[row.get(key, "") for key in keys] for row in rows]
        return [table(keys, cells, [15, 20, 8, *([8] if "torch.onnx" in keys else []), 50])]


class Versions(SphinxDirective):
    """The versions of the libraries."""

    required_arguments = 1

    def run(self):
        return [table(["library", "version"], list(_found(self.arguments[0])["versions"].items()), [50, 50])]


def _found(what):
    return json.loads(TABLE.read_text())[what]


def setup(app):
    app.add_directive("coverage-totals", Totals)
    app.add_directive("coverage-cases", Cases)
    app.add_directive("coverage-versions", Versions)
    return {"parallel_read_safe": True}
