"""`show_progress`, which displays the stages of an export while they run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from exportkit.programs.stages import watched_by

if TYPE_CHECKING:
    from rich.console import Console


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
    with _Line(console) if console.is_terminal else _Lines(console) as view:
        if text:
            view.begin(text)

        @contextlib.contextmanager
        def watcher(name: str, about: float | None) -> Iterator[Callable[[str], None]]:
            label = f"{text}: {name}" if text else name
            label += "" if about is None else f" (about {max(about, 1):.0f} s)"
            view.begin(label)
            yield lambda detail: view.refine(f"{label}: {detail}")

        with watched_by(watcher):
            yield


class _Line:
    """A line with a clock, for terminals."""

    def __init__(self, console: Console) -> None:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task("")

    def __enter__(self) -> _Line:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, text: str) -> None:
        self._progress.reset(self._task, description=text)

    def refine(self, text: str) -> None:
        self._progress.update(self._task, description=text)


class _Lines:
    """A line for each stage, for log files; details are left out."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def begin(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def refine(self, _text: str) -> None:
        return None
