"""Compares two runs, module call by module call: in come two traces, out goes a `Comparison`.

The runs may be of other element types, on other devices, or of other code. What differs first by the flow of data is
what is wrong; what comes later is carried on from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from exportkit.errors import InvalidRequestError
from exportkit.module_traces.align import Pair, align_calls
from exportkit.module_traces.comparison import Comparison, ModuleRow, TensorRow
from exportkit.module_traces.distance import distance_of_statistics, same_content
from exportkit.module_traces.judge import judge
from exportkit.module_traces.records import ModuleCall, TensorRecord
from exportkit.module_traces.steps import Compared, Leaf, Step
from exportkit.module_traces.trace import Trace
from exportkit.module_traces.visible import Padding
from exportkit.running.compare import TF32_UNIT, Distance, distance, position_of_largest, unit_of

_Matched = list[tuple[TensorRecord, TensorRecord]]


def compare_traces(first: Trace, second: Trace, names: Mapping[str, str] | None = None) -> Comparison:
    """Returns how the second run differs from the first; see `Trace.compare`."""
    pairs = align_calls(first.calls, second.calls, names)
    if not pairs:
        raise InvalidRequestError(
            "These traces have no module call in common.",
            expected=_some_paths(first.calls),
            got=_some_paths(second.calls),
            hint='say which paths of the second are which of the first: names={"^model[.]": "", "query": "q_proj"}.',
        )
    return _Comparing(first, second, pairs).result()


class _Comparing:
    """One comparison: tensors that are the same ones in several places are compared once."""

    def __init__(self, first: Trace, second: Trace, pairs: list[Pair]) -> None:
        self._first, self._second, self._pairs = first, second, pairs
        self._padding = _paddings(first)
        self._seen: dict[tuple[Any, ...], Distance] = {}
        self._matched: dict[tuple[int, str], _Matched] = {}

    def result(self) -> Comparison:
        calls = self._calls()
        steps = judge(calls)
        by_index = {call.index: call for call in calls}
        wrong = next((step for step in steps if step.verdict == "differs"), None)
        return Comparison(
            first=None if wrong is None else _row(wrong, by_index),
            modules=_module_rows(steps, by_index),
            tensors=tuple(self._tensor_rows(steps, by_index)),
            only_first=_left(self._first.calls, [one for one, _ in self._pairs]),
            only_second=_left(self._second.calls, [two for _, two in self._pairs]),
            notes=tuple(self._notes()),
        )

    def _calls(self) -> list[Compared]:
        paired = {one.index for one, _ in self._pairs}
        nearest: dict[int, int | None] = {}
        for call in self._first.calls:  # the innermost call with a pair that each call is, or is part of
            above = nearest.get(call.parent) if call.parent is not None else None
            nearest[call.index] = call.index if call.index in paired else above
        return [self._compared(one, two, nearest.get(one.parent) if one.parent is not None else None)
                for one, two in self._pairs]  # fmt: skip

    def _compared(self, one: ModuleCall, two: ModuleCall, parent: int | None) -> Compared:
        sides = []
        for side, records, others in (("inputs", one.inputs, two.inputs), ("outputs", one.outputs, two.outputs)):
            self._matched[one.index, side] = matched = match_records(records, others)
            sides.append(tuple(self._leaf(one, a, b) for a, b in matched))
        return Compared(one.index, one.path, one.class_name, one.number, parent, sides[0], sides[1], two.path)

    def _leaf(self, call: ModuleCall, a: TensorRecord, b: TensorRecord) -> Leaf:
        return Leaf(a.path, self._distance(call, a, b), _unit(a, b), (a.dtype, b.dtype))

    def _distance(self, call: ModuleCall, a: TensorRecord, b: TensorRecord) -> Distance:
        if a.key is None or b.key is None:  # statistics of stored values are computed when they are asked for
            return distance_of_statistics(a, b)
        key = (a.key, b.key, a.shape, b.shape)
        if key not in self._seen:
            one, two = self._first.tensor(a), self._second.tensor(b)
            self._seen[key] = distance(one, two, self._visible(call, one))
        return self._seen[key]

    def _visible(self, call: ModuleCall, tensor: torch.Tensor) -> torch.Tensor | None:
        return self._padding[call.index](tensor)

    def _tensor_rows(self, steps: Sequence[Step], calls: Mapping[int, Compared]) -> Any:
        for step in steps:
            call = calls[step.call]
            for leaf in call.inputs if step.side == "inputs" else call.outputs:
                verdict = step.verdicts[leaf.path]
                index = self._index(step, leaf) if verdict == "differs" else None
                yield TensorRow(call.path, call.number, step.side, leaf.path, verdict, leaf.distance.rms,
                                leaf.distance.largest, index, leaf.dtypes, leaf.distance.values)  # fmt: skip

    def _index(self, step: Step, leaf: Leaf) -> tuple[int, ...] | None:
        a, b = next(pair for pair in self._matched[step.call, step.side] if pair[0].path == leaf.path)
        if a.key is None or b.key is None:
            return None
        one = self._first.tensor(a)
        call = next(call for call in self._first.calls if call.index == step.call)
        return position_of_largest(one, self._second.tensor(b), self._visible(call, one))

    def _notes(self) -> Any:
        for name, trace in (("first", self._first), ("second", self._second)):
            for call in trace.calls:
                if call.error is not None:
                    yield f"the {name} run failed in {call.path or 'the model'} ({call.class_name}): {call.error}"
                    break
            if not trace.complete:
                yield f"the {name} trace is incomplete: {'; '.join(trace.problems)}"
        records = [pair for matched in self._matched.values() for pair in matched]
        bare = sum(a.key is None or b.key is None for a, b in records)
        if bare:
            yield (
                f"{bare} of {len(records)} tensors were compared by statistics and hash alone: their errors are lower "
                'bounds; for values record both runs with values="all"'
            )


def match_records(first: Sequence[TensorRecord], second: Sequence[TensorRecord]) -> _Matched:
    """Returns which tensor of a call is which of another: by path, else by content, else by shape and order.

    Args:
        first: Tensors of one call.
        second: Tensors of the other.
    """
    by_path = {record.path: record for record in second}
    found = {record.path: by_path.pop(record.path) for record in first if record.path in by_path}
    left = list(by_path.values())
    for record in first:
        if record.path not in found:
            match = next((other for other in left if same_content(record, other)), None)
            match = match or next(
                (other for other in left if other.shape == record.shape and _alike(record, other)), None
            )
            if match is not None:
                found[record.path] = match
                left.remove(match)
    pairs = [(record, found[record.path]) for record in first if record.path in found]
    return [
        (a, b) for a, b in pairs if (a.dtype == "bool") == (b.dtype == "bool")
    ]  # masks that hide, or that are added


def _alike(a: TensorRecord, b: TensorRecord) -> bool:
    return (unit_of(a.dtype) > 0) == (unit_of(b.dtype) > 0)


def _unit(a: TensorRecord, b: TensorRecord) -> float:
    unit = max(unit_of(a.dtype), unit_of(b.dtype))
    devices = {record.device.partition(":")[0] for record in (a, b)}
    return max(unit, TF32_UNIT) if len(devices) > 1 and "cuda" in devices and unit else unit


def _paddings(trace: Trace) -> dict[int, Padding]:
    """The padding of each call, by its index: that of the outermost call that it is part of."""
    found: dict[int, Padding] = {}
    for call in trace.calls:
        above = found.get(call.parent) if call.parent is not None else None
        found[call.index] = Padding.of_call(trace, call) if above is None else above
    return found


def _row(step: Step, calls: Mapping[int, Compared]) -> ModuleRow:
    owner = calls[step.owner] if step.owner is not None else None
    at = calls[step.call]
    leaf = step.leaf.path if step.leaf else ""
    return ModuleRow(
        path=owner.path if owner else None,
        other_path=owner.other_path if owner else None,
        class_name=owner.class_name if owner else "",
        number=owner.number if owner else at.number,
        tensor=leaf if owner is at else f"{at.path or 'model'} {leaf}",
        base=step.base,
        error=step.error,
        largest=step.leaf.distance.largest if step.leaf else 0.0,
        verdict=step.verdict,
        reason=step.reason,
    )


def _module_rows(steps: Sequence[Step], calls: Mapping[int, Compared]) -> tuple[ModuleRow, ...]:
    """A row for each module call, those that are wrong first, then by the error that they add."""
    worst: dict[int | None, Step] = {}
    for step in steps:
        known = worst.get(step.owner)
        if step.leaf is not None and (known is None or _weight(step) > _weight(known)):
            worst[step.owner] = step
    ranked = sorted(worst.values(), key=_weight, reverse=True)
    return tuple(_row(step, calls) for step in ranked)


def _weight(step: Step) -> tuple[bool, bool, float]:
    return step.verdict == "differs", step.verdict == "unknown", step.added


def _left(calls: Sequence[ModuleCall], paired: Sequence[ModuleCall]) -> tuple[str, ...]:
    known = {call.index for call in paired}
    return tuple(dict.fromkeys(call.path for call in calls if call.index not in known))


def _some_paths(calls: Sequence[ModuleCall]) -> str:
    paths = [*Counter(call.path or "the model" for call in calls)]
    return ", ".join(paths[:4]) + (", ..." if len(paths) > 4 else "") or "no call"
