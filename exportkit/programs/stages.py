"""The slow stages of an export: they are timed, reported to the watchers of this thread or task, and shown."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Detail = Callable[[str], None]
# Called with the name of a stage and about how many seconds it takes. Its context lasts as long as the stage, and
# yields a function that takes details.
Watcher = Callable[[str, float | None], contextlib.AbstractContextManager[Detail]]

_watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("watchers", default=())

# Measured with Llamas of 2 to 12 layers: translating a program takes 2.4 to 3.9 times as long as tracing it, and
# tracing takes 0.04 s for each module.
TRANSLATION_PER_TRACE = 3.0
TRACE_PER_MODULE = 0.04


@contextlib.contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Reports the stages that begin in this block to ``watcher``."""
    token = _watchers.set((*_watchers.get(), watcher))
    try:
        yield
    finally:
        _watchers.reset(token)


@contextlib.contextmanager
def stage(name: str, seconds: MutableMapping[str, float] | None = None, about: float | None = None) -> Iterator[Detail]:
    """Runs a stage, and yields a function that takes details about its progress.

    Args:
        name: Its name.
        seconds: Its duration is added here.
        about: About how many seconds it takes, if that is known.
    """
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        details = [stack.enter_context(watcher(name, about)) for watcher in _watchers.get()]

        def tell(text: str) -> None:
            for detail in details:
                detail(text)

        yield tell
    if seconds is not None:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started


@contextlib.contextmanager
def show_progress(text: str = "", console: Console | None = None) -> Iterator[None]:
    """Shows the slow stages of an export while they run, with the elapsed time and an estimate for each stage.

    On a terminal, a single line is updated. Elsewhere, each stage is printed on a line of its own.

    Args:
        text: Shown before the name of each stage, and while no stage runs.
        console: Where to print; stderr by default.

    Example:
        >>> import torch, exportkit
        >>> model, observer = torch.nn.Linear(4, 2), exportkit.InputObserver()
        >>> with observer(model):
        ...     _ = model(torch.ones(3, 4))
        >>> with exportkit.show_progress():
        ...     exported = exportkit.export(model, observer)
    """
    from rich.console import Console

    console = console or Console(stderr=True, highlight=False)
    with (_line_with_clock if console.is_terminal else _printed_lines)(console) as (begin, refine):
        if text:
            begin(text)

        @contextlib.contextmanager
        def watcher(name: str, about: float | None) -> Iterator[Detail]:
            label = f"{text}: {name}" if text else name
            label += "" if about is None else f" (about {max(about, 1):.0f} s)"
            begin(label)
            yield lambda detail: refine(f"{label}: {detail}")

        with watched_by(watcher):
            yield


@contextlib.contextmanager
def _line_with_clock(console: Console) -> Iterator[tuple[Detail, Detail]]:
    """Shows a line with a clock, and yields what shows a stage in it, and what shows a detail of the stage."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("")
        yield lambda text: shown.reset(task, description=text), lambda text: shown.update(task, description=text)


def _printed_lines(console: Console) -> contextlib.AbstractContextManager[tuple[Detail, Detail]]:
    """Prints a line for each stage, for log files; details are left out."""
    return contextlib.nullcontext((lambda text: console.print(text, markup=False, soft_wrap=True), lambda _: None))
