"""Tables and lists for the terminal, and tables and lines as HTML for notebooks, in their colours, light or dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

# Text and background are the notebook's own; only the bar beside a verdict has a colour. Its contrast is 3 and more to
# white, and to the dark greys of JupyterLab and VS Code (#111 and #1e1e1e).
_GOOD, _BAD = "#1a7f37", "#cf222e"
_LINE = "1px solid rgba(127, 127, 127, .35)"
_CELL = f"text-align: left; vertical-align: top; padding: .2em .8em .2em 0; border-bottom: {_LINE}"


def aligned(rows: Sequence[Sequence[str]], ruled: bool = False) -> list[str]:
    """Returns the lines of a table; with ``ruled``, dashes below its first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]] if ruled else lines


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Returns the sizes of variables as text."""
    return ", ".join([f"{name} {size}" for name, size in sizes.items()])


def count(number: int, one: str, several: str = "") -> str:
    """Formats a number with its noun, such as ``1 call`` or ``3 calls``."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def first_of(items: Sequence[str], most: int, separator: str = ", ") -> str:
    """Returns the first items as text, and how many more there are, if any."""
    more = f"{separator.strip(', ')} and {len(items) - most} more" if len(items) > most else ""
    return separator.join(items[:most]) + more


def html_of(*parts: str) -> str:
    """Returns parts of a page as one, which scrolls where a table is too wide."""
    return f'<div style="overflow-x: auto; max-width: 100%">{"".join(parts)}</div>'


def html_verdict(text: str, good: bool) -> str:
    """Returns a verdict as a line that stands out."""
    colour = _GOOD if good else _BAD
    style = f"border-left: .3em solid {colour}; padding-left: .5em; margin: .3em 0; font-weight: 600"
    return f'<p style="{style}">{escape(text)}</p>'


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table, of which the first row is the header."""
    header, *body = rows
    head = "".join(f'<th scope="col" style="{_CELL}">{escape(cell)}</th>' for cell in header)
    cells = ["".join(f'<td style="{_CELL}">{escape(cell)}</td>' for cell in row) for row in body]
    lines = "".join(f"<tr>{row}</tr>" for row in cells)
    style = "border-collapse: collapse; margin: .3em 0; background: transparent; color: inherit"
    return f'<table style="{style}"><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>'


def html_lines(lines: Sequence[str]) -> str:
    """Returns lines of text as a list; nothing if there are none."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul style="margin: .3em 0">{items}</ul>' if items else ""


def html_details(title: str, content: str) -> str:
    """Returns content that a reader can fold."""
    return f"<details open><summary>{escape(title)}</summary>{content}</details>"
