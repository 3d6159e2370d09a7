"""Sees every call of the modules of a model, and leaves no mark on the model.

In come a model and its recorder; while they are watched, calls of the modules go through the recorder. What is replaced
are methods of classes: the ``__call__`` of all modules, and each ``forward`` that the modules have, for those who call
that directly. So nothing is ever in the ``vars`` of a module, a model can be pickled and copied meanwhile, and no hook
of anybody comes earlier or later than it would. A module that nobody watches is only looked up.
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
from exportkit.module_traces.recorder import Frame, Recorder
from exportkit.rewrites.attributes import original_attribute, replaced_attributes


class _Watch(NamedTuple):
    """One recorder that watches a module."""

    recorder: Recorder
    path: str


_lock = threading.Lock()
_watched: dict[int, tuple[_Watch, ...]] = {}  # by id of the module, which is held as long
_watching: dict[Recorder, _Watching] = {}


@contextlib.contextmanager
def watched(model: torch.nn.Module, recorder: Recorder) -> Iterator[None]:
    """Lets calls of the modules of a model go through a recorder."""
    paths = paths_of_modules(model)
    watching = _Watching(paths, recorder)
    block = Frame(recorder)
    with contextlib.ExitStack() as stack:
        stack.enter_context(scope.carried_into_threads())
        stack.enter_context(replaced_attributes(torch.nn.Module, {"__call__": _calling()}))
        for cls in {_owner(type(module)) for module in paths} - {None}:
            stack.enter_context(replaced_attributes(cls, {"forward": _forwarding(cls)}))
        for module in paths:
            if "forward" in vars(module):  # of those who wrapped it before us
                owner: Any = module
                stack.enter_context(replaced_attributes(owner, {"forward": _OwnForward(module)}))
        stack.callback(watching.end)
        stack.callback(_close, scope.push(block))
        yield


def _close(frame: Any) -> None:
    scope.pop(frame)
    frame.collector = None


class _Watching:
    """The modules that one recorder watches: those of the model, and those that come into it meanwhile."""

    def __init__(self, paths: dict[torch.nn.Module, list[str]], recorder: Recorder) -> None:
        self._recorder = recorder
        self._held: list[torch.nn.Module] = []
        # called inside of it, and no part of it
        self._foreign: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()
        for module, (path, *_) in paths.items():
            self.add(path, module)
        _watching[recorder] = self

    def add(self, path: str, module: torch.nn.Module) -> None:
        with _lock:
            self._held.append(module)
            _watched[id(module)] = (*_watched.get(id(module), ()), _Watch(self._recorder, path))

    def adopt(self, module: torch.nn.Module, around: Frame) -> None:
        """Adds a module if it is inside of the one whose call it is called in."""
        if id(module) in self._foreign or around.module is None:
            return
        path = next((path for path, other in around.module.named_modules() if other is module), None)
        if path is None:
            self._foreign[id(module)] = module
        else:
            self.add(f"{around.path}.{path}".strip("."), module)

    def end(self) -> None:
        with _lock:
            del _watching[self._recorder]
            for module in self._held:
                rest = tuple([watch for watch in _watched.pop(id(module)) if watch.recorder is not self._recorder])
                if rest:
                    _watched[id(module)] = rest
            self._held.clear()


def _calling() -> Callable[..., Any]:
    original = original_attribute(torch.nn.Module, "__call__")

    @functools.wraps(original)
    def __call__(self: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return original(self, *args, **kwargs)
        watches = _watched.get(id(self)) or _adopted(self)
        if watches is None:
            return original(self, *args, **kwargs)
        return _recorded(watches, self, functools.partial(original, self), args, kwargs, is_forward=False)

    return __call__


def _forwarding(cls: type) -> Callable[..., Any]:
    original = original_attribute(cls, "forward")

    @functools.wraps(original)
    def forward(self: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return original(self, *args, **kwargs)
        watches = _watched.get(id(self))
        if watches is None or _entered(watches, self):
            return original(self, *args, **kwargs)
        # through super(), or through a forward of the instance, which recorded it
        if _owner(type(self)) is not cls or type(vars(self).get("forward")) is _OwnForward:
            return original(self, *args, **kwargs)
        return _recorded(watches, self, functools.partial(original, self), args, kwargs, is_forward=True)

    return forward


def _entered(watches: tuple[_Watch, ...], module: torch.nn.Module) -> bool:
    """Whether this is the forward of a call that its only recorder has begun to record, as nearly always."""
    frames: Any = scope.frames()
    if not frames or len(watches) > 1:
        return False
    frame = frames[-1]
    if type(frame) is not Frame or frame.collector is not watches[0].recorder or frame.module is not module:
        return False
    begun = not frame.entered
    frame.entered = True
    return begun


class _OwnForward:
    """In the place of a forward that a module has in its ``vars``."""

    def __init__(self, module: torch.nn.Module) -> None:
        owner: Any = module
        self._original = original_attribute(owner, "forward")
        self._module = module
        functools.update_wrapper(self, self._original, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watches = None if torch.compiler.is_dynamo_compiling() else _watched.get(id(self._module))
        if watches is None:
            return self._original(*args, **kwargs)
        return _recorded(watches, self._module, self._original, args, kwargs, is_forward=True)

    def __reduce__(self) -> Any:
        """Pickles and copies what was there before."""
        return _same, (self._original,)


def _same(value: Any) -> Any:
    return value


def _recorded(
    watches: tuple[_Watch, ...],
    module: torch.nn.Module,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_forward: bool,
) -> Any:
    """Runs a call through all recorders that have not begun to record it."""
    for recorder, path in watches:
        around = recorder.own_frame()
        if around is None:
            continue
        if is_forward and around.module is module and not around.entered:
            around.entered = True  # the forward of a call that is being recorded
        elif not recorder.is_deaf():
            frame = Frame(recorder, path, module)
            frame.entered = is_forward
            call = functools.partial(recorder.record, call, around, frame)
    return call(*args, **kwargs)


def _adopted(module: torch.nn.Module) -> tuple[_Watch, ...] | None:
    """Who watches a module that nobody knew: it was put into one whose call is being recorded."""
    frames: Any = scope.frames()
    if not frames:
        return None
    innermost = {frame.collector: frame for frame in frames if type(frame) is Frame and frame.module is not None}
    for recorder, frame in innermost.items():
        watching = _watching.get(recorder) if recorder is not None else None
        if watching is not None:
            watching.adopt(module, frame)
    return _watched.get(id(module))


@functools.lru_cache(maxsize=1024)
def _owner(cls: Any) -> Any:
    """The class whose forward the instances of a class have; None if that is no function that could be replaced."""
    for base in cls.__mro__:
        if "forward" in vars(base):
            found = base is not torch.nn.Module and isinstance(vars(base)["forward"], types.FunctionType)
            return base if found else None
    return None
