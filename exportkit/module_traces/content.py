"""Reads the folder of a trace. In comes the path of an index; out comes its `Content`. Nothing is executed.

The last line may be cut short, and calls may have no end: the recording was ended by force, or goes on. Any other line
that makes no sense is damage, and an error.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exportkit.errors import DestinationError, TraceError
from exportkit.module_traces.files import FORMAT, HEADER_LENGTH, INDEX, TENSORS, VERSION
from exportkit.module_traces.forms import as_tensor
from exportkit.module_traces.measure import measure
from exportkit.module_traces.records import ModuleCall, TensorRecord

UNENDED = "the recording ended inside this call"


@dataclass(frozen=True)
class Content:
    """What an index holds.

    Attributes:
        index: Its path.
        size: How long it was when it was read.
        metadata: Its first line.
        lines: The other lines.
        finished: Its last line, if the recording ended.
    """

    index: Path
    size: int
    metadata: Mapping[str, Any]
    lines: list[dict[str, Any]]
    finished: Mapping[str, Any] | None

    def is_current(self) -> bool:
        """Returns whether nothing was written since."""
        return self.finished is not None or self.index.stat().st_size == self.size

    @functools.cached_property
    def problems(self) -> tuple[str, ...]:
        """Why the trace is incomplete."""
        if self.finished is None:
            return ("The recording did not end: calls, or parts of the last one, are missing.",)
        return tuple(map(str, self.finished["problems"]))

    @functools.cached_property
    def data(self) -> DataFile:
        """The data file."""
        return DataFile(self.index.with_name(TENSORS))

    @functools.cached_property
    def stored(self) -> dict[str, Mapping[str, Any]]:
        """Where the values of tensors are, by their key."""
        return {line["key"]: line for line in self.lines if "key" in line}

    def tensor(self, stored: Mapping[str, Any]) -> torch.Tensor:
        """Returns values that are stored, from the line that says where.

        Raises:
            TraceError: if the data file is damaged.
        """
        data = self.data
        try:
            return as_tensor(stored, data.read)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise TraceError(
                "A tensor cannot be read from this trace.",
                where=f"{stored.get('key')} in {self.index.parent}",
                got=error,
                hint="the data file was changed or cut short.",
            ) from error

    @functools.cached_property
    def calls(self) -> tuple[ModuleCall, ...]:
        """The calls, in the order in which they began."""
        try:
            return _Calls(self).all()
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise damaged(self.index, f"{type(error).__name__}: {error}") from error


def read_content(index: Path) -> Content:
    """Returns what an index holds.

    Raises:
        DestinationError: if there is none.
        TraceError: if it is damaged, or of another version.
    """
    try:
        data = index.read_bytes()
    except OSError as error:
        raise DestinationError(
            "No trace can be read here.",
            where=str(index.parent),
            expected=f"a directory with {INDEX}, as trace_model(model, directory) writes it",
            got=error,
        ) from error
    *whole, _cut = data.split(b"\n")  # a line that was written to its end ends with a newline
    lines = [_parsed(index, number, line) for number, line in enumerate(whole, start=1)]
    metadata = lines.pop(0) if lines else {}
    if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
        raise TraceError(
            "This is no trace that this version reads.",
            where=str(index),
            expected=f"{FORMAT} {VERSION}",
            got=f"{metadata.get('format')} {metadata.get('version')}",
        )
    finished = lines.pop() if lines and "finished" in lines[-1] else None
    return Content(index, len(data), metadata, lines, finished)


def _parsed(index: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise damaged(index, f"line {number}: {error}") from error
    if not isinstance(found, dict):
        raise damaged(index, f"line {number}: {str(found)[:100]}")
    return found


def damaged(index: Path, cause: object) -> TraceError:
    """Returns the error for an index that is not what was written."""
    return TraceError(
        "This trace is damaged.", where=str(index), got=cause, hint="the file was changed: record the trace again."
    )


class _Calls:
    """Makes calls of the lines of an index."""

    def __init__(self, content: Content) -> None:
        self._content = content
        by_kind: dict[str, list[dict[str, Any]]] = {"begin": []}
        for line in content.lines:
            by_kind.setdefault(next(iter(line)), []).append(line)
        self._begins = by_kind["begin"]
        self._ends, self._layouts, stored = (
            {line[kind]: line for line in by_kind.get(kind, ())} for kind in ("end", "layout", "stored")
        )
        self._stored = stored | {line["tensor"]: line for line in by_kind.get("tensor", ()) if "key" in line}
        if self._stored:
            with contextlib.suppress(DestinationError):  # which comes when a value is asked for
                content.data  # noqa: B018  # from now on it is there, even if the folder is removed
        self._tensors: dict[int, Callable[[str], TensorRecord]] = {}
        for line in by_kind.get("tensor", ()):
            self._tensors[line["tensor"]] = self._maker(line)

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
        if line["layout"] is None:  # nothing was returned, or it could not be taken apart
            return (), {}
        layout, tensors = self._layouts[line["layout"]], self._tensors
        pairs = zip(layout["tensors"], line["tensors"], strict=True)
        others = {**layout["empty"], **dict(zip(layout["others"], line["others"], strict=True))}
        return tuple([tensors[number](path) for path, number in pairs]), others

    def _maker(self, line: dict[str, Any]) -> Callable[[str], TensorRecord]:
        """What makes the record of a tensor at a path."""
        shape = tuple(map(int, line["shape"]))
        if "as" in line:
            return functools.partial(_reshaped, self._tensors[line["as"]], shape)
        stored = self._stored.get(line["tensor"])
        known: dict[str, Any] = {"shape": shape, "dtype": str(line["dtype"]), "device": str(line["device"])}
        known |= {"key": None if stored is None else str(stored["key"])}
        if "hash" in line:
            known |= {name: _number(line[name]) for name in ("mean", "std", "min", "max")}
            return functools.partial(TensorRecord, **known, **{name: line[name] for name in ("nan", "inf", "hash")})
        if stored is None:
            raise ValueError(f"tensor {line['tensor']} has neither statistics nor values")
        derive = functools.cache(functools.partial(_derived, self._content, stored))
        return functools.partial(TensorRecord.of_stored, **known, derive=derive)


def _reshaped(make: Callable[[str], TensorRecord], shape: tuple[int, ...], path: str) -> TensorRecord:
    record = make(path)
    vars(record)["shape"] = shape
    return record


def _derived(content: Content, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Statistics and hash of values that are stored."""
    measured = measure(content.tensor(stored))
    return {**measured.statistics._asdict(), "hash": measured.hash}


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


class DataFile:
    """The data file of a trace, whose parts are read when they are used.

    Args:
        path: Its path.

    Raises:
        DestinationError: if it is not there.
    """

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                # What is read from it can be written to, as any tensor can; the file does not change.
                self._memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        except (OSError, ValueError) as error:
            raise DestinationError("The values of a trace cannot be read.", where=str(path), got=error) from error
        self._start = HEADER_LENGTH + int.from_bytes(self._memory[:HEADER_LENGTH], "little")

    def read(self, offset: int, size: int) -> memoryview:
        """Returns bytes of the data, counted from the end of the header.

        Raises:
            ValueError: if there are not as many.
        """
        part = self._memory[self._start + offset : self._start + offset + size]
        if offset < 0 or len(part) != size:
            raise ValueError(f"expected {size} bytes at {offset}, and there are {len(part)}")
        return part
