"""Prints the results of comparing and locating, and writes them as JSON."""

from __future__ import annotations

import abc
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

_WIDTH = 110


class PrintedResult(abc.ABC):
    """A result that prints as a headline, labelled lines about the first difference, and tables."""

    @abc.abstractmethod
    def _title(self) -> tuple[str, bool]:
        """The result in one line, and whether it is good."""

    @abc.abstractmethod
    def _details(self) -> Iterator[tuple[str, str]]:
        """A label and a text for each line about the first difference."""

    @abc.abstractmethod
    def _tables(self) -> Iterator[RenderableType | str]:
        """The tables, and lines of text."""

    @abc.abstractmethod
    def _data(self) -> dict[str, Any]:
        """All of it as data for JSON, in which numbers need not be finite."""

    def as_json(self) -> str:
        """Returns all of it as JSON text; what is not finite is null or a string."""
        return json.dumps(_finite(self._data()), indent=1, allow_nan=False)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=_WIDTH, color_system=None, highlight=False)
        with console.capture() as captured:
            console.print(self)
        return "\n".join(line.rstrip() for line in captured.get().splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        title, is_good = self._title()
        yield Text(title, style="bold green" if is_good else "bold red")
        for label, text in self._details():
            yield Text.assemble((f"  {label:8}", "dim"), text)
        for item in self._tables():
            yield Text(item) if isinstance(item, str) else item


def error_text(error: float, base: float, largest: float, index: Sequence[int] | None) -> str:
    """Returns what is printed about the size of an error."""
    at = f" at {list(index)}" if index else ""
    return f"{error:.1e} from {base:.1e} (relative), {largest:.3g} at most{at}"


def call_text(path: str, number: int) -> str:
    """Returns a module and its call in words, such as ``decoder.block.0 #2``."""
    return (path or "(model)") + (f" #{number}" if number else "")


def printed_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    """Returns a table for the terminal."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
