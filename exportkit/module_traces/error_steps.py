"""Divides two runs of a model into the steps that compute its tensors, so that each step can be compared by itself.

A step leads either to the inputs of a call, which the module around it computes, or to its outputs. It computes from
the inputs of its module, and from all that the calls inside that module took and returned before.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from exportkit.running.compare import Distance

Side = Literal["inputs", "outputs"]
Verdict = Literal["equal", "close", "carried", "unknown", "differs"]


@dataclass(frozen=True)
class TensorPair:
    """A tensor in both runs.

    Attributes:
        path: Its path, such as ``args[0]`` or ``outputs.last_hidden_state``.
        distance: How far the second tensor is from the first.
        unit: Rounding error of its dtype; 0 for integers.
        dtypes: Its dtype in both runs.
    """

    path: str
    distance: Distance
    unit: float
    dtypes: tuple[str, str]

    @property
    def exact(self) -> bool:
        """Whether the tensor is bitwise equal in both runs."""
        return self.distance.exact and self.dtypes[0] == self.dtypes[1]


@dataclass(frozen=True)
class ComparedCall:
    """A call of a module in both runs.

    Attributes:
        index: Its number among the calls.
        path: Path of the module.
        class_name: Its class.
        number: Which of its calls this is.
        parent: ``index`` of the call that it is part of, or None.
        inputs: Tensors that it was given.
        outputs: Tensors that it returned.
        other_path: Path of the module in the other run.
    """

    index: int
    path: str
    class_name: str
    number: int
    parent: int | None
    inputs: tuple[TensorPair, ...]
    outputs: tuple[TensorPair, ...]
    other_path: str = ""

    def side(self, side: Side) -> tuple[TensorPair, ...]:
        """Returns its inputs or its outputs."""
        return self.inputs if side == "inputs" else self.outputs


@dataclass(frozen=True)
class ErrorStep:
    """A step with the error that it makes.

    Attributes:
        owner: ``index`` of the call whose module computes it; None for what happens outside all modules.
        call: ``index`` of the call whose inputs or outputs these are.
        side: Which of the two.
        pair: The tensor that differs most, relative to its limit; None where there is no tensor.
        error: How far it is apart.
        base: The error of the tensors that it is computed from.
        verdict: ``differs`` where error is introduced; ``carried`` where it was introduced before; ``close`` for
            rounding; ``equal``; ``unknown`` where only values could tell.
        reason: What is wrong, in words.
        verdicts: A verdict for each of its tensors, by path.
    """

    owner: int | None
    call: int
    side: Side
    pair: TensorPair | None
    error: float
    base: float
    verdict: Verdict
    reason: str = ""
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Sorts steps by how much they matter: those that are wrong, then by the error that they add."""
        return self.verdict == "differs", self.verdict == "unknown", added_error(self.base, self.error)


def added_error(base: float, error: float) -> float:
    """Returns how much of an error is not in the inputs already."""
    return error if math.isinf(error) else max(error - base, 0.0)


def worst_steps(steps: Iterable[ErrorStep]) -> dict[int | None, ErrorStep]:
    """Returns the step that matters most for each call that owns steps, in the order in which they matter.

    Args:
        steps: The steps; the first of equal ones counts.
    """
    worst: dict[int | None, ErrorStep] = {}
    for step in steps:
        known = worst.get(step.owner)
        if step.pair is not None and (known is None or step.rank > known.rank):
            worst[step.owner] = step
    return dict(sorted(worst.items(), key=lambda item: item[1].rank, reverse=True))


@dataclass(frozen=True)
class Step:
    """A step whose error is not attributed yet.

    Attributes:
        owner: See `ErrorStep`.
        call: See `ErrorStep`.
        side: See `ErrorStep`.
        pairs: Its tensors.
        sources: The tensors that they are computed from.
        kind: Equal for steps that compute the same: the class of the module.
    """

    owner: int | None
    call: int
    side: Side
    pairs: tuple[TensorPair, ...]
    sources: tuple[TensorPair, ...]
    kind: tuple[str, ...]

    @functools.cached_property
    def exact_sources(self) -> bool:
        """Whether all that it computes from is bitwise equal in both runs."""
        return all(pair.exact for pair in self.sources)

    @functools.cached_property
    def base(self) -> float:
        """The error of what it computes from.

        Integers that differ select different rows: the square root of their share stands for the error of these rows.
        """
        return max(
            (
                pair.distance.spread if pair.unit else math.sqrt(pair.distance.spread)
                for pair in self.sources
                if pair.unit or not pair.distance.exact
            ),
            default=0.0,
        )


def steps_of(calls: Sequence[ComparedCall]) -> Iterable[Step]:
    """Yields the steps in the order in which they happened.

    Args:
        calls: The calls in the order in which they began.
    """
    by_index: dict[int | None, ComparedCall] = {call.index: call for call in calls}
    done: dict[int | None, list[TensorPair]] = defaultdict(list)
    opened: list[ComparedCall] = []

    def around(call: ComparedCall) -> tuple[TensorPair, ...]:
        """What a call can compute from: the inputs of the module around it, and what happened in that before."""
        parent = by_index.get(call.parent)
        return (*(parent.inputs if parent else ()), *done[call.parent])

    def closed(call: ComparedCall) -> Step:
        sources = (*(call.inputs or around(call)), *done.pop(call.index, ()))
        done[call.parent].extend(call.outputs)
        return Step(call.index, call.index, "outputs", call.outputs, sources, (call.class_name,))

    for call in calls:
        while opened and opened[-1].index != call.parent:
            yield closed(opened.pop())
        parent = by_index.get(call.parent)
        kind = (parent.class_name if parent else "", call.path.rpartition(".")[2])
        yield Step(call.parent, call.index, "inputs", call.inputs, around(call), kind)
        done[call.parent].extend(call.inputs)
        opened.append(call)
    while opened:
        yield closed(opened.pop())
