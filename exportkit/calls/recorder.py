"""Records calls of one method: the inputs before, the outputs after, and the latency, as one record.

The observed run must not be disturbed: whatever fails here is kept as a problem and reported when observing ends, and
the method returns or raises what it would without a recorder. During a call only snapshots are taken; the trees and
their paths are made when the observation is requested.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import isfinite
from typing import Any, NamedTuple

from exportkit._torch_compat.tracing import autocast_dtypes, is_capturing, is_tracing, random_states
from exportkit.calls.call import Call
from exportkit.calls.observation import Failure, Observation
from exportkit.calls.shape_counter import MOST_SHAPES, Constants, ShapeCounter
from exportkit.calls.signature import Signature
from exportkit.calls.snapshot import Copying, Memory, Share, Snapshot, shape_list
from exportkit.errors import described
from exportkit.trees import join, note_values, string_type, with_changed
from exportkit.trees.flatten import Flattened, flattened, flattened_call
from exportkit.trees.structure import Structure, joined_parts, path_of
from exportkit.trees.tree import lazy_tree

_KEPT = frozenset({bool, int, float, str})  # types of constants that are kept of calls that are not stored

Method = Callable[..., Any]


class _Begun(NamedTuple):
    """What is kept of the inputs while the method runs."""

    number: int
    inputs: Snapshot
    large: frozenset[int]
    share: Share


class _Stored(NamedTuple):
    """One call with its values."""

    inputs: Snapshot
    outputs: Snapshot
    latency: float
    gradients: bool
    autocast: tuple[tuple[str, str], ...]
    draws: bool


class _Paused(threading.local):
    """Whether calls of this thread are not recorded. A class attribute is the default: a failed look-up is slow."""

    on = False


_paused = _Paused()


@contextlib.contextmanager
def recording_paused() -> Iterator[None]:
    """Does not record what this thread calls: for exportkit's own runs of an observed model."""
    before = _paused.on
    _paused.on = True
    try:
        yield
    finally:
        _paused.on = before


class Recorder:
    """Collects the calls of one method, from any number of threads and models with the same signature.

    Attributes:
        signature: Parameters of the observed method.
        seconds: How long all calls took together that returned, stored or not.
        first_seconds: How long the first of them took, which is often slower than the others; 0 if there was none.
    """

    def __init__(self, signature: Signature, method_name: str, model_name: str) -> None:
        self.signature, self._method_name, self._model_name = signature, method_name, model_name
        self._lock = threading.Lock()
        self._stored: dict[int, _Stored] = {}
        self._failures: list[Failure] = []
        self._problems: list[str] = []
        self._limits: list[str] = []
        self._running = 0  # calls to be stored that have not ended yet
        self._next_index = 0
        self._limit = 0
        self._memory = Memory(None, [])
        self._counts_shapes = True
        paths_of = functools.partial(_input_paths, signature), lambda structure: structure.listed().tensors()
        self._counter = ShapeCounter(*paths_of, functools.partial(_constant_path, signature))
        self.seconds = 0.0
        self.first_seconds = 0.0
        self._calls: dict[int, Call] = {}
        self._known: tuple[tuple[int, ...], Observation] | None = None
        self._reading = threading.Lock()

    @property
    def problems(self) -> tuple[str, ...]:
        """What could not be recorded."""
        return tuple(self._problems)

    @property
    def limits(self) -> tuple[str, ...]:
        """Which limits were reached, so that not everything was kept."""
        overflow = f"More than {MOST_SHAPES} different shapes were seen; further ones are not kept."
        return (*self._limits, *([overflow] if self._counter.overflowed else []))

    def allow(self, more_calls: int, counts_shapes: bool = True, max_bytes: int | None = None) -> None:
        """Allows ``more_calls`` further calls to be stored, and ``max_bytes`` of values in total.

        Args:
            more_calls: How many calls to store with their values.
            counts_shapes: Count the shapes of further calls.
            max_bytes: The most memory for the values of all stored calls, including earlier ones.
        """
        with self._lock:
            self._limit = len(self._stored) + more_calls
            self._counts_shapes = counts_shapes
            snapshots = [side for call in self._stored.values() for side in (call.inputs, call.outputs)]
            self._memory = Memory(max_bytes, [part for snapshot in snapshots for part in snapshot.memory()])

    def is_spent(self) -> bool:
        """Returns whether all calls to be stored have ended."""
        return len(self._stored) >= self._limit

    def num_calls(self) -> int:
        """Returns how many calls are stored."""
        return len(self._stored)

    def observation(self) -> Observation:
        """Returns what was recorded so far."""
        with self._reading:
            if self._known is None or self._known[0] != self._state():
                found = self._observation().with_filled_caches()
                self._known = self._state(), found  # making it may meet a problem
            return self._known[1]

    def _state(self) -> tuple[int, ...]:
        kept = (self._stored, self._failures, self._problems, self._limits)
        return *map(len, kept), self._counter.total

    def _observation(self) -> Observation:
        with self._lock:
            indices = sorted(self._stored)
        made = [call for index in indices if (call := self._guarded(functools.partial(self._call, index))) is not None]
        return Observation(
            self.signature,
            tuple([c if c.index == number else replace(c, index=number) for number, c in enumerate(made)]),
            tuple(self._failures),
            (*self._problems, *self.limits),
            self._method_name,
            self._model_name,
            further=self._guarded(self._counter.seen) or (),
        )

    def _call(self, index: int) -> Call:
        """The call with its trees, which are made once."""
        if index not in self._calls:
            stored = self._stored[index]
            args, kwargs = stored.inputs.structure.arguments()
            given = self.signature.bind(args, kwargs)
            arguments = {name: lazy_tree(value, stored.inputs) for name, value in given.items()}
            named = frozenset(n for n in given if n in kwargs or n == self.signature.var_keyword)
            outputs = stored.outputs.tree()
            call = Call(
                arguments,
                self.signature,
                named,
                outputs,
                index,
                stored.latency,
                gradients=stored.gradients,
                autocast=stored.autocast,
                seed=index if stored.draws else None,
            )
            self._calls[index] = replace(call, seed=index) if call.generators() else call
        return self._calls[index]

    def call(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs ``method(*args, **kwargs)``, records the call if there is room, and returns the result."""
        if (self._is_full() and not self._counts_shapes) or _paused.on or is_tracing():
            return method(*args, **kwargs)
        begun = self._begin(args, kwargs)
        if begun is not None:
            return self._store(begun, method, args, kwargs)
        if self._counts_shapes:
            return self._count(method, args, kwargs)
        return method(*args, **kwargs)

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Begun | None:
        """Reserves one of the allowed calls and takes a snapshot of the inputs; None if that is not possible."""
        index = self._take_place()
        if index is None:
            return None
        begun: _Begun | None = self._guarded(lambda: self._begun(index, args, kwargs))
        if begun is None:
            with self._lock:
                self._running -= 1
        return begun

    def _take_place(self) -> int | None:
        if self._is_full() or is_capturing():
            return None
        with self._lock:
            if self._is_full():
                return None
            self._running += 1
            self._next_index += 1
            return self._next_index - 1

    def _is_full(self) -> bool:
        return len(self._stored) + self._running >= self._limit

    def _begun(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Begun | None:
        copying = Copying(flattened_call(args, kwargs))
        note_values(copying.structure)
        large, share = copying.large(), self._room_for(copying)
        return None if share is None else _Begun(index, copying.snapshot(), large, share)

    def _room_for(self, copying: Copying) -> Share | None:
        """Reserves the memory for a snapshot; if there is not enough, only shapes are kept from then on."""
        share = self._memory.take(copying.memory)
        if share is None:
            with self._lock:
                self._limit = 0
                self._limits.append(
                    f"Values of {len(self._stored)} calls are kept; with the next call they would take more than "
                    f"{self._memory.limit} bytes (max_bytes), so only shapes are kept from then on."
                )
        return share

    def _store(self, begun: _Begun, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        states = self._guarded(random_states)
        started = time.perf_counter()
        try:
            result = method(*args, **kwargs)
        except BaseException as error:
            self._fail(error, args, kwargs)
            self._end(begun, None)
            raise
        latency = time.perf_counter() - started
        self._took(latency)
        self._end(begun, self._guarded(lambda: self._stored_call(begun, result, latency, states)))
        return result

    def _took(self, seconds: float) -> None:
        self.first_seconds = self.first_seconds or seconds
        self.seconds += seconds

    def _stored_call(self, begun: _Begun, result: Any, latency: float, states: Any) -> _Stored | None:
        begun.inputs.structure = with_changed(begun.inputs.structure)
        copying = Copying(flattened(result), begun.large)
        note_values(copying.structure)
        if self._room_for(copying) is not None:
            gradients, draws = copying.require_gradients(), states is not None and states != random_states()
            return _Stored(begun.inputs, copying.snapshot(), latency, gradients, autocast_dtypes(), draws)
        if self._counts_shapes:
            self._counter.count(
                (begun.inputs.structure, tuple(begun.inputs.shapes())), (copying.structure, copying.shapes())
            )
        return None

    def _end(self, begun: _Begun, stored: _Stored | None) -> None:
        with self._lock:
            self._running -= 1
            if stored is not None:
                self._stored[begun.number] = stored
        if stored is None:
            begun.share.give_back()

    def _fail(self, error: BaseException, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        text = self._guarded(lambda: string_type(self.signature.bind(args, kwargs), with_shape=True))
        with self._lock:
            self._failures.append(Failure(described(error), text or "?"))

    def _count(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the method and counts the shapes of its inputs, as they were before, and outputs."""
        inputs = self._guarded(lambda: _shaped(flattened_call(args, kwargs, keep_values=False)))
        constants = _constants(args, kwargs)
        started = time.perf_counter()
        result = method(*args, **kwargs)
        self._took(time.perf_counter() - started)
        if inputs is not None:
            self._guarded(lambda: self._counter.count(inputs, _shaped(flattened(result, keep_values=False)), constants))
        return result

    def _guarded(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except Exception as error:
            with self._lock:
                self._problems.append(described(error))
            return None


def _input_paths(signature: Signature, structure: Structure) -> list[tuple[str, int]]:
    given = signature.bind(*structure.arguments())
    leaves = {name: joined_parts(value).leaves for name, value in given.items()}
    return [(join(name, path), number) for name, found in leaves.items() for path, number in found.tensors()]


def _constants(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Constants:
    """The numbers, flags and texts among the arguments, without infinities and NaN, which is not equal to itself."""
    found = []
    given: Iterable[tuple[int | str, Any]] = (*enumerate(args), *kwargs.items()) if args else kwargs.items()
    for place, value in given:
        if type(value) in _KEPT and (type(value) is not float or isfinite(value)):
            found.append((place, type(value), value))
    return tuple(found)


def _constant_path(signature: Signature, place: int | str) -> str | None:
    """The path of an argument by its position or name; None for one of ``*args``."""
    if isinstance(place, str):
        return place if place in signature.by_name() else path_of((place,), str(signature.var_keyword))
    rest = signature.var_positional
    names = signature.names if rest is None else signature.names[: signature.names.index(rest)]
    return names[place] if place < len(names) else None


def _shaped(found: Flattened) -> tuple[Structure, tuple[tuple[int, ...], ...]]:
    """The structure and the shapes: all that is kept of a call whose values are not recorded."""
    return found.structure, shape_list(found.tensors)
