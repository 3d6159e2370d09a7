"""Writes the two files of a trace: an index of JSON lines, and the values as SafeTensors.

The folder can be read at any time, also after a crash; `trace_data` reads it. The format, line by line:

    {"format": "exportkit-trace", "version": 1, "model": ..., "values": ..., "written_by": {...}}
    {"layout": 0, "tensors": [paths], "others": [paths], "empty": {...}}  leaves of values that have one structure
    {"tensor": 0, "shape": ..., "dtype": ..., "mean": ..., "hash": ...}   a tensor that was not seen before, ...
    {"tensor": 0, "shape": ..., "key": ..., "kind": ..., "parts": {name: {"offset": ..., ...}}}   ... or is stored
    {"tensor": 7, "as": 3, "shape": ...}                                  the content of tensor 3, in another shape
    {"stored": 0, "key": ..., "kind": ..., "parts": {...}}                where its values are, if stored later
    {"begin": 0, "path": ..., "layout": 0, "tensors": [0, 7], "others": [...], ...}   a call, and what it was given
    {"end": 0, "layout": 1, "tensors": [8], "others": [...], "error": null}           and what it returned
    {"finished": true, "problems": []}

Numbers that JSON lacks are texts ("nan", "inf"). The data file is in the format of `SafeTensors
<https://huggingface.co/docs/safetensors>`_: space for its header is reserved at the beginning, and filled in at the
end.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from exportkit.errors import DestinationError
from exportkit.files import check_folder

INDEX, TENSORS = "calls.jsonl", "tensors.safetensors"
FORMAT, VERSION = "exportkit-trace", 1
HEADER_LENGTH = 8  # bytes, at the very beginning
_LEAST_RESERVED, _MOST_RESERVED = 2**20, 2**24  # bytes
_COPIED = 2**20  # bytes at a time, if the data have to be moved behind a longer header

encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
quoted = json.encoder.encode_basestring_ascii  # for one string, ten times as fast


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
        """Adds lines to the index: all of them, or none if they cannot be written."""
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
        """Reserves as much disk space again as is used: many small requests take longer."""
        more = min(max(self._size, _LEAST_RESERVED), _MOST_RESERVED)
        try:
            os.posix_fallocate(self._data.fileno(), HEADER_LENGTH + self._room + self._size, more)
            self._reserved = self._size + more
        except (AttributeError, OSError):  # not available on every system, or the disk has less left
            self._reserved = sys.maxsize

    def name_data(self, name: str, dtype: str, shape: list[int], offset: int) -> None:
        """Names the bytes from an offset on, for the header."""
        self._name_rest(offset)
        self._header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, self._size]}
        self._named = self._size

    def _name_rest(self, end: int) -> None:
        """Names the bytes of tensors whose writing failed halfway: the format allows no holes."""
        if self._named < end:
            size = end - self._named
            self._header[f"unusable.{self._named}"] = {
                "dtype": "U8",
                "shape": [size],
                "data_offsets": [self._named, end],
            }
            self._named = end

    def write_header(self) -> None:
        """Writes the header of the data file; if it is longer than the reserved space, into a new file."""
        self._name_rest(self._size)
        self._data.truncate(HEADER_LENGTH + self._room + self._size)  # drops a tensor whose writing failed
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
    """A new file in place of an existing one; processes that have that one open keep it."""
    path.unlink(missing_ok=True)
    return path.open("x+b", buffering=0)


def _reused_file(path: Path) -> Any:
    """The existing file, to be written over; None if there is none, or it is open or linked elsewhere.

    Freeing the memory in which the system caches a file, and getting as much again, takes longer than all other work
    of a recording.
    """
    try:
        import fcntl

        file = os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+b", buffering=0)
    except (ImportError, AttributeError, OSError):  # only Linux can tell whether the file is open elsewhere
        return None
    with contextlib.suppress(AttributeError, OSError):  # also where the file system cannot tell
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        if os.fstat(file.fileno()).st_nlink == 1:
            return file
    file.close()
    return None


def _write_header(file: Any, header: bytes, room: int) -> None:
    _write_all(file, memoryview(room.to_bytes(HEADER_LENGTH, "little") + header.ljust(room)))


def _write_all(file: Any, data: Any) -> None:
    while len(data):
        data = data[file.write(data) :]


def check_destination(target: Path) -> None:
    """Raises DestinationError unless a trace may be written there: over nothing, or over a trace."""
    check_folder(target, "a trace", _is_trace)


def _is_trace(folder: Path) -> bool:
    if not (folder / INDEX).exists():
        return False
    with (folder / INDEX).open("rb") as file:
        return FORMAT in file.readline(1000).decode(errors="replace")
