"""Replaces attributes of a class or module for a while, and puts back what was there, in any order of leaving."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

_lock = threading.RLock()
_Owner = type | ModuleType
_open: dict[tuple[_Owner, str], list[tuple[object, Any]]] = {}  # who replaced an attribute, and by what, in order
_originals: dict[tuple[_Owner, str], Any] = {}
_ABSENT = object()


def original_attribute(owner: Any, name: str) -> Any:
    """Returns what an attribute is when no block that replaces it is open."""
    with _lock:
        return _originals[owner, name] if (owner, name) in _originals else getattr(owner, name)


def is_open(owner: Any, name: str) -> bool:
    """Returns whether a block that replaces an attribute is open."""
    return (owner, name) in _open


@contextlib.contextmanager
def replaced_attributes(cls: _Owner, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Gives a class or module other attributes for the time of a ``with`` block.

    Blocks may overlap in any order and in several threads: the latest one still open decides, and with the last one the
    class is as it was.
    """
    token = object()
    for name, value in attributes.items():
        _push(cls, name, token, value)
    try:
        yield
    finally:
        for name in attributes:
            _pop(cls, name, token)


def _push(cls: _Owner, name: str, token: object, value: Any) -> None:
    with _lock:
        if not _open.setdefault((cls, name), []):
            _originals[cls, name] = vars(cls).get(name, _ABSENT)
        _open[cls, name].append((token, value))
        setattr(cls, name, value)


def _pop(cls: _Owner, name: str, token: object) -> None:
    with _lock:
        rest = [entry for entry in _open[cls, name] if entry[0] is not token]
        _open[cls, name] = rest
        if rest:
            setattr(cls, name, rest[-1][1])
            return
        del _open[cls, name]
        original = _originals.pop((cls, name))
        if original is _ABSENT:
            delattr(cls, name)
        else:
            setattr(cls, name, original)
