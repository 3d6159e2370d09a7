"""``manifest.json``: what is in a folder, and how its graphs are called like the model.

In come graphs and what was saved of their export; out goes JSON data, and back. The recorded calls and those at unseen
sizes are observations of their own, in folders beside it. Nothing is pickled: classes are looked up by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.calls.parts import Edge
from exportkit.errors import DestinationError
from exportkit.folder.saved import Case, Saved
from exportkit.onnx_files.onnx_model import OnnxModel
from exportkit.onnx_files.translate import OnnxFile
from exportkit.plan.leaves import Finding
from exportkit.plan.plan import Plan
from exportkit.probing.missing import MissingDefaults
from exportkit.programs.stateful import onnx_model_of
from exportkit.trees import Tree, flatten
from exportkit.trees.json_form import dump_tree, load_value

_CALLS, _UNSEEN, _PLAN = "calls", "unseen", "plan.json"
_PARTS = "parts"
_MOST_BYTES = 2**28  # of the calls at unseen sizes that are kept
_TOO_LARGE = "its tensors are too large to keep"


def dump_program(onnx_model: OnnxModel, saved: Saved, folder: Path, values: bool, home: str = "") -> dict[str, Any]:
    """Writes plan and calls of a graph, and of its parts, and returns what the manifest says of them.

    Args:
        onnx_model: The graph.
        saved: What is to be said of it.
        folder: The folder.
        values: Also write the values of the calls.
        home: Where in the folder plan and calls go.
    """
    import onnx_ir

    place = folder / home
    place.mkdir(parents=True, exist_ok=True)
    (place / _PLAN).write_text(saved.plan.to_json() + "\n", "utf-8")
    saved.observation.save(place / _CALLS, values=values)
    file, leaves = onnx_model.file, saved.plan.by_path
    returned = saved.outputs.tensors()
    return {
        "file": file.path.name,
        "opset": onnx_ir.load(onnx_model.path).opset_imports[""],
        "model": saved.observation.model_name,
        "method": saved.method,
        "home": home,
        "inputs": [
            {"name": name, "path": path, "dtype": leaves[path].dtype, "axes": [str(s) for s in leaves[path].sizes]}
            for name, path in file.inputs.items()
        ],
        "outputs": [
            {"name": n, "path": path, "dtype": _dtype(returned[path]), "axes": list(file.output_axes[path])}
            for n, path in file.outputs.items()
        ],
        "structure": {"layout": dump_tree(saved.outputs), "paths": list(returned)},
        "constants": {path: _plain(value) for path, value in saved.baked_constants().items()},
        "fills": dict(saved.fills.values),
        "unproven": list(saved.fills.unproven),
        "rules": list(saved.rules),
        "findings": [finding.text for finding in saved.plan.findings],
        "unseen": _dump_cases(saved, place / _UNSEEN) if values else [],
        "parts": {
            name: dump_program(part, saved.parts[name], folder, values, f"{home}{_PARTS}/{name}/")
            for name, part in onnx_model.parts.items()
        },
        "joined_outputs": list(saved.joined_outputs),
        "member_rows": dict(saved.member_rows),
        "stateful": saved.stateful,
        "sizes": dict(saved.sizes),
        "seconds": dict(saved.seconds),
        "guards": [vars(guard) for guard in saved.guards],
        "edges": {name: [vars(edge) for edge in edges] for name, edges in saved.edges.items()},
    }


def load_program(folder: Path, data: Mapping[str, Any], digests: Mapping[Path, str]) -> OnnxModel:
    """Returns the graph that `dump_program` described.

    Args:
        folder: The folder.
        data: What the manifest says of it.
        digests: SHA-256 of each file of the folder.
    """
    place, path = inside(folder, data["home"]), inside(folder, data["file"])
    plan, observation = _load_plan(place)
    parts = {name: load_program(folder, part, {}) for name, part in data["parts"].items()}
    saved = Saved(
        plan=plan,
        observation=observation,
        fills=MissingDefaults(data["fills"], tuple(data["unproven"])),
        outputs=_load_structure(data),
        method=data["method"],
        cases=_load_cases(data["unseen"], place / _UNSEEN),
        rules=tuple(data["rules"]),
        parts={name: part.exported for name, part in parts.items() if isinstance(part.exported, Saved)},
        edges={name: tuple(Edge(**edge) for edge in edges) for name, edges in data["edges"].items()},
        joined_outputs=tuple(data["joined_outputs"]),
        member_rows=data["member_rows"],
        stateful=data["stateful"],
        digests=digests,
    )
    file = OnnxFile(
        path,
        {item["name"]: item["path"] for item in data["inputs"]},
        {item["name"]: item["path"] for item in data["outputs"]},
        {item["path"]: tuple(item["axes"]) for item in data["outputs"]},
    )
    return onnx_model_of(file, saved, parts)


def inside(folder: Path, name: str) -> Path:
    """Returns the path of a file in a folder.

    Raises:
        DestinationError: if it is outside.
    """
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise damaged(folder, f"{name} is outside of the folder")
    return path


def damaged(file: Path, cause: object) -> DestinationError:
    """Returns the error for a folder that is not as it was written."""
    return DestinationError(
        "This exported model is damaged.",
        where=str(file),
        got=cause,
        hint="the folder was changed or cut short: save again.",
    )


def _load_plan(place: Path) -> tuple[Plan, Observation]:
    plan = Plan.from_json((place / _PLAN).read_text("utf-8"))
    observation = Observation.load(place / _CALLS)
    if observation.has_values:
        return plan, observation
    text = "the folder was saved without the values of the recorded calls, so there is nothing to compare with."
    return plan.with_findings([Finding("no values", "", text)]), observation


def _load_structure(data: Mapping[str, Any]) -> Tree:
    found = {item["path"]: torch.empty(0, dtype=getattr(torch, item["dtype"])) for item in data["outputs"]}
    return flatten(load_value(data["structure"]["layout"], [found[path] for path in data["structure"]["paths"]]))


def _dump_cases(saved: Saved, place: Path) -> list[dict[str, Any]]:
    """Writes the calls at unseen sizes as an observation, and returns what belongs to each."""
    described: list[dict[str, Any]] = []
    calls: list[Call] = []
    room = _MOST_BYTES
    for case in saved.cases:
        call, error = _call(case, len(calls)), case.error
        if call is not None:
            room -= _bytes(call)
            call, error = (call, error) if room >= 0 else (None, _TOO_LARGE)
        described.append(
            {
                "label": case.label,
                "sizes": dict(case.sizes),
                "call": None if call is None else call.index,
                "error": error,
            }
        )
        calls += [] if call is None else [call]
    replace(saved.observation, calls=tuple(calls), further=(), failures=()).save(place)
    return described


def _call(case: Case, index: int) -> Call | None:
    if case.arguments is None or case.outputs is None:
        return None
    trees = {name: flatten(value) for name, value in case.arguments.values().items()}
    signature = case.arguments.signature
    return Call(trees, signature, frozenset(trees), case.outputs, index, case.seconds)


def _bytes(call: Call) -> int:
    return sum(t.numel() * t.element_size() for t in (*call.tensors().values(), *call.outputs.tensors().values()))


def _load_cases(described: list[dict[str, Any]], place: Path) -> tuple[Case, ...]:
    if not described:
        return ()
    observation = Observation.load(place)
    return tuple(_case(item, observation) for item in described)


def _case(item: Mapping[str, Any], observation: Observation) -> Case:
    if item["call"] is None:
        return Case(item["label"], item["sizes"], error=item["error"])
    call = observation.calls[item["call"]]
    return Case(item["label"], item["sizes"], call, call.outputs, call.latency)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
