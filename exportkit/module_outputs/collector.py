"""Collects what modules return, by hooks that are in place while a capture is open.

Every hook knows its collector and asks which call the running code belongs to, so two captures of one model, in two
threads or nested, do not see each other's values. If attention weights are captured, attention is computed eagerly,
because fused attention does not compute the weights. The implementation is read from a config that layers and threads
share, and the mask depends on it, so the config returns "eager" to the calls that capture weights and its own value to
all others.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from exportkit._torch_compat.modules import paths_of_modules
from exportkit._torch_compat.tracing import in_backward, is_tracing
from exportkit._torch_compat.transformers import ATTENTION, attention_implementation, attention_property
from exportkit.module_outputs import scope
from exportkit.module_outputs.record import FIRST_INPUT_KEY, Match, Record, Selection, first_input, pick
from exportkit.overrides import replaced_attributes

EAGER = "eager"

_lock = threading.Lock()
_properties: dict[type, property] = {}
_switched: Counter[int] = Counter()  # configs (by id) of open collectors


class Collector:
    """Records what the matched modules return inside a ``with`` block.

    Args:
        model: The model.
        matches: The modules to record.
        keys: The keys.
        selections: Which values of a key to keep.
        one_call: Whether it is used for a single call, which begins now.

    Attributes:
        outside: The record for values outside of any call of the model.
        compiled: The record for compiled code, which cannot tell threads apart.
        eager: Configs (by id) that return "eager" to the calls recorded here.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        matches: Sequence[Match],
        keys: Iterable[str],
        selections: Mapping[str, Selection] | None = None,
        one_call: bool = False,
    ) -> None:
        self.model = model
        self.matches = matches
        self.keys = tuple(keys)
        self._selections = selections
        self.eager: frozenset[int] = frozenset()
        self.outside = self.compiled = self.new_record() if one_call else Record(self.keys, selections)
        self._unclaimed: set[str] = set()
        self._undo = contextlib.ExitStack()

    def new_record(self) -> Record:
        """Returns a record for one call, which begins now."""
        return Record(self.keys, self._selections, is_tracing())

    def __enter__(self) -> Collector:
        with contextlib.ExitStack() as stack:
            stack.enter_context(scope.carried_into_threads())
            configs = fused_configs(self.model, self.matches)
            for config in configs:
                stack.enter_context(_answering(config))
            self.eager = frozenset(map(id, configs))
            for match in self.matches:
                after = functools.partial(_after, self, match)
                stack.callback(match.module.register_forward_hook(after, with_kwargs=True).remove)
                if begins_with_input(match):
                    before = functools.partial(_before, self, match)
                    stack.callback(match.module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(_close, scope.push(scope.Frame(self, self.outside)))
            self._undo = stack.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self._undo.close()
        self.matches = ()

    def own_frame(self) -> scope.Frame | None:
        """Returns the innermost frame of this collector that the running code belongs to."""
        frames = scope.frames()
        if frames and frames[-1].collector is self:  # the usual case
            return frames[-1]
        return next((frame for frame in reversed(frames or ()) if frame.collector is self), None)

    def record_here(self, match: Match) -> Record | None:
        """Returns the record for values of the running code, or None if this collector does not record them."""
        if torch.compiler.is_dynamo_compiling():
            return self.compiled
        if in_backward():  # checkpointed layers run again
            return None
        frame = self.own_frame()
        if frame is None:
            if scope.frames() is None:
                self._unclaimed.add(match.target.key)
            return None
        record: Record | None = frame.record
        return record

    @property
    def has_unclaimed(self) -> bool:
        """Whether modules ran in threads that cannot be assigned to a call."""
        return bool(self._unclaimed)

    def warn_of_unclaimed(self, values: Mapping[str, tuple[Any, ...]]) -> None:
        """Warns if a key has no values and modules ran in threads that cannot be assigned to a call."""
        lost = [key for key in sorted(self._unclaimed) if not values.get(key, True)]
        if lost:
            warnings.warn(
                f"Nothing was captured as {', '.join(map(repr, lost))}: the modules ran in threads that are older than "
                "the capture and take their work from a queue. Let them run it with "
                "`contextvars.copy_context().run`, called in the thread that calls the model.",
                stacklevel=3,
            )


def _close(frame: scope.Frame) -> Record | None:
    """Closes a frame and returns its record. Threads and tasks that still hold the frame keep nothing else alive."""
    scope.pop(frame)
    record: Record | None = frame.record
    frame.record = frame.collector = None
    if record is not None:
        record.finish()
    return record


def begins_with_input(match: Match) -> bool:
    """Returns whether the input of the first matched module is recorded as well."""
    return match.target.key == FIRST_INPUT_KEY and match.target.recorder.capture_initial_hidden_state


# If another thread removes hooks that this thread is about to run, torch calls them without keyword arguments.


def _before(collector: Collector, match: Match, _module: torch.nn.Module, args: Any, *rest: Any) -> None:
    record = collector.record_here(match) if rest else None
    if record is not None and record.is_empty(FIRST_INPUT_KEY):
        record.add(match, first_input(args, rest[0]))


def _after(collector: Collector, match: Match, _module: torch.nn.Module, _args: Any, *rest: Any) -> None:
    record = collector.record_here(match) if len(rest) == 2 else None
    if record is not None:
        record.add(match, pick(rest[1], match))


class Calls:
    """Gives each call of the model a record of its own while a collector is open."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._lock = threading.Lock()
        self._records: list[Record] = []

    def hook_begin(self) -> Any:
        """Registers a hook before all others of the model, and returns its handle."""
        return self._collector.model.register_forward_pre_hook(self._begin, prepend=True)

    def hook_end(self) -> Any:
        """Registers a hook after all others of the model, including those of the collector, and returns its handle."""
        return self._collector.model.register_forward_hook(self._end, always_call=True)

    def records(self) -> list[Record]:
        """Returns the record of values outside of calls, then the records of calls in the order in which they began."""
        outside, compiled = self._collector.outside, self._collector.compiled
        with self._lock:
            records = list(self._records)
        if not outside.is_blank():
            records.insert(0, outside)
        if not compiled.is_blank() and not any(record is compiled for record in records):
            records.append(compiled)
        return records

    def _begin(self, *_call: Any) -> None:
        collector = self._collector
        if torch.compiler.is_dynamo_compiling():
            collector.compiled = collector.new_record()
            return
        frame = collector.own_frame()
        if frame is None:
            return
        if frame.record is not collector.outside:  # the model calls itself
            frame.depth += 1
            return
        record = collector.compiled = collector.new_record()
        with self._lock:
            self._records.append(record)
        scope.push(scope.Frame(collector, record, sys.exception()))

    def _end(self, *_call: Any) -> None:
        collector = self._collector
        frame = None if torch.compiler.is_dynamo_compiling() else collector.own_frame()
        if frame is None or frame.record is collector.outside:
            return
        if frame.depth:
            frame.depth -= 1
            return
        record = _close(frame)
        if collector.compiled is record:
            collector.compiled = collector.outside
        if sys.exception() is not frame.handled:
            with self._lock:
                self._records = [other for other in self._records if other is not record]
        elif record is not None:
            record.require_values()
            if collector.has_unclaimed:
                collector.warn_of_unclaimed(record.values())


def fused_configs(model: torch.nn.Module, matches: Sequence[Match]) -> list[Any]:
    """Returns the configs that must return "eager" for the matched modules to return attention weights.

    These are the configs of the modules, of their submodules, and of the modules around them, which build the mask.
    """
    modules: dict[torch.nn.Module, Any] = {}
    for match in matches:
        names = f"{match.target.key} {type(match.module).__name__}".lower()
        if "attention" in names and match.target.recorder.index != 0:
            steps = match.path.split(".")
            modules |= {model.get_submodule(".".join(steps[:depth])): None for depth in range(len(steps))}
            modules |= paths_of_modules(match.module)
    configs: dict[int, Any] = {}
    for module in modules:
        config = vars(module).get("config")  # most modules have none, and getattr is slow then
        configs[id(config)] = config
    return [config for config in configs.values() if attention_implementation(config) not in (None, EAGER)]


@contextlib.contextmanager
def _answering(config: Any) -> Iterator[None]:
    """Makes a config return "eager" to calls that capture weights; to all calls if it cannot have a property."""
    found = attention_property(config)
    with _lock:
        _switched[id(config)] += 1
        owner, answer = (config, EAGER) if found is None else (found[0], _switching(*found))
    try:
        with replaced_attributes(owner, {ATTENTION: answer}):
            yield
    finally:
        with _lock:
            _switched[id(config)] -= 1
            if not _switched[id(config)]:
                del _switched[id(config)]


def _switching(cls: type, current: property) -> property:
    """The property whose value depends on the running call; one for each class, however many captures are open."""
    if _properties.get(cls) is current:
        return current
    read, write = current.fget, current.fset

    def answer(config: Any) -> Any:
        return EAGER if _asked_by_capture(config) else read(config)  # type: ignore[misc]

    _properties[cls] = property(answer, write)
    return _properties[cls]


def _asked_by_capture(config: Any) -> bool:
    if torch.compiler.is_dynamo_compiling():
        return _switched.get(id(config), 0) > 0
    # the frame of a trace, or of a call that has ended, has no configs
    return any(id(config) in getattr(frame.collector, "eager", ()) for frame in scope.frames() or ())
