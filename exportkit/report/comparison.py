"""The page of a comparison of two runs: in comes a `Comparison`, out goes HTML that needs no other file and no network.

Its plot shows the error of what each module call returns, in the order of the run, on a logarithmic scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from exportkit.module_traces.comparison import Comparison, TensorRow
from exportkit.report.render import difference, render

WIDTH, HEIGHT, LEFT, BOTTOM = 960, 300, 60, 30
# Errors below are drawn at the lower edge; exact ones, too.
_LOWEST, _HIGHEST = -9.0, 1.0
_MOST_TENSORS = 2000


@dataclass(frozen=True)
class Point:
    """A module call in the plot: where it is, how it is judged, and what its tooltip says."""

    x: float
    y: float
    verdict: str
    text: str


def comparison_page(comparison: Comparison, title: str) -> str:
    """Returns the page: the verdict, a plot of the errors along the run, the modules, and the tensors.

    Args:
        comparison: The comparison.
        title: What was compared.
    """
    apart = [row for row in comparison.tensors if row.verdict != "equal"]
    return render(
        "comparison.html.j2",
        title=title,
        comparison=comparison,
        points=_points(comparison.tensors),
        ticks=[(_y(10.0**power), f"1e{power:+d}") for power in range(int(_LOWEST), int(_HIGHEST) + 1, 2)],
        size=(WIDTH, HEIGHT, LEFT, BOTTOM),
        modules=[row for row in comparison.modules if row.error],
        tensors=apart[:_MOST_TENSORS],
        left_out=len(apart) - len(apart[:_MOST_TENSORS]),
    )


def _points(tensors: Sequence[TensorRow]) -> list[Point]:
    """The largest error of what each call returns."""
    worst: dict[tuple[str, int], TensorRow] = {}
    for row in tensors:
        if row.side == "outputs":
            known = worst.get((row.module, row.number))
            if known is None or row.error > known.error:
                worst[row.module, row.number] = row
    step = (WIDTH - LEFT - 10) / max(len(worst) - 1, 1)
    return [
        Point(
            round(LEFT + 5 + i * step, 1),
            _y(row.error),
            row.verdict,
            _tooltip(row),
        )
        for i, row in enumerate(worst.values())
    ]


def _tooltip(row: TensorRow) -> str:
    number = f" #{row.number}" if row.number else ""
    return f"{row.module or '(model)'}{number}: {difference(row.error)}, {row.verdict}"


def _y(error: float) -> float:
    """Where an error is in the plot."""
    power = math.log10(error) if error > 0 and math.isfinite(error) else (_HIGHEST if error else _LOWEST)
    part = (min(max(power, _LOWEST), _HIGHEST) - _LOWEST) / (_HIGHEST - _LOWEST)
    return round(10 + (1 - part) * (HEIGHT - BOTTOM - 10), 1)
