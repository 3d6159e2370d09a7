"""The pages of a trace and of a comparison of two traces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exportkit.module_traces.comparison import Comparison, TensorRow
from exportkit.module_traces.trace import Trace
from exportkit.module_traces.trace_data import ModuleCall, TensorRecord
from exportkit.plan.tables import first_of
from exportkit.report.render import difference, render

_MOST_CALLS, _MOST_TENSORS = 3000, 2000  # rows of a page, which stays usable in a browser

# The plot of a comparison, in pixels, and the powers of ten on its vertical axis. Smaller errors are drawn at the edge.
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 960, 300, 60, 30
_LOWEST, _HIGHEST = -9.0, 1.0


@dataclass(frozen=True)
class CallRow:
    """A module call: its depth, what it takes and returns, and the statistics of the first tensor that it returns."""

    call: ModuleCall
    depth: int
    takes: str
    returns: str
    statistics: tuple[float | None, ...]
    odd: int


@dataclass(frozen=True)
class Point:
    """A module call in the plot: its place, its verdict, and its tooltip."""

    x: float
    y: float
    verdict: str
    text: str


def trace_page(folder: Path) -> str:
    """Returns the page of a trace, with a row for each module call. The recording need not be complete.

    Raises:
        DestinationError: if the folder holds no trace.
        TraceError: if the trace is damaged.
    """
    trace = Trace.load(folder)
    depths: dict[int, int] = {}
    for call in trace.calls:
        depths[call.index] = 0 if call.parent is None else depths.get(call.parent, -1) + 1
    return render(
        "trace.html.j2",
        title=f"{trace.metadata['model']} in {folder.resolve().name}",
        total=len(trace.calls),
        values=trace.metadata.get("values") or "none",
        problems=trace.problems,
        rows=[_row(call, depths[call.index]) for call in trace.calls[:_MOST_CALLS]],
        left_out=max(len(trace.calls) - _MOST_CALLS, 0),
    )


def _row(call: ModuleCall, depth: int) -> CallRow:
    shown = call.outputs[0] if call.outputs else None
    statistics = (None,) * 4 if shown is None else (shown.mean, shown.std, shown.min, shown.max)
    odd = sum(record.nan + record.inf for record in call.outputs)
    return CallRow(call, depth, _tensors(call.inputs), _tensors(call.outputs), statistics, odd)


def _tensors(records: Sequence[TensorRecord]) -> str:
    return first_of([f"{record.dtype} {'x'.join(map(str, record.shape)) or 'scalar'}" for record in records], 2)


def comparison_page(comparison: Comparison, title: str) -> str:
    """Returns the page of a comparison: the verdict, a plot of the errors along the run, the modules, and the tensors.

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
        size=(_WIDTH, _HEIGHT, _LEFT, _BOTTOM),
        modules=[row for row in comparison.modules if row.error],
        tensors=apart[:_MOST_TENSORS],
        left_out=len(apart) - len(apart[:_MOST_TENSORS]),
    )


def _points(tensors: Sequence[TensorRow]) -> list[Point]:
    """The output of each call that has the largest error."""
    worst: dict[tuple[str, int], TensorRow] = {}
    for row in tensors:
        if row.side == "outputs":
            known = worst.get((row.module, row.number))
            if known is None or row.error > known.error:
                worst[row.module, row.number] = row
    step = (_WIDTH - _LEFT - 10) / max(len(worst) - 1, 1)
    points = []
    for i, row in enumerate(worst.values()):
        text = f"{row.name}: {difference(row.error)}, {row.verdict}"
        points.append(Point(round(_LEFT + 5 + i * step, 1), _y(row.error), row.verdict, text))
    return points


def _y(error: float) -> float:
    """The vertical position of an error in the plot."""
    power = math.log10(error) if error > 0 and math.isfinite(error) else (_HIGHEST if error else _LOWEST)
    part = (min(max(power, _LOWEST), _HIGHEST) - _LOWEST) / (_HIGHEST - _LOWEST)
    return round(10 + (1 - part) * (_HEIGHT - _BOTTOM - 10), 1)
