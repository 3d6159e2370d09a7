"""Compares two runs, module call by module call, and defines `Comparison`, the result.

The runs may have different dtypes, devices or code. What differs first in the flow of data is wrong; what differs later
only carries the error on.
"""

from __future__ import annotations

import abc
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from exportkit.errors import InvalidRequestError
from exportkit.json_data import as_json_data
from exportkit.module_traces.align import (
    Pair,
    align_calls,
    distance_of_statistics,
    match_records,
    padding_of,
    rounding_unit,
)
from exportkit.module_traces.attribution import attribute_error
from exportkit.module_traces.error_steps import (
    ComparedCall,
    ErrorStep,
    Side,
    TensorPair,
    Verdict,
    added_error,
    worst_steps,
)
from exportkit.module_traces.trace_data import ModuleCall, TensorRecord, TraceData, calls_around
from exportkit.plan.tables import first_of
from exportkit.running.compare import Distance, distance, position_of_largest
from exportkit.running.masks import Padding

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

_SHOWN, _WIDTH = 10, 110  # modules that are listed, and columns of the printed text


@dataclass(frozen=True)
class PrintedResult(abc.ABC):
    """A result that prints as a headline, labelled lines about the first difference, and tables."""

    @abc.abstractmethod
    def _parts(self) -> Iterator[RenderableType]:
        """The headline, the lines and the tables."""

    def _data(self) -> dict[str, Any]:
        """All of it as data for JSON, in which numbers need not be finite."""
        return asdict(self)

    def as_json(self) -> str:
        """Returns all of it as JSON text; what is not finite is null or a string."""
        return json.dumps(as_json_data(self._data()), indent=1, allow_nan=False)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=_WIDTH, color_system=None, highlight=False)
        with console.capture() as captured:
            console.print(self)
        return "\n".join(line.rstrip() for line in captured.get().splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        return self._parts()


def headline(text: str, is_good: bool) -> RenderableType:
    """Returns the first line of a printed result."""
    from rich.text import Text

    return Text(text, style="bold green" if is_good else "bold red")


def labelled(label: str, text: str) -> RenderableType:
    """Returns a line about the first difference."""
    from rich.text import Text

    return Text.assemble((f"  {label:8}", "dim"), text)


def error_text(error: float, base: float, largest: float, index: Sequence[int] | None) -> str:
    """Returns what is printed about the size of an error."""
    at = f" at {list(index)}" if index else ""
    return f"{error:.1e} from {base:.1e} (relative), {largest:.3g} at most{at}"


def call_text(path: str, number: int = 0) -> str:
    """Returns a module, or one of its calls, in words, such as ``decoder.block.0 #2``."""
    return (path or "(model)") + (f" #{number}" if number else "")


def printed_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    """Returns a table for the terminal."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


@dataclass(frozen=True)
class ModuleRow:
    """What a call of a module adds to the error.

    Attributes:
        path: Path of the module; "" for the model itself, None for what happens outside all modules.
        other_path: Its path in the other run.
        class_name: Its class.
        number: Which of its calls.
        tensor: The tensor whose error exceeds that of its inputs the most: an output of the module, or an input of a
            module inside it.
        base: The relative error of its inputs.
        error: Its relative error, a root mean square.
        largest: Its largest absolute difference.
        verdict: ``differs`` where the module is wrong; see `TensorRow`.
        reason: What is wrong.
        index: Position of the largest difference, if the tensor differs and its values were stored.
    """

    path: str | None
    other_path: str | None
    class_name: str
    number: int
    tensor: str
    base: float
    error: float
    largest: float
    verdict: Verdict
    reason: str
    index: tuple[int, ...] | None

    @property
    def added(self) -> float:
        """The error that it adds."""
        return added_error(self.base, self.error)

    @property
    def name(self) -> str:
        """The module and its call in words, such as ``decoder.block.0 #2``."""
        return call_text("(inputs)" if self.path is None else self.path, self.number)


@dataclass(frozen=True)
class TensorRow:
    """A tensor in both runs.

    Attributes:
        module: Path of the module.
        number: Which of its calls.
        side: ``inputs`` or ``outputs``.
        path: Path of the tensor among these.
        verdict: ``equal``; ``close``: apart by rounding; ``carried``: apart, as are its inputs; ``differs``: apart by
            more than that; ``unknown``: apart, and only values could tell how far.
        error: The relative error, a root mean square.
        largest: The largest absolute difference.
        index: Position of the largest difference, for a tensor that differs.
        dtypes: Its dtype in both runs.
        values: Whether values were compared, and not only statistics.
    """

    module: str
    number: int
    side: str
    path: str
    verdict: Verdict
    error: float
    largest: float
    index: tuple[int, ...] | None
    dtypes: tuple[str, str]
    values: bool

    @property
    def name(self) -> str:
        """The module and its call in words, such as ``decoder.block.0 #2``."""
        return call_text(self.module, self.number)


@dataclass(frozen=True)
class Comparison(PrintedResult):
    """How a run differs from another. Prints as a table.

    Attributes:
        first: What differs first in the flow of data, or None if nothing does.
        modules: The module calls, those that are wrong first, then by the error that they add.
        tensors: All tensors that both runs have, in the order in which they were computed.
        only_first: Paths of modules whose calls have no counterpart in the second run.
        only_second: Paths of modules whose calls have no counterpart in the first run.
        notes: What a reader should know, such as what was compared without values.
    """

    first: ModuleRow | None
    modules: tuple[ModuleRow, ...]
    tensors: tuple[TensorRow, ...]
    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no tensor differs by more than rounding, and values are not needed to decide that for any."""
        return not any(row.verdict in ("differs", "unknown") for row in self.tensors)

    def verdict(self) -> str:
        """Returns the result in one line."""
        if self.first is not None:
            at = "the inputs of the model" if self.first.path is None else self.first.name
            return f"The runs differ in {at}" + (f" ({self.first.class_name})" if self.first.class_name else "") + "."
        counts = Counter(row.verdict for row in self.tensors)
        if counts["unknown"]:
            row = next(row for row in self.modules if row.verdict == "unknown")
            return f"Undecided: the tensors of {row.name} ({row.class_name}) differ; only values can show by how much."
        return "The runs are equal." if counts["equal"] == len(self.tensors) else "The runs agree, up to rounding."

    def _data(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok, "verdict": self.verdict()}

    def _parts(self) -> Iterator[RenderableType]:
        from rich.text import Text

        yield headline(self.verdict(), self.ok)
        if self.first is not None:
            yield labelled("tensor", self.first.tensor)
            if math.isfinite(self.first.error):
                yield labelled(
                    "error", error_text(self.first.error, self.first.base, self.first.largest, self.first.index)
                )
            yield labelled("reason", self.first.reason)
        rows = [row for row in self.modules if row.error][:_SHOWN]
        if rows:
            yield printed_table(
                ("module", "class", "adds", "from", "to", "verdict"),
                [
                    (row.name, row.class_name, f"{row.added:.1e}", f"{row.base:.1e}", f"{row.error:.1e}", row.verdict)
                    for row in rows
                ],
            )
        for title, paths in (("only in the first", self.only_first), ("only in the second", self.only_second)):
            if paths:
                yield Text(f"{title}: {first_of(list(map(call_text, paths)), _SHOWN)}")
        yield from (Text(f"note: {note}") for note in self.notes)


def compare_traces(first: TraceData, second: TraceData, names: Mapping[str, str] | None) -> Comparison:
    """Returns how the second run differs from the first; see `Trace.compare`."""
    pairs = align_calls(first.calls, second.calls, names)
    if not pairs:
        raise InvalidRequestError(
            "These traces have no module call in common.",
            expected=_some_paths(first.calls),
            got=_some_paths(second.calls),
            hint='map paths of the second trace to paths of the first: names={"^model[.]": "", "query": "q_proj"}.',
        )
    return _Comparing(first, second, pairs).result()


class _Comparing:
    """One comparison. A tensor that occurs in several places is compared once."""

    def __init__(self, first: TraceData, second: TraceData, pairs: list[Pair]) -> None:
        self._first, self._second, self._pairs = first, second, pairs
        self._padding: dict[int, Padding] = {}  # of the outermost call that each call is part of
        for call in first.calls:
            above = self._padding.get(call.parent) if call.parent is not None else None
            self._padding[call.index] = padding_of(first, call) if above is None else above
        self._seen: dict[tuple[Any, ...], Distance] = {}
        self._matched: dict[tuple[int, Side], list[tuple[TensorRecord, TensorRecord]]] = {}
        self._indices: dict[tuple[int, Side, str], tuple[int, ...] | None] = {}

    def result(self) -> Comparison:
        paired = {one.index for one, _ in self._pairs}
        around = calls_around(self._first.calls, paired)
        calls = {one.index: self._compared(one, two, around[one.index]) for one, two in self._pairs}
        steps = attribute_error(list(calls.values()))
        wrong = next((step for step in steps if step.verdict == "differs"), None)
        return Comparison(
            first=None if wrong is None else self._module_row(wrong, calls),
            modules=tuple(self._module_row(step, calls) for step in worst_steps(steps).values()),
            tensors=tuple(self._tensor_rows(steps, calls)),
            only_first=_paths_without(self._first.calls, paired),
            only_second=_paths_without(self._second.calls, {two.index for _, two in self._pairs}),
            notes=tuple(self._notes()),
        )

    def _compared(self, one: ModuleCall, two: ModuleCall, parent: int | None) -> ComparedCall:
        sides = []
        both: list[tuple[Side, tuple[TensorRecord, ...], tuple[TensorRecord, ...]]]
        both = [("inputs", one.inputs, two.inputs), ("outputs", one.outputs, two.outputs)]
        for side, records, others in both:
            self._matched[one.index, side] = matched = match_records(records, others)
            sides.append(
                tuple(
                    TensorPair(a.path, self._distance(one, a, b), rounding_unit(a, b), (a.dtype, b.dtype))
                    for a, b in matched
                )
            )
        return ComparedCall(one.index, one.path, one.class_name, one.number, parent, sides[0], sides[1], two.path)

    def _distance(self, call: ModuleCall, a: TensorRecord, b: TensorRecord) -> Distance:
        if a.key is None or b.key is None:  # statistics of stored values are computed on request
            return distance_of_statistics(a, b)
        key = (a.key, b.key, a.shape, b.shape)
        if key not in self._seen:
            one, two = self._first.tensor(a), self._second.tensor(b)
            self._seen[key] = distance(one, two, self._padding[call.index](one))
        return self._seen[key]

    def _module_row(self, step: ErrorStep, calls: Mapping[int, ComparedCall]) -> ModuleRow:
        owner = calls[step.owner] if step.owner is not None else None
        at = calls[step.call]
        path = step.pair.path if step.pair else ""
        return ModuleRow(
            path=owner.path if owner else None,
            other_path=owner.other_path if owner else None,
            class_name=owner.class_name if owner else "",
            number=owner.number if owner else at.number,
            tensor=path if owner is at else f"{at.path or 'model'} {path}",
            base=step.base,
            error=step.error,
            largest=step.pair.distance.largest if step.pair else 0.0,
            verdict=step.verdict,
            reason=step.reason,
            index=self._index(step, step.pair) if step.pair else None,
        )

    def _tensor_rows(self, steps: Sequence[ErrorStep], calls: Mapping[int, ComparedCall]) -> Iterator[TensorRow]:
        for step in steps:
            call = calls[step.call]
            for pair in call.side(step.side):
                verdict = step.verdicts[pair.path]
                yield TensorRow(
                    call.path,
                    call.number,
                    step.side,
                    pair.path,
                    verdict,
                    pair.distance.rms,
                    pair.distance.largest,
                    self._index(step, pair),
                    pair.dtypes,
                    pair.distance.values,
                )

    def _index(self, step: ErrorStep, pair: TensorPair) -> tuple[int, ...] | None:
        """The position of the largest difference, for a tensor that differs."""
        key = (step.call, step.side, pair.path)
        if key not in self._indices:
            a, b = next(records for records in self._matched[step.call, step.side] if records[0].path == pair.path)
            found = None
            if step.verdicts[pair.path] == "differs" and a.key is not None and b.key is not None:
                one: torch.Tensor = self._first.tensor(a)
                found = position_of_largest(one, self._second.tensor(b), self._padding[step.call](one))
            self._indices[key] = found
        return self._indices[key]

    def _notes(self) -> Iterator[str]:
        for name, trace in (("first", self._first), ("second", self._second)):
            failed = next((call for call in trace.calls if call.error is not None), None)
            if failed is not None:
                yield f"the {name} run failed in {failed.path or 'the model'} ({failed.class_name}): {failed.error}"
            if not trace.complete:
                yield f"the {name} trace is incomplete: {'; '.join(trace.problems)}"
        records = [pair for matched in self._matched.values() for pair in matched]
        bare = sum(a.key is None or b.key is None for a, b in records)
        if bare:
            yield (
                f"{bare} of {len(records)} tensors were compared by statistics and hash alone: their errors are lower "
                'bounds; for values record both runs with values="all"'
            )


def _paths_without(calls: Sequence[ModuleCall], paired: set[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(call.path for call in calls if call.index not in paired))


def _some_paths(calls: Sequence[ModuleCall]) -> str:
    paths = [*Counter(call.path or "the model" for call in calls)]
    return ", ".join(paths[:4]) + (", ..." if len(paths) > 4 else "") or "no call"
