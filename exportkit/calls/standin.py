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

    def is_spent(self) -> bool:
        """Returns whether the listener has heard enough."""


class Place:
    """The place of a listener before a method; one listener may have several.

    Args:
        stand_in: What stands before the method.
        listener: Who listens.
        leaves_when_spent: Whether the listener goes as soon as it has heard enough.
    """

    def __init__(self, stand_in: StandIn, listener: Listener, leaves_when_spent: bool) -> None:
        self._stand_in, self.listener, self.leaves_when_spent = stand_in, listener, leaves_when_spent

    def leave(self) -> None:
        """Takes the listener away from here, and with the last one the stand-in; a second time does nothing."""
        self._stand_in.remove(self)

    def leave_when_spent(self) -> None:
        """Takes the listener away if it came until it has heard enough, and has."""
        if self.leaves_when_spent and self.listener.is_spent():
            self.leave()


class StandIn:
    """Callable in the place of ``model.<name>``; passes each call through its listeners to the original."""

    def __init__(self, model: torch.nn.Module, name: str, before: Any = _ABSENT) -> None:
        self._model, self._name = model, name
        self._before = before
        self._set(())
        # inspect.signature follows __wrapped__: GenerationMixin asks forward which inputs it takes
        functools.update_wrapper(self, self.original(), updated=())

    def original(self) -> Any:
        """Returns the method as it would be without the stand-in."""
        if self._before is not _ABSENT:
            return self._before
        for cls in type(self._model).__mro__:
            if self._name in cls.__dict__:
                found = cls.__dict__[self._name]
                return found.__get__(self._model, type(self._model)) if hasattr(found, "__get__") else found
        return self._model.__getattr__(self._name)  # of a wrapper, which passes on to the model inside

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the original through all listeners."""
        call = self.original()
        if not self._listeners:
            self._leave()  # left behind by somebody who wrapped us and restored us after our last observer was gone
            return call(*args, **kwargs)
        *others, last = self._listeners
        for listener in others:
            call = functools.partial(_heard, listener, call)
        result = last.call(call, args, kwargs)
        for place in self._passing:
            place.leave_when_spent()
        return result

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

    def add(self, place: Place) -> None:
        """Lets a listener in."""
        with _lock:
            self._set((*self._places, place))

    def remove(self, place: Place) -> None:
        """Takes a listener away, and with the last one the stand-in."""
        with _lock:
            if place in self._places:
                self._set(tuple(other for other in self._places if other is not place))
            if not self._places:
                self._leave()

    def _set(self, places: tuple[Place, ...]) -> None:
        self._places: tuple[Place, ...] = places
        self._listeners = tuple(dict.fromkeys(place.listener for place in places))
        self._passing = tuple(place for place in places if place.leaves_when_spent)

    def _leave(self) -> None:
        with _lock:
            if vars(self._model).get(self._name) is not self:
                return  # somebody else stands before us; when they put us back, the next call takes us away
            if self._before is _ABSENT:
                delattr(self._model, self._name)
            else:
                setattr(self._model, self._name, self._before)


def attach(model: torch.nn.Module, name: str, listener: Listener, leaves_when_spent: bool = False) -> Place:
    """Lets ``listener`` hear each call of ``model.<name>``; returns its place, whose `leave` ends that.

    Args:
        model: The model.
        name: The method.
        listener: Who listens.
        leaves_when_spent: Also end that as soon as the listener has heard enough.
    """
    with _lock:
        stand_in = vars(model).get(name)
        if not isinstance(stand_in, StandIn):
            stand_in = StandIn(model, name, vars(model).get(name, _ABSENT))
            setattr(model, name, stand_in)
        place = Place(stand_in, listener, leaves_when_spent)
        stand_in.add(place)
        place.leave_when_spent()
        return place


def _heard(listener: Listener, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return listener.call(call, args, kwargs)
