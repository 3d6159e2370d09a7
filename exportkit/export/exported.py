"""export(): from an observed model to an ExportedProgram, and on to an ONNX file."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from exportkit.arguments import (
    Arguments,
    Fills,
    build_arguments,
    choose_sizes,
    find_fills,
    lists_of_many,
    plan_calls,
    rows_of_members,
    run_eager,
    with_joined_lists,
)
from exportkit.axes import Finding, Plan
from exportkit.errors import ArgumentError, ExportError, InvalidTypeError, PlanError
from exportkit.export.audit import audit_sizes
from exportkit.export.effects import audit_effects
from exportkit.export.failure import Attempt, explained
from exportkit.export.module_state import STATE, WithState, with_module_state
from exportkit.export.onnx_model import OnnxModel
from exportkit.export.program import Captured, capture_somehow
from exportkit.export.stateful import onnx_model_of
from exportkit.export.translate import OnnxFile, check_destination, translate
from exportkit.observe import Edge, InputObserver, Observation
from exportkit.patching import (
    FEATURE_ROWS,
    LIBRARY_PATCHES,
    LISTS_OF_ONE,
    ListingNoted,
    Rule,
    adapted_call,
    chunk_size_of,
    matching_rules,
)
from exportkit.trees import Tree, flatten


@dataclass(frozen=True, repr=False)
class Exported:
    """An exported model, before it is written as ONNX.

    Attributes:
        captured: The traced program and the paths behind its inputs and outputs.
        plan: What varies.
        sizes: Sizes of the variables that the export used.
        fills: What stands for missing inputs.
        outputs: Structure of what the model returns.
        model: The model, the truth that the result is compared with.
        method: The exported method.
        joined_outputs: Paths of lists with a tensor for each image or the like, which the graph returns as one tensor.
        member_rows: Rows of each tensor of such a list, by its path, where they are always as many.
        seconds: Duration of each stage, in seconds.
        parts: Exports of what runs before the model and feeds it, such as an image encoder, by name.
        edges: Which outputs of each part are inputs of this one.
    """

    captured: Captured
    plan: Plan
    sizes: Mapping[str, int]
    fills: Fills
    outputs: Tree
    model: torch.nn.Module
    method: str = "forward"
    joined_outputs: tuple[str, ...] = ()
    member_rows: Mapping[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    parts: Mapping[str, Exported] = field(default_factory=dict)
    edges: Mapping[str, tuple[Edge, ...]] = field(default_factory=dict)

    def __repr__(self) -> str:
        names = ", ".join(variable.name for variable in self.plan.variables) or "none"
        where = f"{self.observation.model_name}.{self.method}"
        return f"Exported({where}, {len(self.captured.input_paths)} inputs, variables: {names})"

    @property
    def program(self) -> torch.export.ExportedProgram:
        """The ExportedProgram; call its ``module()`` like the model, without the Python constants."""
        return self.captured.program

    @property
    def observation(self) -> Observation:
        """The recorded calls."""
        found: Observation = self.plan.calls
        return found

    @property
    def stateful(self) -> bool:
        """Whether the model keeps a state on its modules, so that its graph does from call to call."""
        return isinstance(self.model, WithState)

    def baked_constants(self) -> dict[str, Any]:
        """Returns the Python values that are part of the graph, by path."""
        return {constant.path: constant.value for constant in self.plan.constants}

    def to_onnx(self, path: str | os.PathLike[str], opset: int | None = None) -> OnnxModel:
        """Writes the program as ONNX and returns it as something to call like the model.

        Args:
            path: File to write; the weights go beside it, into ``<path>.data``, and parts into ``<stem>.<part>.onnx``.
            opset: ONNX opset; by default torch's own choice.

        Raises:
            DestinationError: if the path cannot be written.
            ExportError: if an operator cannot be translated.
        """
        target = check_destination(path)
        started = time.perf_counter()
        with explained(lambda: self.attempt(onnx=True)):
            exported, file = self.translated(target, opset)
        self.seconds["onnx"] = time.perf_counter() - started
        parts = {
            name: part.to_onnx(target.with_name(f"{target.stem}.{name}{target.suffix}"), opset)
            for name, part in self.parts.items()
        }
        return onnx_model_of(file, exported, parts)

    def translated(self, target: Path, opset: int | None = None) -> tuple[Exported, OnnxFile]:
        """Returns what was translated and its file: where it cannot be, transformers' own patches are tried.

        Args:
            target: Where to write.
            opset: ONNX opset; by default torch's own choice.

        Raises:
            ExportError: if an operator cannot be translated.
        """
        try:
            return self, translate(self.captured, self.plan, target, opset)
        except ExportError:
            again = self._with_library_patches()
            if again is None:
                raise
            return again, translate(again.captured, again.plan, target, opset)

    def _with_library_patches(self) -> Exported | None:
        """The model traced again with transformers' own export patches; None if it was, or cannot be."""
        if LIBRARY_PATCHES.name in self.captured.rules:
            return None
        try:
            traced = _traced(self.model, self.method, self.plan, self.seconds, [LIBRARY_PATCHES])
        except ExportError:
            return None
        plan = traced.plan.with_findings(_rule_findings(traced))
        return replace(traced, plan=plan, parts=self.parts, edges=self.edges)

    def attempt(self, onnx: bool = False) -> Attempt:
        """Returns what was traced, to look for the cause of a failure.

        Args:
            onnx: Whether it is about the translation to ONNX.
        """
        arguments = build_arguments(self.plan, self.observation, self.sizes)
        return Attempt(self.model, self.method, self.plan, arguments, self.captured.rules, onnx=onnx)

    def repro(self, directory: str | os.PathLike[str]) -> Path:
        """Writes a script that traces the model with torch alone, and returns its path.

        It holds shapes, types, the range of integers, and versions; neither values of tensors nor weights.

        Args:
            directory: Where to write ``repro.py``.

        Raises:
            DestinationError: if it cannot be written.
        """
        return self.attempt().repro(directory)

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        runtime: Literal["genai"] | None = None,
        opset: int | None = None,
        values: bool = True,
        verify: bool = True,
    ) -> OnnxModel:
        """Writes a folder that runs elsewhere, proves it, and returns its graphs as something to call.

        In it are the ONNX files with their weights, the plan, ``manifest.json``, the recorded calls, and the report;
        ``exportkit.load`` reads it. For the clients that know this kind of model there are their configuration files.

        Args:
            directory: A new or empty directory, or one that an export was saved to, which is replaced.
            runtime: "genai" for a graph that onnxruntime-genai can run in any case: a model with sliding windows is
                exported again, with caches that hold every token.
            opset: ONNX opset; by default torch's own choice.
            values: Also write the values of the calls, so that the folder can be proven without the model.
            verify: Prove the graphs, which takes memory for the weights once more; if that fails, a RuntimeWarning says
                so. Without it there is no report, and ``exportkit verify`` proves the folder later.

        Raises:
            DestinationError: if the directory cannot be written, or holds something else.
            ExportError: if an operator cannot be translated.
            InvalidRequestError: if the runtime cannot run the model.
        """
        from exportkit.export.folder import save_folder

        return save_folder(self, directory, runtime=runtime, opset=opset, values=values, verify=verify)


@explained()
def export(
    model: torch.nn.Module, observer_or_plan: InputObserver | Observation | Plan, *, probe: bool = True
) -> Exported:
    """Returns the model as one traced program that serves every call like those that were observed, at any size.

    Nothing is given by hand: what varies comes from the observed calls, and the model is run a few times more to
    confirm it. The model, its hooks and all registries are afterwards as they were.

    Args:
        model: The model, as it was observed.
        observer_or_plan: The observer, its observation, or a plan made from it (also an edited one).
        probe: Let the model confirm the plan by running it; with False the recorded sizes alone decide.

    Raises:
        NoCallsError: if nothing was observed.
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
    seconds: dict[str, float] = {}
    started = time.perf_counter()
    model, plan, method = _plan(model, observer_or_plan, probe)
    seconds["plan"] = time.perf_counter() - started
    try:
        exported = _traced(model, method, plan, seconds)
    except ExportError:
        cautious = _without_extended(plan)
        if cautious is None:
            raise
        exported = _traced(model, method, cautious, seconds)
    findings = [
        *_rule_findings(exported),
        *_fill_findings(exported.fills),
        *_mode_findings(model),
        *_state_findings(model),
    ]
    exported = replace(exported, plan=exported.plan.with_findings(findings))
    return _with_parts(exported, observer_or_plan, probe)


def _with_parts(exported: Exported, source: Any, probe: bool) -> Exported:
    parts = source.parts if isinstance(source, InputObserver) else {}
    root = exported.model.model if isinstance(exported.model, WithState) else exported.model
    modules = {name: root.get_submodule(part.module) for name, part in parts.items()}
    return replace(
        exported,
        parts={name: export(modules[name], part.observation, probe=probe) for name, part in parts.items()},
        edges={name: part.edges for name, part in parts.items()},
    )


def _traced(
    model: torch.nn.Module, method: str, plan: Plan, seconds: dict[str, float], first: Sequence[Rule] = ()
) -> Exported:
    started = time.perf_counter()
    rules = [*first, *matching_rules(model, build_arguments(plan, plan.calls, choose_sizes(plan)).values())]
    rules += [FEATURE_ROWS] if plan.placeholders else []
    partly_cached = any(rule.adapt is not None for rule in rules)
    sizes = choose_sizes(plan, partly_cached, chunk_size_of(model))
    arguments = build_arguments(plan, plan.calls, sizes)
    with ListingNoted(sizes) as listing:
        outputs = flatten(_eager_outputs(model, method, arguments, rules))
    rules += [LISTS_OF_ONE] if listing.found else []
    returned = [outputs.tensors(), *(call.outputs.tensors() for call in plan.calls.calls)]
    joined = lists_of_many(returned)
    member_rows = rows_of_members(returned, joined)
    outputs = with_joined_lists(outputs, joined)
    fills = find_fills(plan, plan.calls, model, method)
    seconds["arguments"] = time.perf_counter() - started
    started = time.perf_counter()
    captured = capture_somehow(model, method, plan, arguments, outputs, rules, joined)
    seconds["export"] = time.perf_counter() - started
    exported = Exported(captured, plan, sizes, fills, outputs, model, method, joined, member_rows, seconds)
    return replace(exported, plan=plan.with_findings([*audit_sizes(exported), *audit_effects(exported)]))


def _without_extended(plan: Plan) -> Plan | None:
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


def _plan(model: torch.nn.Module, source: Any, probe: bool) -> tuple[torch.nn.Module, Plan, str]:
    """The model in the form to export, its plan and the method: with what it keeps on its modules as an argument."""
    if isinstance(source, Plan):
        if source.calls is None:
            raise PlanError(
                "This plan does not know the calls it was made from.",
                hint="pass the observer, or a plan that observer.plan() returned.",
            )
        return model, source, source.calls.method_name
    if isinstance(source, InputObserver | Observation):
        observation = source.observation if isinstance(source, InputObserver) else source
        observation.require_calls()
        stateful = with_module_state(model, observation.method_name, observation)
        model, observation = (model, observation) if stateful is None else stateful
        plan = plan_calls(observation, model if probe else None, observation.method_name)
        return model, plan, observation.method_name
    raise InvalidTypeError(
        "export needs to know how the model is called.",
        expected="an InputObserver, its observation, or a Plan",
        got=type(source).__name__,
        hint="run the model inside `with observer(model):`, then export(model, observer).",
    )


def _eager_outputs(model: torch.nn.Module, method: str, arguments: Arguments, rules: Sequence[Rule]) -> Any:
    try:
        return run_eager(model, method, arguments, lambda values, call: adapted_call(rules, values, call))
    except Exception as error:
        shapes = ", ".join(f"{path} {tuple(tensor.shape)}" for path, tensor in arguments.tensors().items())
        raise ArgumentError(
            "The model refuses the sizes that the plan leads to, so they are related in a way that was not found.",
            where=shapes,
            expected="sizes like those recorded",
            got=f"{type(error).__name__}: {str(error)[:300]}",
            hint="observe more sizes, so that the relation shows; print(observer.plan()) says what was found.",
        ) from error


def _rule_findings(exported: Exported) -> list[Finding]:
    rules = ", ".join(exported.captured.rules)
    return [Finding("exported with", rules, f"exported with: {rules}.")] if rules else []


def _mode_findings(model: torch.nn.Module) -> list[Finding]:
    if not model.training:
        return []
    text = "the model is in training mode: dropout and batch statistics differ from call to call; model.eval() first."
    return [Finding("training mode", "", text)]


def _state_findings(model: torch.nn.Module) -> list[Finding]:
    if not isinstance(model, WithState):
        return []
    text = f"the model keeps its state on its modules; the graph takes it as {STATE} and returns it."
    return [Finding("module state", STATE, text)]


def _fill_findings(fills: Fills) -> list[Finding]:
    if not fills.unproven:
        return []
    calls = ", ".join(map(str, fills.unproven))
    text = f"calls {calls} lack inputs for which no stand-in gives the same result; the graph does not serve them."
    return [Finding("missing input", f"calls {calls}", text)]
