"""Collects the values of one call, and returns them as tuples by key.

A value is the tensor that the module returned, so gradients flow through it. If a layer changes it in place later, the
value is a copy from before the change, which shares memory until then.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from exportkit._torch_compat.memory import copies_on_write, memory_address, version_of
from exportkit._torch_compat.tracing import is_tracing, is_transformed
from exportkit.errors import CaptureError
from exportkit.module_outputs.specs import Match


class Selection:
    """Which values of a key to keep: positions, where negative ones count from the end. All others become None."""

    def __init__(self, indices: Iterable[int]) -> None:
        self._indices = frozenset(indices)
        self._tail = max((-index for index in self._indices if index < 0), default=0)

    def dropped(self, count: int) -> int | None:
        """Returns the position that is certainly not needed once there are ``count`` values, or None."""
        position = count - 1 - self._tail
        return position if position >= 0 and position not in self._indices else None

    def __call__(self, position: int, count: int) -> bool:
        """Returns whether a value out of ``count`` is needed."""
        return position in self._indices or position - count in self._indices


@dataclasses.dataclass(slots=True)
class _Entry:
    """A value, and a copy in case it is changed in place after ``version``; if ``shared``, both still share memory.

    The version is None for tensors of inference mode, which do not count changes; the copy is used for them.
    """

    value: Any
    position: int
    thread: int
    version: int | None = None
    copy: torch.Tensor | None = None
    shared: bool = False

    def unchanged(self) -> Any:
        if self.copy is None:
            return self.value
        unchanged = self.version is not None and self.version == version_of(self.value) and self._is_same()
        return self.value if unchanged else self.copy

    def _is_same(self) -> bool:
        """Whether it was not changed through ``data`` either, which does not change the version."""
        if not self.shared or self.copy is None:
            return True
        here, there = (memory_address(tensor) for tensor in (self.value, self.copy))
        return (here is not None and here == there) or torch.equal(self.value, self.copy)


class Record:
    """Collects the values of one call, from any number of threads.

    Args:
        keys: The keys.
        selections: Which values of a key to keep.
        traced: Whether the whole call is traced; None checks each value, which takes longer.
    """

    def __init__(
        self, keys: Iterable[str], selections: Mapping[str, Selection] | None = None, traced: bool | None = None
    ) -> None:
        self._traced = traced
        self._entries: dict[str, list[_Entry]] = {key: [] for key in keys}
        self._selections = selections or {}
        self._without_value: dict[str, list[str]] = {}

    def is_empty(self, key: str) -> bool:
        """Returns whether the key has no value yet."""
        return not self._entries[key]

    def add(self, match: Match, value: Any) -> None:
        """Adds a value; None is ignored."""
        key = match.target.key
        if value is None:
            self._without_value.setdefault(key, []).append(match.path)
            return
        entries = self._entries[key]
        entries.append(_entry(value, match.position, self._traced))
        if key in self._selections:
            dropped = self._selections[key].dropped(len(entries))
            if dropped is not None:
                entries[dropped] = _entry(None, match.position)

    def is_blank(self) -> bool:
        """Returns whether no module was called at all."""
        return not any(self._entries.values()) and not self._without_value

    def finish(self) -> None:
        """Releases the copies that were not needed."""
        for entries in self._entries.values():
            for entry in entries:
                entry.value, entry.copy = entry.unchanged(), None

    def values(self) -> dict[str, tuple[Any, ...]]:
        """Returns the values collected so far.

        Raises:
            CaptureError: if modules were called, and none of them returned a value.
        """
        self.require_values()
        return {key: self._of(key) for key in self._entries}

    def require_values(self) -> None:
        """Raises for a call whose modules returned no values.

        Raises:
            CaptureError: naming the modules.
        """
        for key, paths in self._without_value.items():
            if not self._entries[key]:
                raise CaptureError(
                    f"Nothing to capture as {key!r}: the modules return None there.",
                    where=", ".join(paths[:3]),
                    hint="only eager attention returns weights: load the model with "
                    'attn_implementation="eager", or choose another index with OutputRecorder.',
                )

    def _of(self, key: str) -> tuple[Any, ...]:
        entries = _in_order(list(self._entries[key]))
        selected = self._selections.get(key)
        return tuple(
            entry.unchanged() if selected is None or selected(i, len(entries)) else None
            for i, entry in enumerate(entries)
        )


def pick(output: Any, match: Match) -> Any:
    """Returns the part of a module's output to record.

    Raises:
        CaptureError: if the output has no such part.
    """
    index = match.target.recorder.index
    if isinstance(output, torch.Tensor):
        return output
    if type(output) is tuple and type(index) is int and 0 <= index < len(output):  # the usual case
        return output[index]
    by_name = _parts(output)
    if by_name is None:
        return output
    if isinstance(index, str) and index in by_name:
        return by_name[index]
    parts = list(by_name.values())
    if isinstance(index, int) and -len(parts) <= index < len(parts):
        return parts[index]
    raise CaptureError(
        f"A module has no output {index!r} to capture as {match.target.key!r}.",
        where=match.path or type(match.module).__name__,
        got=f"{type(output).__name__} with {len(parts)}: {', '.join(map(str, by_name))}",
        hint=f"say which one: OutputRecorder({type(match.module).__name__}, index=0).",
    )


def first_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the first tensor that a module is called with: by position, as ``hidden_states``, or with any name."""
    candidates = [*args, kwargs.get("hidden_states"), *kwargs.values()]
    for value in candidates:
        if isinstance(value, torch.Tensor):
            return value
    return None


def _parts(output: Any) -> Mapping[Any, Any] | None:
    """The outputs by name or position, or None for a single output."""
    if isinstance(output, Mapping):
        return output
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return dict(zip(output._fields, output, strict=True))
    if isinstance(output, list | tuple):
        return dict(enumerate(output))
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    return None


def _entry(value: Any, position: int, traced: bool | None = None) -> _Entry:
    if torch.compiler.is_dynamo_compiling():  # it supports neither versions nor threads
        return _Entry(value.clone() if isinstance(value, torch.Tensor) else value, position, 0)
    thread = threading.get_ident()
    if not isinstance(value, torch.Tensor):
        return _Entry(value, position, thread)
    if traced is None or is_transformed():
        traced = is_tracing()
    copy = None if traced else copies_on_write([value])[0]
    return _Entry(value, position, thread, version_of(value), value.clone() if copy is None else copy, copy is not None)


def _in_order(entries: list[_Entry]) -> list[_Entry]:
    """Entries in the order of computation; if modules ran once each in several threads, in the order of the model."""
    positions = {entry.position for entry in entries}
    if len({entry.thread for entry in entries}) > 1 and len(positions) == len(entries):
        return sorted(entries, key=lambda entry: entry.position)
    return entries
