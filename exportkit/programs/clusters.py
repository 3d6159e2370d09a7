"""Groups recorded calls by what may lead a model down another path: what they give, a filled cache, a single token.

In comes an observation; out go clusters, each an observation of its own with a name. A trace holds one path through the
model's Python, so calls of one cluster are those that one program can serve if no program can serve all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.trees import Tree, is_cache_class, join

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Kind:
    """What calls of one cluster have in common.

    Attributes:
        given: Inputs that they give, with their ranks, without the numbers in their paths; those of an empty cache do
            not count.
        single: Axes of the first input, but for the leading one, that have size 1.
        constants: Python values that are arguments of their own.
    """

    given: frozenset[tuple[str, int]]
    single: frozenset[int]
    constants: frozenset[tuple[str, Any]]

    def data(self) -> dict[str, Any]:
        """Returns the kind as JSON data."""
        return {
            "given": sorted(map(list, self.given)),
            "single": sorted(self.single),
            "constants": dict(sorted(self.constants)),
        }

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Kind:
        """Returns the kind that `data` described."""
        return cls(
            frozenset(map(tuple, data["given"])), frozenset(data["single"]), frozenset(data["constants"].items())
        )


@dataclass(frozen=True)
class Landmarks:
    """What tells kinds of calls apart, in calls that one model was seen to take.

    Attributes:
        first: Path of the first input that all calls give and that does not grow; None if there is none.
        growing: Length axes of caches by path.
    """

    first: str | None
    growing: Mapping[str, int]

    @classmethod
    def of(cls, observation: Observation) -> Landmarks:
        """Returns the landmarks of the calls."""
        trees = [(name, tree) for call in observation.calls for name, tree in call.arguments.items()]
        growing = {join(name, path): axis.axis for name, tree in trees for path, axis in tree.growing.items()}
        given = [call.shapes() for call in observation.calls]
        common = (p for p in observation.tensor_paths() if p not in growing and all(p in shapes for shapes in given))
        return cls(next(common, None), growing)

    def kind(self, shapes: Shapes, constants: Mapping[str, Any]) -> Kind:
        """Returns the kind of a call.

        Args:
            shapes: Shapes of the tensors that it gives, by path.
            constants: The other inputs, by path.
        """
        given = {(_unnumbered(path), len(shape)) for path, shape in shapes.items() if not self._is_empty(path, shape)}
        first = shapes.get(self.first or "", ())
        plain = {path: value for path, value in constants.items() if isinstance(value, bool | int | float | str)}
        return Kind(
            frozenset(given),
            frozenset(axis for axis, size in enumerate(first) if axis and size == 1),
            frozenset(plain.items()),
        )

    def _is_empty(self, path: str, shape: tuple[int, ...]) -> bool:
        return path in self.growing and shape[self.growing[path]] == 0


@dataclass(frozen=True)
class Cluster:
    """Calls of one kind.

    Attributes:
        name: What they do, such as ``prefill``; part of a file's name.
        kind: What they have in common.
        observation: The calls, numbered anew.
        calls: Their numbers among all calls.
    """

    name: str
    kind: Kind
    observation: Observation
    calls: tuple[int, ...]


def clusters_of(observation: Observation, landmarks: Landmarks) -> list[Cluster]:
    """Returns the clusters in the order of their first calls."""
    kinds: dict[Kind, list[Call]] = {}
    for call in observation.calls:
        kinds.setdefault(landmarks.kind(call.shapes(), constants_of(call.arguments)), []).append(call)
    names = _names(observation, list(kinds))
    return [
        Cluster(name, kind, _only(observation, calls, kind, landmarks), tuple(call.index for call in calls))
        for name, (kind, calls) in zip(names, kinds.items(), strict=True)
    ]


def constants_of(arguments: Mapping[str, Tree]) -> dict[str, Any]:
    """Returns the Python values among arguments by path, but for those inside of caches, which count calls."""
    plain = {name: tree for name, tree in arguments.items() if not is_cache_class(tree.cls)}
    return {join(name, path): value for name, tree in plain.items() for path, value in tree.constants().items()}


def shapes_of(arguments: Mapping[str, Tree]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors among arguments, by path."""
    pairs = [(name, tree.tensor_paths, tree.shapes()) for name, tree in arguments.items()]
    return {join(name, p): shape for name, paths, shapes in pairs for p, shape in zip(paths, shapes, strict=True)}


def _only(observation: Observation, calls: list[Call], kind: Kind, landmarks: Landmarks) -> Observation:
    """The observation with some of its calls, and of those that were not stored the ones of that kind."""
    further = []
    for seen in observation.further:
        other = landmarks.kind(seen.inputs, {})
        if (other.given, other.single) == (kind.given, kind.single):
            further.append(seen)
    numbered = tuple(replace(call, index=number) for number, call in enumerate(calls))
    return replace(observation, calls=numbered, further=tuple(further))


def _names(observation: Observation, kinds: list[Kind]) -> list[str]:
    """A name for each kind: what it does with a cache, and as far as needed, what it is given, how and how much."""
    caches = {name for call in observation.calls for name, tree in call.arguments.items() if is_cache_class(tree.cls)}
    names = [""] * len(kinds)
    for said in (_roles(kinds, caches), _inputs(kinds, caches), _ranks(kinds), _amounts(kinds)):
        if len(set(names)) < len(names):
            names = ["_".join(filter(None, pair)) for pair in zip(names, said, strict=True)]
    return [f"{name}_{names[:i].count(name) + 1}" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _roles(kinds: list[Kind], caches: set[str]) -> list[str]:
    stored = [{item for item in kind.given if _argument(item[0]) in caches} for kind in kinds]
    full = set().union(*stored)
    names = ("decode" if kind.single else "continuation" for kind in kinds)
    return ["prefill" if found < full else name if full else "" for found, name in zip(stored, names, strict=True)]


def _inputs(kinds: list[Kind], caches: set[str]) -> list[str]:
    given = [{_argument(path) for path, _ in kind.given} - caches for kind in kinds]
    varying = set().union(*given) - given[0].intersection(*given)
    with_ = [f"with_{'_and_'.join(sorted(found & varying))}" if found & varying else "" for found in given]
    return [name or (f"without_{'_and_'.join(sorted(varying))}" if varying else "") for name in with_]


def _ranks(kinds: list[Kind]) -> list[str]:
    varying = frozenset().union(*(kind.given for kind in kinds)) - kinds[0].given.intersection(
        *(k.given for k in kinds)
    )
    both = {path for path, rank in varying if any(path == other and rank != r for other, r in varying)}
    found = [sorted(item for item in kind.given if item[0] in both) for kind in kinds]
    return ["_".join(f"{_argument(path)}_of_rank_{rank}" for path, rank in items[:1]) for items in found]


def _amounts(kinds: list[Kind]) -> list[str]:
    return ["single" if kind.single else "several" for kind in kinds]


def _argument(path: str) -> str:
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def _unnumbered(path: str) -> str:
    return re.sub(r"\[\d+\]", "[]", path)
