"""The table of docs/coverage.json: a row for each case, and totals by family or task."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from judged import LIMITED, LOUD, NOT_BUILT, PASS, SILENT, WRONG

_PACKAGES = ("torch", "transformers", "onnxruntime")
_LIBRARIES = Path(__file__).with_name("requirements.txt")
_REASON = 300  # characters


def table_of(rows: Sequence[dict[str, Any]], **how: Any) -> dict[str, Any]:
    """Returns the table of the results of all cases.

    Args:
        rows: The results, in plain values.
        how: What else the table says, such as the seed of a sample.
    """
    plain = {(row["family"], row["name"]): row for row in rows if row["by"] == "torch.onnx"}
    found: list[dict[str, Any]] = []
    for row in rows:
        if row["by"] == "exportkit":
            shown = {key: row[key] for key in ("family", "name", "verdict")} | {"reason": _reason(row["reason"])}
            if (other := plain.get((row["family"], row["name"]))) is not None:
                shown["torch.onnx"] = {LOUD: "error", WRONG: "wrong", PASS: "right"}.get(other["verdict"], "")
            found.append(shown)
    totals = {family: _counts([row for row in found if row["family"] == family]) for family in _families(found)}
    worse = [row["name"] for row in found if row.get("torch.onnx") == "right" and row["verdict"] in (LOUD, SILENT)]
    return {
        "versions": dict(_versions()),
        **how,
        "totals": totals | {"all": _counts(found)},
        "only torch.onnx is right": worse,
        "rows": found,
    }


def printed(table: dict[str, Any]) -> str:
    """Returns the failures and the totals as text."""
    lines = [
        f"{row['verdict']:9}  {row['family']}: {row['name']}: {row['reason'][:200]}"
        for row in table["rows"]
        if row["verdict"] != PASS
    ]
    keys = list(table["totals"]["all"])
    width = max(map(len, table["totals"]))
    lines += ["", f"{'':{width}}  {'  '.join(keys)}"]
    for family, counts in table["totals"].items():
        lines.append(f"{family:{width}}  {'  '.join(f'{counts[key]:>{len(key)}}' for key in keys)}")
    built = table["totals"]["all"]["built"] or 1
    share = 100 * table["totals"]["all"][PASS] / built
    lines.append(f"{share:.0f} % pass; torch.onnx.export alone is right: {len(table['only torch.onnx is right'])}")
    return "\n".join(lines)


def _families(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["family"] for row in rows))


def _counts(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    verdicts, others = Counter(row["verdict"] for row in rows), Counter(row.get("torch.onnx") for row in rows)
    counts = {"built": len(rows) - verdicts[NOT_BUILT]}
    counts |= {verdict: verdicts[verdict] for verdict in (PASS, LIMITED, LOUD, SILENT, NOT_BUILT)}
    return counts | {f"torch.onnx {outcome}": others[outcome] for outcome in ("right", "error", "wrong")}


def _reason(text: str) -> str:
    """A reason without the paths of the machine, and without advice."""
    text = re.sub(r"\S*/(site-packages|benchmarks/coverage)/", "", text.partition(" hint:")[0])
    text = re.sub(r"full message of torch: \S+|\S*/model\.onnx", "", text)
    return text if len(text) <= _REASON else text[: _REASON - 1] + "…"


def _versions() -> Any:
    listed = [line.partition("==")[0] for line in _LIBRARIES.read_text().splitlines() if "==" in line]
    for name in (*_PACKAGES, *listed):
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue
