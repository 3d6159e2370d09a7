"""Recorded calls on disk: a directory with ``observation.json``, and ``tensors.safetensors`` for the values.

From it, another process on another machine plans and exports without the inputs at hand. Nothing is pickled, so reading
the files never executes anything. If only shapes were written, the values are made up when they are read.

Both files are checked before anything is made from them: they have to be as they were written, and they may come from
anywhere.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from exportkit.calls.call import Call
from exportkit.calls.signature import NumberKind, Signature
from exportkit.errors import DestinationError, ObservationError, TreeError
from exportkit.files import (
    as_path,
    check_folder,
    damaged_error,
    digest_of,
    read_json_file,
    reading,
    replacing,
    versions,
    write_json_file,
)
from exportkit.json_data import InvalidDataError, Size, read
from exportkit.trees import Tree, check_opened, flatten, join
from exportkit.trees.json_form import dump_constant, dump_tree, load_value
from exportkit.trees.tree import dtype_name

JSON, TENSORS = "observation.json", "tensors.safetensors"
# What a safetensors file can hold; complex numbers are stored as pairs of real ones.
DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
        torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
        torch.complex128, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    )
}  # fmt: skip
_FORM = ("exportkit-observation", 4)
_NOUN = "an observation"
damaged = damaged_error(
    ObservationError, "This observation is damaged.", "the file was changed or truncated: observe and save again."
)
_MOST_BYTES = 2**47  # of one tensor: as many bytes as a process can address


@dataclass(frozen=True)
class _LeafData:
    path: str
    dtype: str
    shape: tuple[Size, ...]
    tensor: str | None  # its key in the other file; None if it has no values


@dataclass(frozen=True)
class _TreeData:
    layout: Any
    leaves: tuple[_LeafData, ...]


@dataclass(frozen=True)
class _CallData:
    index: Size | None
    named: frozenset[str]
    latency: float
    arguments: Mapping[str, _TreeData]
    outputs: _TreeData
    gradients: bool = False
    autocast: tuple[tuple[Literal["cpu", "cuda"], Literal["float16", "bfloat16"]], ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class _SignatureData:
    names: tuple[str, ...]
    var_positional: str | None
    var_keyword: str | None
    positional_only: frozenset[str]
    defaults: Mapping[str, Any]
    numbers: Mapping[str, NumberKind] = field(default_factory=dict)


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
    target = check_folder(as_path(directory), _NOUN, _is_observation)
    kept = KeptTensors(values)
    dumped = [_dump_call(number, call, kept) for number, call in enumerate(calls)]
    stamp = uuid.uuid4().hex  # in both files: if only one of them could be replaced, loading says so
    data = {
        "stamp": stamp,
        "values": values,
        "written_by": versions("exportkit", "torch", "transformers", "safetensors"),
        "signature": _dump_signature(signature),
        "calls": dumped,
        **about,
    }

    def clear() -> None:
        if not values:
            (target / TENSORS).unlink(missing_ok=True)

    with replacing(target, _NOUN, last=JSON, clear=clear) as folder:
        if values:
            try:
                save_file(kept.tensors, folder / TENSORS, metadata={"format": "pt", "stamp": stamp})
            except SafetensorError as error:
                raise OSError(str(error)) from error
            data["tensors"] = digest_of(folder / TENSORS)
        try:
            write_json_file(folder / JSON, _FORM, data)
        except (TypeError, ValueError) as error:
            raise ObservationError(
                "This observation contains a value that JSON cannot represent.", got=error
            ) from error
        if values:
            shutil.copymode(folder / JSON, folder / TENSORS)  # safetensors makes it readable for the owner alone


def load_calls(directory: str | os.PathLike[str]) -> tuple[Signature, tuple[Call, ...], dict[str, Any]]:
    """Returns the signature, the calls, and all JSON data of an observation; see `Observation.load`."""
    folder = as_path(directory)
    data = read_json_file(
        folder / JSON,
        _FORM,
        noun=_NOUN,
        written=f"a directory with {JSON}, as observation.save(directory) writes it",
        damaged=damaged,
        foreign=ObservationError,
    )
    with reading(folder / JSON, damaged):
        signature = _load_signature(read(_SignatureData, data["signature"]))
        described = read(tuple[_CallData, ...], data["calls"])
        _require_possible(described, has_values=read(bool, data["values"]))
        with opened_tensors(folder / TENSORS, data) as tensors:
            calls = tuple([_load_call(number, call, signature, tensors) for number, call in enumerate(described)])
        return signature, calls, data


def _require_possible(calls: Sequence[_CallData], has_values: bool) -> None:
    """Raises InvalidDataError for tensors that no machine can hold, or that this one cannot make up values for."""
    total = 0
    trees = [(_place(n, name), tree) for n, call in enumerate(calls) for name, tree in call.arguments.items()]
    for place, tree in [*trees, *((_place(number), call.outputs) for number, call in enumerate(calls))]:
        for leaf in tree.leaves:
            if leaf.dtype not in DTYPES:
                raise InvalidDataError("a dtype that can be written", leaf.dtype, join(place, leaf.path))
            size = math.prod(leaf.shape) * DTYPES[leaf.dtype].itemsize
            if size >= _MOST_BYTES:
                raise InvalidDataError(f"less than {_MOST_BYTES} bytes", leaf.shape, join(place, leaf.path))
            total += size
    most = _memory() // 2
    if not has_values and total > most:
        text = f"values are made up, as only shapes were saved, and they would take {total} bytes"
        raise InvalidDataError(f"at most {most} bytes, half of this machine's memory", text)


def _memory() -> int:
    """Bytes of memory of this machine; if unknown, as many as can be addressed."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows
        return _MOST_BYTES


def _dump_call(number: int, call: Call, kept: KeptTensors) -> dict[str, Any]:
    for name, tree in call.arguments.items():
        check_opened(name, tree)
    return {
        "index": call.index,
        "named": sorted(call.named),
        "latency": call.latency,
        "gradients": call.gradients,
        "autocast": [list(item) for item in call.autocast],
        "seed": call.seed,
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
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "tensor": kept.key_of(tensor, join(place, path)),
        }
        for path, tensor in tree.tensors().items()
    ]
    return {"layout": layout, "leaves": leaves}


def _dump_signature(signature: Signature) -> dict[str, Any]:
    return {
        **vars(signature),
        "positional_only": sorted(signature.positional_only),
        "defaults": {name: dump_constant(value) for name, value in signature.defaults.items()},
    }


def _is_observation(folder: Path) -> bool:
    file = folder / JSON
    return file.exists() and _FORM[0] in file.read_text("utf-8", "replace")[:100]


def _load_call(number: int, data: _CallData, signature: Signature, tensors: StoredTensors) -> Call:
    if not data.named | data.arguments.keys() <= {*signature.names}:
        raise InvalidDataError(f"arguments among {', '.join(signature.names)}", ", ".join(data.arguments))
    arguments = {name: _load_tree(_place(number, name), tree, tensors) for name, tree in data.arguments.items()}
    for name, cls in ((signature.var_positional, tuple), (signature.var_keyword, dict)):
        if name in arguments and type(arguments[name].build()) is not cls:
            raise InvalidDataError(f"a {cls.__name__}", "another value", _place(number, name))
    outputs = _load_tree(_place(number), data.outputs, tensors)
    call = Call(arguments, signature, data.named, outputs, data.index, data.latency)
    return replace(call, gradients=data.gradients, autocast=data.autocast, seed=data.seed)


def _load_tree(place: str, data: _TreeData, tensors: StoredTensors) -> Tree:
    found = [tensors.tensor(leaf, place) for leaf in data.leaves]
    with _located(place):
        tree = flatten(load_value(data.layout, found))
    paths = [leaf.path for leaf in data.leaves]
    if list(tree.tensors()) != paths:
        raise ObservationError(
            "A value has different leaves from when it was saved.",
            where=place,
            expected=", ".join(paths),
            got=", ".join(tree.tensors()),
            hint="register its class as it was registered when the model was observed.",
        )
    return tree


def _load_signature(data: _SignatureData) -> Signature:
    mentioned = {*data.defaults, *data.positional_only, data.var_positional, data.var_keyword} - {None}
    if not mentioned <= {*data.names} or len({*data.names}) < len(data.names):
        raise InvalidDataError("a signature with each of its parameters once", ", ".join(data.names), ".signature")
    with _located("defaults"):
        defaults = {name: load_value(value) for name, value in data.defaults.items()}
    return Signature(data.names, data.var_positional, data.var_keyword, defaults, data.positional_only, data.numbers)


@contextlib.contextmanager
def _located(place: str) -> Iterator[None]:
    """Prefixes an error with the place of the value in the observation."""
    try:
        yield
    except TreeError as error:
        raise TreeError(f"{place}: {error}") from error


class KeptTensors:
    """The tensors of an observation by their key in the file; a tensor that several calls share is kept once."""

    def __init__(self, values: bool) -> None:
        self._values = values
        self.tensors: dict[str, torch.Tensor] = {}
        self._known: dict[int, tuple[str, torch.Tensor]] = {}

    def key_of(self, tensor: torch.Tensor, wanted: str) -> str | None:
        """Returns the key of a tensor, and keeps the tensor; None if its values are not written."""
        if tensor.layout is not torch.strided or tensor.dtype not in DTYPES.values():
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
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    return plain.to("cpu", copy=True, memory_format=torch.contiguous_format)


class StoredTensors:
    """Reads the tensors of an observation, or makes up their values if only their shapes were written."""

    def __init__(self, file: Path, content: Any = None) -> None:
        self._file, self._content = file, content
        self._read: dict[str, torch.Tensor] = {}

    def tensor(self, leaf: _LeafData, place: str) -> torch.Tensor:
        """Returns the tensor of a leaf."""
        key, shape, dtype = leaf.tensor, torch.Size(leaf.shape), DTYPES[leaf.dtype]
        if self._content is None:
            return _invented(shape, dtype, join(place, leaf.path))
        if key is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        if key not in self._read:
            try:
                self._read[key] = self._content.get_tensor(key).clone()  # independent of the file
            except SafetensorError as error:
                raise damaged(self._file, error) from error
            if dtype.is_complex:
                self._read[key] = torch.view_as_complex(self._read[key])
        tensor = self._read[key]
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            raise ObservationError(
                "A tensor does not match its description in the observation.",
                where=f"{key} in {self._file}",
                expected=f"{dtype} {tuple(shape)}",
                got=f"{tensor.dtype} {tuple(tensor.shape)}",
                hint=f"keep {JSON} and {TENSORS} of one save together.",
            )
        return tensor


@contextlib.contextmanager
def opened_tensors(file: Path, data: Mapping[str, Any]) -> Iterator[StoredTensors]:
    """Opens the tensor file that belongs to the JSON data of an observation, if there is one."""
    if not data["values"]:
        yield StoredTensors(file)
        return
    try:
        opened = safe_open(file, framework="pt")
    except OSError as error:
        raise DestinationError(
            "The values of an observation are missing.",
            where=str(file),
            expected=f"the file that was written with {JSON}",
            got=error,
            hint="copy the whole directory, or save with values=False.",
        ) from error
    except SafetensorError as error:
        raise damaged(file, error) from error
    with opened as content:  # only the header was read
        stamp = (content.metadata() or {}).get("stamp")
        if stamp != data["stamp"]:
            raise ObservationError(
                "The two files of an observation were not saved together.",
                where=str(file),
                expected=f"stamp {data['stamp']}, as in {JSON}",
                got=f"stamp {stamp}",
                hint="the last save was interrupted: save again.",
            )
        if digest_of(file) != data["tensors"]:
            raise damaged(file, "the content does not match the digest in " + JSON)
        yield StoredTensors(file, content)


def _invented(shape: torch.Size, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Ones, or numbers between 0.1 and 1, which are the same whenever the leaf of that name is read."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.ones(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    pair = (2,) if dtype.is_complex else ()
    values = torch.randn((*shape, *pair), generator=generator, dtype=torch.float64).sigmoid() * 0.9 + 0.1
    return (torch.view_as_complex(values) if pair else values).to(dtype)
