"""The page of a trace: in comes a folder that ``trace_model`` wrote, out goes HTML with a row for each module call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exportkit.module_traces.records import ModuleCall, TensorRecord
from exportkit.module_traces.trace import Trace
from exportkit.report.render import render

_MOST_CALLS = 3000


@dataclass(frozen=True)
class CallRow:
    """One module call: how deep it is, what it takes and returns, and the statistics of the first tensor returned."""

    call: ModuleCall
    depth: int
    takes: str
    returns: str
    statistics: tuple[float | None, ...]
    odd: int


def trace_page(folder: Path) -> str:
    """Returns the page of a trace, also of one whose recording did not end.

    Raises:
        TraceError: if this is no trace, or it is damaged.
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
    return CallRow(call, depth, _said(call.inputs), _said(call.outputs), statistics, odd)


def _said(records: Sequence[TensorRecord]) -> str:
    first = ", ".join(f"{record.dtype} {'x'.join(map(str, record.shape)) or 'scalar'}" for record in records[:2])
    return f"{first} and {len(records) - 2} more" if len(records) > 2 else first
