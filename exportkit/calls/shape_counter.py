"""Counts calls whose values are not recorded by their shapes, and by the constants among their arguments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from exportkit.calls.observation import SeenShapes
from exportkit.trees.structure import Structure

MOST_SHAPES = 1000  # different shapes of calls that are kept
# Beyond this, calls that only differ in constants are one: a loop of many steps may count them in an argument.
_MOST_CONSTANTS = 64
Shapes = Mapping[str, tuple[int, ...]]
PathsOf = Callable[[Structure], Sequence[tuple[str, int]]]
# What distinguishes values here: their structure, and the shapes of their tensors.
_Key = tuple[tuple[Any, ...], tuple[tuple[int, ...], ...]]
# By position or name, each with its type: 3, 3.0 and True are not the same constant.
Constants = tuple[tuple[int | str, type, bool | int | float | str], ...]


class ShapeCounter:
    """Counts calls by their shapes. Calls of one structure and equal shapes take no more memory than one call.

    Args:
        input_paths: Gives full path and number of each tensor in the structure of ``(args, kwargs)``.
        output_paths: Gives path and number of each tensor in the structure of outputs.
        constant_path: Gives the path of an argument by its position or name, None for one of ``*args``.

    Attributes:
        total: Number of calls.
        overflowed: Whether some calls had shapes that are not kept.
    """

    def __init__(
        self, input_paths: PathsOf, output_paths: PathsOf, constant_path: Callable[[int | str], str | None]
    ) -> None:
        self._constant_path = constant_path
        self._inputs, self._outputs = _Side(input_paths), _Side(output_paths)
        self._lock = threading.Lock()
        self._counts: dict[tuple[_Key, _Key, Constants], list[int]] = {}  # lists of one, as the keys take long to hash
        self.total = 0
        self.overflowed = False

    def count(self, inputs: tuple[Structure, Any], outputs: tuple[Structure, Any], constants: Constants = ()) -> None:
        """Counts one call, given by the structures and shapes of both sides, and the constants among its arguments."""
        constants = constants if len(self._counts) < _MOST_CONSTANTS else ()
        key = (inputs[0].marks, inputs[1]), (outputs[0].marks, outputs[1]), constants
        with self._lock:
            self.total += 1
            known = self._counts.get(key)
            if known is not None:
                known[0] += 1
            elif len(self._counts) < MOST_SHAPES:
                self._counts[self._inputs.keep(*inputs), self._outputs.keep(*outputs), constants] = [1]
            else:
                self.overflowed = True

    def seen(self) -> tuple[SeenShapes, ...]:
        """Returns the different shapes with the number of calls that had them."""
        with self._lock:
            counted = [(key, count) for key, (count,) in self._counts.items()]
        return tuple(
            SeenShapes(self._inputs.by_path(inputs), self._outputs.by_path(outputs), count, self._by_path(constants))
            for (inputs, outputs, constants), count in counted
        )

    def _by_path(self, constants: Constants) -> dict[str, bool | int | float | str]:
        kept = [(p, v) for p, _, v in constants if isinstance(v, str) or -(2**63) <= v < 2**63]  # neither inf nor NaN
        return {path: value for place, value in kept if (path := self._constant_path(place)) is not None}


class _Side:
    """What was seen of the inputs of all calls, or of the outputs."""

    def __init__(self, paths_of: PathsOf) -> None:
        self._paths_of = paths_of
        self._structures: dict[tuple[Any, ...], Structure] = {}
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._paths: dict[tuple[Any, ...], Sequence[tuple[str, int]]] = {}

    def keep(self, structure: Structure, shapes: tuple[tuple[int, ...], ...]) -> _Key:
        """Keeps one of several equal objects: the layers of a cache have one shape, and most calls one structure."""
        marks = self._structures.setdefault(structure.marks, structure).marks
        return marks, tuple(self._shapes.setdefault(shape, shape) for shape in shapes)

    def by_path(self, key: _Key) -> Shapes:
        """Returns shapes by path; the paths of each structure are looked up once."""
        marks, shapes = key
        if marks not in self._paths:
            self._paths[marks] = self._paths_of(self._structures[marks])
        return {path: tuple(shapes[position]) for path, position in self._paths[marks]}
