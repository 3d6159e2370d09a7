"""Instruments a model, so that every call of its modules goes through a recorder.

Methods of classes are wrapped: the ``__call__`` of all modules, and each ``forward`` that the modules have, for code
that calls it directly. So nothing is added to the ``vars`` of a module, the model can be pickled and copied meanwhile,
and hooks run in the order in which they would. For a module that is not instrumented, a call costs one lookup.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from exportkit._torch_compat.modules import paths_of_modules
from exportkit.module_outputs import scope
from exportkit.module_traces.recorder import CallFrame, TraceRecorder
from exportkit.overrides import original_attribute, replaced_attributes


class _Target(NamedTuple):
    """A recorder of a module, and the path under which it records the module."""

    recorder: TraceRecorder
    path: str


_lock = threading.Lock()
_targets: dict[int, tuple[_Target, ...]] = {}  # by id of the module, which is held meanwhile
_instruments: dict[TraceRecorder, _Instrument] = {}


@contextlib.contextmanager
def instrumented(model: torch.nn.Module, recorder: TraceRecorder) -> Iterator[None]:
    """Sends calls of the modules of a model through a recorder, for the time of a ``with`` block."""
    paths = paths_of_modules(model)
    instrument = _Instrument(paths, recorder)
    block = CallFrame(recorder)
    with contextlib.ExitStack() as stack:
        stack.enter_context(scope.carried_into_threads())
        stack.enter_context(replaced_attributes(torch.nn.Module, {"__call__": _wrapped_call()}))
        for cls in {_owner(type(module)) for module in paths} - {None}:
            stack.enter_context(replaced_attributes(cls, {"forward": _wrapped_forward(cls)}))
        for module in paths:
            if "forward" in vars(module):  # set by the user, or wrapped by other code
                owner: Any = module
                stack.enter_context(replaced_attributes(owner, {"forward": _InstanceForward(module)}))
        stack.callback(instrument.remove)
        stack.callback(_close, scope.push(block))
        yield


def _close(frame: Any) -> None:
    scope.pop(frame)
    frame.collector = None


class _Instrument:
    """The modules that go through one recorder: those of the model, and those that are added to it meanwhile."""

    def __init__(self, paths: dict[torch.nn.Module, list[str]], recorder: TraceRecorder) -> None:
        self._recorder = recorder
        self._held: list[torch.nn.Module] = []
        # modules called inside the model that are not part of it
        self._foreign: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()
        for module, (path, *_) in paths.items():
            self.add(path, module)
        _instruments[recorder] = self

    def add(self, path: str, module: torch.nn.Module) -> None:
        with _lock:
            self._held.append(module)
            _targets[id(module)] = (*_targets.get(id(module), ()), _Target(self._recorder, path))

    def adopt(self, module: torch.nn.Module, around: CallFrame) -> None:
        """Adds a module if it is part of the module in whose call it is called."""
        if id(module) in self._foreign or around.module is None:
            return
        path = next((path for path, other in around.module.named_modules() if other is module), None)
        if path is None:
            self._foreign[id(module)] = module
        else:
            self.add(f"{around.path}.{path}".strip("."), module)

    def remove(self) -> None:
        with _lock:
            del _instruments[self._recorder]
            for module in self._held:
                rest = tuple([target for target in _targets.pop(id(module)) if target.recorder is not self._recorder])
                if rest:
                    _targets[id(module)] = rest
            self._held.clear()


def _wrapped_call() -> Callable[..., Any]:
    original = original_attribute(torch.nn.Module, "__call__")

    @functools.wraps(original)
    def __call__(self: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return original(self, *args, **kwargs)
        targets = _targets.get(id(self)) or _adopted(self)
        if targets is None:
            return original(self, *args, **kwargs)
        return _recorded(targets, self, functools.partial(original, self), args, kwargs, is_forward=False)

    return __call__


def _wrapped_forward(cls: type) -> Callable[..., Any]:
    original = original_attribute(cls, "forward")

    @functools.wraps(original)
    def forward(self: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return original(self, *args, **kwargs)
        targets = _targets.get(id(self))
        if targets is None or _entered(targets, self):
            return original(self, *args, **kwargs)
        # called through super(), or by a forward of the instance, which is wrapped itself
        if _owner(type(self)) is not cls or type(vars(self).get("forward")) is _InstanceForward:
            return original(self, *args, **kwargs)
        return _recorded(targets, self, functools.partial(original, self), args, kwargs, is_forward=True)

    return forward


def _entered(targets: tuple[_Target, ...], module: torch.nn.Module) -> bool:
    """Whether this is the forward of a call that its only recorder has begun to record: the usual case, made quick."""
    frames: Any = scope.frames()
    if not frames or len(targets) > 1:
        return False
    frame = frames[-1]
    if type(frame) is not CallFrame or frame.collector is not targets[0].recorder or frame.module is not module:
        return False
    begun = not frame.entered
    frame.entered = True
    return begun


class _InstanceForward:
    """Wraps a forward that a module has in its ``vars``."""

    def __init__(self, module: torch.nn.Module) -> None:
        owner: Any = module
        self._original = original_attribute(owner, "forward")
        self._module = module
        functools.update_wrapper(self, self._original, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        targets = None if torch.compiler.is_dynamo_compiling() else _targets.get(id(self._module))
        if targets is None:
            return self._original(*args, **kwargs)
        return _recorded(targets, self._module, self._original, args, kwargs, is_forward=True)

    def __reduce__(self) -> Any:
        """Pickles and copies as the forward that it wraps."""
        return _unchanged, (self._original,)


def _unchanged(value: Any) -> Any:
    return value


def _recorded(
    targets: tuple[_Target, ...],
    module: torch.nn.Module,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_forward: bool,
) -> Any:
    """Runs a call through all recorders that have not begun to record it."""
    for recorder, path in targets:
        around = recorder.own_frame()
        if around is None:
            continue
        if is_forward and around.module is module and not around.entered:
            around.entered = True  # the forward of a call that is being recorded
        elif not recorder.is_ignoring():
            frame = CallFrame(recorder, path, module)
            frame.entered = is_forward
            call = functools.partial(recorder.record, call, around, frame)
    return call(*args, **kwargs)


def _adopted(module: torch.nn.Module) -> tuple[_Target, ...] | None:
    """The recorders of a new module: it was added to a module whose call is being recorded."""
    frames: Any = scope.frames()
    if not frames:
        return None
    innermost = {frame.collector: frame for frame in frames if type(frame) is CallFrame and frame.module is not None}
    for recorder, frame in innermost.items():
        instrument = _instruments.get(recorder) if recorder is not None else None
        if instrument is not None:
            instrument.adopt(module, frame)
    return _targets.get(id(module))


def _find_owner(cls: Any) -> Any:
    """The class that defines the forward of a class; None if that is not a function, so that it cannot be wrapped."""
    for base in cls.__mro__:
        if "forward" in vars(base):
            found = base is not torch.nn.Module and isinstance(vars(base)["forward"], types.FunctionType)
            return base if found else None
    return None


_owner: Callable[[Any], Any] = functools.lru_cache(maxsize=1024)(_find_owner)
