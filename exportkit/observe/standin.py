"""Puts a stand-in before a method of one model, and takes it away without a trace.

One stand-in serves all observers of a method: observers come and go in any order, and with the last one the attribute
is what it was before. While nobody listens, the stand-in only passes calls on. It looks the original up at each call,
so that a class patched meanwhile is honoured.
"""

from __future__ import annotations

import copy
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

    def __init__(self, model: torch.nn.Module, name: str, before: Any = _ABSENT) -> None:
        self._model, self._name = model, name
        self._before = before
        self._listeners: tuple[Listener, ...] = ()
        # inspect.signature follows __wrapped__: GenerationMixin asks forward which inputs it takes
        functools.update_wrapper(self, self.original(), updated=())

    def original(self) -> Any:
        """Returns the method as it would be without the stand-in."""
        if self._before is not _ABSENT:
            return self._before
        for cls in type(self._model).__mro__:
            if self._name in vars(cls):
                found = vars(cls)[self._name]
                return found.__get__(self._model, type(self._model)) if hasattr(found, "__get__") else found
        return self._model.__getattr__(self._name)  # of a wrapper, which passes on to the model inside

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the original through all listeners."""
        call = self.original()
        for listener in dict.fromkeys(self._listeners):
            call = _through(listener, call)
        if not self._listeners:
            self._leave()  # left behind by somebody who wrapped us and restored us after our last observer was gone
        return call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Passes on what is asked of a function, such as the ``__code__`` that torch.export looks at."""
        return getattr(self.original(), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIn:
        """Gives the copied model a stand-in of its own: nobody listens to it, so that it leaves when it is called."""
        model = memo.get(id(self._model))
        if model is None:
            return self
        before = self._before if self._before is _ABSENT else copy.deepcopy(self._before, memo)
        return StandIn(model, self._name, before)

    def __reduce__(self) -> Any:
        """Pickles the original alone, in a form that needs nothing of this package to be read."""
        if self._before is _ABSENT:
            return getattr, (self._model, self._name)
        return functools.partial, (self._before,)

    def remove(self, listener: Listener) -> None:
        """Takes a listener away, once for each time that it came, and with the last one the stand-in."""
        with _lock:
            position = self._listeners.index(listener)
            self._listeners = self._listeners[:position] + self._listeners[position + 1 :]
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
            stand_in = StandIn(model, name, vars(model).get(name, _ABSENT))
            setattr(model, name, stand_in)
        stand_in._listeners = (*stand_in._listeners, listener)
        return stand_in


def _through(listener: Listener, call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: listener.call(call, args, kwargs)
