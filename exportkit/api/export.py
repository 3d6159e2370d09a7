"""export(): from an observed model to a traced program."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from exportkit.api.exported import Exported
from exportkit.api.observer import InputObserver
from exportkit.arguments.table import varying_numbers
from exportkit.calls.application import module_at, require_distinct
from exportkit.calls.observation import Observation
from exportkit.calls.parts import Part
from exportkit.errors import ExportkitError, InvalidRequestError, InvalidTypeError, PlanError
from exportkit.plan.plan import Plan
from exportkit.probing.planning import BoundPlan, plan_calls
from exportkit.programs.exported import ExportedModel, export_calls
from exportkit.programs.failure import explained
from exportkit.programs.number_inputs import Uses, as_sizes, decides
from exportkit.programs.search import export_program
from exportkit.programs.subject import exported_form
from exportkit.programs.weights import with_weights
from exportkit.proof.prove import problems_of
from exportkit.trees import COUNTER, join


@explained()
def export(
    model: torch.nn.Module | object,
    observer_or_plan: InputObserver | Observation | Plan,
    *,
    outputs: Mapping[str, Any] | None = None,
    probe: bool = True,
    weights: str | os.PathLike[str] | None = None,
    random_numbers: bool = False,
) -> Exported:
    """Returns the model as one traced program that serves every call like those that were observed, at any size.

    If no single program can, there is one for each kind of call: calls that give the same inputs, with an empty or a
    filled cache, one token or several, and on one side of a condition on sizes. Each of them is proven first; if one
    cannot be, the error is about the single program. A plan always gives a single program.

    Several modules that were observed together, those of a pipeline or of a dict, are exported together: each is one of
    the ``parts`` of the result, which has no program of its own.

    Neither dynamic shapes nor example inputs are needed: what varies is inferred from the observed calls, and the model
    runs a few more times to confirm it. The model, its hooks and all registries are left unchanged.

    Args:
        model: The model, the pipeline or the dict of modules, as it was observed.
        observer_or_plan: The observer, its observation, or a plan made from it (also an edited one).
        outputs: Values of inner modules that the graph returns as well, by key: a class, a path or a pattern, as
            `exportkit.capture` takes it. ``{"hidden_states": LlamaDecoderLayer}`` adds the outputs ``hidden_states.0``,
            ``hidden_states.1``, ...
        probe: Whether to run the model to confirm the plan. If False, the plan is based on the recorded sizes alone.
        weights: Safetensors file, or folder with such files, for a model on the meta device. They are memory-mapped, so
            the model only has to fit on the disk; the given model itself gets no weights.
        random_numbers: Give the model and the graph the same random numbers when they are compared, for models that
            draw noise on purpose. By default, such a model is not proven, because no two of its results are equal.

    Raises:
        NoCallsError: if nothing was observed.
        InvalidRequestError: if ``outputs`` names modules that the model does not have, or weights are missing; if one
            of these is given for several modules.
        UnknownMethodError: if ``model`` does not have the modules that were observed.
        DestinationError: if the files of the weights cannot be read.
        ArgumentError: if the model raises for the arguments that are built from the plan.
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

    def calls_of(observation: Observation) -> Observation:
        return observation if random_numbers else observation.without_seeds()

    found: dict[str, Part] = {}
    if isinstance(observer_or_plan, InputObserver):
        found = {
            name: replace(part, observation=calls_of(part.observation)) for name, part in observer_or_plan.parts.items()
        }
        if observer_or_plan.has_only_parts:
            return Exported.of(_only_parts(model, found, probe, {"outputs": outputs, "weights": weights}))
    if not isinstance(model, torch.nn.Module):
        raise InvalidTypeError(
            "Only a torch.nn.Module can be exported.",
            expected="the module that was observed, or the pipeline or dict whose modules were",
            got=type(model).__name__,
        )
    model = with_weights(model, weights)
    if isinstance(observer_or_plan, Plan):
        return Exported.of(_planned(model, observer_or_plan, calls_of, outputs or {}))
    exported = _whole(model, calls_of(_observed(observer_or_plan)), outputs or {}, probe)
    if found:
        padded = bool(exported.observation.restored)  # and by that the encoder as well
        parts = {name: _part(model, part, probe, padded) for name, part in found.items()}
        exported = replace(exported, parts=parts, edges={name: part.edges for name, part in found.items()})
    return Exported.of(exported)


def _only_parts(model: Any, parts: Mapping[str, Part], probe: bool, options: Mapping[str, Any]) -> ExportedModel:
    """Several modules, or methods of one, none of which calls the others."""
    for name, value in options.items():
        if value is not None:
            raise InvalidRequestError(f"{name} is only supported for a single model.", where=name, got=", ".join(parts))
    modules = {
        name: module_at(model, part.module, part.observation.method_name, part.observation.model_name)
        for name, part in parts.items()
    }
    targets = {name: join(part.module, part.observation.method_name) for name, part in parts.items()}
    require_distinct((targets[name], modules[name]) for name in parts)
    exported = {}
    for name, part in parts.items():
        try:
            with explained():
                exported[name] = _whole(modules[name], part.observation, {}, probe, path=part.module)
        except ExportkitError as error:
            error.args = (f"{name}: {error}",)
            raise
    return ExportedModel({}, parts=exported, edges=dict.fromkeys(exported, ()))


def _whole(
    model: torch.nn.Module, observation: Observation, outputs: Mapping[str, Any], probe: bool, path: str = ""
) -> ExportedModel:
    """The model exported for its calls; the path is where it is in an application."""

    def form(**options: Any) -> tuple[torch.nn.Module, Observation]:
        module, calls = exported_form(model, observation, outputs, **options)
        return module, replace(calls, target=join(path, calls.target))

    exported = None if outputs else _with_number_inputs(form, observation, probe)
    if exported is None:
        exported = _exported(*form(), probe)
    return exported


def _exported(form: torch.nn.Module, calls: Observation, probe: bool) -> ExportedModel:
    plan_of = functools.partial(plan_calls, model=form if probe else None, method=calls.method_name)
    return export_calls(form, calls, plan_of, problems_of)


def _with_number_inputs(
    form: Callable[..., tuple[torch.nn.Module, Observation]], observation: Observation, probe: bool
) -> ExportedModel | None:
    """The model exported with Python numbers that vary as inputs; None if a graph cannot follow them."""
    numbers = varying_numbers(observation) if probe else {}
    numbers = as_sizes(observation, numbers, {path for path in numbers if path.endswith(COUNTER)})
    while numbers:
        unused, sizes = set[str](), {path for path, kind in numbers.items() if kind == "int"}
        with contextlib.suppress(ExportkitError):
            exported = _exported(*form(numbers=numbers), probe)
            programs = exported.programs.values()
            uses = [Uses.of(t.program, t.input_paths, numbers) for t in programs]
            sizes = set(frozenset.union(*(use.sizes for use in uses)))
            unused = {
                path
                for path in frozenset.intersection(*(use.nothing for use in uses))
                if numbers[path] != "size"
                or not any(decides(t.model, t.method, t.observation.calls, path) for t in programs)
            }
            if not unused | sizes and not any(problems_of(traced, True) for traced in programs):
                return exported
        if not unused | sizes or (not unused and "size" in numbers.values()):
            return None
        kept = {path: kind for path, kind in numbers.items() if path not in unused}
        numbers = as_sizes(observation, kept, sizes)
    return None


def _planned(
    model: torch.nn.Module,
    plan: Plan,
    calls_of: Callable[[Observation], Observation],
    outputs: Mapping[str, Any],
) -> ExportedModel:
    """The model exported for a plan, with what is captured of its modules in its result."""
    if not isinstance(plan, BoundPlan):
        raise PlanError(
            "This plan is not bound to the calls that it was made from.",
            hint="pass the observer, or a plan that observer.plan() returned.",
        )
    model, observation = exported_form(model, calls_of(plan.observation), outputs, carries_state=False)
    traced, attempts = export_program(model, observation.method_name, BoundPlan.of(plan, observation))
    return ExportedModel({"": traced}, attempts=attempts)


def _part(model: torch.nn.Module, part: Part, probe: bool, padded: bool) -> ExportedModel:
    """What runs before the model and feeds it, exported for its own calls, with a mask if the model has one."""
    module, calls = exported_form(model.get_submodule(part.module), part.observation, {})
    calls = replace(calls, target=join(part.module, calls.target))
    plan = plan_calls(calls, module if probe else None, calls.method_name, needs_cache=not padded)
    traced, attempts = export_program(module, calls.method_name, plan)
    return ExportedModel({"": traced}, attempts=attempts)


def _observed(source: InputObserver | Observation) -> Observation:
    if not isinstance(source, InputObserver | Observation):
        raise InvalidTypeError(
            "export needs to know how the model is called.",
            expected="an InputObserver, its observation, or a Plan",
            got=type(source).__name__,
            hint="run the model inside `with observer(model):`, then export(model, observer).",
        )
    observation = source.observation if isinstance(source, InputObserver) else source
    observation.require_calls()
    return observation
