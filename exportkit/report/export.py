"""The page of an exported folder, from the recorded calls to the proof.

Everything is read from the JSON files of the folder. Neither the model nor onnxruntime is needed, and nothing is proven
again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exportkit.files import reading
from exportkit.folder.checked import CheckedFiles, SavedFile, damaged, inside
from exportkit.folder.folder import MANIFEST, REPORT_JSON, read_manifest
from exportkit.json_data import parse_json, read
from exportkit.plan.leaves import listed
from exportkit.plan.plan import Plan
from exportkit.plan.tables import count, first_of
from exportkit.plan.text import alike_leaves, seen_shapes
from exportkit.programs.kinds import Split
from exportkit.report.render import render, seconds, size

_INDEX = re.compile(r"\[\d+\]|(?<=\.)\d+(?=\.|$)")
_STAGES = ("plan", "arguments", "export", "domain", "onnx", "verify")
_COARSEST, _FINEST = -3, -9  # powers of ten between which a difference has shades

# Axes in the picture: the number of colours that the page has (--c0 to --c7), and sizes in pixels.
_COLOURS = 8
_LETTER, _PAD, _HEIGHT, _GAP = 7.9, 10, 26, 3
_BAR, _TALLEST, _MOST_BARS = 7, 26, 24


@dataclass(frozen=True)
class ExportStep:
    """A stage of the pipeline. Its state is "good", "bad", or "" if the stage did not run."""

    name: str
    state: str
    text: str
    seconds: float | None = None


@dataclass(frozen=True)
class OutputDifference:
    """The differences of an output, or of several outputs that are alike, in each call."""

    label: str
    largest: float | None
    call: str
    shades: tuple[tuple[int, str], ...]  # per call: 0 (equal) to 9 (large) or -1 (not compared), and its tooltip


@dataclass(frozen=True)
class Program:
    """A graph, as its folder describes it; ``proof`` is None if it was never verified."""

    name: str
    data: Mapping[str, Any]
    plan: Plan
    observed: Mapping[str, Any]
    proof: Mapping[str, Any] | None
    bytes: int

    @property
    def id(self) -> str:
        """The prefix of the ids of its sections."""
        return f"{self.name}-" if self.name else ""

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """The calls of its proof."""
        return self.proof["rows"] if self.proof else ()

    @property
    def inputs(self) -> list[dict[str, Any]]:
        """The inputs, with the reason for each axis; inputs that are alike share an entry."""
        return [
            {
                "label": label,
                "leaf": leaf,
                "seen": seen_shapes(leaf),
                "why": [self.plan.explain(leaf.path, axis) for axis in range(len(leaf.sizes))],
            }
            for label, leaf in alike_leaves(self.plan.leaves)
        ]

    @property
    def outputs(self) -> list[tuple[str, Mapping[str, Any]]]:
        """The outputs, each with a label; outputs that are alike share an entry, and the label counts them."""
        groups: dict[object, list[Mapping[str, Any]]] = {}
        for output in self.data["outputs"]:
            key = _INDEX.sub("*", output["name"]), output["dtype"], tuple(output["axes"])
            groups.setdefault(key, []).append(output)
        return [(g[0]["name"] + (f" and {len(g) - 1} alike" if len(g) > 1 else ""), g[0]) for g in groups.values()]

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The recorded calls: the sizes of the variables, absent inputs, and how long the model and the graph took."""
        proven = {row["label"]: row for row in self.rows if row["kind"] == "recorded"}
        found = []
        for position, call in enumerate(self.observed["calls"]):
            absent = {leaf.path.partition(".")[0] for leaf in self.plan.leaves if leaf.shapes[position] is None}
            row = proven.get(str(position), {})
            found.append(
                {
                    "sizes": [variable.seen[position] for variable in self.plan.variables],
                    "absent": sorted(absent),
                    "eager": call["latency"],
                    "onnx": row.get("onnx_seconds"),
                    "status": row.get("status", ""),
                }
            )
        return found

    @property
    def differences(self) -> list[OutputDifference]:
        """The outputs with their differences, largest first; outputs that differ only in an index share an entry."""
        families: dict[str, list[str]] = {}
        for path in {path: None for row in self.rows for path in row.get("outputs", {})}:
            families.setdefault(_INDEX.sub("[*]", path), []).append(path)
        found = [self._difference(label, paths) for label, paths in families.items()]
        return sorted(found, key=lambda item: -(item.largest if item.largest is not None else float("inf")))

    def _difference(self, label: str, paths: Sequence[str]) -> OutputDifference:
        shades, worst = [], (-1.0, "", "")
        for row in self.rows:
            call = f"{row['kind']} {row['label']}"
            values = {path: row["outputs"][path] for path in paths if path in row.get("outputs", {})}
            path = max(values, key=lambda p: _number(values[p]), default="")
            value = _number(values[path]) if values else -1.0
            if value > worst[0]:
                worst = (value, call, path)
            shades.append(
                (_shade(value), f"{call}: {_said(value)} in {path}" if values else f"{call}: nothing compared")
            )
        name = f"{label} ({len(paths)})" if len(paths) > 1 else paths[0]
        largest = None if worst[0] in (-1.0, float("inf")) else worst[0]
        where = f"{worst[1]}, {worst[2]}" if len(paths) > 1 and worst[0] > 0 else worst[1]
        return OutputDifference(name, largest, where, tuple(shades))


def export_page(folder: Path) -> str:
    """Returns the page of a folder that `Exported.save` wrote.

    Raises:
        DestinationError: if the folder holds no exported model, or one of its files is missing or damaged.
    """
    manifest = read_manifest(folder)
    with reading(folder / MANIFEST, damaged):
        edited = CheckedFiles(folder, read(Mapping[str, SavedFile], manifest["files"])).check(_is_read)
        proven = folder / REPORT_JSON
        proof = parse_json(proven.read_bytes()) if proven.exists() else None
        programs = list(_programs(folder, manifest, manifest.get("program", manifest), proof))
        pictures = {p.id: (input_pictures(p.plan), variable_pictures(p.plan)) for p in programs}
        main, several = programs[0], "program" not in manifest and "split" not in manifest
        return render(
            "export.html.j2",
            title=", ".join(manifest["parts"]) if several else f"{main.data['model']}.{main.data['method']}",
            several=several,
            folder=folder.resolve().name,
            manifest=manifest,
            proof=proof,
            programs=programs,
            pictures=pictures,
            steps=_steps(programs, manifest, proof),
            sections=_sections(programs),
            notes=[
                *_notes(programs, Split.from_json(manifest["split"]).text if "split" in manifest else None),
                *[("", note) for note in edited],
            ],
            attempts=manifest["attempts"],
            timings=_timings(programs),
        )


def _is_read(file: Path) -> bool:
    return file.suffix == ".json"


def _programs(
    folder: Path, manifest: Mapping[str, Any], data: Mapping[str, Any], proof: Mapping[str, Any] | None, name: str = ""
) -> Iterator[Program]:
    """The program that the data describe, or those that a model was split into, and the parts."""
    if "home" in data:
        home = inside(folder, data["home"])
        yield Program(
            name,
            data,
            Plan.from_json((home / "plan.json").read_text("utf-8")),
            parse_json((home / "calls" / "observation.json").read_bytes()),
            proof,
            sum(manifest["files"].get(data["file"] + end, {}).get("bytes", 0) for end in ("", ".data")),
        )
    below = {} if proof is None else proof["parts"]
    for part, described in (*data.get("programs", {}).items(), *data.get("parts", {}).items()):
        yield from _programs(folder, manifest, described, below.get(part), f"{name}.{part}" if name else part)


def _sections(programs: Sequence[Program]) -> list[tuple[str, str]]:
    found = []
    for program in programs:
        end = f" of {program.name}" if program.name else ""
        parts = ["calls", "plan", "axes", "domain", "verification"]
        found += [(program.id + title, title.capitalize() + end) for title in parts]
    titles = {"strategies": "Strategies", "cost": "Time and memory", "findings": "Findings"}
    return [*found, *titles.items(), ("versions", "Versions and files")]


def _steps(
    programs: Sequence[Program], manifest: Mapping[str, Any], proof: Mapping[str, Any] | None
) -> list[ExportStep]:
    main, split, is_single = programs[0], manifest.get("split"), "program" in manifest
    data, took = main.data, main.data.get("seconds", {})
    calls = (
        main.observed["calls"] if is_single else [call for program in programs for call in program.observed["calls"]]
    )
    if split is not None:
        calls = [call for some in split["calls"].values() for call in some]
    rules = f", with {', '.join(data['rules'])}" if data["rules"] else ""
    given = ", ".join(f"{name} {value}" for name, value in data.get("sizes", {}).items()) or "no size varies"
    steps = [
        ExportStep("observe", "good", count(len(calls), "call")),
        ExportStep("plan", "good", count(len(main.plan.variables), "variable"), took.get("plan")),
        ExportStep("arguments", "good", given, took.get("arguments")),
        ExportStep("export", "good", f"torch {manifest['written_by']['torch']}{rules}", took.get("export")),
        ExportStep("ONNX", "good", f"opset {data['opset']}, {size(main.bytes)}", took.get("onnx")),
    ]
    if not is_single:
        others, number = (
            sum(program.bytes for program in programs),
            len(programs) if split is None else len(split["kinds"]),
        )
        steps[-1] = ExportStep("ONNX", "good", f"{number} programs, {size(others)}", took.get("onnx"))
    if proof is None:
        return [*steps, ExportStep("verify", "", "not verified")]
    rows = proof["rows"] if is_single else [row for program in programs for row in program.rows]
    word = "measured" if proof["measured"] else "proven"
    done = sum(row["status"] == word for row in rows)
    text = f"{done} of {count(len(rows), 'call')} {word}"
    return [*steps, ExportStep("verify", "good" if proof["ok"] else "bad", text, took.get("verify"))]


def _notes(programs: Sequence[Program], reason: str | None) -> list[tuple[str, str]]:
    """What a reader should know, each with the name of the program that it is about."""
    found: dict[tuple[str, str], None] = {} if reason is None else {("", reason): None}
    for program in programs:
        texts = [finding.text for finding in program.plan.findings]
        texts += program.proof["findings"] if program.proof else []
        texts += [f"a call could not be recorded: {text}" for text in program.observed["problems"]]
        texts += [f"a call raised: {failure['error']}" for failure in program.observed["failures"]]
        found |= {(program.name, text): None for text in texts}
    return list(found)


def _timings(programs: Sequence[Program]) -> list[tuple[str, float, str]]:
    """The stages with their durations over all programs, in seconds and as text."""
    total = {stage: sum(p.data.get("seconds", {}).get(stage, 0.0) for p in programs) for stage in _STAGES}
    return [(stage, value, seconds(value)) for stage, value in total.items() if value]


def _number(value: Any) -> float:
    """A difference as stored in JSON; None, for values that cannot be compared, counts as infinite."""
    return float("inf") if value is None else float(value)


def _said(value: float) -> str:
    return "not comparable" if value == float("inf") else "equal" if value == 0 else f"{value:.1e}"


def _shade(value: float) -> int:
    if value <= 0:
        return int(value)  # equal, or not compared
    power = _COARSEST if value == float("inf") else math.log10(value)
    share = (power - _FINEST) / (_COARSEST - _FINEST)
    return round(1 + 8 * min(max(share, 0.0), 1.0))


@dataclass(frozen=True)
class Cell:
    """An axis: its size, its place in the picture, and the colours of its variables."""

    text: str
    x: float
    width: float
    colours: tuple[int, ...]


@dataclass(frozen=True)
class InputPicture:
    """An input, drawn as a row of cells, one for each axis."""

    label: str
    cells: tuple[Cell, ...]

    @property
    def width(self) -> float:
        """Width in pixels."""
        return self.cells[-1].x + self.cells[-1].width + 1 if self.cells else 60

    height = _HEIGHT + 2


@dataclass(frozen=True)
class VariablePicture:
    """A variable, drawn as bars: (x, height) for each recorded call."""

    name: str
    colour: int
    sizes: str
    bars: tuple[tuple[float, float], ...]
    height = _TALLEST

    @property
    def width(self) -> float:
        """Width in pixels."""
        return max(len(self.bars), 1) * _BAR


def input_pictures(plan: Plan) -> list[InputPicture]:
    """Returns a picture for each input; inputs that are alike share one."""
    colours = _colours(plan)
    pictures = []
    for label, leaf in alike_leaves(plan.leaves):
        cells, x = [], 1.0
        for expression in leaf.sizes:
            text = str(expression)
            width = max(len(text) * _LETTER + 2 * _PAD, _HEIGHT)
            cells.append(Cell(text, x, width, tuple(colours[name] for name in expression.variables())))
            x += width + _GAP
        pictures.append(InputPicture(label, tuple(cells)))
    return pictures


def variable_pictures(plan: Plan) -> list[VariablePicture]:
    """Returns a picture for each variable."""
    colours = _colours(plan)
    pictures = []
    for variable in plan.variables:
        known = [size or 0 for size in variable.seen][:_MOST_BARS]
        largest = max([*known, 1])
        bars = tuple((i * _BAR, max(_TALLEST * size / largest, 1)) for i, size in enumerate(known))
        sizes = first_of([listed((size,)) for size in variable.seen], _MOST_BARS)
        pictures.append(VariablePicture(variable.name, colours[variable.name], sizes, bars))
    return pictures


def _colours(plan: Plan) -> dict[str, int]:
    return {variable.name: i % _COLOURS for i, variable in enumerate(plan.variables)}
