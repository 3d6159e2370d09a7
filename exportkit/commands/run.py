"""A case on its way through the stages: in comes a model with a run, out go an export, ONNX files and a proof."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import exportkit
from exportkit.commands.shared import progress, stderr
from exportkit.errors import ExportkitError
from exportkit.examples import Case


class Run:
    """A case on its way through the stages, as far as it came."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.seconds: dict[str, float] = {}
        self.observer: exportkit.InputObserver
        self.exported: exportkit.Exported | exportkit.ExportedPrograms
        self.onnx_model: exportkit.OnnxModel | exportkit.OnnxPrograms
        self.report: exportkit.Report | None = None
        self.error: ExportkitError | None = None

    def observe(self) -> None:
        """Runs the model, observed."""
        with self._stage("observe"):
            self.observer = self.case.observe()
        for problem in self.observer.observation.problems:
            stderr.print(f"warning: a call could not be recorded: {problem}", style="yellow", markup=False)

    def export(self) -> None:
        """Exports the model."""
        with self._stage("export"):
            self.exported = exportkit.export(self.case.model, self.observer)

    def write(self, path: Path, opset: int | None = None) -> None:
        """Writes an ONNX file."""
        with self._stage("ONNX"):
            self.onnx_model = self.exported.to_onnx(path, opset)

    def verify(self) -> None:
        """Proves the ONNX file."""
        with self._stage("verify"):
            self.report = self.onnx_model.verify()

    def save(self, folder: Path, opset: int | None, verify: bool) -> None:
        """Writes a folder that runs elsewhere, with its proof."""
        with self._stage("save"):
            self.onnx_model = self.exported.save(folder, opset=opset, verify=verify)

    def durations(self) -> str:
        """Returns how long each stage took."""
        return ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in self.seconds.items())

    def problem(self) -> str:
        """Returns why the case is not proven, or nothing if it is."""
        if self.error is not None:
            return str(self.error).splitlines()[0]
        return "; ".join(self.report.problems()) if self.report is not None else "not verified"

    def to_json(self) -> dict[str, Any]:
        """Returns what came of the case."""
        return {
            "model": self.case.name,
            "observed": self.case.observed,
            "ok": not self.problem(),
            "error": None if self.error is None else str(self.error),
            "seconds": self.seconds,
            "report": None if self.report is None else json.loads(self.report.to_json()),
        }

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        with progress(f"{self.case.name}: {name}"):
            yield
        self.seconds[name] = time.perf_counter() - started
