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
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from exportkit.errors import DestinationError, ExportkitError, ObservationError, TreeError
from exportkit.observe.observation import Call, Failure, Observation
from exportkit.observe.seen import SeenShapes
from exportkit.observe.signature import Signature
from exportkit.trees import Tree, check_opened, flatten, join
from exportkit.trees.json_form import dump_constant, dump_tree, load_value

_FORMAT = "exportkit-observation"
_VERSION = 1
_JSON, _TENSORS = "observation.json", "tensors.safetensors"
_TEMPORARY = ".saving-"
# What a safetensors file holds; complex numbers are in it as pairs of real ones.
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
        torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
        torch.complex128, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    )
}  # fmt: skip


def save_observation(observation: Observation, directory: str | os.PathLike[str], values: bool = True) -> None:
    """Writes an observation into a directory; see `Observation.save`."""
    target = _checked_destination(Path(directory))
    values = values and observation.has_values  # what was made up is not written as if it had been seen
    kept = _Kept(values)
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
        "seen": [{"inputs": one.inputs, "outputs": one.outputs, "count": one.count} for one in observation.seen],
    }
    _write(target, _as_text(data), kept.tensors if values else None, stamp)


def load_observation(directory: str | os.PathLike[str]) -> Observation:
    """Returns the observation that `save_observation` wrote; see `Observation.load`."""
    folder = Path(directory)
    data = _read_json(folder)
    try:
        with _opened_tensors(folder / _TENSORS, data) as tensors:
            calls = tuple(_load_call(number, call, tensors) for number, call in enumerate(data["calls"]))
        return Observation(
            signature=_load_signature(data["signature"]),
            calls=calls,
            failures=tuple(Failure(**failure) for failure in data["failures"]),
            problems=tuple(data["problems"]),
            method_name=data["method_name"],
            model_name=data["model_name"],
            removed=frozenset(data["removed"]),
            restored=frozenset(data["restored"]),
            has_values=data["values"],
            seen=tuple(SeenShapes(_shapes(o["inputs"]), _shapes(o["outputs"]), o["count"]) for o in data["seen"]),
        )
    except ExportkitError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _damaged(folder / _JSON, f"{type(error).__name__}: {error}") from error


class _Kept:
    """The tensors of an observation by their key in the file; one that several calls share is kept once."""

    def __init__(self, values: bool) -> None:
        self._values = values
        self.tensors: dict[str, torch.Tensor] = {}
        self._known: dict[int, tuple[str, torch.Tensor]] = {}

    def key_of(self, tensor: torch.Tensor, wanted: str) -> str | None:
        """Returns the key of a tensor, which is kept from now on; None for one whose values are not written."""
        if tensor.layout is not torch.strided or tensor.dtype not in _DTYPES.values():
            raise ObservationError(
                "A tensor of this kind cannot be written.",
                where=wanted,
                expected="a dense tensor of booleans, or of whole, real or complex numbers",
                got=f"{tensor.dtype}, {tensor.layout}",
                hint="leave the input out: observer.remove_inputs([...]).",
            )
        if tensor.is_meta or not self._values:
            return None
        if id(tensor) not in self._known:
            self._known[id(tensor)] = wanted, tensor
            self.tensors[wanted] = _copied(tensor)
        return self._known[id(tensor)][0]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A dense copy on the CPU: safetensors refuses shared memory, and asking for addresses ends copy-on-write."""
    plain = _as_real(tensor.detach().resolve_conj().resolve_neg())
    return plain.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _dump_call(number: int, call: Call, kept: _Kept) -> dict[str, Any]:
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


def _dump_tree(place: str, tree: Tree, kept: _Kept) -> dict[str, Any]:
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
        if not found or (_JSON in found and _FORMAT in (target / _JSON).read_text("utf-8", "replace")[:100]):
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
            (written / _JSON).write_text(text, "utf-8")
            if tensors is not None:
                save_file(tensors, written / _TENSORS, metadata={"format": "pt", "stamp": stamp})
                shutil.copymode(written / _JSON, written / _TENSORS)  # safetensors lets nobody else read it
                os.replace(written / _TENSORS, target / _TENSORS)
            os.replace(written / _JSON, target / _JSON)
        if tensors is None:
            (target / _TENSORS).unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise DestinationError("An observation cannot be written here.", where=str(target), got=error) from error


def _read_json(folder: Path) -> dict[str, Any]:
    """Returns what the JSON file holds, if it is one that this version reads."""
    file = folder / _JSON
    try:
        data = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise DestinationError(
            "No observation can be read here.",
            where=str(folder),
            expected=f"a directory with {_JSON}, as observation.save(directory) writes it",
            got=error,
        ) from error
    except (ValueError, RecursionError) as error:
        raise _damaged(file, error) from error
    found = data if isinstance(data, dict) else {}
    if (found.get("format"), found.get("version")) != (_FORMAT, _VERSION):
        raise ObservationError(
            "This is no observation that this version reads.",
            where=str(file),
            expected=f"{_FORMAT} {_VERSION}",
            got=f"{found.get('format')} {found.get('version')}",
            hint=_written_by(found),
        )
    return found


def _written_by(data: dict[str, Any]) -> str | None:
    versions = data.get("written_by")
    if not isinstance(versions, dict):
        return None
    return f"it was written by {', '.join(f'{name} {version}' for name, version in versions.items())}."


def _damaged(file: Path, cause: object) -> ObservationError:
    return ObservationError(
        "This observation is damaged.",
        where=str(file),
        got=cause,
        hint="the file was changed or cut short: observe the model again, and save that.",
    )


class _Stored:
    """Reads the tensors of an observation, or invents them where only their shapes were written."""

    def __init__(self, file: Path, content: Any = None) -> None:
        self._file, self._content = file, content
        self._read: dict[str, torch.Tensor] = {}

    def tensor(self, leaf: Mapping[str, Any], place: str) -> torch.Tensor:
        """Returns the tensor of a leaf."""
        key, shape, dtype = leaf["tensor"], torch.Size(leaf["shape"]), _DTYPES[leaf["dtype"]]
        if self._content is None:
            return _invented(shape, dtype, join(place, leaf["path"]))
        if key is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        if key not in self._read:
            self._read[key] = self._checked(key, shape, dtype)
        return self._read[key]

    def _checked(self, key: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        try:
            tensor = self._content.get_tensor(key).clone()  # cut off from the file
        except SafetensorError as error:
            raise _damaged(self._file, error) from error
        wanted = _as_real(torch.empty(shape, dtype=dtype, device="meta"))
        if (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype):
            raise ObservationError(
                "A tensor is another one than the observation says.",
                where=f"{key} in {self._file}",
                expected=f"{wanted.dtype} {tuple(wanted.shape)}",
                got=f"{tensor.dtype} {tuple(tensor.shape)}",
                hint=f"keep {_JSON} and {_TENSORS} of one save together.",
            )
        return torch.view_as_complex(tensor) if dtype.is_complex else tensor


@contextlib.contextmanager
def _opened_tensors(file: Path, data: Mapping[str, Any]) -> Iterator[_Stored]:
    if not data["values"]:
        yield _Stored(file)
        return
    try:
        opened = safe_open(file, framework="pt")
    except OSError as error:
        raise DestinationError(
            "The values of an observation are missing.",
            where=str(file),
            expected=f"the file that was written with {_JSON}",
            got=error,
            hint="copy the whole directory, or save with values=False.",
        ) from error
    except SafetensorError as error:
        raise _damaged(file, error) from error
    with opened as content:
        stamp = (content.metadata() or {}).get("stamp")
        if stamp != data["stamp"]:
            raise ObservationError(
                "The two files of an observation are not of one save.",
                where=str(file),
                expected=f"stamp {data['stamp']}, as in {_JSON}",
                got=f"stamp {stamp}",
                hint="the last save did not end: save again.",
            )
        yield _Stored(file, content)


def _invented(shape: torch.Size, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Ones, or numbers between 0.1 and 1 that are the same wherever and whenever the leaf of that name is read."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.ones(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    pair = (2,) if dtype.is_complex else ()
    values = torch.randn((*shape, *pair), generator=generator, dtype=torch.float64).sigmoid() * 0.9 + 0.1
    return (torch.view_as_complex(values) if pair else values).to(dtype)


def _load_call(number: int, data: Mapping[str, Any], tensors: _Stored) -> Call:
    arguments = {name: _load_tree(_place(number, name), tree, tensors) for name, tree in data["arguments"].items()}
    outputs = _load_tree(_place(number), data["outputs"], tensors)
    return Call(data["index"], arguments, frozenset(data["named"]), outputs, data["latency"])


def _load_tree(place: str, data: Mapping[str, Any], tensors: _Stored) -> Tree:
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
