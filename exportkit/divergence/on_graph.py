"""Eager calls of modules against the values of a graph. In come a trace and a `GraphRun`; out go compared calls.

A graph knows the modules that its nodes come from, and not which value is which argument. Those that enter and leave
a module are few: an argument is the one of them that has its shape and is closest to it.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

from exportkit.divergence.graph_run import GraphRun, Inside
from exportkit.module_traces.first_step import first_step, is_known, judged
from exportkit.module_traces.records import ModuleCall, TensorRecord
from exportkit.module_traces.steps import Compared, Leaf, Step
from exportkit.module_traces.trace import Trace
from exportkit.running.compare import Distance, distance, is_reordered, unit_of

# A value this close to a tensor of the model is that tensor, whatever the rounding.
_CLOSE = 1e-3
# Of more values than these, those are looked at that are closest by as many elements.
_FEW, _SAMPLE = 2, 64

Side = Literal["inputs", "outputs"]
_Identity = tuple[str | None, tuple[int, ...]]


class Visible(Protocol):
    """Says which elements of a tensor count; see `exportkit.module_traces.visible`."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns booleans that broadcast to the tensor, or None for all."""

    def has_several_rows_of_a_token(self, tensor: torch.Tensor) -> bool:
        """Returns whether some of its rows do not count, and nobody knows which."""


@dataclass(frozen=True)
class OnGraph:
    """Calls of modules, compared with the values of a graph.

    Attributes:
        calls: The calls that the graph has values of.
        values: Name of the graph's value by index of the call, side and path of the tensor.
        modules: Paths of the modules in the graph.
        unmatched: Tensors that the model returns, and that no value of the graph has the shape of: the step that makes
            each, by its path.
        complete: ``index`` of each call whose outputs all have values in the graph.
        wrong: Paths of outputs of the model that are known to be wrong.
    """

    calls: tuple[Compared, ...]
    values: Mapping[tuple[int, Side, str], str]
    modules: frozenset[str]
    unmatched: Mapping[str, Step]
    complete: frozenset[int]
    wrong: frozenset[str] = frozenset()

    @functools.cached_property
    def steps(self) -> tuple[Step, ...]:
        """The steps of the run, judged."""
        return judged(self.calls, self.complete)

    @functools.cached_property
    def first(self) -> Step | None:
        """What differs first, or None if nothing does."""
        missing = (step for path, step in self.unmatched.items() if is_known(path, self.wrong))
        return first_step(self.steps, self.calls, self.wrong) or next(missing, None)


def compare_with_graph(trace: Trace, run: GraphRun, visible: Visible, wrong: frozenset[str] = frozenset()) -> OnGraph:
    """Returns the calls of a trace compared with the values of a graph.

    Args:
        trace: What the model did, with values.
        run: What the graph did.
        visible: Which elements of a tensor count.
        wrong: Paths of outputs of the model that are known to be wrong, such as ``outputs.logits``.
    """
    return _Comparison(trace, run, visible).result(wrong)


class _Comparison:
    def __init__(self, trace: Trace, run: GraphRun, visible: Visible) -> None:
        self._trace, self._run, self._visible = trace, run, visible
        self._calls_of = Counter(call.path for call in trace.calls)
        self._seen: dict[tuple[_Identity, str], Distance] = {}
        self._known: dict[_Identity, str] = {}
        self._fused: set[_Identity] = set()
        self._samples: dict[str | _Identity, torch.Tensor] = {}
        self._values: dict[tuple[int, Side, str], str] = {}

    def result(self, wrong: frozenset[str]) -> OnGraph:
        calls = []
        nearest: dict[int, int | None] = {}  # the innermost call in the graph that each call is, or is part of
        for call in self._trace.calls:
            parent = nearest.get(call.parent) if call.parent is not None else None
            if self._insides(call):
                calls.append(self._compared(call, parent))
                parent = call.index
            else:  # a module that was fused into another one
                self._fused.update(map(_identity, call.outputs))
            nearest[call.index] = parent
        missing = {call.index: self._missing(call) for call in self._trace.calls}
        complete = frozenset(index for index, records in missing.items() if not records)
        outermost = (call for call in self._trace.calls if call.parent is None)
        unmatched = {record.path: self._made(record, calls) for call in outermost for record in missing[call.index]}
        return OnGraph(tuple(calls), self._values, self._run.paths, unmatched, complete, wrong)

    def _missing(self, call: ModuleCall) -> list[TensorRecord]:
        return [record for record in call.outputs if (call.index, "outputs", record.path) not in self._values]

    def _made(self, record: TensorRecord, calls: Sequence[Compared]) -> Step:
        """The step that makes an output of the model which the graph does not have: that of the innermost module."""
        compared = {call.index for call in calls}
        returning = (
            (call.index, other.path)
            for call in reversed(self._trace.calls)
            for other in call.outputs
            if call.index in compared and _identity(other) == _identity(record)
        )
        index, path = next(returning, (self._trace.calls[0].index, record.path))
        reason = f"no value of the graph has its shape {tuple(record.shape)}"
        leaf = Leaf(path, Distance(problem=reason), unit_of(record.dtype), (record.dtype, record.dtype))
        return Step(index, index, "outputs", leaf, math.nan, math.nan, "differs", reason)

    def _compared(self, call: ModuleCall, parent: int | None) -> Compared:
        inside = self._insides(call)[call.number]
        inputs = self._leaves(call, "inputs", call.inputs, inside.entering)
        outputs = self._leaves(call, "outputs", call.outputs, inside.leaving)
        return Compared(call.index, call.path, call.class_name, call.number, parent, inputs, outputs)

    def _insides(self, call: ModuleCall) -> tuple[Inside, ...]:
        return self._run.calls_of(call.path, self._calls_of[call.path])

    def _leaves(
        self, call: ModuleCall, side: Side, records: Sequence[TensorRecord], names: Sequence[str]
    ) -> tuple[Leaf, ...]:
        by_path = {record.path: record for record in records if record.key is not None}
        wanted = {path: self._likely(record, self._candidates(record, names)) for path, record in by_path.items()}
        pairs = [(self._distance(by_path[path], name), path, name) for path, found in wanted.items() for name in found]
        taken: dict[str, _Identity] = {}
        leaves: dict[str, Leaf] = {}
        for far, path, name in sorted(pairs, key=lambda pair: 0.0 if pair[0].reordered else pair[0].rms):
            record = by_path[path]
            # Each value is one argument, unless the same tensor was given twice.
            if path in leaves or taken.setdefault(name, _identity(record)) != _identity(record):
                continue
            self._values[call.index, side, path] = name
            types = (record.dtype, _dtype(self._run.values[name]))
            leaves[path] = Leaf(path, far, max(map(unit_of, types)), types)
            if far.rms < _CLOSE:
                self._known.setdefault(_identity(record), name)
        return tuple(leaves[record.path] for record in records if record.path in leaves)

    def _candidates(self, record: TensorRecord, names: Sequence[str]) -> Sequence[str]:
        """The values that can be a tensor; of one that was compared before, its own, if the graph needs it here.

        What a module returns that was fused into another one is no value of the graph.
        """
        if _identity(record) in self._fused:
            return []
        known = self._known.get(_identity(record))
        if known is not None:
            return [known] if known in names else []
        return self._of_shape(record, names)

    def _of_shape(self, record: TensorRecord, names: Sequence[str]) -> list[str]:
        values = self._run.values
        kind = unit_of(record.dtype) > 0
        return [
            name
            for name in names
            if name in values
            and tuple(values[name].shape) == tuple(record.shape)
            and (unit_of(_dtype(values[name])) > 0) == kind
        ]

    def _likely(self, record: TensorRecord, names: Sequence[str]) -> Sequence[str]:
        """The few of the values that are closest by a sample of their elements."""
        if len(names) <= _FEW:
            return names
        own = self._sample(_identity(record), self._trace.tensor(record))
        apart = {name: (own - self._sample(name, self._run.values[name])).abs().nansum().item() for name in names}
        return sorted(names, key=apart.__getitem__)[:_FEW]

    def _sample(self, key: str | _Identity, tensor: torch.Tensor) -> torch.Tensor:
        if key not in self._samples:
            step = max(tensor.numel() // _SAMPLE, 1)
            self._samples[key] = tensor.reshape(-1)[::step].to(torch.float64)
        return self._samples[key]

    def _distance(self, record: TensorRecord, name: str) -> Distance:
        key = (_identity(record), name)
        if key not in self._seen:
            pair = self._trace.tensor(record), self._run.values[name]
            visible = self._visible(pair[0])
            far = distance(*pair, visible)
            half = math.sqrt(max(unit_of(record.dtype), unit_of(_dtype(pair[1]))))  # of the digits are wrong
            unknown = self._visible.has_several_rows_of_a_token(pair[0])
            reordered = half < far.rms < math.inf and (unknown or is_reordered(*pair, visible))
            self._seen[key] = replace(far, reordered=reordered)
        return self._seen[key]


def _identity(record: TensorRecord) -> _Identity:
    """What is the same of records of the same tensor."""
    return record.key, tuple(record.shape)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
