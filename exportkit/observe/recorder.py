"""Records calls of one method: inputs before, outputs after, both and the latency as one record.

The observed run is sacred: whatever fails in here is kept as a problem and reported when observing ends, and the
method returns or raises what it would have without us.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from exportkit import _torch_compat
from exportkit.observe.observation import Call, Failure, Observation
from exportkit.observe.signature import Signature
from exportkit.observe.snapshot import snapshot
from exportkit.trees import Tree, string_type


@dataclass(frozen=True)
class _Begun:
    """What is known of a call while the method runs."""

    index: int
    arguments: dict[str, Tree]
    named: frozenset[str]


_paused = threading.local()


@contextlib.contextmanager
def recording_paused() -> Iterator[None]:
    """Lets this thread call an observed model without being recorded: for exportkit's own runs of it."""
    before = getattr(_paused, "on", False)
    _paused.on = True
    try:
        yield
    finally:
        _paused.on = before


class Recorder:
    """Collects the calls of one method, from any number of threads and models with the same signature."""

    def __init__(self, signature: Signature, method_name: str, model_name: str) -> None:
        self._signature, self._method_name, self._model_name = signature, method_name, model_name
        self._lock = threading.Lock()
        self._calls: dict[int, Call] = {}
        self._failures: list[Failure] = []
        self._problems: list[str] = []
        self._running = 0  # calls that hold a place in the budget and have not ended yet
        self._next_index = 0
        self._limit = 0

    @property
    def signature(self) -> Signature:
        """Parameters of the observed method."""
        return self._signature

    def allow(self, more_calls: int) -> None:
        """Stores up to ``more_calls`` calls beyond those stored so far."""
        with self._lock:
            self._limit = len(self._calls) + more_calls

    def observation(self) -> Observation:
        """Returns what was recorded so far."""
        with self._lock:
            calls = tuple(self._calls[index] for index in sorted(self._calls))
            renumbered = tuple(replace(call, index=number) for number, call in enumerate(calls))
            return Observation(
                self._signature,
                renumbered,
                tuple(self._failures),
                tuple(self._problems),
                self._method_name,
                self._model_name,
            )

    def call(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs ``method(*args, **kwargs)``, records it if there is room, and returns what it returned."""
        index = self._take_place()
        if index is None:
            return method(*args, **kwargs)
        begun = self._guarded(lambda: self._begin(index, args, kwargs))
        started = time.perf_counter()
        try:
            result = method(*args, **kwargs)
        except BaseException as error:
            self._fail(error, args, kwargs)
            raise
        latency = time.perf_counter() - started
        call = self._guarded(lambda: self._end(begun, result, latency)) if begun is not None else None
        with self._lock:
            self._running -= 1
            if call is not None:
                self._calls[call.index] = call
        return result

    def _take_place(self) -> int | None:
        if self._is_full() or getattr(_paused, "on", False) or _torch_compat.is_tracing():
            return None
        with self._lock:
            if self._is_full():
                return None
            self._running += 1
            self._next_index += 1
            return self._next_index - 1

    def _is_full(self) -> bool:
        return len(self._calls) + self._running >= self._limit

    def _begin(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Begun:
        bound = self._signature.bind(args, kwargs)
        named = frozenset(name for name in bound if name in kwargs or name == self._signature.var_keyword)
        return _Begun(index, {name: snapshot(value) for name, value in bound.items()}, named)

    def _end(self, begun: _Begun, result: Any, latency: float) -> Call:
        return Call(begun.index, begun.arguments, begun.named, snapshot(result), latency)

    def _fail(self, error: BaseException, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        text = self._guarded(lambda: string_type(self._signature.bind(args, kwargs), with_shape=True))
        with self._lock:
            self._running -= 1
            self._failures.append(Failure(f"{type(error).__name__}: {error}", text or "?"))

    def _guarded(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except Exception as error:
            with self._lock:
                self._problems.append(f"{type(error).__name__}: {error}")
            return None
