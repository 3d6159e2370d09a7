"""Several programs for one model, where one cannot serve all of its calls: each serves calls of one kind.

In come exports, one for each cluster of calls, and why there are several; out go ONNX files, or a folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from exportkit.onnx_files.onnx_programs import OnnxPrograms
from exportkit.onnx_files.translate import check_destination
from exportkit.plan.leaves import Finding
from exportkit.plan.plan import Plan
from exportkit.programs.clusters import Kind, Landmarks
from exportkit.programs.exported import Exported


@dataclass(frozen=True)
class Split:
    """Why there are several programs, and which calls each is for.

    Attributes:
        reason: What became of the attempt to export one.
        landmarks: What tells the kinds of calls apart.
        kinds: The kind of calls that each program is for, by its name.
        calls: Numbers of the recorded calls that each program is for, by its name.
    """

    reason: str
    landmarks: Landmarks
    kinds: Mapping[str, Kind]
    calls: Mapping[str, tuple[int, ...]]

    @property
    def text(self) -> str:
        """One sentence about the split."""
        return f"one graph failed, so {len(self.kinds)} programs: {', '.join(self.kinds)}. The cause: {self.reason}"

    def data(self) -> dict[str, Any]:
        """Returns the split as JSON data."""
        return {
            "reason": self.reason,
            "first": self.landmarks.first,
            "growing": dict(self.landmarks.growing),
            "kinds": {name: kind.data() for name, kind in self.kinds.items()},
            "calls": {name: list(calls) for name, calls in self.calls.items()},
        }

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Split:
        """Returns the split that `data` described."""
        kinds = {name: Kind.of(kind) for name, kind in data["kinds"].items()}
        calls = {name: tuple(calls) for name, calls in data["calls"].items()}
        return cls(data["reason"], Landmarks(data["first"], data["growing"]), kinds, calls)


@dataclass(frozen=True, repr=False)
class ExportedPrograms:
    """A model that was exported as several programs, as one could not serve all recorded calls.

    Attributes:
        programs: The program for each kind of calls, by its name, such as ``prefill`` and ``decode``.
        split: Why there are several, and which calls each is for.
    """

    programs: Mapping[str, Exported]
    split: Split

    def __repr__(self) -> str:
        where = f"{self._first.observation.model_name}.{self.method}"
        return f"ExportedPrograms({where}, {len(self.programs)} programs: {', '.join(self.programs)})"

    @property
    def _first(self) -> Exported:
        return next(iter(self.programs.values()))

    @property
    def model(self) -> torch.nn.Module:
        """The model, the truth that the result is compared with."""
        return self._first.model

    @property
    def method(self) -> str:
        """The exported method."""
        return self._first.method

    @property
    def plan(self) -> Plan:
        """The plan of the first program, with the split among its findings; each program has a plan of its own."""
        return self._first.plan.with_findings([Finding("several programs", "", self.split.text)])

    @property
    def seconds(self) -> dict[str, float]:
        """Duration of each stage, in seconds, of all programs together."""
        stages = dict.fromkeys(stage for program in self.programs.values() for stage in program.seconds)
        return {stage: sum(p.seconds.get(stage, 0.0) for p in self.programs.values()) for stage in stages}

    def baked_constants(self) -> dict[str, Any]:
        """Returns the Python values that are part of all graphs, by path."""
        constants = [program.baked_constants() for program in self.programs.values()]
        return {path: v for path, v in constants[0].items() if all(path in c and c[path] == v for c in constants)}

    def to_onnx(self, path: str | os.PathLike[str], opset: int | None = None) -> OnnxPrograms:
        """Writes each program as ONNX and returns them as something to call like the model.

        Args:
            path: Where the files go: each program into ``<stem>.<name>.onnx``, as `Exported.to_onnx` writes it.
            opset: ONNX opset; by default torch's own choice.

        Raises:
            DestinationError: if the path cannot be written.
            ExportError: if an operator cannot be translated.
        """
        target = check_destination(path)
        files = {name: target.with_name(f"{target.stem}.{name}{target.suffix}") for name in self.programs}
        return OnnxPrograms({name: p.to_onnx(files[name], opset) for name, p in self.programs.items()}, self.split)

    def repro(self, directory: str | os.PathLike[str]) -> Path:
        """Writes a script for each program, as `Exported.repro` does, into a folder of its own, and returns the path.

        Args:
            directory: Where to write ``<name>/repro.py``.

        Raises:
            DestinationError: if it cannot be written.
        """
        for name, program in self.programs.items():
            program.repro(Path(directory) / name)
        return Path(directory)

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        runtime: Literal["genai"] | None = None,
        opset: int | None = None,
        values: bool = True,
        verify: bool = True,
    ) -> OnnxPrograms:
        """Writes a folder with all programs, as `Exported.save` does for one.

        Args:
            directory: A new or empty directory, or one that an export was saved to, which is replaced.
            runtime: Refused: a runtime for generation takes one graph.
            opset: ONNX opset; by default torch's own choice.
            values: Also write the values of the calls, so that the folder can be proven without the model.
            verify: Prove the programs.

        Raises:
            DestinationError: if the directory cannot be written, or holds something else.
            ExportError: if an operator cannot be translated.
            InvalidRequestError: if a runtime is asked for.
        """
        from exportkit.folder.folder import save_programs

        return save_programs(self, directory, runtime=runtime, opset=opset, values=values, verify=verify)
