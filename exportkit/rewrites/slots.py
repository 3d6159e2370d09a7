"""Places that hold a class or a module, replaced for a while, and what was there put back in any order of leaving.

`replaced_attributes` does the same for attributes; a slot is what a module is made of: its own class, or a child.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

_lock = threading.RLock()
_open: dict[Slot, list[tuple[object, Any]]] = {}
_originals: dict[Slot, Any] = {}


@dataclass(frozen=True)
class ClassOf:
    """The class of a live module."""

    module: torch.nn.Module

    def read(self) -> type:
        """Returns what it holds now."""
        return type(self.module)

    def write(self, cls: Any) -> None:
        """Puts another class there."""
        object.__setattr__(self.module, "__class__", cls)


@dataclass(frozen=True)
class ChildOf:
    """A module's child of that name."""

    parent: torch.nn.Module
    name: str

    def read(self) -> Any:
        """Returns what it holds now."""
        return self.parent.get_submodule(self.name)

    def write(self, child: Any) -> None:
        """Puts another module there."""
        self.parent.add_module(self.name, child)


class Slot(Protocol):
    """A place that holds something; equal ones are the same place."""

    def read(self) -> Any:
        """Returns what it holds now."""

    def write(self, value: Any, /) -> None:
        """Puts something else there."""


def original_in(slot: Slot) -> Any:
    """Returns what a slot holds when no block that replaces it is open."""
    with _lock:
        return _originals[slot] if slot in _originals else slot.read()


def original_class(module: torch.nn.Module) -> type:
    """Returns the class of a module when no block that replaces it is open."""
    return original_in(ClassOf(module)) if _originals else type(module)


@contextlib.contextmanager
def replaced_slots(replacements: Sequence[tuple[Slot, Any]]) -> Iterator[None]:
    """Puts other classes and children in place for the time of a ``with`` block.

    Blocks may overlap in any order and in several threads: the latest one still open decides, and with the last one
    everything is as it was.
    """
    token = object()
    with contextlib.ExitStack() as stack:
        for slot, value in replacements:
            _push(slot, token, value)
            stack.callback(_pop, slot, token)
        yield


def _push(slot: Slot, token: object, value: Any) -> None:
    with _lock:
        if slot not in _open:
            before = slot.read()
            slot.write(value)
            _originals[slot] = before
            _open[slot] = [(token, value)]
        else:
            slot.write(value)
            _open[slot].append((token, value))


def _pop(slot: Slot, token: object) -> None:
    with _lock:
        rest = [entry for entry in _open[slot] if entry[0] is not token]
        if rest:
            _open[slot] = rest
            slot.write(rest[-1][1])
        else:
            del _open[slot]
            slot.write(_originals.pop(slot))
