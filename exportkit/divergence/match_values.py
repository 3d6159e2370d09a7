"""Matches the tensors of a model's module calls with values of a graph, and compares them.

The nodes of a graph record which modules they come from, but not which value is which argument. Only a few values enter
and leave a module, so an argument is matched with the value that has its shape and is closest to it.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from exportkit.divergence.graph_run import GraphRun, ModuleNodes
from exportkit.module_traces.attribution import attribute_error, first_step, is_known
from exportkit.module_traces.error_steps import ComparedCall, ErrorStep, Side, TensorPair
from exportkit.module_traces.trace import Trace
from exportkit.module_traces.trace_data import ModuleCall, TensorRecord, calls_around
from exportkit.running.compare import Distance, distance, is_reordered, unit_of
from exportkit.running.masks import Padding
from exportkit.trees.tree import dtype_name

# A value whose relative distance to a tensor of the model is less than this is that tensor, whatever the rounding:
# float16 and bfloat16 round to 5e-4 and 4e-3, so that in bfloat16 a tensor is matched again in each module.
_CLOSE = 1e-3
# With more candidates than this, only the closest by a sample of so many elements are compared as a whole.
_FEW, _SAMPLE = 2, 64

_Identity = tuple[str | None, tuple[int, ...]]


@dataclass(frozen=True)
class MatchedCalls:
    """Calls of modules, compared with the values of a graph.

    Attributes:
        calls: The calls that the graph has values of.
        values: Name of the graph's value, by index of the call, side and path of the tensor.
        modules: Paths of the modules in the graph.
        unmatched: Tensors that the model returns and whose shape no value of the graph has: the step that computes
            each, by its path.
        complete: ``index`` of each call whose outputs all have values in the graph.
        wrong: Paths of outputs of the model that are known to be wrong.
    """

    calls: tuple[ComparedCall, ...]
    values: Mapping[tuple[int, Side, str], str]
    modules: frozenset[str]
    unmatched: Mapping[str, ErrorStep]
    complete: frozenset[int]
    wrong: frozenset[str] = frozenset()

    @functools.cached_property
    def steps(self) -> tuple[ErrorStep, ...]:
        """The steps of the run, each with a verdict."""
        return attribute_error(self.calls, self.complete)

    @functools.cached_property
    def first(self) -> ErrorStep | None:
        """What differs first, or None if nothing does."""
        missing = (step for path, step in self.unmatched.items() if is_known(path, self.wrong))
        return first_step(self.steps, self.calls, self.wrong) or next(missing, None)


def match_values(trace: Trace, run: GraphRun, padding: Padding, wrong: frozenset[str]) -> MatchedCalls:
    """Returns the calls of a trace compared with the values of a graph.

    Args:
        trace: What the model did, with values.
        run: What the graph did.
        padding: Which elements of a tensor count.
        wrong: Paths of outputs of the model that are known to be wrong, such as ``outputs.logits``.
    """
    return _Matching(trace, run, padding).result(wrong)


class _Matching:
    def __init__(self, trace: Trace, run: GraphRun, padding: Padding) -> None:
        self._trace, self._run, self._padding = trace, run, padding
        self._calls_of = Counter(call.path for call in trace.calls)
        self._seen: dict[tuple[_Identity, str], Distance] = {}
        self._known: dict[_Identity, str] = {}
        self._fused: set[_Identity] = set()
        self._samples: dict[str | _Identity, torch.Tensor] = {}
        self._values: dict[tuple[int, Side, str], str] = {}

    def result(self, wrong: frozenset[str]) -> MatchedCalls:
        calls = []
        nodes = {
            call.index: found[call.number]
            for call in self._trace.calls
            if (found := self._run.calls_of(call.path, self._calls_of[call.path]))
        }
        around = calls_around(self._trace.calls, nodes.keys())
        for call in self._trace.calls:
            if call.index in nodes:
                calls.append(self._compared(call, around[call.index], nodes[call.index]))
            else:  # a module that was fused into a different module
                self._fused.update(map(_identity, call.outputs))
        missing = {
            call.index: [r for r in call.outputs if (call.index, "outputs", r.path) not in self._values]
            for call in self._trace.calls
        }
        complete = frozenset(index for index, records in missing.items() if not records)
        outermost = (call for call in self._trace.calls if call.parent is None)
        unmatched = {r.path: self._unmatched_step(r, calls) for call in outermost for r in missing[call.index]}
        return MatchedCalls(tuple(calls), self._values, self._run.paths, unmatched, complete, wrong)

    def _unmatched_step(self, record: TensorRecord, calls: Sequence[ComparedCall]) -> ErrorStep:
        """The step that computes an output of the model which the graph does not have: of the innermost module."""
        compared = {call.index for call in calls}
        returning = (
            (call.index, other.path)
            for call in reversed(self._trace.calls)
            for other in call.outputs
            if call.index in compared and _identity(other) == _identity(record)
        )
        index, path = next(returning, (self._trace.calls[0].index, record.path))
        reason = f"no value of the graph has its shape {record.shape}"
        pair = TensorPair(path, Distance(problem=reason), unit_of(record.dtype), (record.dtype, record.dtype))
        return ErrorStep(index, index, "outputs", pair, math.nan, math.nan, "differs", reason)

    def _compared(self, call: ModuleCall, parent: int | None, nodes: ModuleNodes) -> ComparedCall:
        inputs = self._pairs(call, "inputs", call.inputs, nodes.entering)
        outputs = self._pairs(call, "outputs", call.outputs, nodes.leaving)
        return ComparedCall(call.index, call.path, call.class_name, call.number, parent, inputs, outputs)

    def _pairs(
        self, call: ModuleCall, side: Side, records: Sequence[TensorRecord], names: Sequence[str]
    ) -> tuple[TensorPair, ...]:
        by_path = {record.path: record for record in records if record.key is not None}
        found = [
            (self._distance(record, name), path, name)
            for path, record in by_path.items()
            for name in self._closest(record, self._candidates(record, names))
        ]
        taken: dict[str, _Identity] = {}
        pairs: dict[str, TensorPair] = {}
        for far, path, name in sorted(found, key=lambda item: 0.0 if item[0].reordered else item[0].rms):
            record = by_path[path]
            # Each value is one argument, unless the same tensor was given twice.
            if path in pairs or taken.setdefault(name, _identity(record)) != _identity(record):
                continue
            self._values[call.index, side, path] = name
            dtypes = (record.dtype, dtype_name(self._run.values[name].dtype))
            pairs[path] = TensorPair(path, far, max(map(unit_of, dtypes)), dtypes)
            if far.rms < _CLOSE:
                self._known.setdefault(_identity(record), name)
        return tuple(pairs[record.path] for record in records if record.path in pairs)

    def _candidates(self, record: TensorRecord, names: Sequence[str]) -> Sequence[str]:
        """The values that can be a tensor; for one that was matched before, that value, if the graph needs it here.

        The outputs of a module that was fused into a different module are not values of the graph.
        """
        if _identity(record) in self._fused:
            return []
        known = self._known.get(_identity(record))
        if known is not None:
            return [known] if known in names else []
        values, is_float = self._run.values, unit_of(record.dtype) > 0
        return [
            name
            for name in names
            if name in values
            and tuple(values[name].shape) == record.shape
            and (unit_of(dtype_name(values[name].dtype)) > 0) == is_float
        ]

    def _closest(self, record: TensorRecord, names: Sequence[str]) -> Sequence[str]:
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
            expected, got = self._trace.tensor(record), self._run.values[name]
            visible = self._padding(expected)
            far = distance(expected, got, visible)
            # Only where half of the digits are wrong can the elements be in another order.
            half = math.sqrt(max(unit_of(record.dtype), unit_of(dtype_name(got.dtype))))
            unknown = self._padding.has_several_rows_of_a_token(expected)
            reordered = half < far.rms < math.inf and (unknown or is_reordered(expected, got, visible))
            self._seen[key] = replace(far, reordered=reordered)
        return self._seen[key]


def _identity(record: TensorRecord) -> _Identity:
    """Equal for records of the same tensor."""
    return record.key, record.shape
