"""Instruments a method of one model: a wrapper replaces the method, and is removed without a trace.

One wrapper serves all listeners to a method: they are attached and detached in any order, and with the last one the
attribute is what it was before. The wrapper looks the original up at each call, so a class that is patched meanwhile
takes effect.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from exportkit._torch_compat.tracing import is_tracing
from exportkit.calls.observation import Observation

_lock = threading.RLock()
_ABSENT = object()


# Takes part in each call of a method: it is called with the method and the arguments, runs ``method(*args, **kwargs)``
# and returns what it returned.
Listener = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Attachment:
    """A listener attached to a method; one listener may be attached to several.

    Args:
        wrapper: The wrapper of the method.
        listener: The listener.
        is_spent: Returns whether the listener needs no further calls, so that it is detached; None if it never is.
    """

    def __init__(self, wrapper: MethodWrapper, listener: Listener, is_spent: Callable[[], bool] | None) -> None:
        self._wrapper, self.listener, self.is_spent = wrapper, listener, is_spent

    def leave(self) -> None:
        """Detaches the listener, and with the last one the wrapper; a second time does nothing."""
        self._wrapper.remove(self)

    def leave_when_spent(self) -> None:
        """Detaches the listener if it needs no further calls."""
        if self.is_spent is not None and self.is_spent():
            self.leave()


class MethodWrapper:
    """Replaces ``model.<name>``, and passes each call through its listeners to the original."""

    def __init__(self, model: torch.nn.Module, name: str, before: Any = _ABSENT) -> None:
        self._model, self._name = model, name
        self._before = before
        self._set(())
        # inspect.signature follows __wrapped__: GenerationMixin asks forward which inputs it takes
        functools.update_wrapper(self, self.original(), updated=())

    def original(self) -> Any:
        """Returns the method as it would be without the wrapper."""
        if self._before is not _ABSENT:
            return self._before
        for cls in type(self._model).__mro__:
            if self._name in cls.__dict__:
                found = cls.__dict__[self._name]
                return found.__get__(self._model, type(self._model)) if hasattr(found, "__get__") else found
        return self._model.__getattr__(self._name)  # a module that wraps a module, and passes attributes on to it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the original through all listeners."""
        call = self.original()
        if not self._listeners:
            self._leave()  # some code wrapped this wrapper, and restored it after the last listener was detached
            return call(*args, **kwargs)
        *others, last = self._listeners
        for listener in others:
            call = functools.partial(_heard, listener, call)
        result = last(call, args, kwargs)
        for attachment in self._leaving:
            attachment.leave_when_spent()
        return result

    def __getattr__(self, name: str) -> Any:
        """Passes on what is asked of a function, such as the ``__code__`` that torch.export looks at."""
        return getattr(self.original(), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> MethodWrapper:
        """Gives the copied model a wrapper of its own, without listeners, which is removed when it is called."""
        model = memo.get(id(self._model))
        if model is None:
            return self
        before = self._before if self._before is _ABSENT else copy.deepcopy(self._before, memo)
        return MethodWrapper(model, self._name, before)

    def __reduce__(self) -> Any:
        """Pickles the original alone, in a form that needs nothing of this package to be read."""
        if self._before is _ABSENT:
            return getattr, (self._model, self._name)
        return functools.partial, (self._before,)

    def add(self, attachment: Attachment) -> None:
        """Attaches a listener."""
        with _lock:
            self._set((*self._attachments, attachment))

    def remove(self, attachment: Attachment) -> None:
        """Detaches a listener, and with the last one the wrapper."""
        with _lock:
            if attachment in self._attachments:
                self._set(tuple(other for other in self._attachments if other is not attachment))
            if not self._attachments:
                self._leave()

    def _set(self, attachments: tuple[Attachment, ...]) -> None:
        self._attachments: tuple[Attachment, ...] = attachments
        self._listeners = tuple(dict.fromkeys(attachment.listener for attachment in attachments))
        self._leaving = tuple(attachment for attachment in attachments if attachment.is_spent is not None)

    def _leave(self) -> None:
        with _lock:
            if vars(self._model).get(self._name) is not self:
                return  # other code wrapped this wrapper; once it restores it, the next call removes it
            if self._before is _ABSENT:
                delattr(self._model, self._name)
            else:
                setattr(self._model, self._name, self._before)


def attach(
    model: torch.nn.Module, name: str, listener: Listener, is_spent: Callable[[], bool] | None = None
) -> Attachment:
    """Attaches a listener to ``model.<name>`` until the returned attachment's `leave` is called.

    Args:
        model: The model.
        name: The method.
        listener: The listener.
        is_spent: Returns whether the listener needs no further calls, so that it is detached at once.
    """
    with _lock:
        wrapper = vars(model).get(name)
        if not isinstance(wrapper, MethodWrapper):
            wrapper = MethodWrapper(model, name, vars(model).get(name, _ABSENT))
            setattr(model, name, wrapper)
        attachment = Attachment(wrapper, listener, is_spent)
        wrapper.add(attachment)
        attachment.leave_when_spent()
        return attachment


class Nesting(threading.local):
    """Whether this thread is inside a call for which calls that it makes do not count: ``with nesting:`` around it.

    A class attribute is the default: a failed look-up is slow.
    """

    inside = False

    def __enter__(self) -> None:
        self.inside = True

    def __exit__(self, *_: object) -> None:
        self.inside = False


def _heard(listener: Listener, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return listener(call, args, kwargs)


def methods_of(module: torch.nn.Module) -> list[str]:
    """Returns the public methods of a module other than ``forward`` that may compute something, such as ``decode``.

    Those of the classes that define ``forward``, and of classes derived from them: what other base classes define,
    such as the ``generate`` of transformers, calls ``forward``.
    """
    bases = [cls for cls in type(module).__mro__ if not issubclass(torch.nn.Module, cls) and cls is not torch.nn.Module]
    last = max((number for number, cls in enumerate(bases) if "forward" in vars(cls)), default=len(bases))

    def computes(name: str) -> bool:
        found = inspect.getattr_static(type(module), name, None)
        try:
            return isinstance(found, FunctionType) and len(inspect.signature(found).parameters) > 1
        except (TypeError, ValueError):  # its __signature__ is not a signature
            return False

    names = dict.fromkeys(name for cls in bases[: last + 1] for name in vars(cls) if not name.startswith("_"))
    return [name for name in names if not hasattr(torch.nn.Module, name) and computes(name)]


class CalledInstead:
    """Counts calls of other methods and modules until the observed method is called.

    Args:
        model: The model.
        method_name: The observed method.
        num_calls: Returns how many of its calls were noticed so far.

    Attributes:
        methods: The other methods that were called, with the number of calls.
        modules: The modules inside that were called, likewise; those that another one calls are left out.
    """

    def __init__(self, model: torch.nn.Module, method_name: str, num_calls: Callable[[], int]) -> None:
        self.methods = collections.Counter[str]()
        self.modules = collections.Counter[str]()
        self._nesting = Nesting()
        self._num_calls = num_calls
        self._paths = {id(module): path for path, module in model.named_modules() if path}
        with contextlib.ExitStack() as stack:
            for name in ("forward", *methods_of(model)):
                if name != method_name:
                    note = functools.partial(self._note, name)
                    stack.callback(attach(model, name, note, self._is_spent).leave)
            self._observed = id(model) if method_name == "forward" else None
            self._hook = register_module_forward_pre_hook(self._note_module)
            stack.callback(self._hook.remove)
            self._attached = stack.pop_all()

    def leave(self) -> None:
        """Ends this; afterwards the model is as it was, and nothing here refers to it."""
        self._attached.close()
        self._paths.clear()

    def in_observation(self, observation: Observation) -> Observation:
        """Returns an observation of the method that says what was called instead."""
        return replace(observation, called_instead=self.methods, modules_called=self.modules)

    def _is_spent(self) -> bool:
        """Whether the observed method was called, so that nothing else matters."""
        return bool(self._num_calls())

    def _note(self, name: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a method; what it calls itself does not count."""
        if self._nesting.inside or is_tracing():
            return method(*args, **kwargs)
        self.methods[name] += 1
        with self._nesting:
            return method(*args, **kwargs)

    def _note_module(self, module: torch.nn.Module, _inputs: Any) -> None:
        if torch.compiler.is_compiling():  # first, since it is then all that torch.compile sees of this function
            return
        if id(module) == self._observed or self._is_spent():
            self._hook.remove()
            return
        path = self._paths.get(id(module))
        if path is not None and not is_tracing() and not any(path.startswith(f"{found}.") for found in self.modules):
            self.modules[path] += 1
