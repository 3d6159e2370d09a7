"""Defines `Divergence`, the result of locating: the stage, module, line and node, and the error that is added there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from exportkit.module_traces.comparison import (
    PrintedResult,
    call_text,
    error_text,
    headline,
    labelled,
    printed_table,
)
from exportkit.module_traces.error_steps import added_error

if TYPE_CHECKING:
    from rich.console import RenderableType

Outcome = Literal["agrees", "diverges", "not checked"]


@dataclass(frozen=True)
class Stage:
    """A form of the model on its way to onnxruntime.

    Attributes:
        name: ``torch.export``, ``ONNX before optimisation``, ``ONNX after optimisation``, or ``onnxruntime``.
        outcome: Whether it agrees with the model.
        error: The largest relative error of an output; NaN where none was compared.
        note: More about it, such as why it was not checked.
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
        error: The relative error of what it computes.
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
        return added_error(self.base, self.error)


@dataclass(frozen=True)
class Divergence(PrintedResult):
    """Where a graph begins to differ from its model. Prints as a short report.

    Attributes:
        stage: The first stage that diverges, or None if all agree.
        module: Path of the module where it begins; "" for the model itself, None if no module can be named.
        class_name: Its class.
        number: Which of its calls.
        tensor: What differs first, such as ``outputs[0]`` or ``inputs args[0]`` of a module.
        node: The node of the graph that computes it, if known.
        operator: What that node computes.
        line: The line of the model's code that the node comes from.
        error: The relative error there, as a root mean square.
        base: The relative error of what it is computed from.
        largest: The largest absolute difference.
        index: Position of the largest difference.
        reason: What is wrong, in words.
        stages: What was checked.
        suspects: The modules that add most.
        unmatched: Paths of outputs of the model whose shape no value of the graph has.
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

    def headline(self) -> str:
        """Returns the result in one line."""
        if self.stage is None:
            names = ", ".join(path.removeprefix("outputs").lstrip(".") or "the output" for path in self.unmatched)
            return f"No stage diverges{f', but there is nothing to compare {names} with' if names else ''}."
        if self.module is None:
            return f"{self.stage} diverges."
        class_name = f" ({self.class_name})" if self.class_name else ""
        return f"{self.stage} diverges in {self.module or 'the model itself'}{class_name}"

    def _parts(self) -> Iterator[RenderableType]:
        yield headline(self.headline(), not self.diverges)
        details = {
            "tensor": self.tensor and self.tensor + (f", call {self.number}" if self.number else ""),
            "error": "" if math.isnan(self.error) else error_text(self.error, self.base, self.largest, self.index),
            "reason": self.reason,
            "node": self.node and f"{self.node} ({self.operator})",
            "line": self.line,
        }
        yield from (labelled(label, text) for label, text in details.items() if text and self.diverges)
        yield printed_table(
            ("stage", "outcome", "error", ""),
            [(s.name, s.outcome, "" if math.isnan(s.error) else f"{s.error:.1e}", s.note) for s in self.stages],
        )
        if self.suspects and self.diverges:
            yield printed_table(
                ("module", "class", "error of its inputs", "of its outputs", "verdict"),
                [
                    (
                        call_text(suspect.module, suspect.number),
                        suspect.class_name,
                        f"{suspect.base:.1e}",
                        f"{suspect.error:.1e}",
                        "differs" if suspect.wrong else "",
                    )
                    for suspect in self.suspects
                ],
            )
