"""What goes on during an export, on the terminal: stages come in, a line for each goes out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from exportkit.programs.stages import watched_by

if TYPE_CHECKING:
    from rich.console import Console


@contextlib.contextmanager
def show_progress(text: str = "", console: Console | None = None) -> Iterator[None]:
    """Shows the slow stages of an export while they run, with the time that has passed and about how long each takes.

    On a terminal that is one line that changes, elsewhere one line for each stage.

    Args:
        text: What is said before each stage, and where no stage runs.
        console: Where to; stderr by default.

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
    """One line with a clock, for a terminal."""

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
    """A line for each stage, for a file; details would fill it."""

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
