"""The steps of two runs. In come calls of modules, with the distances of their tensors; out go steps, not judged yet.

A step is what leads to the inputs of a call, which the module around it computes, or what leads to its outputs. It is
computed from the inputs of that module, and from all that the calls inside of it took and returned before.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from exportkit.running.compare import Distance

Verdict = Literal["equal", "close", "carried", "unknown", "differs"]


@dataclass(frozen=True)
class Leaf:
    """A tensor in both runs.

    Attributes:
        path: Its path, such as ``args[0]`` or ``outputs.last_hidden_state``.
        distance: How far it is apart.
        unit: Rounding error of its element type; 0 for integers.
        dtypes: Its element type in both runs.
    """

    path: str
    distance: Distance
    unit: float
    dtypes: tuple[str, str]

    @property
    def same_type(self) -> bool:
        """Whether the element type is the same in both runs."""
        return self.dtypes[0] == self.dtypes[1]


@dataclass(frozen=True)
class Compared:
    """A call of a module in both runs.

    Attributes:
        index: Its number among the calls.
        path: Path of the module.
        class_name: Its class.
        number: Which of its calls this is.
        parent: ``index`` of the call that it is part of; None for none.
        inputs: Tensors that it was given.
        outputs: Tensors that it returned.
        other_path: Path of the module in the other run.
    """

    index: int
    path: str
    class_name: str
    number: int
    parent: int | None
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    other_path: str = ""


@dataclass(frozen=True)
class Step:
    """What leads to the inputs or to the outputs of a call.

    Attributes:
        owner: ``index`` of the call whose module computes it; None for what happens outside of all modules.
        call: ``index`` of the call whose inputs or outputs these are.
        side: Which of the two.
        leaf: The tensor that differs most, for what it is computed from; None where there is none.
        error: How far it is apart.
        base: The same for what it is computed from.
        verdict: ``differs`` where error comes in; ``carried`` where it came in before; ``close`` for rounding;
            ``equal``; ``unknown`` where only values could tell.
        reason: In words, what is wrong.
        verdicts: The same for each of its tensors, by path.
    """

    owner: int | None
    call: int
    side: Literal["inputs", "outputs"]
    leaf: Leaf | None
    error: float
    base: float
    verdict: Verdict
    reason: str = ""
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)

    @property
    def added(self) -> float:
        """The error that is more than what it is computed from has."""
        return self.error if math.isinf(self.error) else max(self.error - self.base, 0.0)

    @property
    def jump(self) -> float:
        """How many times the error of what it is computed from; infinite where that is exact."""
        return self.error / self.base if self.base else (math.inf if self.error else 1.0)


@dataclass(frozen=True)
class RawStep:
    """A step that is not judged.

    Attributes:
        owner: See `Step`.
        call: See `Step`.
        side: See `Step`.
        leaves: Its tensors.
        sources: Those that they are computed from.
        kind: What is the same of steps that compute the same: the class of the module.
    """

    owner: int | None
    call: int
    side: Literal["inputs", "outputs"]
    leaves: tuple[Leaf, ...]
    sources: tuple[Leaf, ...]
    kind: tuple[str, ...]

    @functools.cached_property
    def exact_sources(self) -> bool:
        """Whether all that it is computed from is bitwise equal."""
        return all(leaf.distance.exact and leaf.same_type for leaf in self.sources)

    @functools.cached_property
    def exact(self) -> bool:
        """Whether its tensors are bitwise equal."""
        return all(leaf.distance.exact and leaf.same_type for leaf in self.leaves)

    @functools.cached_property
    def base(self) -> float:
        """The error of what it is computed from; of other choices it is that of the rows that they stand for."""
        return max((_spread(leaf) for leaf in self.sources if leaf.unit or not leaf.distance.exact), default=0.0)


def _spread(leaf: Leaf) -> float:
    return leaf.distance.spread if leaf.unit else math.sqrt(leaf.distance.spread)


def raw_steps(calls: Sequence[Compared]) -> Iterable[RawStep]:
    """Yields the steps in the order in which they happened.

    Args:
        calls: The calls in the order in which they started.
    """
    by_index = {call.index: call for call in calls}
    done: dict[int | None, list[Leaf]] = defaultdict(list)
    opened: list[Compared] = []

    def around(call: Compared) -> tuple[Leaf, ...]:
        """What a call can be computed from: what the module around it was given, and what happened in that before."""
        parent = by_index.get(call.parent) if call.parent is not None else None
        return (*(parent.inputs if parent else ()), *done[call.parent])

    def closed(call: Compared) -> RawStep:
        sources = (*(call.inputs or around(call)), *done.pop(call.index, ()))
        done[call.parent].extend(call.outputs)
        return RawStep(call.index, call.index, "outputs", call.outputs, sources, (call.class_name,))

    for call in calls:
        while opened and opened[-1].index != call.parent:
            yield closed(opened.pop())
        parent = by_index.get(call.parent) if call.parent is not None else None
        sources = around(call)
        kind = (parent.class_name if parent else "", call.path.rpartition(".")[2])
        yield RawStep(call.parent, call.index, "inputs", call.inputs, sources, kind)
        done[call.parent].extend(call.inputs)
        opened.append(call)
    while opened:
        yield closed(opened.pop())
