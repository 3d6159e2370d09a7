"""The two files of a trace: an index of JSON lines, and the values as SafeTensors.

In come lines and bytes while a model runs; out comes a folder that can be read at any time, after a crash, too:
exportkit/module_traces/content.py reads it. The format, line by line:

    {"format": "exportkit-trace", "version": 1, "model": ..., "values": ..., "written_by": {...}}
    {"layout": 0, "tensors": [paths], "others": [paths], "empty": {...}}  leaves of values that have one structure
    {"tensor": 0, "shape": ..., "dtype": ..., "mean": ..., "hash": ...}   a tensor that was not there before, ...
    {"tensor": 0, "shape": ..., "key": ..., "kind": ..., "parts": {name: {"offset": ..., ...}}}   ... or is stored
    {"tensor": 7, "as": 3, "shape": ...}                                  the content of another one, in another shape
    {"stored": 0, "key": ..., "kind": ..., "parts": {...}}                where its values are, if that is decided later
    {"begin": 0, "path": ..., "layout": 0, "tensors": [0, 7], "others": [...], ...}   a call, and what it was given
    {"end": 0, "layout": 1, "tensors": [8], "others": [...], "error": null}           and what it returned
    {"finished": true, "problems": []}

Numbers that JSON lacks are texts ("nan", "inf"). The data file is one of `SafeTensors
<https://huggingface.co/docs/safetensors>`_: place for its header is kept at the beginning, and filled in the end.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from exportkit.errors import DestinationError

INDEX, TENSORS = "calls.jsonl", "tensors.safetensors"
FORMAT, VERSION = "exportkit-trace", 1
HEADER_LENGTH = 8  # bytes, at the very beginning
_LEAST_RESERVED, _MOST_RESERVED = 2**20, 2**24  # bytes
_COPIED = 2**20  # bytes at a time, where the data have to make room for a longer header

encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
quoted = json.encoder.encode_basestring_ascii  # a text alone, in a tenth of the time


class TraceFiles:
    """The files of a trace that is being recorded.

    Args:
        folder: A directory; it is created, and a trace in it is replaced.
        room: Bytes to keep for the header of the data file.

    Raises:
        DestinationError: if the files cannot be written there, or would replace others.
    """

    def __init__(self, folder: Path, room: int) -> None:
        check_destination(folder)
        self._header: dict[str, Any] = {}
        self._reserved = 0
        self._named = 0  # how far the data have names
        self._room = -(-room // 8) * 8
        self._size = 0
        self._data_path = folder / TENSORS
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._index = _new_file(folder / INDEX)
            self._data = _reused_file(self._data_path) or _new_file(self._data_path)
            _write_header(self._data, b"{}", self._room)
        except OSError as error:
            raise DestinationError("A trace cannot be written here.", where=str(folder), got=error) from error

    @property
    def offset(self) -> int:
        """Where the next bytes go, counted from the end of the header."""
        return self._size

    def write_lines(self, lines: list[str]) -> None:
        """Adds lines to the index: all of them, or if they cannot be written none."""
        end = self._index.tell()
        try:
            _write_all(self._index, memoryview("".join([f"{line}\n" for line in lines]).encode()))
        except OSError:
            self._index.seek(end)
            self._index.truncate()
            raise

    def write_data(self, data: Any) -> None:
        """Adds bytes to the data."""
        if self._size + len(data) > self._reserved:
            self._reserve()
        _write_all(self._data, data)
        self._size += len(data)

    def _reserve(self) -> None:
        """Asks for disk space ahead, as much as there is already: to get it piece by piece takes longer."""
        more = min(max(self._size, _LEAST_RESERVED), _MOST_RESERVED)
        try:
            os.posix_fallocate(self._data.fileno(), HEADER_LENGTH + self._room + self._size, more)
            self._reserved = self._size + more
        except (AttributeError, OSError):  # it is not everywhere, or there is not as much left
            self._reserved = sys.maxsize

    def name_data(self, name: str, dtype: str, shape: list[int], offset: int) -> None:
        """Names the bytes from an offset on, for the header."""
        self._name_rest(offset)
        self._header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, self._size]}
        self._named = self._size

    def _name_rest(self, end: int) -> None:
        """Names what was written of a tensor that could not be written to its end: the format allows no holes."""
        if self._named < end:
            size = end - self._named
            self._header[f"unusable.{self._named}"] = {
                "dtype": "U8",
                "shape": [size],
                "data_offsets": [self._named, end],
            }
            self._named = end

    def write_header(self) -> None:
        """Writes the header of the data file; if it needs more room than was kept, into a new file."""
        self._name_rest(self._size)
        self._data.truncate(HEADER_LENGTH + self._room + self._size)  # of what could not be written as a whole
        header = encode(self._header).encode()
        if len(header) <= self._room:
            self._data.seek(0)
            _write_header(self._data, header, self._room)
            return
        longer = self._data_path.with_suffix(".longer")
        try:
            with longer.open("xb", buffering=0) as file:
                _write_header(file, header, -(-len(header) // 8) * 8)
                self._data.seek(HEADER_LENGTH + self._room)
                while piece := self._data.read(_COPIED):
                    _write_all(file, memoryview(piece))
            os.replace(longer, self._data_path)
        finally:
            longer.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the files."""
        self._index.close()
        self._data.close()


def _new_file(path: Path) -> Any:
    """A file in the place of one that may be there: whoever has that one open keeps it."""
    path.unlink(missing_ok=True)
    return path.open("x+b", buffering=0)


def _reused_file(path: Path) -> Any:
    """The file that is there, to be written over; None if there is none, or somebody else has it open or linked.

    To give back the memory in which the system has it, and to get as much again, takes longer than all else in here.
    """
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+b", buffering=0)
    except (AttributeError, OSError):
        return None
    if _has_no_other_user(file):
        return file
    file.close()
    return None


def _has_no_other_user(file: Any) -> bool:
    try:
        import fcntl

        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)  # refused while the file is open anywhere else
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except (ImportError, AttributeError, OSError):  # only Linux can tell, and not on each file system
        return False
    return os.fstat(file.fileno()).st_nlink == 1


def _write_header(file: Any, header: bytes, room: int) -> None:
    _write_all(file, memoryview(room.to_bytes(HEADER_LENGTH, "little") + header.ljust(room)))


def _write_all(file: Any, data: Any) -> None:
    while len(data):
        data = data[file.write(data) :]


def check_destination(target: Path) -> None:
    """Raises DestinationError unless a trace may be written there: over nothing, or over a trace."""
    try:
        found = sorted(item.name for item in target.iterdir()) if target.exists() else []
        if not found or (INDEX in found and FORMAT in _first_line(target / INDEX)):
            return
    except OSError as error:
        raise DestinationError("A trace cannot be written here.", where=str(target), got=error) from error
    raise DestinationError(
        "A trace is not written over other files.",
        where=str(target),
        expected="a new or empty directory, or one that holds a trace",
        got=", ".join(found[:5]),
        hint="name another directory, or empty this one.",
    )


def _first_line(path: Path) -> str:
    with path.open("rb") as file:
        return file.readline(1000).decode(errors="replace")
