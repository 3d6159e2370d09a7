"""Tracks which captured call the running code belongs to, across threads and asyncio tasks.

Tasks inherit the open captures with their context. Threads do not (only Python 3.14 and later can pass a context on),
so while a capture is open, starting a thread and submitting work to a thread pool carry it over. Both functions are
restored afterwards.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar

FrameT = TypeVar("FrameT")  # a `Frame`, or the frame of a trace, which also has a collector


class Frame:
    """One call of an observed model, or everything outside of calls, in a thread or task and those that it starts.

    Attributes:
        collector: The collector of this call; None once the call has ended.
        record: The record for its values; None once the call has ended.
        handled: The exception that was being handled when the call began.
        depth: How many calls of the model by itself are open inside this call.
    """

    def __init__(self, collector: Any, record: Any, handled: BaseException | None = None) -> None:
        self.collector, self.record = collector, record
        self.handled = handled
        self.depth = 0


_frames: ContextVar[tuple[Any, ...] | None] = ContextVar("exportkit_capture", default=None)
_started_in: weakref.WeakKeyDictionary[threading.Thread, tuple[Frame, ...]] = weakref.WeakKeyDictionary()


def frames() -> tuple[Frame, ...] | None:
    """Returns the frames of open captures around the running code, or None if it is unknown what started it."""
    found = _frames.get()
    return _started_in.get(threading.current_thread()) if found is None else found


def push(frame: FrameT) -> FrameT:
    """Opens a frame for the running code and for what it starts, and returns the frame."""
    _frames.set((*(other for other in frames() or () if other.collector is not None), frame))
    return frame


def pop(frame: object) -> None:
    """Closes a frame, in any order. A frame that other code opened stays in place but is dead."""
    _frames.set(tuple(other for other in frames() or () if other is not frame))


class _Carrying:
    """Carries frames into threads for as long as it is in use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._start: Any = None
        self._submit: Any = None

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._put_in()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._take_out()

    def _put_in(self) -> None:
        start, submit = threading.Thread.start, ThreadPoolExecutor.submit

        def carrying_start(thread: threading.Thread) -> None:
            _started_in[thread] = frames() or ()
            start(thread)

        def carrying_submit(pool: ThreadPoolExecutor, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
            return submit(pool, _run_in, frames() or (), fn, *args, **kwargs)

        self._start, self._submit = (start, carrying_start), (submit, carrying_submit)
        threading.Thread.start = carrying_start  # type: ignore[method-assign, assignment]
        ThreadPoolExecutor.submit = carrying_submit  # type: ignore[method-assign, assignment]

    def _take_out(self) -> None:
        """Restores the original, unless other code has replaced it since."""
        for owner, name, (before, ours) in (
            (threading.Thread, "start", self._start),
            (ThreadPoolExecutor, "submit", self._submit),
        ):
            if vars(owner)[name] is ours:
                setattr(owner, name, before)
        self._start = self._submit = None


def _run_in(frames: tuple[Frame, ...], fn: Any, /, *args: Any, **kwargs: Any) -> Any:
    token = _frames.set(frames)
    try:
        return fn(*args, **kwargs)
    finally:
        _frames.reset(token)


carried_into_threads = _Carrying().used
