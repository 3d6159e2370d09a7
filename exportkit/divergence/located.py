"""What `locate_divergence` found, as a value: the stage, the module, the line, the node, and the error added there."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table

_WIDTH = 110

Outcome = Literal["agrees", "diverges", "not checked"]


@dataclass(frozen=True)
class Stage:
    """A form of the model on its way to onnxruntime.

    Attributes:
        name: ``torch.export``, ``ONNX before optimisation``, ``ONNX after optimisation``, or ``onnxruntime``.
        outcome: Whether it agrees with the model.
        error: The largest relative error of an output; NaN where none was compared.
        note: What there is to say, such as why it was not checked.
    """

    name: str
    outcome: Outcome
    error: float = math.nan
    note: str = ""


@dataclass(frozen=True)
class Suspect:
    """A module that adds error.

    Attributes:
        module: Its path; "" for the model itself.
        class_name: Its class.
        number: Which of its calls it is.
        base: The relative error of what it computes from.
        error: That of what it computes.
        wrong: Whether that is more than rounding.
    """

    module: str
    class_name: str
    number: int
    base: float
    error: float
    wrong: bool

    @property
    def added(self) -> float:
        """The error that it adds."""
        return self.error if math.isinf(self.error) else max(self.error - self.base, 0.0)


@dataclass(frozen=True)
class Located:
    """Where a graph begins to differ from its model. Prints as a short report.

    Attributes:
        stage: The first stage that diverges, or None if all agree.
        module: Path of the module where it begins; "" for the model itself, None if none can be named.
        class_name: Its class.
        number: Which of its calls.
        tensor: What differs first, such as ``outputs[0]`` or ``inputs args[0]`` of a module.
        node: The node of the graph that makes it, if known.
        operator: What that node computes.
        line: The line of the model's code that the node comes from.
        error: The relative error there, as a root mean square.
        base: The relative error of what it is computed from.
        largest: The largest absolute difference.
        index: Where that is.
        reason: What is wrong, in words.
        stages: What was checked.
        suspects: The modules that add most.
        unmatched: Paths of what the model returns and no value of the graph has the shape of.
    """

    stage: str | None
    module: str | None = None
    class_name: str = ""
    number: int = 0
    tensor: str = ""
    node: str = ""
    operator: str = ""
    line: str = ""
    error: float = math.nan
    base: float = math.nan
    largest: float = math.nan
    index: tuple[int, ...] | None = None
    reason: str = ""
    stages: tuple[Stage, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    unmatched: tuple[str, ...] = ()

    @property
    def diverges(self) -> bool:
        """Whether any stage does."""
        return self.stage is not None

    def as_json(self) -> str:
        """Returns all of it as JSON text; what is not finite is null or a string."""
        return json.dumps(_plain(asdict(self)), indent=1, allow_nan=False)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=_WIDTH, color_system=None, highlight=False)
        with console.capture() as captured:
            console.print(self)
        return "\n".join(line.rstrip() for line in captured.get().splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        yield Text(self.headline(), style="bold red" if self.diverges else "bold green")
        yield from (Text.assemble((f"  {name:8}", "dim"), value) for name, value in self._rows())
        yield self._stage_table()
        if self.suspects and self.diverges:
            yield self._suspect_table()

    def headline(self) -> str:
        """Returns the result in one line."""
        if self.stage is None:
            names = ", ".join(path.removeprefix("outputs").lstrip(".") or "the output" for path in self.unmatched)
            return (
                f"No stage diverges, but there is nothing to compare {names} with." if names else "No stage diverges."
            )
        if self.module is None:
            return f"{self.stage} diverges."
        return f"{self.stage} diverges in {self.module or 'the model itself'}" + (
            f" ({self.class_name})" if self.class_name else ""
        )

    def _rows(self) -> Iterator[tuple[str, str]]:
        if self.stage is None:
            return
        at = f" at {list(self.index)}" if self.index else ""
        call = f", call {self.number}" if self.number else ""
        if self.tensor:
            yield "tensor", f"{self.tensor}{call}"
        if not math.isnan(self.error):
            yield "error", f"{self.error:.1e} from {self.base:.1e} (relative), {self.largest:.3g} at most{at}"
        if self.reason:
            yield "reason", self.reason
        if self.node:
            yield "node", f"{self.node} ({self.operator})"
        if self.line:
            yield "line", self.line

    def _stage_table(self) -> RenderableType:
        table = _table("stage", "outcome", "error", "")
        for stage in self.stages:
            error = "" if math.isnan(stage.error) else f"{stage.error:.1e}"
            table.add_row(stage.name, stage.outcome, error, stage.note)
        return table

    def _suspect_table(self) -> RenderableType:
        table = _table("module", "class", "error of its inputs", "of its outputs", "verdict")
        for suspect in self.suspects:
            path = (suspect.module or "(model)") + (f" #{suspect.number}" if suspect.number else "")
            verdict = "differs" if suspect.wrong else ""
            table.add_row(path, suspect.class_name, f"{suspect.base:.1e}", f"{suspect.error:.1e}", verdict)
        return table


def _table(*titles: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
