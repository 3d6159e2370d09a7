"""Renders the HTML templates of this package and formats the numbers in them.

A page needs no other files and no network. Templates extend ``base.html.j2`` and use the macros of ``macros.html.j2``.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

from exportkit.plan.tables import count

_TEMPLATES = Path(__file__).with_name("templates")
_SIZE_UNITS = ("B", "kB", "MB", "GB", "TB")


def render(template: str, **values: Any) -> str:
    """Renders a template of this package. All text in the values is escaped.

    Args:
        template: Its file name, such as ``"trace.html.j2"``.
        **values: The values that the template uses; a missing one is an error.
    """
    text: str = _environment().get_template(template).render(values)
    return text


@cache
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(seconds=seconds, size=size, difference=difference, count=count)
    return environment


def seconds(value: float | None) -> str:
    """Formats a duration, such as ``1.2 s`` or ``35 ms``; a dash if it is unknown."""
    if value is None or math.isnan(value):
        return "–"
    if round(1000 * value) < 1000:
        return f"{1000 * value:.1f} ms" if value < 0.01 else f"{1000 * value:.0f} ms"
    if round(value, 1) < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s"


def size(value: float | None) -> str:
    """Formats a number of bytes, such as ``1.5 MB``; a dash if it is unknown."""
    if value is None:
        return "–"
    digits = 0
    for unit in _SIZE_UNITS[:-1]:
        if round(value, digits) < 1000:
            return f"{value:.{digits}f} {unit}"
        value, digits = value / 1000, 1
    return f"{value:.1f} {_SIZE_UNITS[-1]}"


def difference(value: float | str | None) -> str:
    """Formats a difference, such as ``6.0e-08``, ``0`` or ``inf``; a dash if there is none."""
    if value is None or math.isnan(float(value)):
        return "–"
    return "0" if value == 0 else f"{float(value):.1e}"
