"""The proof as a value: one row for each call, and a verdict."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from exportkit.errors import InvalidRequestError
from exportkit.json_data import as_json_data
from exportkit.onnx_files.quantised import Quantised
from exportkit.plan.tables import (
    aligned,
    first_of,
    html_details,
    html_lines,
    html_of,
    html_table,
    html_verdict,
    sizes_text,
)
from exportkit.proof.figures import Figures, layer_table, over_budget, together, worst

_SHOWN_PROBLEMS = 3
LOCATE_HINT = "locate() names the module, line and node where the difference begins"

Status = Literal["proven", "measured", "differs", "refused", "no call", "outside"]
_HEADER = ("call", "sizes", "result", "max difference", "where")
Kind = Literal["recorded", "given", "unseen", "assembled", "application"]


class Divergence(Protocol):
    """Where a graph begins to differ from the model; `exportkit.locate_divergence` returns such a value."""

    @property
    def diverges(self) -> bool:
        """Whether a stage of the export differs from the model."""

    @property
    def stage(self) -> str | None:
        """The first stage that differs."""

    @property
    def module(self) -> str | None:
        """Path of the module where the difference begins."""

    @property
    def reason(self) -> str:
        """What is wrong, in words."""


@dataclass(frozen=True)
class Row:
    """One call, in eager mode and in onnxruntime.

    Attributes:
        kind: What the row is about: a recorded call, a call in further data, a call at sizes that were never run, a
            call that went through all parts, or a run of an application with all its calls.
        label: The recorded call's number, or what the sizes stand for.
        sizes: Sizes of the variables.
        status: ``proven``; ``measured``: the graph is quantised, and ``figures`` say how far it is from the model;
            ``differs``: a different result; ``refused``: onnxruntime raised; ``no call``: the model itself raises for
            these sizes, so there is nothing to prove; ``outside``: the sizes are not in the domain.
        absolute: Largest absolute difference over all outputs.
        where: Output leaf and position of the difference, or the error.
        eager_seconds: Duration of the model.
        onnx_seconds: Duration of onnxruntime.
        outputs: Largest absolute difference of each output, by its path.
        figures: For a quantised graph, how far each output is from the model's, by its path.
        locator: Finds the module where a difference begins; None if there is nothing to find.
    """

    kind: Kind
    label: str
    sizes: Mapping[str, int]
    status: Status
    absolute: float = float("nan")
    where: str = ""
    eager_seconds: float = float("nan")
    onnx_seconds: float = float("nan")
    outputs: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, Figures] = field(default_factory=dict)
    locator: Callable[[torch.nn.Module | None], Divergence] | None = field(default=None, repr=False, compare=False)

    @property
    def is_right(self) -> bool:
        """Whether the graph returns what the model returns, or approximately that if it is quantised."""
        return self.status in ("proven", "measured")

    @property
    def is_wrong(self) -> bool:
        """Whether the graph returns something other than the model does, or nothing."""
        return self.status in ("differs", "refused")

    def locate(self, model: torch.nn.Module | None = None) -> Divergence:
        """Returns the module, line and node where this call begins to differ from the model.

        Args:
            model: The model in PyTorch; only needed for an export that was loaded from a folder.

        Raises:
            InvalidRequestError: if the call is proven, or went through several graphs.
            RuntimeFailure: if onnxruntime refuses the graph.
        """
        if self.locator is None:
            raise InvalidRequestError(
                "There is no difference to locate.",
                where=f"{self.kind} call {self.label}",
                expected="a call of one graph that differs, or is refused",
                got=f"{self.status}{', ' if self.where else ''}{self.where}",
            )
        return self.locator(model)


@dataclass(frozen=True)
class Report:
    """The result of `OnnxModel.verify`. Prints as a table.

    Attributes:
        rows: A row for each call.
        expected_unseen: How many unseen combinations of sizes must be proven.
        findings: What users should know, such as constants that are part of the graph.
        parts: Reports of the parts that feed the model and, if there are several graphs, of each graph, by name.
        attempts: The strategies that were tried to export the model, in order, each with its outcome.
        limits: For which calls the graph may be used, in words.
        quantised: How the graph was quantised; None if it was not.
    """

    rows: tuple[Row, ...]
    expected_unseen: int
    findings: tuple[str, ...] = ()
    parts: Mapping[str, Report] = field(default_factory=dict)
    attempts: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    quantised: Quantised | None = None

    @property
    def ok(self) -> bool:
        """Whether every recorded call is proven, no unseen call is wrong, and enough unseen calls are proven.

        A quantised graph is measured, not proven: the graph that it was made from has to be proven, and the figures
        have to be within the budget, if there is one.
        """
        return not self.problems()

    @property
    def is_measured(self) -> bool:
        """Whether a graph was quantised, so that nothing is proven."""
        return self.quantised is not None or any(part.is_measured for part in self.parts.values())

    @property
    def figures(self) -> Mapping[Kind, Mapping[str, Figures]]:
        """How far each output of a quantised graph is from the model's, by kind of call and by its path."""
        found: dict[Kind, dict[str, Figures]] = {}
        for kind in dict.fromkeys(row.kind for row in self.rows if row.figures):
            rows = [row.figures for row in self.rows if row.kind == kind]
            paths = dict.fromkeys(path for figures in rows for path in figures)
            items = {path: together(figures[path] for figures in rows if path in figures) for path in paths}
            found[kind] = {path: item for path, item in items.items() if item is not None}
        return found

    def problems(self) -> tuple[str, ...]:
        """Returns the reasons why the graph is not proven, one sentence each."""
        wrong = [row for row in self.rows if row.is_wrong]
        found = [f"{row.kind} call {row.label}: {row.status}, {row.where}" for row in wrong]
        recorded = [row for row in self.rows if row.kind == "recorded"]
        found += [f"recorded call {r.label}: {r.where}" for r in recorded if r.status == "no call"]
        has_calls = any(row.kind != "application" for row in self.rows)
        if not recorded and (has_calls or not self.parts):  # several modules have a report each, and no calls besides
            found.append("no recorded call was checked")
        proven = sum(row.is_right for row in self.rows if row.kind == "unseen")
        if proven < self.expected_unseen:
            found.append(f"only {proven} of {self.expected_unseen} unseen combinations of sizes could be proven")
        if self.quantised is not None:
            found += [f"before it was quantised: {problem}" for problem in self.quantised.problems]
            for kind, figures in self.figures.items():
                found += over_budget(figures, self.quantised.budget, f"{kind} calls")
        found += [f"{name}: {problem}" for name, part in self.parts.items() for problem in part.problems()]
        return tuple(found)

    def locate(self, model: torch.nn.Module | None = None) -> Divergence | None:
        """Returns the module, line and node where the first call that is not proven begins to differ, or None.

        Args:
            model: The model in PyTorch; only needed for an export that was loaded from a folder.

        Raises:
            RuntimeFailure: if onnxruntime refuses the graph.
        """
        row = self._to_locate()
        if row is not None:
            return row.locate(model)
        return next((found for part in self.parts.values() if (found := part.locate(model)) is not None), None)

    def _to_locate(self) -> Row | None:
        return next((row for row in self.rows if row.locator is not None), None)

    def to_json(self) -> str:
        """Returns the report as JSON text; values that were not measured are null."""
        return json.dumps(as_json_data(self._data()), indent=1, allow_nan=False)

    def _data(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "measured": self.is_measured,
            "verdict": self.verdict(),
            "problems": self.problems(),
            "limits": self.limits,
            "rows": [{key: value for key, value in vars(row).items() if key != "locator"} for row in self.rows],
            "findings": self.findings,
            "attempts": self.attempts,
            "quantised": self.quantised,
            "figures": self.figures,
            "parts": {name: part._data() for name, part in self.parts.items()},
        }

    def __str__(self) -> str:
        parts = [line for name, part in self.parts.items() for line in (name, *part.lines(), "")]
        first = [self.verdict(), ""] if self.is_measured else []
        return "\n".join([*first, *parts, *self.lines(), self.verdict()])

    def _repr_html_(self) -> str:
        """Returns the same for notebooks."""
        parts = [html_details(name, part._repr_html_()) for name, part in self.parts.items()]
        limits = [f"{self._word} for {', '.join(self.limits)}"] if self.limits else []
        notes = html_lines([*limits, *self.findings, *(f"tried: {text}" for text in self.attempts)])
        rows = html_table([_HEADER, *map(_cells, self.rows)]) if self.rows else ""
        return html_of(html_verdict(self.verdict(), self.ok), *parts, rows, notes)

    def lines(self) -> list[str]:
        """Returns the limits of the graph, the table of the calls, the findings and the attempts."""
        if not self.rows and self.parts:
            return [f"note: {text}" for text in self.findings] + [f"tried: {text}" for text in self.attempts]
        lines = aligned([_HEADER, *map(_cells, self.rows)], ruled=True)
        hints = [LOCATE_HINT] if self._to_locate() is not None else []
        tried = [f"tried: {text}" for text in self.attempts]
        if self.limits:
            lines = [f"{self._word} for {', '.join(self.limits)}", "", *lines]
        if self.quantised is not None:
            lines += ["", *layer_table(self.quantised), ""]
        return lines + [f"note: {text}" for text in (*self.findings, *hints)] + tried

    def verdict(self) -> str:
        """Returns ``proven``, or ``NOT PROVEN`` and the first reasons; the figures of a quantised graph."""
        problems, found = self.problems(), ""
        if self.is_measured:
            texts = [f"{worst(figures).text} at {kind} calls" for kind, figures in self.figures.items()]
            found = ": " + "; ".join(texts) if texts else ""
        if not problems:
            return self._word + found
        shown = first_of(problems, _SHOWN_PROBLEMS, "; ")
        return f"{self._word}: {shown}" + found.replace(":", "; measured:", 1)

    @property
    def _word(self) -> str:
        if self.is_measured:
            return "measured" if self.ok else "measured, NOT ACCEPTED"
        return "proven" if self.ok else "NOT PROVEN"


def _cells(row: Row) -> tuple[str, str, str, str, str]:
    absolute = "" if row.absolute != row.absolute else f"{row.absolute:.1e}"
    where = row.where or (worst(row.figures).text if row.figures else "")
    return f"{row.kind} {row.label}", sizes_text(row.sizes), row.status, absolute, where
