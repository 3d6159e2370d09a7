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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from exportkit.calls.call import Call
from exportkit.calls.json_file import read_json_file
from exportkit.calls.signature import Signature
from exportkit.calls.stored_tensors import JSON, TENSORS, KeptTensors, StoredTensors, damaged, opened_tensors
from exportkit.errors import DestinationError, ExportkitError, ObservationError, TreeError
from exportkit.trees import Tree, check_opened, flatten, join
from exportkit.trees.json_form import dump_constant, dump_tree, load_value

_FORMAT = "exportkit-observation"
_VERSION = 2
_TEMPORARY = ".saving-"


def save_calls(
    signature: Signature,
    calls: Sequence[Call],
    about: Mapping[str, Any],
    directory: str | os.PathLike[str],
    values: bool,
) -> None:
    """Writes an observation into a directory; see `Observation.save`.

    Args:
        signature: The signature of the observed method.
        calls: The calls.
        about: Everything else, as JSON data.
        directory: Where to write.
        values: Also write the values of the tensors.
    """
    target = _checked_destination(Path(directory))
    kept = KeptTensors(values)
    dumped = [_dump_call(number, call, kept) for number, call in enumerate(calls)]
    stamp = uuid.uuid4().hex
    data = {
        "format": _FORMAT,
        "version": _VERSION,
        "stamp": stamp,
        "values": values,
        "written_by": versions("exportkit", "torch", "transformers", "safetensors"),
        "signature": _dump_signature(signature),
        "calls": dumped,
        **about,
    }
    _write(target, _as_text(data), kept.tensors if values else None, stamp)


def load_calls(directory: str | os.PathLike[str]) -> tuple[Signature, tuple[Call, ...], dict[str, Any]]:
    """Returns the signature, the calls, and all JSON data of an observation; see `Observation.load`."""
    folder = Path(directory)
    data = read_json_file(
        folder / JSON,
        (_FORMAT, _VERSION),
        noun="observation",
        written=f"a directory with {JSON}, as observation.save(directory) writes it",
        damaged=damaged,
        foreign=ObservationError,
    )
    with reading(folder):
        signature = _load_signature(data["signature"])
        with opened_tensors(folder / TENSORS, data) as tensors:
            calls = tuple(_load_call(number, call, signature, tensors) for number, call in enumerate(data["calls"]))
        return signature, calls, data


@contextlib.contextmanager
def reading(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Turns the errors of reading data that are not as they were written into an ObservationError."""
    try:
        yield
    except ExportkitError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise damaged(Path(directory) / JSON, f"{type(error).__name__}: {error}") from error


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
