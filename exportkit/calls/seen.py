"""Shapes of all calls: what was seen how often, without the values.

In come structures of calls and the shapes of their tensors; out go `SeenShapes`. Calls of one structure and equal
shapes take no more memory than one, and there is an end to how many different ones are kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from exportkit.trees.structure import Structure

MOST_SHAPES = 1000

Shapes = Mapping[str, tuple[int, ...]]
PathsOf = Callable[[Structure], Sequence[tuple[str, int]]]
# What tells one value from another here: its structure, and the shapes of its tensors.
_Key = tuple[tuple[Any, ...], tuple[tuple[int, ...], ...]]


@dataclass(frozen=True)
class SeenShapes:
    """Shapes that one call had, or several.

    Attributes:
        inputs: Shape of each input tensor by full path.
        outputs: Shape of each output tensor by its path in what the method returned.
        count: Number of calls that had these shapes.
    """

    inputs: Shapes
    outputs: Shapes
    count: int = 1

    def without(self, names: set[str]) -> SeenShapes:
        """Returns the same shapes without the arguments of these names."""
        kept = {path: shape for path, shape in self.inputs.items() if _argument(path) not in names}
        return replace(self, inputs=kept)


class ShapeCounter:
    """Counts calls by their shapes.

    Args:
        input_paths: Gives full path and number of each tensor in the structure of ``(args, kwargs)``.
        output_paths: Gives path and number of each tensor in the structure of outputs.

    Attributes:
        total: Number of calls.
        overflowed: Whether some calls had shapes that are not kept.
    """

    def __init__(self, input_paths: PathsOf, output_paths: PathsOf) -> None:
        self._inputs, self._outputs = _Side(input_paths), _Side(output_paths)
        self._lock = threading.Lock()
        self._counts: dict[tuple[_Key, _Key], list[int]] = {}  # lists of one, as the keys take long to hash
        self.total = 0
        self.overflowed = False

    def count(self, inputs: tuple[Structure, Any], outputs: tuple[Structure, Any]) -> None:
        """Counts one call, given by the structures and shapes of both sides."""
        key = (inputs[0].marks, inputs[1]), (outputs[0].marks, outputs[1])
        with self._lock:
            self.total += 1
            known = self._counts.get(key)
            if known is not None:
                known[0] += 1
            elif len(self._counts) < MOST_SHAPES:
                self._counts[self._inputs.keep(*inputs), self._outputs.keep(*outputs)] = [1]
            else:
                self.overflowed = True

    def seen(self) -> tuple[SeenShapes, ...]:
        """Returns the different shapes with the number of calls that had them."""
        with self._lock:
            counted = [(key, count) for key, (count,) in self._counts.items()]
        return tuple(
            SeenShapes(self._inputs.by_path(inputs), self._outputs.by_path(outputs), count)
            for (inputs, outputs), count in counted
        )


class _Side:
    """What was seen of the inputs of all calls, or of the outputs."""

    def __init__(self, paths_of: PathsOf) -> None:
        self._paths_of = paths_of
        self._structures: dict[tuple[Any, ...], Structure] = {}
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._paths: dict[tuple[Any, ...], Sequence[tuple[str, int]]] = {}

    def keep(self, structure: Structure, shapes: tuple[tuple[int, ...], ...]) -> _Key:
        """Keeps one object of those that are equal: the layers of a cache have one shape, and calls one structure."""
        marks = self._structures.setdefault(structure.marks, structure).marks
        return marks, tuple(self._shapes.setdefault(shape, shape) for shape in shapes)

    def by_path(self, key: _Key) -> Shapes:
        """Returns shapes by path; paths are found once for each structure."""
        marks, shapes = key
        if marks not in self._paths:
            self._paths[marks] = self._paths_of(self._structures[marks])
        return {path: tuple(shapes[position]) for path, position in self._paths[marks]}


def merged_shapes(every: Iterable[SeenShapes]) -> tuple[SeenShapes, ...]:
    """Returns each different one once, with the number of all calls that had it."""
    found: dict[Any, SeenShapes] = {}
    for one in every:
        key = tuple(one.inputs.items()), tuple(one.outputs.items())
        before = found.get(key)
        found[key] = one if before is None else replace(before, count=before.count + one.count)
    return tuple(found.values())


def _argument(path: str) -> str:
    return path.partition(".")[0].partition("[")[0]
