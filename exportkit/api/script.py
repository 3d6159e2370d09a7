"""Runs a script unchanged; its models can be observed, or replaced by graphs, from their first call on.

A script creates its models while it runs. exportkit looks for the variable at each line of the script, and before each
call of a module that is not made by another module. If no variable is named, these calls show the models. Errors of
exportkit are noted, and the script continues.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import runpy
import signal
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch

from exportkit._torch_compat.tracing import is_tracing
from exportkit.calls.application import modules_in
from exportkit.calls.method_wrapper import MethodWrapper, Nesting
from exportkit.errors import InvalidRequestError, UnknownMethodError, described
from exportkit.overrides import replaced_attributes
from exportkit.trees.flatten import flattened_call

_MOST_MODULES = 16  # that are found in a script; more are made in a loop, and each would be exported
_MAIN = "__main__"

# Is given the name of what was found, and the model or the application; its context lasts until the script ends.
Enter = Callable[[str, Any], contextlib.AbstractContextManager[Any]]


@dataclass
class ScriptRun:
    """A run of a script.

    Attributes:
        exit_code: What the script exited with.
        error: What the script raised; None if it ended by itself, or called ``sys.exit``.
        printed: What it printed to stdout.
        found: The models that it called, or the application that was named, by name.
        problems: What failed in exportkit meanwhile.
        main: The Python module that the script was.
    """

    exit_code: int = 0
    error: BaseException | None = None
    printed: str = ""
    found: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    main: ModuleType | None = None

    def print_error(self) -> None:
        """Prints what the script raised as Python does, from the first line of the script on."""
        if self.error is not None:
            step = self.error.__traceback__
            while step is not None and step.tb_frame.f_globals.get("__name__") != _MAIN:
                step = step.tb_next
            sys.excepthook(type(self.error), self.error.with_traceback(step), step)


@dataclass(frozen=True)
class Script:
    """A Python script, or a module with ``is_module``, and how it is run.

    Attributes:
        name: The file, or the name of the module.
        arguments: Its arguments on the command line.
        is_module: Run a module, as ``python -m`` does.
        observed: Path of a model, a method of it, or an application in the variables of the script, such as
            ``app.model``; None for the modules with weights that it calls.
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    observed: str | None = None

    def require(self) -> None:
        """Raises InvalidRequestError if there is no such script, or if ``observed`` is not the name of a variable."""
        path = Path(self.name)
        if not self.is_module and not path.is_file() and not (path / "__main__.py").is_file():
            raise InvalidRequestError(
                "The script does not exist.",
                where=self.name,
                expected="a Python file, or a module with -m",
                hint="give the path of the script, from the current directory.",
            )
        if self.observed is not None and not all(self.observed.split(".")):
            raise InvalidRequestError(
                "This is neither a variable of the script nor an attribute of one.",
                where="--observe",
                expected="a name such as model, or app.model",
                got=repr(self.observed),
            )

    def run(self, enter: Enter, quiet: bool = False) -> ScriptRun:
        """Runs the script, and returns the result.

        Args:
            enter: Is entered when a model is found, right before its first call.
            quiet: Show nothing of what the script prints to stdout.
        """
        run = ScriptRun()
        with contextlib.ExitStack() as files, self._started(), contextlib.ExitStack() as stack:
            hidden = files.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) if quiet else None
            output: Any = _Tee(sys.stdout) if hidden is None else hidden
            files.enter_context(contextlib.redirect_stdout(output))
            finder = _Finder(self.observed, enter, run, stack)
            stack.enter_context(finder.looking())
            try:
                if self.is_module:
                    runpy.run_module(self.name, run_name=_MAIN, alter_sys=True)
                else:
                    runpy.run_path(self.name, run_name=_MAIN)
            except SystemExit as error:
                run.exit_code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
                if run.exit_code and not isinstance(error.code, int):
                    print(error.code, file=sys.stderr)  # as Python does
            except BaseException as error:
                run.exit_code, run.error = 130 if isinstance(error, KeyboardInterrupt) else 1, error
            run.problems += _left(stack)
            if hidden is not None:
                hidden.seek(0)
            run.printed = output.read() if hidden is not None else output.getvalue()
        return run

    @contextlib.contextmanager
    def _started(self) -> Iterator[None]:
        """What ``sys`` and Ctrl-C are for a script that Python runs."""
        before = sys.argv, sys.path[:]
        home = os.getcwd() if self.is_module else str(Path(self.name).resolve().parent)
        sys.argv, sys.path[:1] = [self.name, *self.arguments], [home]
        is_main = threading.current_thread() is threading.main_thread()
        handler = signal.signal(signal.SIGINT, signal.default_int_handler) if is_main else None
        try:
            yield
        finally:
            if is_main:
                signal.signal(signal.SIGINT, handler)
            sys.argv, sys.path[:] = before


@dataclass(frozen=True)
class ProcessState:
    """What a script may change for the whole process: working directory, environment variables, modes of torch."""

    home: str
    environment: dict[str, str]
    dtype: torch.dtype
    gradients: bool

    @classmethod
    def now(cls) -> ProcessState:
        """Returns the present state."""
        return cls(os.getcwd(), dict(os.environ), torch.get_default_dtype(), torch.is_grad_enabled())

    def restore(self) -> None:
        """Restores the state, so that a second run begins like the first."""
        os.chdir(self.home)
        os.environ.clear()
        os.environ.update(self.environment)
        torch.set_default_dtype(self.dtype)
        torch.set_grad_enabled(self.gradients)


def _left(stack: contextlib.ExitStack) -> list[str]:
    """Leaves what was entered, and returns what it warned of or raised."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            stack.close()
        except Exception as error:
            return [described(error)]
    return [str(warning.message) for warning in caught]


class _Finder:
    """Looks for the models of a script."""

    def __init__(self, observed: str | None, enter: Enter, run: ScriptRun, stack: contextlib.ExitStack) -> None:
        self._observed, self._enter, self._run, self._stack = observed, enter, run, stack
        self._seen: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._nesting = Nesting()
        self._lock = threading.RLock()
        self._is_done = False
        self._entered: contextlib.ExitStack | None = None
        self._known: list[int] = []

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Looks at each call of a module that no other module makes, until there is nothing left to find."""
        original, finder = torch.nn.Module.__call__, self

        def call(self: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if finder._is_done or is_tracing() or finder._nesting.inside:
                return original(self, *args, **kwargs)
            with finder._nesting:
                finder._look(self, args, kwargs)
                return original(self, *args, **kwargs)

        traces = self._observed is not None and sys.gettrace() is None  # not under a debugger
        if traces:
            sys.settrace(self._trace)
        try:
            with replaced_attributes(torch.nn.Module, {"__call__": call}):
                yield
        finally:
            if traces:
                self._stop_tracing()

    def _trace(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        """Follows the lines of the script itself, and of nothing that it calls."""
        if self._is_done:
            self._stop_tracing()
            return None
        code = frame.f_code
        if code.co_name != "<module>" or frame.f_globals.get("__name__") != _MAIN:
            return None
        if self._observed is not None and self._observed.partition(".")[0] in frame.f_globals:
            self._look(None, (), {})
        return self._trace

    def _stop_tracing(self) -> None:
        if sys.gettrace() == self._trace:
            sys.settrace(None)

    def _look(self, module: torch.nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Looks for models, before a module is called or, without one, at a line of the script."""
        try:
            with self._lock:
                self._run.main = self._run.main or sys.modules.get(_MAIN)
                if self._observed is not None:
                    self._look_for(self._observed, is_called=module is not None)
                elif module is not None:
                    self._look_at(module, args, kwargs)
        except Exception as error:  # the script goes on
            self._is_done = self._observed is not None
            self._run.problems.append("".join(traceback.format_exception_only(error)).strip())

    def _look_for(self, path: str, is_called: bool) -> None:
        """Takes what has the name now, until a module is called: it may be rebound, and get more modules."""
        found = _stored_at(vars(sys.modules[_MAIN]), path)
        if isinstance(found, MethodWrapper):
            found = found.original()
        model = owner_of(found)
        if not isinstance(model, torch.nn.Module) and found is not model:
            return
        modules = {"": model} if isinstance(model, torch.nn.Module) else modules_in(model)
        known = [id(model), *map(id, modules.values())]
        if not modules or self._is_done:
            return
        if known != self._known:
            entered = contextlib.ExitStack()
            try:
                entered.enter_context(self._enter("", found))
            except UnknownMethodError:
                if not is_called:  # it may still get the modules that it lacks
                    return
                raise
            self._stack.push(entered)
            before, self._entered, self._known = self._entered, entered, known
            self._run.found[""] = found
            if before is not None:
                self._run.problems += _left(before)
        self._is_done = is_called

    def _look_at(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module in self._seen or isinstance(module, torch.jit.ScriptModule):
            return
        if next(module.parameters(), None) is None and next(module.buffers(), None) is None:
            return
        if not flattened_call(args, kwargs, keep_values=False).tensors:
            return
        self._seen.add(module)
        if len(self._run.found) >= _MOST_MODULES:
            self._is_done = True
            self._run.problems.append(f"The script calls more than {_MOST_MODULES} modules: name one with --observe.")
            return
        name = type(module).__name__
        alike = sum(type(other).__name__ == name for other in self._run.found.values())
        name = f"{name}_{alike + 1}" if alike else name
        self._run.found[name] = module
        self._stack.enter_context(self._enter(name, module))


def _stored_at(application: Any, path: str) -> Any:
    """What a path leads to, as far as that can be told without running code, such as a property that loads a model."""
    value = application
    for step in path.split("."):
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list | tuple):
            value = value[int(step)] if step.isdecimal() and int(step) < len(value) else None
        else:
            found = inspect.getattr_static(value, step, None)
            is_plain = isinstance(found, FunctionType | MemberDescriptorType)  # a method, or an item of __slots__
            if is_plain or (found is None and isinstance(value, torch.nn.Module)):  # children are no attributes
                found = getattr(value, step, None)
            elif hasattr(type(found), "__get__"):
                return None
            value = found
    return value


class _Tee:
    """A stream that also keeps the text that is written to it; everything else is up to the stream."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._kept = stream, list[str]()

    def write(self, text: str) -> Any:
        self._kept.append(text)
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def getvalue(self) -> str:
        """Returns the text."""
        return "".join(self._kept)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def owner_of(found: Any) -> Any:
    """Returns the model of a method; anything else is the model or the application itself."""
    return found.__self__ if isinstance(found, MethodType) else found
