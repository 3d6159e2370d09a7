"""An observation on disk: a directory with ``observation.json``, and ``tensors.safetensors`` for the values.

In comes an `Observation`; out goes a directory from which another process, on another machine, plans and exports
without the inputs at hand. Nothing is pickled, so that nothing which the files say is executed when they are read.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from exportkit.calls.call import Call
from exportkit.calls.json_file import read_json_file
from exportkit.calls.observation import Failure, Observation
from exportkit.calls.seen import SeenShapes
from exportkit.calls.signature import Signature
from exportkit.calls.stored_tensors import JSON, TENSORS, KeptTensors, StoredTensors, damaged, opened_tensors
from exportkit.errors import DestinationError, ExportkitError, ObservationError, TreeError
from exportkit.trees import Tree, check_opened, flatten, join
from exportkit.trees.json_form import dump_constant, dump_tree, load_value

_FORMAT = "exportkit-observation"
_VERSION = 1
_TEMPORARY = ".saving-"


def save_observation(observation: Observation, directory: str | os.PathLike[str], values: bool = True) -> None:
    """Writes an observation into a directory; see `Observation.save`."""
    target = _checked_destination(Path(directory))
    values = values and observation.has_values  # what was made up is not written as if it had been seen
    kept = KeptTensors(values)
    calls = [_dump_call(number, call, kept) for number, call in enumerate(observation.calls)]
    stamp = uuid.uuid4().hex
    data = {
        "format": _FORMAT,
        "version": _VERSION,
        "stamp": stamp,
        "values": values,
        "written_by": versions("exportkit", "torch", "transformers", "safetensors"),
        "model_name": observation.model_name,
        "method_name": observation.method_name,
        "signature": _dump_signature(observation.signature),
        "removed": sorted(observation.removed),
        "restored": sorted(observation.restored),
        "problems": list(observation.problems),
        "failures": [{"error": failure.error, "arguments": failure.arguments} for failure in observation.failures],
        "calls": calls,
        "further": [{"inputs": s.inputs, "outputs": s.outputs, "count": s.count} for s in observation.further],
    }
    _write(target, _as_text(data), kept.tensors if values else None, stamp)


def load_observation(directory: str | os.PathLike[str]) -> Observation:
    """Returns the observation that `save_observation` wrote; see `Observation.load`."""
    folder = Path(directory)
    data = read_json_file(
        folder / JSON,
        (_FORMAT, _VERSION),
        noun="observation",
        written=f"a directory with {JSON}, as observation.save(directory) writes it",
        damaged=damaged,
        foreign=ObservationError,
    )
    try:
        signature = _load_signature(data["signature"])
        with opened_tensors(folder / TENSORS, data) as tensors:
            calls = tuple(_load_call(number, call, signature, tensors) for number, call in enumerate(data["calls"]))
        return Observation(
            signature=signature,
            calls=calls,
            failures=tuple(Failure(**failure) for failure in data["failures"]),
            problems=tuple(data["problems"]),
            method_name=data["method_name"],
            model_name=data["model_name"],
            removed=frozenset(data["removed"]),
            restored=frozenset(data["restored"]),
            has_values=data["values"],
            further=tuple(SeenShapes(_shapes(o["inputs"]), _shapes(o["outputs"]), o["count"]) for o in data["further"]),
        )
    except ExportkitError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise damaged(folder / JSON, f"{type(error).__name__}: {error}") from error


def _dump_call(number: int, call: Call, kept: KeptTensors) -> dict[str, Any]:
    for name, tree in call.arguments.items():
        check_opened(name, tree)
    return {
        "index": call.index,
        "named": sorted(call.named),
        "latency": call.latency,
        "arguments": {n: _dump_tree(_place(number, n), tree, kept) for n, tree in call.arguments.items()},
        "outputs": _dump_tree(_place(number), call.outputs, kept),
    }


def _place(number: int, argument: str | None = None) -> str:
    return f"calls[{number}].outputs" if argument is None else f"calls[{number}].arguments.{argument}"


def _dump_tree(place: str, tree: Tree, kept: KeptTensors) -> dict[str, Any]:
    with _located(place):
        layout = dump_tree(tree)
    leaves = [
        {
            "path": path,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "tensor": kept.key_of(tensor, join(place, path)),
        }
        for path, tensor in tree.tensors().items()
    ]
    return {"layout": layout, "leaves": leaves}


def _dump_signature(signature: Signature) -> dict[str, Any]:
    return {
        "names": list(signature.names),
        "var_positional": signature.var_positional,
        "var_keyword": signature.var_keyword,
        "positional_only": sorted(signature.positional_only),
        "defaults": {name: dump_constant(value) for name, value in signature.defaults.items()},
    }


def versions(*packages: str) -> dict[str, str | None]:
    """Returns versions of what writes a file: for a person who wonders why it cannot be read elsewhere."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _as_text(data: dict[str, Any]) -> str:
    try:
        return json.dumps(data, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ObservationError("This observation holds a value that JSON does not.", got=error) from error


def _checked_destination(target: Path) -> Path:
    """Returns the path if an observation may be written there: over nothing, or over an observation."""
    if not target.exists():
        return target
    try:
        found = sorted(item.name for item in target.iterdir() if not item.name.startswith(_TEMPORARY))
        if not found or (JSON in found and _FORMAT in (target / JSON).read_text("utf-8", "replace")[:100]):
            return target
    except OSError as error:
        raise DestinationError("An observation cannot be written here.", where=str(target), got=error) from error
    raise DestinationError(
        "An observation is not written over other files.",
        where=str(target),
        expected="a new or empty directory, or one that holds an observation",
        got=", ".join(found[:5]),
        hint="name another directory, or empty this one.",
    )


def _write(target: Path, text: str, tensors: dict[str, torch.Tensor] | None, stamp: str) -> None:
    """Writes beside the old files, then replaces them.

    The stamp is in both files: if only one of them could be replaced, they do not load together.
    """
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=target) as temporary:
            written = Path(temporary)
            (written / JSON).write_text(text, "utf-8")
            if tensors is not None:
                save_file(tensors, written / TENSORS, metadata={"format": "pt", "stamp": stamp})
                shutil.copymode(written / JSON, written / TENSORS)  # safetensors lets nobody else read it
                os.replace(written / TENSORS, target / TENSORS)
            os.replace(written / JSON, target / JSON)
        if tensors is None:
            (target / TENSORS).unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise DestinationError("An observation cannot be written here.", where=str(target), got=error) from error


def _load_call(number: int, data: Mapping[str, Any], signature: Signature, tensors: StoredTensors) -> Call:
    arguments = {name: _load_tree(_place(number, name), tree, tensors) for name, tree in data["arguments"].items()}
    outputs = _load_tree(_place(number), data["outputs"], tensors)
    return Call(arguments, signature, frozenset(data["named"]), outputs, data["index"], data["latency"])


def _load_tree(place: str, data: Mapping[str, Any], tensors: StoredTensors) -> Tree:
    found = [tensors.tensor(leaf, place) for leaf in data["leaves"]]
    with _located(place):
        tree = flatten(load_value(data["layout"], found))
    paths = [leaf["path"] for leaf in data["leaves"]]
    if list(tree.tensors()) != paths:
        raise ObservationError(
            "A value has other leaves than when it was written.",
            where=place,
            expected=", ".join(paths),
            got=", ".join(tree.tensors()),
            hint="register its class in the way it was registered when the model was observed.",
        )
    return tree


def _shapes(data: Mapping[str, list[int]]) -> dict[str, tuple[int, ...]]:
    return {path: tuple(shape) for path, shape in data.items()}


def _load_signature(data: Mapping[str, Any]) -> Signature:
    with _located("defaults"):
        defaults = {name: load_value(value) for name, value in data["defaults"].items()}
    return Signature(
        names=tuple(data["names"]),
        var_positional=data["var_positional"],
        var_keyword=data["var_keyword"],
        defaults=defaults,
        positional_only=frozenset(data["positional_only"]),
    )


@contextlib.contextmanager
def _located(place: str) -> Iterator[None]:
    """Says where in the observation a value is that cannot be written or read."""
    try:
        yield
    except TreeError as error:
        raise TreeError(f"{place}: {error}") from error
