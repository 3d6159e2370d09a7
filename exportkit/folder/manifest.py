"""``manifest.json``: the contracts of the graphs in a folder as JSON, and back.

The recorded calls and those at unseen sizes are observations of their own, in folders beside it. Nothing is pickled:
classes are looked up by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.errors import DestinationError
from exportkit.onnx_files.graph import Contract, OnnxGraph
from exportkit.plan.leaves import Finding
from exportkit.plan.plan import Plan
from exportkit.probing.missing import MissingDefaults, dependent_outputs
from exportkit.programs.domain import Domain
from exportkit.trees import flatten
from exportkit.trees.json_form import dump_tree, load_value

_CALLS, _UNSEEN, _PLAN = "calls", "unseen", "plan.json"
_MOST_BYTES = 2**28  # of the calls at unseen sizes that are kept
_TOO_LARGE = "its tensors are too large to keep"
# Files that clients and people read, and may change.
_EDITABLE = {"config.json", "generation_config.json", "genai_config.json", "report.txt", "report.json"}


def dump_graph(graph: OnnxGraph, folder: Path, values: bool, home: str = "") -> dict[str, Any]:
    """Writes the plan and the calls of a graph, and returns its contract as JSON data.

    Args:
        graph: The graph.
        folder: The folder.
        values: Also write the values of the calls.
        home: Where in the folder the plan and the calls go.
    """
    contract, place = graph.contract, folder / home
    place.mkdir(parents=True, exist_ok=True)
    (place / _PLAN).write_text(contract.plan.to_json() + "\n", "utf-8")
    graph.observation.save(place / _CALLS, values=values)
    leaves, returned = contract.plan.by_path, contract.structure.tensors()
    domain = contract.domain.to_json()
    return {
        "file": contract.path.name,
        "opset": contract.opset,
        "model": contract.model_name,
        "method": contract.method,
        "home": home,
        "inputs": [
            {"name": name, "path": path, "dtype": leaves[path].dtype, "axes": [str(s) for s in leaves[path].sizes]}
            for name, path in contract.inputs.items()
        ],
        "outputs": [
            {"name": n, "path": path, "dtype": _dtype(returned[path]), "axes": list(contract.output_axes[path])}
            for n, path in contract.outputs.items()
        ],
        "structure": {"layout": dump_tree(contract.structure), "paths": list(returned)},
        "fills": dict(contract.defaults.values),
        "unproven": list(contract.defaults.unproven),
        "rules": list(contract.rules),
        "findings": [finding.text for finding in contract.plan.findings],
        "unseen": _dump_unseen(graph, place / _UNSEEN) if values else [],
        "joined_outputs": list(contract.joined_outputs),
        "member_rows": dict(contract.member_rows),
        "stateful": contract.stateful,
        "sizes": dict(contract.sizes),
        "seconds": dict(contract.seconds),
        "domain": domain,
    }


def load_graph(folder: Path, data: Mapping[str, Any]) -> OnnxGraph:
    """Returns the graph that `dump_graph` described.

    Args:
        folder: The folder.
        data: What the manifest says about it.
    """
    place = inside(folder, data["home"])
    observation = Observation.load(place / _CALLS)
    plan = Plan.from_json((place / _PLAN).read_text("utf-8"))
    if not observation.has_values:
        text = "the folder was saved without the values of the recorded calls, so there is nothing to compare with."
        plan = plan.with_findings([Finding("no values", "", text)])
    returned = {item["path"]: torch.empty(0, dtype=getattr(torch, item["dtype"])) for item in data["outputs"]}
    structure = data["structure"]
    joined = tuple(data["joined_outputs"])
    contract = Contract(
        path=inside(folder, data["file"]),
        inputs={item["name"]: item["path"] for item in data["inputs"]},
        outputs={item["name"]: item["path"] for item in data["outputs"]},
        output_axes={item["path"]: tuple(item["axes"]) for item in data["outputs"]},
        opset=data["opset"],
        model_name=data["model"],
        method=data["method"],
        signature=observation.signature,
        plan=plan,
        domain=Domain.from_json(data["domain"]),
        defaults=MissingDefaults(data["fills"], tuple(data["unproven"])),
        structure=flatten(load_value(structure["layout"], [returned[path] for path in structure["paths"]])),
        joined_outputs=joined,
        member_rows=data["member_rows"],
        dependent=dependent_outputs(observation, joined),
        stateful=data["stateful"],
        rules=tuple(data["rules"]),
        sizes=data["sizes"],
        seconds=data["seconds"],
    )
    return OnnxGraph(contract, observation, unseen=_load_unseen(data["unseen"], place / _UNSEEN, contract))


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


def check_files(digests: Mapping[Path, str]) -> tuple[str, ...]:
    """Returns a sentence for each file that was edited since it was saved, if no proof depends on it.

    Args:
        digests: SHA-256 of each file by path, as they were saved.

    Raises:
        DestinationError: if any other file is not the one that was saved.
    """
    edited = []
    for path, digest in digests.items():
        with path.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        if found == digest:
            continue
        if path.name not in _EDITABLE:
            raise DestinationError(
                "A file of an exported model is not the one that was saved.",
                where=str(path),
                expected=f"SHA-256 {digest}",
                got=found,
                hint="copy the folder again; deliberate changes have to be saved and proven anew.",
            )
        edited.append(f"{path.name} was edited since the folder was saved.")
    return tuple(edited)


def _dump_unseen(graph: OnnxGraph, place: Path) -> list[dict[str, Any]]:
    """Writes the calls at unseen sizes as an observation, and returns what belongs to each."""
    described: list[dict[str, Any]] = []
    calls: list[Call] = []
    room = _MOST_BYTES
    for call in graph.unseen or ():
        kept, error = call.is_made, call.error
        if kept:
            tensors = (*call.tensors().values(), *call.outputs.tensors().values())
            room -= sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            kept, error = (True, error) if room >= 0 else (False, _TOO_LARGE)
        number = len(calls) if kept else None
        described.append({"label": call.label, "sizes": dict(call.sizes), "call": number, "error": error})
        if kept:
            trees = {name: flatten(value) for name, value in call.values().items()}  # with the counters of caches
            calls.append(replace(call, arguments=trees, named=frozenset(trees), index=number))
    replace(graph.observation, calls=tuple(calls), further=(), failures=()).save(place)
    return described


def _load_unseen(described: list[dict[str, Any]], place: Path, contract: Contract) -> tuple[Call, ...]:
    if not described:
        return ()
    calls = Observation.load(place).calls
    return tuple(
        replace(
            Call({}, contract.signature) if item["call"] is None else calls[item["call"]],
            label=item["label"],
            sizes=item["sizes"],
            error=item["error"],
        )
        for item in described
    )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
