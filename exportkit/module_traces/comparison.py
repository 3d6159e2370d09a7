"""How two runs differ, as a value: what differs first, what each module adds, and a verdict on each tensor."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from exportkit.module_traces.steps import Verdict

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

_SHOWN, _WIDTH = 10, 110


@dataclass(frozen=True)
class ModuleRow:
    """What a call of a module adds to the error.

    Attributes:
        path: Path of the module; "" for the model itself, None for what happens outside of all modules.
        other_path: Its path in the other run.
        class_name: Its class.
        number: Which of its calls.
        tensor: The tensor that is furthest apart, for what it is computed from: an output of the module, or an input of
            a module inside.
        base: The relative error of what it is computed from.
        error: Its relative error, a root mean square.
        largest: Its largest absolute difference.
        verdict: ``differs`` where the module is wrong; see `TensorRow`.
        reason: What is wrong.
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

    @property
    def added(self) -> float:
        """The error that it adds."""
        return self.error if math.isinf(self.error) else max(self.error - self.base, 0.0)

    @property
    def name(self) -> str:
        """The module and its call in words, such as ``decoder.block.0 #2``."""
        path = {None: "(inputs)", "": "(model)"}.get(self.path, self.path) or ""
        return path + (f" #{self.number}" if self.number else "")


@dataclass(frozen=True)
class TensorRow:
    """A tensor in both runs.

    Attributes:
        module: Path of the module.
        number: Which of its calls.
        side: ``inputs`` or ``outputs``.
        path: Path of the tensor in that.
        verdict: ``equal``; ``close``: apart by rounding; ``carried``: apart, as is what it is computed from;
            ``differs``: apart by more than that; ``unknown``: apart, and only values could tell how far.
        error: The relative error, a root mean square.
        largest: The largest absolute difference.
        index: Where that is, for one that differs.
        dtypes: Its element type in both runs.
        values: Whether values were compared, and not statistics alone.
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


@dataclass(frozen=True)
class Comparison:
    """How a run differs from another. Prints as a table.

    Attributes:
        first: What differs first by the flow of data, or None if nothing does.
        modules: The module calls, those that are wrong first, then by the error that they add.
        tensors: All tensors that both runs have, in the order in which they were computed.
        only_first: Paths of modules whose calls have no pair in the second run.
        only_second: The same of the first.
        notes: What a person should know, such as what was compared without values.
    """

    first: ModuleRow | None
    modules: tuple[ModuleRow, ...]
    tensors: tuple[TensorRow, ...]
    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no tensor differs by more than rounding, and none is left that only values could tell of."""
        return not any(row.verdict in ("differs", "unknown") for row in self.tensors)

    def verdict(self) -> str:
        """Returns the result in one line."""
        if self.first is not None:
            at = "the inputs of the model" if self.first.path is None else self.first.name
            return f"The runs differ in {at}" + (f" ({self.first.class_name})" if self.first.class_name else "") + "."
        counts = Counter(row.verdict for row in self.tensors)
        if counts["unknown"]:
            row = next(row for row in self.modules if row.verdict == "unknown")
            return f"Undecided: what {row.name} ({row.class_name}) computes differs; how much, only values can tell."
        return "The runs are equal." if counts["equal"] == len(self.tensors) else "The runs agree, up to rounding."

    def as_json(self) -> str:
        """Returns all of it as JSON text; what is not finite is null or a string."""
        data = asdict(self) | {"ok": self.ok, "verdict": self.verdict()}
        return json.dumps(_plain(data), indent=1, allow_nan=False)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=_WIDTH, color_system=None, highlight=False)
        with console.capture() as captured:
            console.print(self)
        return "\n".join(line.rstrip() for line in captured.get().splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        yield Text(self.verdict(), style="bold green" if self.ok else "bold red")
        if self.first is not None:
            yield from (Text.assemble((f"  {name:7}", "dim"), value) for name, value in self._first_lines())
        if any(row.error for row in self.modules):
            yield self._table()
        for title, paths in (("only in the first", self.only_first), ("only in the second", self.only_second)):
            if paths:
                yield Text(f"{title}: {_listed(paths)}")
        for note in self.notes:
            yield Text(f"note: {note}")

    def _first_lines(self) -> Iterator[tuple[str, str]]:
        row = self.first
        assert row is not None
        tensor = next((t for t in self.tensors if t.verdict == "differs"), None)
        at = f" at {list(tensor.index)}" if tensor is not None and tensor.index else ""
        yield "tensor", row.tensor
        if math.isfinite(row.error):
            yield "error", f"{row.error:.1e} from {row.base:.1e} (relative), {row.largest:.3g} at most{at}"
        yield "reason", row.reason

    def _table(self) -> RenderableType:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
        for title in ("module", "class", "adds", "from", "to", "verdict"):
            table.add_column(title, overflow="fold")
        for row in [row for row in self.modules if row.error][:_SHOWN]:
            numbers = (f"{value:.1e}" for value in (row.added, row.base, row.error))
            table.add_row(row.name, row.class_name, *numbers, row.verdict)
        return table


def _listed(paths: tuple[str, ...]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(path or "(model)" for path in paths[:_SHOWN]) + more


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
