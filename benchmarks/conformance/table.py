"""The table of a conformance run: a row for each operator and dtype, and totals for each exporter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import onnxruntime
import torch

EXPORTERS = ("torch.onnx", "exportkit")
# What counts for an operator whose samples come out differently: what is silent, then what is loud.
_WORST = ("differs", "crashed", "refused", "not translated", "not traced", "equal")
OUTCOMES = ("equal", "differs", "refused", "crashed", "not translated", "not traced")


def table_of(results: Sequence[Mapping[str, Any]], samples: int) -> dict[str, Any]:
    """Returns the table.

    Args:
        results: What was found for each operator and dtype.
        samples: How many samples were asked for.
    """
    rows = [_row(result) for result in results if result["rows"]]
    return {
        "versions": {"torch": torch.__version__.partition("+")[0], "onnxruntime": onnxruntime.__version__},
        "samples per operator and dtype": samples,
        "minutes": round(sum(result.get("seconds", 0) for result in results) / 60),
        "totals": {name: _totals(rows, name) for name in EXPORTERS},
        "problems": {f"{r['operator']} {_short(r['dtype'])}": r["problem"] for r in results if r["problem"]},
        "rows": rows,
    }


def _short(dtype: str) -> str:
    return dtype.removeprefix("torch.")


def _row(result: Mapping[str, Any]) -> dict[str, Any]:
    row = {
        "operator": result["operator"],
        "dtype": _short(result["dtype"]),
        "samples": len(result["rows"]),
        "sets": sum(sample["sets"] for sample in result["rows"]),
    }
    for name in EXPORTERS:
        outcomes = [sample[name] for sample in result["rows"]]
        counts = Counter(outcome["status"] for outcome in outcomes)
        where: dict[str, str] = {}
        for outcome in outcomes:
            for values, text in outcome["where"].items():
                where.setdefault(values, text)
        row[name] = {**{status: counts[status] for status in OUTCOMES if counts[status]}, "where": where}
    row["findings"] = list(dict.fromkeys(text for s in result["rows"] for text in s["exportkit"]["findings"]))
    wrong = [s["exportkit"] for s in result["rows"] if s["exportkit"]["status"] == "differs"]
    row["silent"] = sum(not outcome["findings"] for outcome in wrong)
    return row


def _totals(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, int]:
    samples: Counter[str] = Counter()
    seen: dict[str, set[str]] = {}
    for row in rows:
        for status in OUTCOMES:
            if row[name].get(status):
                samples[status] += row[name][status]
                seen.setdefault(row["operator"], set()).add(status)
    operators = Counter(next(status for status in _WORST if status in known) for known in seen.values())
    found = {"operators": len(seen), "samples": sum(samples.values())}
    found |= {f"samples: {status}": samples[status] for status in OUTCOMES}
    found |= {f"operators: {status}": operators[status] for status in OUTCOMES}
    if name == "exportkit":
        found["samples that differ without a finding"] = sum(row["silent"] for row in rows)
    return found


def printed_totals(table: Mapping[str, Any]) -> str:
    """Returns the totals of both exporters as text."""
    lines = [f"{'':42}" + "".join(f"{name:>12}" for name in EXPORTERS)]
    for key in table["totals"]["exportkit"]:
        lines.append(f"{key:42}" + "".join(f"{table['totals'][name].get(key, ''):>12}" for name in EXPORTERS))
    silent = [f"{row['operator']} {row['dtype']}" for row in table["rows"] if row["silent"]]
    return "\n".join([*lines, *(["differs without a finding: " + ", ".join(silent)] if silent else [])])
