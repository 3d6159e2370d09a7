"""Decisions by the values of tensors, such as ``if x.max() > 1:``, in one graph with all recorded branches.

The recorded calls show which execution paths there are. A trace runs the model once for each, and where two of them
part, the graph chooses between their results by the condition of the model. A decision with the same outcome in all
recorded calls is asserted, so that the graph fails for a call that would take a different branch.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableSet, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from exportkit._torch_compat.memory import version_of
from exportkit._torch_compat.modules import buffer_table
from exportkit._torch_compat.symbolic_shapes import traced_expression
from exportkit._torch_compat.traced_values import UNRECORDED_PATH_TEXT, asserted, value_error
from exportkit.errors import ExportError
from exportkit.overrides import replaced_attributes
from exportkit.rewrites.branches import deciding, place_asking
from exportkit.rewrites.execution_paths import ExecutionPath, asked_for_equality
from exportkit.rewrites.model_code import Place, is_model_code, line_text
from exportkit.trees import Tree, cloned, flatten, set_stored_length, stored_length
from exportkit.trees.tree import dtype_name

MOST_PATHS = 8  # a trace runs the model once for each

_NUMBERS = {int: torch.int64, float: torch.float64}


class _Decision(NamedTuple):
    place: Place
    condition: torch.Tensor  # of no axes
    outcome: bool


@dataclass
class _PathRun:
    """A run of the model in a trace: what it decided, and what it returned."""

    decisions: list[_Decision]
    outputs: Tree

    @property
    def outcomes(self) -> list[tuple[Place, bool]]:
        """What each place decided, in order."""
        return [(decision.place, decision.outcome) for decision in self.decisions]


@contextlib.contextmanager
def recorded_paths(
    model: torch.nn.Module,
    method: str = "forward",
    paths: Sequence[ExecutionPath] = (),
    of_numbers: MutableSet[Place] | None = None,
) -> Iterator[None]:
    """Lets a model take several execution paths at once while it is traced.

    Args:
        model: The model.
        method: The method that is traced.
        paths: The execution paths that it takes.
        of_numbers: Gets the place of a decision by a number that was read from a tensor, if the paths lack it.
    """
    cls, is_running, undecided = type(model), False, set() if of_numbers is None else of_numbers
    original = getattr(cls, method)

    def run(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_running
        if self is not model or is_running or not paths:
            return original(self, *args, **kwargs)
        is_running = True
        try:
            return _chosen(_runs(model, functools.partial(original, self), args, kwargs, paths, undecided))
        finally:
            is_running = False

    with replaced_attributes(cls, {method: run}):
        yield


class _NotRecorded(BaseException):
    """Raised where no recorded call shows what a place decides: a graph need not serve such a call.

    Code of a model that catches errors catches no others than those of its own.
    """


def _runs(
    model: torch.nn.Module,
    call: Callable[..., Any],
    args: Any,
    kwargs: Any,
    paths: Sequence[ExecutionPath],
    undecided: MutableSet[Place],
) -> list[_PathRun]:
    """A run for each combination of outcomes that places had, or, if there are too many, for fewer combinations."""
    given, counted = flatten((args, kwargs)), stored_length((args, kwargs))
    outcomes = defaultdict[Place, set[bool]](set)
    for path in paths:
        for place, found in path.items():
            outcomes[place].update(found)
    is_only = all(len(found) == 1 for found in outcomes.values())
    unchanged = contextlib.nullcontext if is_only else _modules_unchanged

    def explored(outcomes_of: OutcomesOf) -> list[_PathRun]:
        runs, pending = list[_PathRun](), list[list[bool]]([[]])
        while pending:
            values, named = (given if is_only else given.map(cloned)).build()
            if not (isinstance(counted, int) and counted == 0):
                set_stored_length((values, named), counted)
            forced = _ForcedPath(paths, pending.pop(), undecided, outcomes_of)
            with contextlib.suppress(_NotRecorded), forced.applied(), unchanged(model):
                run = _PathRun(forced.decisions, flatten(call(*values, **named)))
                runs += [] if forced.is_lost else [run]
            pending += forced.others
            if len(runs) + len(pending) > MOST_PATHS:
                return []
        return runs

    for outcomes_of in (_of_place, _of_position, _of_paths):
        if runs := explored(outcomes_of):
            return runs
    raise ExportError(
        "The model branches on tensor values, and takes branches in the trace that no recorded call took."
    )


# What a place may decide, given how often it has decided before, and which paths agree with the run so far.
OutcomesOf = Callable[[Sequence[ExecutionPath], Sequence[ExecutionPath], Place, int], set[bool]]


def _of_place(paths: Sequence[ExecutionPath], _: Sequence[ExecutionPath], place: Place, position: int) -> set[bool]:
    """What it decided at any time, as often as in some recorded call."""
    found = [path[place] for path in paths if place in path]
    is_recorded = any(position < len(outcomes) for outcomes in found)
    return {outcome for outcomes in found for outcome in outcomes} if is_recorded else set()


def _of_position(paths: Sequence[ExecutionPath], _: Sequence[ExecutionPath], place: Place, position: int) -> set[bool]:
    """What it decided at this time in some recorded call."""
    return {path[place][position] for path in paths if position < len(path.get(place, ()))}


def _of_paths(_: Sequence[ExecutionPath], agreeing: Sequence[ExecutionPath], place: Place, position: int) -> set[bool]:
    """What it decided at this time in a recorded call that took the same path until then."""
    return _of_position(agreeing, agreeing, place, position)


class _ForcedPath:
    """Lets places decide as some recorded call did, where a trace cannot know, and notes their conditions.

    Args:
        paths: The recorded paths.
        start: What the first places decide.
        undecided: Gets the place of a decision by a number, if the paths lack it.
        outcomes_of: What places may decide.

    Attributes:
        decisions: What was decided.
        others: How other runs start, which decide otherwise at some place.
        is_lost: Whether a place was to decide what no recorded call shows.
    """

    def __init__(
        self,
        paths: Sequence[ExecutionPath],
        start: Sequence[bool],
        undecided: MutableSet[Place],
        outcomes_of: OutcomesOf,
    ) -> None:
        self._paths, self._start, self._undecided, self._outcomes_of = paths, start, undecided, outcomes_of
        self._agreeing, self._counts = [*paths], Counter[Place]()
        self._value_of: Callable[[torch.Tensor], bool] = torch.Tensor.__bool__
        self.decisions: list[_Decision] = []
        self.others: list[list[bool]] = []
        self.is_lost = False

    def _knows(self, place: Place) -> bool:
        return any(place in path for path in self._paths)

    def _decide(self, place: Place, condition: torch.Tensor) -> bool:
        position, made = self._counts[place], [decision.outcome for decision in self.decisions]
        self._counts[place] += 1
        outcomes = self._outcomes_of(self._paths, self._agreeing, place, position)
        if not outcomes:
            self.is_lost = True
            raise _NotRecorded
        if len(made) < len(self._start):
            outcome = self._start[len(made)]
        else:
            outcome = max(outcomes)
            self.others += [[*made, False]] if len(outcomes) > 1 else []
        self._agreeing = [
            path for path in self._agreeing if [*path.get(place, ())][position : position + 1] == [outcome]
        ]
        self.decisions.append(_Decision(place, condition, outcome))
        return outcome

    def _of_tensor(self, place: Place, found: torch.Tensor) -> bool | None:
        if not self._knows(place):
            return None
        with contextlib.suppress(value_error()):
            is_known = self._value_of(found)  # it may follow from buffers
            self._counts[place] += 1
            return is_known
        return self._decide(place, found.detach().reshape(()).bool().clone())

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Is in force while the model runs."""
        known: Callable[[torch.SymBool], bool] = torch.SymBool.__bool__

        def of_number(condition: torch.SymBool) -> bool:
            try:
                return known(condition)
            except value_error():
                place = place_asking(sys._getframe(1))
                if not self._knows(place):
                    self._undecided |= {place} if is_model_code(place[0]) else set()
                    raise
            return self._decide(place, torch.scalar_tensor(torch.sym_ite(condition, 1, 0)) > 0)

        with (
            replaced_attributes(torch.SymBool, {"__bool__": of_number}),
            deciding(self._of_tensor),
            asked_for_equality(self._of_tensor),
        ):
            yield


@contextlib.contextmanager
def _modules_unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Takes back what a run sets on modules, for the next run.

    Raises:
        ExportError: if it writes to buffers.
    """
    kept = [(vars(module), dict(vars(module))) for module in model.modules()]
    tables = [buffer_table(module) for module in model.modules()]
    before = [{name: (id(held), _version(held)) for name, held in table.items()} for table in tables]
    kept += [(table, dict(table)) for table in tables]
    try:
        yield
        after = [{name: (id(held), _version(held)) for name, held in table.items()} for table in tables]
    finally:
        for table, entries in kept:
            table.clear()
            table.update(entries)
    if before != after:
        raise ExportError(
            "The model branches on the values of a tensor, and writes to its buffers.",
            hint="record only calls that take the same branch; the graph then rejects the others.",
        )


def _version(buffer: torch.Tensor | None) -> int | None:
    return None if buffer is None else version_of(buffer)


def _chosen(runs: Sequence[_PathRun]) -> Any:
    """What the model returns on the path that its decisions lead to."""
    first, *others = runs
    for run in others:
        _require_same_kind(first, run)
    constants = [run.outputs.constants() for run in runs]
    numbers = [path for path, leaf in constants[0].items() if any(leaf != other[path] for other in constants[1:])]
    returned = []
    for run, leaves in zip(runs, constants, strict=True):
        made = {path: torch.scalar_tensor(leaves[path], dtype=_NUMBERS[type(leaves[path])]) for path in numbers}
        returned.append((run, {**run.outputs.tensors(), **made}))
    chosen = _select(returned, 0, [])
    # a result that the graph computes can be refused; it may be a buffer
    leaves = {path: leaf.item() if path in numbers else leaf.clone() for path, leaf in chosen.items()}
    return first.outputs.with_leaves(leaves).build()


def _select(
    runs: Sequence[tuple[_PathRun, Mapping[str, torch.Tensor]]], depth: int, on_path: Sequence[torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """The results of the runs that agree in their first decisions, chosen by the others.

    Args:
        runs: The runs, and what they returned.
        depth: In how many decisions they agree.
        on_path: What holds on their execution path.
    """
    run, outputs = runs[0]
    if depth == len(run.decisions):
        return outputs
    place, condition, _ = run.decisions[depth]
    if any(other.decisions[depth].place != place for other, _ in runs):
        raise ExportError(
            "The model branches on tensor values in a different order when it runs again.",
            where=line_text(place),
        )
    parts = {
        outcome: [other for other in runs if other[0].decisions[depth].outcome is outcome] for outcome in (True, False)
    }
    if all(parts.values()):
        yes, no = (_select(parts[outcome], depth + 1, [*on_path, _is(condition, outcome)]) for outcome in parts)
        return {path: torch.where(condition, tensor, no[path]) for path, tensor in yes.items()}
    (outcome,) = [outcome for outcome, members in parts.items() if members]
    holds = _is(condition, outcome)
    for other in on_path:
        holds = holds | ~other
    asserted(holds, UNRECORDED_PATH_TEXT + line_text(place))
    return _select(runs, depth + 1, on_path)


def _is(condition: torch.Tensor, outcome: bool) -> torch.Tensor:
    return condition if outcome else ~condition


def _require_same_kind(one: _PathRun, other: _PathRun) -> None:
    """Raises ExportError if a graph cannot choose between two results."""
    kinds = [{path: _kind(leaf) for path, leaf in run.outputs.by_path().items()} for run in (one, other)]
    different = [path for path in {**kinds[0], **kinds[1]} if kinds[0].get(path) != kinds[1].get(path)]
    if different:
        pairs = zip(one.outcomes, other.outcomes, strict=False)
        place, _ = next(left for left, right in pairs if left != right)
        error = ExportError(
            "Depending on the values of a tensor, the model returns results of different types or shapes.",
            where=line_text(place),
            expected="tensors of the same shapes and dtypes in both branches",
            got=f"{different[0] or 'the result'}: {' and '.join(kind.get(different[0], 'nothing') for kind in kinds)}",
            hint="record only calls that take the same branch; the graph then rejects the others.",
        )
        error.decision = place[:2]
        raise error


def _kind(leaf: Any) -> str:
    """What has to be the same of two leaves, so that a graph can choose between them; numbers may differ."""
    if isinstance(leaf, torch.Tensor):
        sizes = [size if (found := traced_expression(size)) is None else found for size in leaf.shape]
        return f"{dtype_name(leaf.dtype)} ({', '.join(map(str, sizes))})"
    found = traced_expression(leaf)
    return str(found) if found is not None else type(leaf).__name__ if type(leaf) in _NUMBERS else repr(leaf)
