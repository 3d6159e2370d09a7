"""Groups recorded calls by kind: which inputs they give, whether a cache is filled, one token or several.

A trace holds one path through the Python code of a model. If no program serves all calls, one program serves the calls
of one kind. Calls of one kind may still be on both sides of a condition on sizes, and are split by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.calls.signature import Signature
from exportkit.json_data import Size, read
from exportkit.trees import Fingerprint, Tree, constants_in, fingerprint, first_name, is_cache_class, join, text_of
from exportkit.trees.constants import from_json
from exportkit.trees.structure import without_indices

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class CallKind:
    """What the calls of one group have in common.

    Attributes:
        given: Inputs that they give: path, without indices of lists unless their lengths matter, and rank. Tensors of
            an empty cache do not count.
        single: Axes of the first input, other than the leading one, that have size 1.
        constants: Python values that are arguments.
        sizes: A condition on their sizes, which the domain of a program checks.
    """

    given: frozenset[tuple[str, int]]
    single: frozenset[int]
    constants: frozenset[tuple[str, Fingerprint]]
    sizes: str = field(default="", compare=False)


@dataclass(frozen=True)
class CallClassifier:
    """Tells the kinds of call of a model apart by their inputs.

    Attributes:
        first: Path of the first input that all calls give and that does not grow; None if there is none.
        growing: Length axes of caches by path.
        lists: Paths, without indices, in lists whose lengths matter.
    """

    first: str | None
    growing: Mapping[str, Size]
    lists: frozenset[str] = frozenset()

    @classmethod
    def of(cls, observation: Observation) -> CallClassifier:
        """Returns the classifier for recorded calls."""
        growing: dict[str, int] = {}
        common = dict.fromkeys(observation.tensor_paths())
        for call in observation.calls:
            for name, tree in call.arguments.items():
                growing |= {join(name, path): axis.axis for path, axis in tree.growing.items()}
            shapes = call.shapes()
            common = {path: None for path in common if path in shapes}
        return cls(next((path for path in common if path not in growing), None), growing)

    def with_lists(self, observation: Observation) -> CallClassifier:
        """Returns the classifier that also tells calls apart by the lengths of their lists, if these differ."""
        counts: dict[str, set[int]] = {}
        for call in observation.calls:
            paths = [without_indices(path) for path in call.shapes() if path not in self.growing]
            for path, count in Counter(paths).items():
                counts.setdefault(path, set()).add(count)
        return replace(self, lists=frozenset(path for path, found in counts.items() if len(found) > 1))

    def kind(self, shapes: Shapes, constants: Mapping[str, Fingerprint]) -> CallKind:
        """Returns the kind of a call.

        Args:
            shapes: Shapes of the tensors that it gives, by path.
            constants: Its other inputs by path, as `given_constants` returns them.
        """
        given = {
            (path if (general := without_indices(path)) in self.lists else general, len(shape))
            for path, shape in shapes.items()
            if path not in self.growing or 0 not in shape[: self.growing[path] + 1]
        }
        first = shapes.get(self.first or "", ())
        single = {axis for axis, size in enumerate(first) if axis and size == 1}
        return CallKind(frozenset(given), frozenset(single), frozenset(constants.items()))


@dataclass(frozen=True)
class CallGroup:
    """Calls of one kind.

    Attributes:
        name: What they do, such as ``prefill``; part of a file name.
        kind: What they have in common.
        observation: The calls, numbered from 0.
        calls: Their numbers among all calls.
    """

    name: str
    kind: CallKind
    observation: Observation
    calls: tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """Why a model was exported as several programs, and which calls each of them serves.

    Attributes:
        reason: Why one program cannot serve all calls.
        classifier: What tells the kinds of call apart.
        kinds: The kind of call that each program serves, by its name.
        calls: Numbers of the recorded calls that each program serves, by its name.
    """

    reason: str
    classifier: CallClassifier
    kinds: Mapping[str, CallKind]
    calls: Mapping[str, tuple[int, ...]]

    @property
    def text(self) -> str:
        """One sentence about the split."""
        shared = frozenset.intersection(*(kind.constants for kind in self.kinds.values()))
        names = []
        for name, kind in self.kinds.items():
            own = [f"{path} = {text_of(value)}" for path, value in sorted(kind.constants - shared)]
            own += [kind.sizes] if kind.sizes else []
            names.append(f"{name} ({', '.join(own)})" if own else name)
        return f"one graph failed, so {len(self.kinds)} programs: {', '.join(names)}. The cause: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        """Returns the split as JSON data."""
        return {
            "reason": self.reason,
            "first": self.classifier.first,
            "growing": dict(self.classifier.growing),
            "lists": sorted(self.classifier.lists),
            "kinds": {
                name: {
                    "given": sorted(map(list, kind.given)),
                    "single": sorted(kind.single),
                    "constants": dict(sorted(kind.constants)),
                    "sizes": kind.sizes,
                }
                for name, kind in self.kinds.items()
            },
            "calls": {name: list(calls) for name, calls in self.calls.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Split:
        """Returns the split that `to_json` described.

        Raises:
            InvalidDataError: if the data is not a split.
        """
        kinds = {}
        for name, kind in read(Mapping[str, Mapping[str, Any]], data["kinds"]).items():
            constants = read(Mapping[str, Any], kind["constants"])
            kinds[name] = CallKind(
                read(frozenset[tuple[str, Size]], kind["given"]),
                read(frozenset[Size], kind["single"]),
                frozenset((path, from_json(value)) for path, value in constants.items()),
                read(str, kind.get("sizes", "")),
            )
        classifier = read(CallClassifier, {name: data[name] for name in ("first", "growing", "lists")})
        calls = read(Mapping[str, tuple[Size, ...]], data["calls"])
        return cls(read(str, data["reason"]), classifier, kinds, calls)


def kinds_of(observation: Observation, classifier: CallClassifier) -> dict[CallKind, list[Call]]:
    """Returns the recorded calls by their kind, in the order of their first calls."""
    kinds: dict[CallKind, list[Call]] = {}
    for call in observation.calls:
        kind = classifier.kind(call.shapes(), given_constants(call.arguments, call.signature))
        kinds.setdefault(kind, []).append(call)
    return kinds


def groups_of(observation: Observation, classifier: CallClassifier) -> list[CallGroup]:
    """Returns the groups of recorded calls, in the order of their first calls."""
    kinds = kinds_of(observation, classifier)
    names = _names(observation, list(kinds))
    return [
        CallGroup(name, kind, _only(observation, calls, kind, classifier), tuple(call.index or 0 for call in calls))
        for name, (kind, calls) in zip(names, kinds.items(), strict=True)
    ]


def split_by_sizes(group: CallGroup, condition: str, breaking: Collection[int]) -> list[CallGroup]:
    """Returns the calls of a group that fulfil a condition on sizes, and those that break it; none if all are alike.

    Args:
        group: The group.
        condition: The condition.
        breaking: Numbers of the calls that break it.
    """
    found = []
    for number, breaks in enumerate((False, True), 1):
        held = [call for call in group.observation.calls if (call.index in breaking) == breaks]
        text = f"not ({condition})" if breaks else condition
        kind = replace(group.kind, sizes=", ".join(filter(None, (group.kind.sizes, text))))
        calls = tuple(replace(call, index=position) for position, call in enumerate(held))
        numbers = tuple(group.calls[call.index or 0] for call in held)
        only = replace(group.observation, calls=calls, further=())
        found += [CallGroup(f"{group.name or 'sizes'}_{number}", kind, only, numbers)] if held else []
    return found if len(found) > 1 else []


def given_constants(arguments: Mapping[str, Tree], signature: Signature) -> dict[str, Fingerprint]:
    """Returns the Python values among arguments by path, without those inside caches, which count calls.

    Args:
        arguments: The arguments that a call gives.
        signature: Its parameters: what is left out has its default.
    """
    found: dict[str, Fingerprint] = {}
    for name, default in signature.defaults.items():
        if name not in arguments:
            found |= constants_in(fingerprint(default), name)
    for name, tree in arguments.items():
        found |= constants_in(fingerprint(tree.build()), name)
    return found


def _only(observation: Observation, calls: list[Call], kind: CallKind, classifier: CallClassifier) -> Observation:
    """The observation with only these calls; of the calls that were not stored, it keeps those of the kind."""
    further, constants = [], dict(kind.constants)
    for seen in observation.further:
        other = classifier.kind(seen.inputs, {})
        given = {
            path: form
            for name, tree in observation.constants_of(seen).items()
            for path, form in constants_in(fingerprint(tree.build()), name).items()
        }
        has_constants = all(constants.get(path, form) == form for path, form in given.items())
        if (other.given, other.single) == (kind.given, kind.single) and has_constants:
            further.append(seen)
    numbered = tuple(replace(call, index=number) for number, call in enumerate(calls))
    return replace(observation, calls=numbered, further=tuple(further))


def _names(observation: Observation, kinds: list[CallKind]) -> list[str]:
    """A name for each kind: its role for a cache and, if needed to be unique, its inputs, ranks and lengths."""
    caches = {name for call in observation.calls for name, tree in call.arguments.items() if is_cache_class(tree.cls)}
    names = [""] * len(kinds)
    for said in (_roles(kinds, caches), _inputs(kinds, caches), _ranks(kinds), _amounts(kinds)):
        if len(set(names)) < len(names):
            names = ["_".join(filter(None, pair)) for pair in zip(names, said, strict=True)]
    return [f"{name}_{names[:i].count(name) + 1}" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _roles(kinds: list[CallKind], caches: set[str]) -> list[str]:
    stored = [{item for item in kind.given if first_name(item[0]) in caches} for kind in kinds]
    full = set().union(*stored)
    names = ("decode" if kind.single else "continuation" for kind in kinds)
    return ["prefill" if found < full else name if full else "" for found, name in zip(stored, names, strict=True)]


def _inputs(kinds: list[CallKind], caches: set[str]) -> list[str]:
    given = [{first_name(path) for path, _ in kind.given} - caches for kind in kinds]
    varying = set().union(*given) - given[0].intersection(*given)
    with_ = [f"with_{'_and_'.join(sorted(found & varying))}" if found & varying else "" for found in given]
    return [name or (f"without_{'_and_'.join(sorted(varying))}" if varying else "") for name in with_]


def _ranks(kinds: list[CallKind]) -> list[str]:
    varying = frozenset().union(*(kind.given for kind in kinds)) - kinds[0].given.intersection(
        *(k.given for k in kinds)
    )
    both = {path for path, rank in varying if any(path == other and rank != r for other, r in varying)}
    found = [sorted(item for item in kind.given if item[0] in both) for kind in kinds]
    return ["_".join(f"{first_name(path)}_of_rank_{rank}" for path, rank in items[:1]) for items in found]


def _amounts(kinds: list[CallKind]) -> list[str]:
    return ["single" if kind.single else "several" for kind in kinds]
