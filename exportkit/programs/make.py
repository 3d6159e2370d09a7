"""export(): from an observed model to an ExportedProgram.

In come a model and its recorded calls, or a plan; out goes an `Exported`, with each stage on the way done once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from exportkit.arguments.build import build_call
from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.calls.observer import Observer
from exportkit.errors import ArgumentError, ExportError, InvalidTypeError, PlanError
from exportkit.plan.leaves import Finding
from exportkit.plan.plan import Plan
from exportkit.plan.sizes import choose_sizes
from exportkit.probing.missing import find_missing_defaults
from exportkit.probing.planning import BoundPlan, plan_calls
from exportkit.probing.simplify import lists_of_many, rows_of_members, with_joined_lists
from exportkit.programs.audit import audit_sizes, fixed_branches
from exportkit.programs.effects import audit_effects
from exportkit.programs.exported import Exported
from exportkit.programs.extra_outputs import with_outputs
from exportkit.programs.failure import explained
from exportkit.programs.findings import findings_of
from exportkit.programs.module_state import with_module_state
from exportkit.programs.program import capture_somehow
from exportkit.programs.programs import ExportedPrograms
from exportkit.programs.split import split_export, wrong_on_a_cluster
from exportkit.programs.stages import TRACE_PER_MODULE, stage
from exportkit.programs.weights import with_weights
from exportkit.rewrites.chunk_scans import chunk_size_of
from exportkit.rewrites.lists import ListingNoted
from exportkit.rewrites.table import (
    ALL_BUT_NONE,
    ALL_EXPERTS,
    FEATURE_ROWS,
    LISTS_OF_ONE,
    SYMBOLIC_LENGTHS,
    Rewrite,
    adapted_call,
    applied,
    matching_rewrites,
)
from exportkit.running.eager import run_eager
from exportkit.trees import flatten


@explained()
def export(
    model: torch.nn.Module,
    observer_or_plan: Observer | Observation | Plan,
    *,
    outputs: Mapping[str, Any] | None = None,
    probe: bool = True,
    weights: str | os.PathLike[str] | None = None,
) -> Exported | ExportedPrograms:
    """Returns the model as one traced program that serves every call like those that were observed, at any size.

    Where no one program can, there is one for each kind of calls, as `ExportedPrograms`: calls that give the same
    inputs, with an empty or a filled cache, and one token or several. Each is proven before; if one cannot be, the
    error is about the one program. A plan is for one program in any case.

    Nothing is given by hand: what varies comes from the observed calls, and the model is run a few times more to
    confirm it. The model, its hooks and all registries are afterwards as they were.

    Args:
        model: The model, as it was observed.
        observer_or_plan: The observer, its observation, or a plan made from it (also an edited one).
        outputs: What modules inside the model return and the graph shall return too, by key: a class, a path or a
            pattern, as `exportkit.capture` takes it. ``{"hidden_states": LlamaDecoderLayer}`` adds the outputs
            ``hidden_states.0``, ``hidden_states.1``, ...
        probe: Let the model confirm the plan by running it; with False the recorded sizes alone decide.
        weights: Safetensors file, or folder with such files, for a model on the meta device. They are used where they
            are, so that a model that fits the disk can be exported; the given model stays without values.

    Raises:
        NoCallsError: if nothing was observed.
        InvalidRequestError: if ``outputs`` names modules that the model does not have, or weights are missing.
        DestinationError: if the files of the weights cannot be read.
        ArgumentError: if the model refuses the arguments that the plan leads to.
        ExportError: if torch cannot trace the model.

    Example:
        >>> import torch, exportkit
        >>> model, observer = torch.nn.Linear(4, 2), exportkit.InputObserver()
        >>> with observer(model):
        ...     _ = model(torch.ones(3, 4))
        >>> exported = exportkit.export(model, observer)
        >>> [str(size) for size in exported.plan.leaves[0].sizes]
        ['batch', '4']
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidTypeError("Only a torch.nn.Module can be exported.", got=type(model).__name__)
    model = with_weights(model, weights)
    if isinstance(observer_or_plan, Plan):
        model, plan, method = _with_outputs_of_plan(model, observer_or_plan, outputs or {})
        return one_graph(model, method, plan)
    subject, calls = _subject(model, _observed(observer_or_plan), outputs or {})

    def plan_of(some: Observation) -> BoundPlan:
        return plan_calls(some, subject if probe else None, some.method_name)

    def export_of(plan: BoundPlan) -> Exported:
        return one_graph(subject, calls.method_name, plan)

    exported = _one_graph_or_several(calls, plan_of, export_of)
    return _with_parts(exported, model, observer_or_plan, probe)


def _one_graph_or_several(
    observation: Observation, plan_of: Callable[[Observation], BoundPlan], export_of: Callable[[BoundPlan], Exported]
) -> Exported | ExportedPrograms:
    """One graph for all calls; where that fails, a program for each cluster of them, if each is proven."""
    seconds: dict[str, float] = {}
    try:
        with stage("plan", seconds):
            plan = plan_of(observation)
        exported = export_of(plan)
    except (ArgumentError, ExportError, PlanError) as error:
        programs = split_export(observation, error, plan_of, export_of)
        if programs is None:
            raise
        return programs
    exported.seconds.update(seconds)
    why = wrong_on_a_cluster(exported, observation)
    return (split_export(observation, why, plan_of, export_of) if why else None) or exported


def one_graph(model: torch.nn.Module, method: str, plan: BoundPlan) -> Exported:
    """Returns the model traced for a plan, with what a person should know of it.

    Args:
        model: The model in the form to export.
        method: The method.
        plan: The plan.

    Raises:
        ArgumentError: if the model refuses the arguments that the plan leads to.
        ExportError: if torch cannot trace the model, or its program serves less than the plan.
    """
    seconds: dict[str, float] = {}
    try:
        exported = traced(model, method, plan, seconds)
    except ExportError:
        cautious = _without_extended(plan)
        if cautious is None:
            raise
        exported = traced(model, method, cautious, seconds)
    return replace(exported, plan=exported.plan.with_findings(findings_of(exported)))


def _with_parts(
    exported: Exported | ExportedPrograms, root: torch.nn.Module, source: Any, probe: bool
) -> Exported | ExportedPrograms:
    """The export with those of the parts that feed it; of several programs, each that takes what a part returns."""
    found = source.parts if isinstance(source, Observer) else {}
    modules = {name: root.get_submodule(part.module) for name, part in found.items()}
    parts = {name: _part(modules[name], part.observation, probe) for name, part in found.items()}
    edges = {name: part.edges for name, part in found.items()}
    if isinstance(exported, Exported):
        return replace(exported, parts=parts, edges=edges)
    programs = {}
    for name, program in exported.programs.items():
        fed = {n for n in parts if any(path.startswith(e.target) for e in edges[n] for path in program.plan.by_path)}
        programs[name] = replace(
            program,
            parts={n: part for n, part in parts.items() if n in fed},
            edges={n: edge for n, edge in edges.items() if n in fed},
        )
    return replace(exported, programs=programs)


def _part(module: torch.nn.Module, observation: Observation, probe: bool) -> Exported:
    module, calls = _subject(module, observation, {})
    return one_graph(module, calls.method_name, plan_calls(calls, module if probe else None, calls.method_name))


def traced(
    model: torch.nn.Module, method: str, plan: BoundPlan, seconds: dict[str, float], first: Sequence[Rewrite] = ()
) -> Exported:
    """Returns the model traced for a plan, and audited.

    Args:
        model: The model in the form to export.
        method: The method.
        plan: The plan.
        seconds: Takes the duration of each stage.
        first: Rules to trace with besides those that match.

    Raises:
        ArgumentError: if the model refuses the arguments that the plan leads to.
        ExportError: if torch cannot trace the model, or its program serves less than the plan.
    """
    with stage("arguments", seconds):
        rules = [*first, *matching_rewrites(model, build_call(plan, plan.observation, choose_sizes(plan)).values())]
        rules += [FEATURE_ROWS] if plan.placeholders else []
        partly_cached = any(rule.adapt is not None for rule in rules)
        sizes = choose_sizes(plan, partly_cached, chunk_size_of(model))
        arguments = build_call(plan, plan.observation, sizes)
        with ListingNoted(sizes) as listing:
            outputs = flatten(_eager_outputs(model, method, arguments, rules))
        rules += [LISTS_OF_ONE] if listing.found else []
        rules += [_rule_for_experts(model, method, arguments, rules)] if listing.of_places else []
        returned = [outputs.tensors(), *(call.outputs.tensors() for call in plan.observation.calls)]
        joined = lists_of_many(returned)
        member_rows = rows_of_members(returned, joined)
        outputs = with_joined_lists(outputs, joined)
        fills = find_missing_defaults(plan, plan.observation, model, method)
    about = TRACE_PER_MODULE * sum(1 for _ in model.modules())

    def attempt(with_rules: Sequence[Rewrite]) -> Exported:
        captured = capture_somehow(model, method, plan, arguments, outputs, with_rules, joined)
        exported = Exported(
            captured, plan.plan, plan.observation, sizes, fills, outputs, model, method, joined, member_rows, seconds
        )
        return replace(exported, plan=plan.plan.with_findings([*audit_sizes(exported), *audit_effects(exported)]))

    with stage("export", seconds, about):
        return _with_lengths_kept(attempt, rules)


def _with_lengths_kept(attempt: Callable[[Sequence[Rewrite]], Exported], rules: Sequence[Rewrite]) -> Exported:
    """What an attempt returns; where it takes a length for a number, and need not, that of the one that does not."""
    exported = attempt(rules)
    if SYMBOLIC_LENGTHS.name in exported.captured.rules or not fixed_branches(exported.plan):
        return exported
    try:
        again = attempt([SYMBOLIC_LENGTHS, *rules])
    except ExportError:
        return exported
    return again if len(fixed_branches(again.plan)) < len(fixed_branches(exported.plan)) else exported


def _without_extended(plan: BoundPlan) -> BoundPlan | None:
    """The plan in which lengths that no recorded call varied are static; None where there are none.

    The model accepts other lengths in eager mode, and tracing it may still fix them, for instance in a Python loop.
    """
    extended = [v.name for v in plan.variables if v.role != "batch" and len({s for s in v.seen if s is not None}) == 1]
    if not extended:
        return None
    for name in extended:
        plan = plan.static(name)
    text = f"torch.export fixed {', '.join(extended)}, which no recorded call varied; static at the recorded size."
    return plan.with_findings([Finding("fixed by the trace", ", ".join(extended), text)])


def _with_outputs_of_plan(
    model: torch.nn.Module, plan: Plan, outputs: Mapping[str, Any]
) -> tuple[torch.nn.Module, BoundPlan, str]:
    """The model and the plan, with what is captured of its modules in its result, and the method."""
    if not isinstance(plan, BoundPlan):
        raise PlanError(
            "This plan does not know the calls it was made from.",
            hint="pass the observer, or a plan that observer.plan() returned.",
        )
    if not outputs:
        return model, plan, plan.observation.method_name
    model, observation = with_outputs(model, plan.observation.method_name, plan.observation, outputs)
    return model, BoundPlan.of(plan, observation), observation.method_name


def _observed(source: Any) -> Observation:
    if isinstance(source, Observer | Observation):
        observation: Observation = source.observation if isinstance(source, Observer) else source
        observation.require_calls()
        return observation
    raise InvalidTypeError(
        "export needs to know how the model is called.",
        expected="an InputObserver, its observation, or a Plan",
        got=type(source).__name__,
        hint="run the model inside `with observer(model):`, then export(model, observer).",
    )


def _subject(
    model: torch.nn.Module, observation: Observation, outputs: Mapping[str, Any]
) -> tuple[torch.nn.Module, Observation]:
    """The model in the form to export, and its calls.

    In that form what it keeps on its modules is an argument, and what is captured of them is in its result.
    """
    if outputs:
        model, observation = with_outputs(model, observation.method_name, observation, outputs)
    return with_module_state(model, observation.method_name, observation) or (model, observation)


def _eager_outputs(model: torch.nn.Module, method: str, arguments: Call, rules: Sequence[Rewrite]) -> Any:
    names = arguments.signature.names
    adapting = [rule for rule in rules if rule.adapt is not None]

    def around(values: dict[str, Any], call: Callable[[Mapping[str, Any]], Any]) -> Any:
        with applied(adapting, model):
            return adapted_call(adapting, model, values, names, call)

    try:
        return run_eager(model, method, arguments, around)
    except Exception as error:
        shapes = ", ".join(f"{path} {tuple(tensor.shape)}" for path, tensor in arguments.tensors().items())
        raise ArgumentError(
            "The model refuses the sizes that the plan leads to, so they are related in a way that was not found.",
            where=shapes,
            expected="sizes like those recorded",
            got=f"{type(error).__name__}: {str(error)[:300]}",
            hint="observe more sizes, so that the relation shows; print(observer.plan()) says what was found.",
        ) from error


def _rule_for_experts(model: torch.nn.Module, method: str, arguments: Call, rules: Sequence[Rewrite]) -> Rewrite:
    """How loops over experts go over all of them: the model itself says whether the last place stands for none."""
    try:
        with applied([ALL_EXPERTS], model):
            _eager_outputs(model, method, arguments, rules)
    except ArgumentError as error:
        if isinstance(error.__cause__, IndexError):
            return ALL_BUT_NONE
        raise
    return ALL_EXPERTS
