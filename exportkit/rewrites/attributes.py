"""Replaces attributes of something for a while, and puts back what was there, in any order of leaving."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

_lock = threading.RLock()
_Owner = Any  # a class, a module of Python, or another object with attributes of its own
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
def replaced_attributes(owner: _Owner, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Gives a class, a module or an object other attributes for the time of a ``with`` block.

    Blocks may overlap in any order and in several threads: the latest one still open decides, and with the last one the
    owner is as it was.
    """
    token = object()
    for name, value in attributes.items():
        _push(owner, name, token, value)
    try:
        yield
    finally:
        for name in attributes:
            _pop(owner, name, token)


def _push(owner: _Owner, name: str, token: object, value: Any) -> None:
    with _lock:
        if not _open.setdefault((owner, name), []):
            _originals[owner, name] = vars(owner).get(name, _ABSENT)
        _open[owner, name].append((token, value))
        setattr(owner, name, value)


def _pop(owner: _Owner, name: str, token: object) -> None:
    with _lock:
        rest = [entry for entry in _open[owner, name] if entry[0] is not token]
        _open[owner, name] = rest
        if rest:
            setattr(owner, name, rest[-1][1])
            return
        del _open[owner, name]
        original = _originals.pop((owner, name))
        if original is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
