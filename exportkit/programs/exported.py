"""An exported model: one program, or one for each kind of call where no single program serves all recorded calls.

Several modules that run together have no program of their own, and a part for each of them.

Programs of several kinds are compared with the model in torch first, which takes no longer than running the model. What
seems right is then proven as ONNX, by a function that the caller passes in.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from exportkit.arguments.build import build_call
from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.calls.parts import Edge
from exportkit.errors import ArgumentError, ExportError, ExportkitError, InvalidRequestError
from exportkit.plan.leaves import Finding, PlannedLeaf
from exportkit.plan.plan import Plan
from exportkit.plan.small_sizes import small
from exportkit.probing.planning import BoundPlan, one_size
from exportkit.probing.simplify import as_simplified
from exportkit.programs.domain import Domain
from exportkit.programs.failure import in_one_line
from exportkit.programs.findings import findings_of
from exportkit.programs.kinds import CallClassifier, CallGroup, CallKind, Split, groups_of, kinds_of, split_by_sizes
from exportkit.programs.left_out import with_harmless_constants
from exportkit.programs.patterns import sizes_of_calls
from exportkit.programs.program import TracedProgram
from exportkit.programs.search import Programs, Search, export_program
from exportkit.programs.strategies import Attempt
from exportkit.running.compare import Difference, Tensors, compare_outputs
from exportkit.running.runner import Runner, compare_calls, recorded

_MOST_PROGRAMS = 6  # with more groups than these, they are not kinds of call

PlanOf = Callable[[Observation], BoundPlan]
# Returns what stands against a proof of a program as ONNX; the flag says whether to try sizes that were never run.
Prove = Callable[[TracedProgram, bool], tuple[str, ...]]


@dataclass(frozen=True, repr=False)
class ExportedModel:
    """A model that was exported as one program, the usual case, or as one for each kind of call.

    Attributes:
        programs: The programs by name; the name of a single program is empty. There is none for several modules, which
            are all parts.
        parts: Exports of what runs before the model and feeds it, such as an image encoder, or of the modules of an
            application, by name.
        edges: Which outputs of each part are inputs of the model.
        split: Why there are several programs, and which calls each serves; None for a single one.
        attempts: What was tried, in order.
    """

    programs: Mapping[str, TracedProgram]
    parts: Mapping[str, ExportedModel] = field(default_factory=dict)
    edges: Mapping[str, tuple[Edge, ...]] = field(default_factory=dict)
    split: Split | None = None
    attempts: tuple[Attempt, ...] = ()

    def __repr__(self) -> str:
        if not self.programs:
            return f"{type(self).__name__}({', '.join(f'{name}: {part!r}' for name, part in self.parts.items())})"
        where = f"{type(self).__name__}({self.observation.model_name}.{self.method}"
        if self.split is not None:
            return f"{where}, {len(self.programs)} programs: {', '.join(self.programs)})"
        names = ", ".join(self.plan.names) or "none"
        return f"{where}, {len(self.traced.input_paths)} inputs, variables: {names})"

    @property
    def traced(self) -> TracedProgram:
        """The program; the first of several.

        Raises:
            InvalidRequestError: if there is none, but a part for each of several modules.
        """
        require_own(self.programs, self.parts)
        return next(iter(self.programs.values()))

    @property
    def program(self) -> torch.export.ExportedProgram:
        """The ExportedProgram; call its ``module()`` like the model, without the Python constants."""
        return self.traced.program

    @property
    def plan(self) -> Plan:
        """What varies. Each of several programs has a plan of its own; this is the first one, with the split noted."""
        plan = self.traced.plan
        return plan if self.split is None else plan.with_findings([Finding("several programs", "", self.split.text)])

    @functools.cached_property
    def domain(self) -> Domain:
        """Where the graph may be used; the first one of several (see `domains`)."""
        return self.traced.domain

    @functools.cached_property
    def domains(self) -> Mapping[str, Domain]:
        """Where each graph may be used, by the name of its program."""
        return {name: traced.domain for name, traced in self.programs.items()}

    @property
    def observation(self) -> Observation:
        """The recorded calls; those that the first of several programs serves."""
        return self.traced.observation

    @property
    def model(self) -> torch.nn.Module:
        """The model, the truth that the result is compared with."""
        return self.traced.model

    @property
    def method(self) -> str:
        """The exported method."""
        return self.traced.method

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of the variables during the trace; those of the first of several programs."""
        return self.traced.sizes

    @property
    def inputs(self) -> tuple[str, ...]:
        """Path of each tensor that the program takes, in order; those of the first of several programs."""
        return self.traced.input_paths

    @property
    def outputs(self) -> tuple[str, ...]:
        """Path of each tensor that the program returns, in order; those of the first of several programs."""
        return self.traced.output_paths

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the rewrites that were in force during the trace."""
        return tuple(dict.fromkeys(rule for traced in self.programs.values() for rule in traced.rules))

    @property
    def seconds(self) -> dict[str, float]:
        """Duration of each stage, in seconds, of all programs together."""
        stages = dict.fromkeys(stage for traced in self.programs.values() for stage in traced.seconds)
        return {stage: sum(t.seconds.get(stage, 0.0) for t in self.programs.values()) for stage in stages}

    def baked_constants(self) -> dict[str, Any]:
        """Returns the Python values that are part of all graphs, by path."""
        require_own(self.programs, self.parts)
        found = [{constant.path: constant for constant in t.plan.constants} for t in self.programs.values()]
        shared = [
            c for path, c in found[0].items() if all(path in f and f[path].fingerprint == c.fingerprint for f in found)
        ]
        return {constant.path: constant.value for constant in shared}


def require_own(programs: Mapping[str, Any], parts: Iterable[str]) -> None:
    """Raises InvalidRequestError if there is no program or graph: several modules together have none of their own.

    Args:
        programs: The programs or graphs.
        parts: Names of the parts.
    """
    if not programs:
        raise InvalidRequestError(
            "Several modules were exported, so there is no single program.",
            expected=f"one of {', '.join(parts)}",
            hint=f"parts has them by name: .parts[{next(iter(parts), '')!r}]; in_place_of(...) runs the application.",
        )


def export_calls(model: torch.nn.Module, observation: Observation, plan_of: PlanOf, prove: Prove) -> ExportedModel:
    """Returns the model exported for the recorded calls: as one program, the usual case, or one for each kind of call.

    Args:
        model: The model in the form to export.
        observation: Its calls.
        plan_of: Makes the plan of some calls.
        prove: Returns what stands against a proof of a program as ONNX.

    Raises:
        ArgumentError: if the model raises for the arguments that the plan leads to.
        PlanError: if the recorded calls contradict each other.
        ExportError: if torch cannot trace the model, or its program serves less than the plan.
    """
    classifier = CallClassifier.of(observation)
    with_lists = classifier.with_lists(observation)
    kinds = kinds_of(observation, classifier)

    def check(traced: TracedProgram) -> str | ExportkitError:
        found = _wrong_on_a_kind(traced, kinds, prove) if len(kinds) > 1 or with_lists.lists else ""
        return found or _wrong_at_small_sizes(traced, prove) or ""

    def split(why: str | ExportkitError) -> Programs | None:
        found = _by_kind(model, observation, classifier, why, plan_of, prove)
        if found is None and with_lists.lists:
            found = _by_kind(model, observation, with_lists, why, plan_of, prove)
        return found

    search = Search(model, observation.method_name, functools.partial(plan_of, observation), check=check, split=split)
    search.walk()
    if search.several is not None:
        programs, why_split = search.several
        return ExportedModel(programs, split=why_split, attempts=tuple(search.attempts))
    return ExportedModel({"": search.found()}, attempts=tuple(search.attempts))


def _wrong_on_a_kind(traced: TracedProgram, kinds: Mapping[CallKind, list[Call]], prove: Prove) -> str:
    """What is wrong with a program for some kind of call; nothing if it serves all of them."""
    if traced.absences.refused:
        return next(finding.text for finding in findings_of(traced) if finding.kind == "missing input")
    refusal = next(filter(None, (_refusal(traced, first) for first, *_ in kinds.values())), None)
    if refusal is not None:
        return refusal
    for first, *_ in kinds.values():
        call = traced.observation.calls[first.index or 0]
        if not _serves(traced, recorded, [traced.completed(call)]):
            return next(iter(prove(traced, False)), "")
    return ""


def _wrong_at_small_sizes(traced: TracedProgram, prove: Prove) -> ExportError | None:
    """What is wrong with a program for recorded calls in which some size is 0 or 1; None if it serves them.

    A trace assumes that sizes are at least 2, so code such as ``if x.shape[1] == 0:`` leaves no condition in it.
    """
    calls, sizes_of = traced.observation.calls, sizes_of_calls(traced)

    @functools.cache
    def is_served(number: int) -> bool:
        return _serves(traced, recorded, [traced.completed(calls[number])])

    for name, size in dict.fromkeys(pair for sizes in sizes_of for pair in small(sizes).items()):
        breaking = [number for number, sizes in enumerate(sizes_of) if sizes[name] == size]
        others = set(range(len(calls))).difference(breaking)
        if any(map(is_served, breaking)) or not any(map(is_served, others)):
            continue
        problem = next(iter(prove(traced, False)), "")
        if problem:
            error = ExportError(problem)
            error.sides = f"{name} != {size}", frozenset(breaking)
            return error
    return None


def _by_kind(
    model: torch.nn.Module,
    observation: Observation,
    classifier: CallClassifier,
    why: str | ExportkitError,
    plan_of: PlanOf,
    prove: Prove,
) -> Programs | None:
    """A program for each kind of call, given why no single one serves all; None if one of them cannot be proven."""
    pending = groups_of(observation, classifier)
    if len(pending) == 1:  # all calls failed together, so only their sizes can tell them apart
        pending = _sides(pending[0], why)
    if not 1 < len(pending) <= _MOST_PROGRAMS:
        return None
    try:
        whole = plan_of(observation)
    except ExportkitError:
        whole = None
    programs: dict[str, TracedProgram] = {}
    groups: list[CallGroup] = []
    while pending:
        group = pending.pop(0)
        plans = _plans(group, classifier, whole, plan_of)
        found = _proven(model, observation.method_name, plans, classifier.first, prove)
        if isinstance(found, TracedProgram):
            groups.append(group)
            programs[group.name] = found
            continue
        sides = _sides(group, found)
        if not sides or len(groups) + len(pending) + len(sides) > _MOST_PROGRAMS:
            return None
        pending = [*sides, *pending]
    reason = in_one_line(why) if isinstance(why, ExportkitError) else why
    by_name = {group.name: group.kind for group in groups}
    return programs, Split(reason, classifier, by_name, {c.name: c.calls for c in groups})


def _refusal(traced: TracedProgram, call: Call) -> str | None:
    """Why the graph refuses a recorded call for its constants; the model is only asked if it has to be."""
    try:
        try:
            traced.domain.values.require(call.values())
        except ArgumentError:
            with_harmless_constants(traced).domain.values.require(call.values())
    except ArgumentError as error:
        return f"recorded call {call.index}: refused, {in_one_line(error)}"
    return None


def _sides(group: CallGroup, why: object) -> list[CallGroup]:
    """The calls on both sides of the condition on sizes that an error is about; none for anything else."""
    sides = why.sides if isinstance(why, ExportError) else None
    return [] if sides is None else split_by_sizes(group, *sides)


def _proven(
    model: torch.nn.Module, method: str, plans: Iterator[BoundPlan], first: str | None, prove: Prove
) -> TracedProgram | ExportkitError | None:
    """The program of the first plan with which it can be proven, or the first error about both sides of a condition."""
    sides: ExportkitError | None = None
    tried: list[BoundPlan] = []
    untraceable: list[tuple[PlannedLeaf, ...]] = []
    try:
        for plan in plans:
            if plan in tried or plan.leaves in untraceable:
                continue
            tried.append(plan)
            try:
                traced = export_program(model, method, plan)[0]
            except ExportkitError as error:
                untraceable += [plan.leaves] if isinstance(error, ExportError) and error.__cause__ is not None else []
                sides = sides or (error if isinstance(error, ExportError) and error.sides is not None else None)
                continue
            if _serves_one(traced, first) and not prove(traced, True):
                return traced
    except ExportkitError:  # there is no plan
        return None
    return sides


def _plans(
    group: CallGroup, classifier: CallClassifier, whole: BoundPlan | None, plan_of: PlanOf
) -> Iterator[BoundPlan]:
    """Yields plans for a group: for all sizes that the model may take, for its kind of call, for the sizes seen.

    The last ones lack inputs that no call had: with a filled cache, a model may read a mask in another way.
    """
    own = plan_of(group.observation)
    if whole is not None:  # with the findings about static sizes that still hold
        varied = own.widened(whole)
        findings = [finding for finding in varied.findings if finding.kind not in ("one call", "one size")]
        yield from _limited(replace(varied, findings=(*findings, *one_size(varied))), group, classifier)
    yield from _limited(own, group, classifier)
    restored = {leaf.argument for leaf in own.leaves if leaf.restored}
    if restored:
        yield from _limited(plan_of(group.observation.without(restored)), group, classifier)


def _limited(plan: BoundPlan, group: CallGroup, classifier: CallClassifier) -> Iterator[BoundPlan]:
    """Yields the plan, the plan limited to filled caches, and that limited to one token or to several."""
    yield plan
    for leaf in plan.leaves:
        name = None if leaf.growing is None else leaf.sizes[leaf.growing].variable
        plan = plan if name is None else _at_least(plan, name, 1)
    yield plan
    first = None if classifier.first is None else plan.by_path.get(classifier.first)
    for axis, size in enumerate(() if first is None else first.sizes):
        if axis and size.variable is not None:
            plan = plan.static(size.variable) if axis in group.kind.single else _at_least(plan, size.variable, 2)
    yield plan


def _at_least(plan: BoundPlan, name: str, minimum: int) -> BoundPlan:
    variable = plan.variable(name)
    smallest = min(size for size in variable.seen if size is not None)
    return plan.with_changed(replace(variable, minimum=max(variable.minimum, min(minimum, smallest))))


def _serves_one(traced: TracedProgram, first: str | None) -> bool:
    """Whether the program returns what the model returns for one token: the proof need not have such a call."""
    plan, calls = traced.plan, []
    leaf = None if first is None else plan.by_path.get(first)
    for size in leaf.sizes[1:] if leaf is not None else ():
        if size.variable is not None and plan.variable(size.variable).minimum <= 1:
            with contextlib.suppress(Exception):  # one token may have no room for an image
                calls.append(build_call(plan, traced.observation, {**traced.sizes, size.variable: 1}))
    return _serves(traced, traced.eager, calls)


def _serves(traced: TracedProgram, model: Runner, calls: Iterable[Call]) -> bool:
    """Whether the program, run in torch, returns what the model returns for calls with all inputs."""

    def compare(_: Call, expected: Tensors, got: Tensors) -> Iterator[Difference]:
        joined = traced.joined_outputs
        return compare_outputs(as_simplified(expected, joined), as_simplified(got, joined))

    return all(outcome.agrees for outcome in compare_calls(model, traced.runner, calls, compare))
