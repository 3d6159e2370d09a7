"""The figures of the benchmarks with their targets, printed as a table and written as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measure import environment
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
WIDTH = 120


@dataclass(frozen=True)
class Figure:
    """One measured figure.

    Attributes:
        case: What was measured.
        values: What each variant took, by name.
        unit: The unit of the values.
        value: What the target applies to: one of the values, or a ratio of two.
        target: At most this is wanted; infinite where nothing is.
        noise: By what part of the target two measurements of the same thing differ.
    """

    case: str
    values: dict[str, float]
    unit: str
    value: float
    target: float = math.inf
    noise: float = 0.0

    @property
    def reached(self) -> bool:
        return self.value <= self.target * (1 + self.noise)

    @property
    def has_target(self) -> bool:
        return math.isfinite(self.target)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | ({"reached": self.reached} if self.has_target else {"target": None})


def publish(name: str, title: str, variants: Sequence[str], figures: Iterable[Figure], width: int = WIDTH) -> None:
    """Prints figures as a table with a column for each variant, and writes them to ``results/<name>.json``."""
    figures = list(figures)
    console = Console()
    console.width = max(console.width, width)
    console.print(_as_table(title, variants, figures))
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"environment": environment(), "figures": [figure.as_json() for figure in figures]}
    path.write_text(json.dumps(data, indent=2) + "\n")


def _as_table(title: str, variants: Sequence[str], figures: list[Figure]) -> Table:
    caption = "figure: a ratio, or where the case names no other side, the value itself; at most the target is wanted"
    table = Table(title=title, caption=caption, caption_justify="left")
    table.add_column("case")
    for name in (*variants, "unit", "figure", "target", ""):
        table.add_column(name, justify="right")
    for figure in figures:
        values = [f"{figure.values[name]:.4g}" if name in figure.values else "-" for name in variants]
        target, verdict = (f"{figure.target:.4g}", "ok" if figure.reached else "MISSED")
        if not figure.has_target:
            target = verdict = "-"
        table.add_row(figure.case, *values, figure.unit, f"{figure.value:.4g}", target, verdict)
    return table
