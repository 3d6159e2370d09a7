"""Draws the axes of a plan's inputs: in comes a plan, out go pieces of SVG, a colour for each variable.

Each input is a row of cells, one for each axis, with the axis's size in it; each variable has bars, one for each call.
Colours only repeat what the names say.
"""

from __future__ import annotations

from dataclasses import dataclass

from exportkit.plan.plan import Plan
from exportkit.plan.text import alike_leaves

_COLOURS = 8  # that the page has, as --c0 to --c7
_LETTER, _PAD, _HEIGHT, _GAP = 7.9, 10, 26, 3  # of a cell, in pixels: width of a character, margins
_BAR, _TALLEST, _MOST_BARS = 7, 26, 24


@dataclass(frozen=True)
class Cell:
    """One axis: its size, its place in the picture, and the colours of its variables, with the share of each."""

    text: str
    x: float
    width: float
    colours: tuple[int, ...]


@dataclass(frozen=True)
class InputPicture:
    """The axes of an input."""

    label: str
    cells: tuple[Cell, ...]

    @property
    def width(self) -> float:
        """Width in pixels."""
        return self.cells[-1].x + self.cells[-1].width + 1 if self.cells else 60

    height = _HEIGHT + 2


@dataclass(frozen=True)
class VariablePicture:
    """The sizes of a variable in the recorded calls: (x, height) of a bar for each; None where it has none."""

    name: str
    colour: int
    sizes: str
    bars: tuple[tuple[float, float], ...]
    height = _TALLEST

    @property
    def width(self) -> float:
        """Width in pixels."""
        return max(len(self.bars), 1) * _BAR


def input_pictures(plan: Plan) -> list[InputPicture]:
    """Returns a picture for each input; those that are alike have one."""
    colours = _colours(plan)
    pictures = []
    for label, leaf in alike_leaves(plan):
        cells, x = [], 1.0
        for size in leaf.sizes:
            width = max(len(str(size)) * _LETTER + 2 * _PAD, _HEIGHT)
            cells.append(Cell(str(size), x, width, tuple(colours[name] for name in size.variables())))
            x += width + _GAP
        pictures.append(InputPicture(label, tuple(cells)))
    return pictures


def variable_pictures(plan: Plan) -> list[VariablePicture]:
    """Returns a picture for each variable."""
    colours = _colours(plan)
    pictures = []
    for variable in plan.variables:
        known = [size or 0 for size in variable.seen][:_MOST_BARS]
        largest = max([*known, 1])
        bars = tuple((i * _BAR, max(_TALLEST * size / largest, 1)) for i, size in enumerate(known))
        sizes = ", ".join("absent" if size is None else str(size) for size in variable.seen[:_MOST_BARS])
        more = f", and {len(variable.seen) - _MOST_BARS} more" if len(variable.seen) > _MOST_BARS else ""
        pictures.append(VariablePicture(variable.name, colours[variable.name], sizes + more, bars))
    return pictures


def _colours(plan: Plan) -> dict[str, int]:
    return {variable.name: i % _COLOURS for i, variable in enumerate(plan.variables)}
