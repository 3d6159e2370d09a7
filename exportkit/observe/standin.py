"""Puts a stand-in before a method of one model, and takes it away without a trace.

One stand-in serves all observers of a method: observers come and go in any order, and with the last one the attribute
is what it was before. While nobody listens, the stand-in only passes calls on. It looks the original up at each call,
so that a class patched meanwhile is honoured.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

_lock = threading.RLock()
_ABSENT = object()


class Listener(Protocol):
    """Is asked at each call of the method."""

    def call(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs ``method(*args, **kwargs)`` and returns what it returned."""


class StandIn:
    """Callable in the place of ``model.<name>``; passes each call through its listeners to the original."""

    def __init__(self, model: torch.nn.Module, name: str) -> None:
        self._model, self._name = model, name
        self._before = vars(model).get(name, _ABSENT)
        self._listeners: tuple[Listener, ...] = ()
        # inspect.signature follows __wrapped__: GenerationMixin asks forward which inputs it takes
        functools.update_wrapper(self, self.original(), updated=())

    def original(self) -> Callable[..., Any]:
        """Returns the method as it would be without the stand-in."""
        if self._before is not _ABSENT:
            return self._before
        return getattr(type(self._model), self._name).__get__(self._model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the original through all listeners."""
        call = self.original()
        for listener in self._listeners:
            call = _through(listener, call)
        if not self._listeners:
            self._leave()  # left behind by somebody who wrapped us and restored us after our last observer was gone
        return call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        model = memo.get(id(self._model))
        if model is None:
            return self
        return self._before if self._before is not _ABSENT else getattr(type(model), self._name).__get__(model)

    def __reduce__(self) -> Any:
        return getattr, (self._model, self._name)

    def remove(self, listener: Listener) -> None:
        """Takes a listener away, and with the last one the stand-in."""
        with _lock:
            self._listeners = tuple(other for other in self._listeners if other is not listener)
            if not self._listeners:
                self._leave()

    def _leave(self) -> None:
        with _lock:
            if vars(self._model).get(self._name) is not self:
                return  # somebody else stands before us; when they put us back, the next call takes us away
            if self._before is _ABSENT:
                delattr(self._model, self._name)
            else:
                setattr(self._model, self._name, self._before)


def attach(model: torch.nn.Module, name: str, listener: Listener) -> StandIn:
    """Lets ``listener`` hear each call of ``model.<name>``; returns the stand-in, whose `remove` ends that."""
    with _lock:
        stand_in = vars(model).get(name)
        if not isinstance(stand_in, StandIn):
            stand_in = StandIn(model, name)
            setattr(model, name, stand_in)
        stand_in._listeners = (*stand_in._listeners, listener)
        return stand_in


def _through(listener: Listener, call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: listener.call(call, args, kwargs)
