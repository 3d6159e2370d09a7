"""Reads the folder of a trace: its module calls, and the tensors whose values were stored.

Nothing in the folder is executed. The last line of the index may be cut short, and calls may have no end: the recording
was killed, or is still running. Any other line that makes no sense is damage, and an error.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import torch

from exportkit.errors import DestinationError, TraceError, described
from exportkit.files import as_path, damaged_error
from exportkit.module_traces.files import FORMAT, HEADER_LENGTH, INDEX, TENSORS, VERSION
from exportkit.module_traces.measure import measure, reassemble

UNENDED = "the recording ended inside this call"
_STATISTICS = ("mean", "std", "min", "max")
# What a recording that stores the values of a tensor leaves to be computed from them.
DERIVED = (*_STATISTICS, "nan", "inf", "hash")
_damaged = damaged_error(TraceError, "This trace is damaged.", "the file was changed: record the trace again.")


@dataclass(frozen=True)
class TensorRecord:
    """What is known about a tensor that a module was given or returned.

    The statistics are those of the finite elements; for complex numbers, of their absolute values. They are None where
    there is nothing to compute them from. Where the values are stored, statistics and hash are computed from them the
    first time one is read.

    Attributes:
        path: Where it was: ``args[0]``, ``kwargs.attention_mask``, ``outputs.past_key_values.layers[0].keys``.
        shape: Its shape; () for a nested tensor, which has none.
        dtype: Its dtype, such as ``float32``.
        device: Where it was, such as ``cpu`` or ``cuda:0``.
        mean: Mean.
        std: Sample standard deviation.
        min: Smallest element.
        max: Largest element.
        nan: How many elements are NaN.
        inf: How many elements are infinite.
        hash: Hash of its content: differs if one element differs, or their order; empty if there are no values.
        key: Name of its values in the data file, for `Trace.tensor`; None if they were not stored.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    nan: int
    inf: int
    hash: str
    key: str | None

    @classmethod
    def of(cls, **known: Any) -> TensorRecord:
        """Returns a record with these attributes; ``derive()`` computes the others, the first time one is read."""
        record = object.__new__(cls)
        vars(record).update(known)
        return record

    def __getattr__(self, name: str) -> Any:
        if name not in DERIVED:
            raise AttributeError(name)
        vars(self).update(vars(self)["derive"]())
        return vars(self)[name]

    def __reduce__(self) -> Any:
        return TensorRecord, tuple([getattr(self, each.name) for each in fields(self)])


@dataclass(frozen=True)
class ModuleCall:
    """One call of one module.

    Attributes:
        index: How many calls of all modules began before.
        path: Path of the module in the model; "" for the model itself.
        class_name: Class of the module.
        number: How many calls of this module began before.
        parent: Index of the call inside which it was made, or None.
        inputs: The tensors among its arguments.
        outputs: The tensors in what it returned.
        other_inputs: The other arguments by path: what JSON can hold, and a text in place of what it cannot.
        other_outputs: The other leaves of what it returned, in the same form.
        error: What it raised, or why its end is missing; None if it returned.
        thread: Number of the thread that made the call; 0 for the thread of the first call.
    """

    index: int
    path: str
    class_name: str
    number: int
    parent: int | None
    inputs: tuple[TensorRecord, ...]
    outputs: tuple[TensorRecord, ...]
    other_inputs: Mapping[str, Any] = field(default_factory=dict)
    other_outputs: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    thread: int = 0


def calls_around(calls: Iterable[ModuleCall], known: Collection[int]) -> dict[int, int | None]:
    """Returns the innermost of some calls inside which each call was made, or None, by index.

    Args:
        calls: The calls, in the order in which they began.
        known: Indices of the calls in question.
    """
    found: dict[int, int | None] = {}
    for call in calls:
        found[call.index] = call.parent if call.parent is None or call.parent in known else found.get(call.parent)
    return found


class TraceData:
    """The module calls of a run, read from a folder.

    Args:
        folder: The folder.
        problems: What is known to be missing, beyond what the folder says; may grow.
    """

    def __init__(self, folder: str | os.PathLike[str], problems: Collection[str] = ()) -> None:
        self.folder = as_path(folder)
        self._problems = problems
        self._index: _Index | None = None

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Self:
        """Returns the trace in a directory. Nothing in it is executed.

        Raises:
            DestinationError: if there is no trace.
            TraceError: if it is damaged, or was written by a version that this one does not read. If the recording was
                cut short, the trace contains what was written; see `complete`.
        """
        trace = cls(directory)
        trace._read()
        return trace

    def __repr__(self) -> str:
        partial = "" if self.complete else ", incomplete"
        return f"Trace({self.metadata['model']}: {len(self.calls)} calls{partial})"

    @property
    def calls(self) -> tuple[ModuleCall, ...]:
        """The calls, in the order in which they began."""
        return self._read().calls

    @property
    def complete(self) -> bool:
        """Whether the recording ended, and nothing is missing; `problems` says what is."""
        return not self.problems

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the trace is incomplete; empty if it is complete."""
        return tuple(dict.fromkeys((*self._problems, *self._read().problems)))

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Class of the model (``model``), which values were stored (``values``), and versions of what wrote it."""
        return self._read().metadata

    def tensor(self, record: TensorRecord) -> torch.Tensor:
        """Returns the values of a tensor, on the CPU; they are read from the file when they are used.

        Args:
            record: A record of this trace.

        Raises:
            TraceError: if its values were not stored, or the file is damaged.
        """
        if record.key is None:
            raise TraceError(
                "The values of this tensor were not stored.",
                where=record.path,
                hint='record them: trace_model(model, values="all"), or the paths of the modules that matter.',
            )
        entry = self._read().stored.get(record.key)
        if entry is None:
            raise TraceError(
                "This tensor is not in the trace.", where=record.key, hint="the record belongs to a different trace."
            )
        tensor = self._read().tensor(entry)
        return tensor.reshape(record.shape) if entry["kind"] == "dense" else tensor

    def _read(self) -> _Index:
        """The content of the index; read again while it grows."""
        if self._index is None or not self._index.is_current():
            self._index = _read_index(self.folder / INDEX)
        return self._index


@dataclass(frozen=True)
class _Index:
    """The content of an index file.

    Attributes:
        path: Its path.
        size: How long it was when it was read.
        metadata: Its first line.
        lines: The other lines.
        finished: Its last line, if the recording ended.
    """

    path: Path
    size: int
    metadata: Mapping[str, Any]
    lines: list[dict[str, Any]]
    finished: Mapping[str, Any] | None

    def is_current(self) -> bool:
        """Returns whether nothing was written since it was read."""
        return self.finished is not None or self.path.stat().st_size == self.size

    @functools.cached_property
    def problems(self) -> tuple[str, ...]:
        """Why the trace is incomplete."""
        if self.finished is None:
            return ("The recording did not end: calls, or parts of the last one, are missing.",)
        return tuple(map(str, self.finished["problems"]))

    @functools.cached_property
    def data(self) -> _DataFile:
        """The data file."""
        return _DataFile(self.path.with_name(TENSORS))

    @functools.cached_property
    def stored(self) -> dict[str, Mapping[str, Any]]:
        """The lines that say where the values of tensors are, by key."""
        return {line["key"]: line for line in self.lines if "key" in line}

    def tensor(self, stored: Mapping[str, Any]) -> torch.Tensor:
        """Returns stored values, from the line that says where they are.

        Raises:
            TraceError: if the data file is damaged.
        """
        data = self.data
        try:
            return reassemble(stored, data.read)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise TraceError(
                "A tensor cannot be read from this trace.",
                where=f"{stored.get('key')} in {self.path.parent}",
                got=error,
                hint="the data file was changed or cut short.",
            ) from error

    @functools.cached_property
    def calls(self) -> tuple[ModuleCall, ...]:
        """The calls, in the order in which they began."""
        try:
            return _CallReader(self).all()
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(self.path, described(error)) from error


def _read_index(path: Path) -> _Index:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DestinationError(
            "No trace was found.",
            where=str(path.parent),
            expected=f"a directory with {INDEX}, as trace_model(model, directory) writes it",
            got=error,
        ) from error
    *whole, _cut = data.split(b"\n")  # a line that was written to its end ends with a newline
    lines: list[dict[str, Any]] = []
    for number, line in enumerate(whole, start=1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _damaged(path, f"line {number}: {error}") from error
        if not isinstance(found, dict):
            raise _damaged(path, f"line {number}: {str(found)[:100]}")
        lines.append(found)
    metadata = lines.pop(0) if lines else {}
    if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
        raise TraceError(
            "Unsupported trace format.",
            where=str(path),
            expected=f"{FORMAT} {VERSION}",
            got=f"{metadata.get('format')} {metadata.get('version')}",
        )
    finished = lines.pop() if lines and "finished" in lines[-1] else None
    return _Index(path, len(data), metadata, lines, finished)


class _CallReader:
    """Makes calls from the lines of an index."""

    def __init__(self, index: _Index) -> None:
        self._index = index
        by_kind: dict[str, list[dict[str, Any]]] = {"begin": []}
        for line in index.lines:
            by_kind.setdefault(next(iter(line)), []).append(line)
        self._begins = by_kind["begin"]
        self._ends, self._layouts, stored = (
            {line[kind]: line for line in by_kind.get(kind, ())} for kind in ("end", "layout", "stored")
        )
        self._stored = stored | {line["tensor"]: line for line in by_kind.get("tensor", ()) if "key" in line}
        if self._stored:
            with contextlib.suppress(DestinationError):  # raised when a value is read
                index.data  # noqa: B018  # opened now, so that values can be read even if the folder is removed
        self._tensors: dict[int, dict[str, Any]] = {}  # what is known of each, except its path
        for line in by_kind.get("tensor", ()):
            self._tensors[line["tensor"]] = self._known(line)

    def all(self) -> tuple[ModuleCall, ...]:
        return tuple([self._call(line, self._ends.get(line["begin"])) for line in self._begins])

    def _call(self, begin: Mapping[str, Any], end: Mapping[str, Any] | None) -> ModuleCall:
        inputs, other_inputs = self._leaves(begin)
        outputs, other_outputs = ((), {}) if end is None else self._leaves(end)
        return ModuleCall(
            index=begin["begin"],
            path=begin["path"],
            class_name=begin["class"],
            number=begin["number"],
            parent=begin["parent"],
            inputs=inputs,
            outputs=outputs,
            other_inputs=other_inputs,
            other_outputs=other_outputs,
            error=UNENDED if end is None else end["error"],
            thread=begin["thread"],
        )

    def _leaves(self, line: Mapping[str, Any]) -> tuple[tuple[TensorRecord, ...], dict[str, Any]]:
        if line["layout"] is None:  # nothing was returned, or it could not be flattened
            return (), {}
        layout = self._layouts[line["layout"]]
        pairs = zip(layout["tensors"], line["tensors"], strict=True)
        others = {**layout["empty"], **dict(zip(layout["others"], line["others"], strict=True))}
        return tuple([TensorRecord.of(path=path, **self._tensors[number]) for path, number in pairs]), others

    def _known(self, line: dict[str, Any]) -> dict[str, Any]:
        shape = tuple(map(int, line["shape"]))
        if "as" in line:
            return self._tensors[line["as"]] | {"shape": shape}
        stored = self._stored.get(line["tensor"])
        known: dict[str, Any] = {"shape": shape, "dtype": str(line["dtype"]), "device": str(line["device"])}
        known |= {"key": None if stored is None else str(stored["key"])}
        if "hash" in line:
            known |= {name: line[name] for name in DERIVED}
            return known | {name: float(known[name]) for name in _STATISTICS if known[name] is not None}
        if stored is None:
            raise ValueError(f"tensor {line['tensor']} has neither statistics nor values")

        @functools.cache
        def derive() -> dict[str, Any]:
            measured = measure(self._index.tensor(stored))
            return {**measured.statistics._asdict(), "hash": measured.hash}

        return known | {"derive": derive}


class _DataFile:
    """The data file of a trace; parts of it are read when they are used."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                # A private mapping, so that tensors read from it are writable and the file does not change.
                self._memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        except (OSError, ValueError) as error:
            raise DestinationError("The values of a trace cannot be read.", where=str(path), got=error) from error
        self._start = HEADER_LENGTH + int.from_bytes(self._memory[:HEADER_LENGTH], "little")

    def read(self, offset: int, size: int) -> memoryview:
        """Returns bytes of the data; the offset counts from the end of the header.

        Raises:
            ValueError: if there are fewer bytes.
        """
        part = self._memory[self._start + offset : self._start + offset + size]
        if offset < 0 or len(part) != size:
            raise ValueError(f"expected {size} bytes at {offset}, got {len(part)}")
        return part
