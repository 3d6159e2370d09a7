"""How much memory the snapshots hold, and how much they may.

In comes the memory of a snapshot that is about to be made; out goes a share of what is allowed, if there is room.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

# Pieces of memory in bytes, each with its address where snapshots share it, so that it counts once; else with None.
Parts = list[tuple[int | None, int]]


class Share(NamedTuple):
    """Memory that was granted."""

    memory: Memory
    parts: Parts

    def give_back(self) -> None:
        """Lets others have it."""
        self.memory.give_back(self.parts)


class Memory:
    """Counts bytes up to a limit.

    Args:
        limit: Most bytes; None to grant everything and count nothing.
        held: What is held already.
    """

    def __init__(self, limit: int | None, held: Parts) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._held = 0
        self._sharers: Counter[int] = Counter()
        self._uncounted = Share(self, [])
        self._add(held)

    def take(self, wanted: Callable[[], Parts]) -> Share | None:
        """Returns a share of as much as is wanted, or None if there is no room for it."""
        if self.limit is None:
            return self._uncounted
        parts = wanted()
        with self._lock:
            self._add(parts)
            if self._held <= self.limit:
                return Share(self, parts)
            self._remove(parts)
        return None

    def give_back(self, parts: Parts) -> None:
        """Lets others have what was granted."""
        with self._lock:
            self._remove(parts)

    def _add(self, parts: Parts) -> None:
        for address, size in parts:
            if address is None or not self._sharers[address]:
                self._held += size
            if address is not None:
                self._sharers[address] += 1

    def _remove(self, parts: Parts) -> None:
        for address, size in parts:
            if address is not None:
                self._sharers[address] -= 1
            if address is None or not self._sharers[address]:
                self._held -= size
