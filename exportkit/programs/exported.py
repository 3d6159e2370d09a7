"""An exported model as a value: one or several programs, and the parts that run before it and feed it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from exportkit.calls.observation import Observation
from exportkit.calls.parts import Edge
from exportkit.plan.leaves import Finding
from exportkit.plan.plan import Plan
from exportkit.programs.audit import domain_of
from exportkit.programs.domain import Domain
from exportkit.programs.kinds import Split
from exportkit.programs.program import TracedProgram
from exportkit.programs.strategies import Attempt

Self = TypeVar("Self", bound="ExportedModel")


@dataclass(frozen=True, repr=False)
class ExportedModel:
    """A model that was exported as one program, the usual case, or as one for each kind of calls.

    Attributes:
        programs: The programs by name; the name of a single program is empty.
        parts: Exports of what runs before the model and feeds it, such as an image encoder, by name.
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
        where = f"{type(self).__name__}({self.observation.model_name}.{self.method}"
        if self.split is not None:
            return f"{where}, {len(self.programs)} programs: {', '.join(self.programs)})"
        names = ", ".join(variable.name for variable in self.plan.variables) or "none"
        return f"{where}, {len(self.traced.input_paths)} inputs, variables: {names})"

    @property
    def traced(self) -> TracedProgram:
        """The program; the first of several."""
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
        return next(iter(self.domains.values()))

    @functools.cached_property
    def domains(self) -> Mapping[str, Domain]:
        """Where each graph may be used, by the name of its program."""
        return {name: domain_of(traced) for name, traced in self.programs.items()}

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
        found = [{constant.path: constant.value for constant in t.plan.constants} for t in self.programs.values()]
        return {path: v for path, v in found[0].items() if all(path in c and c[path] == v for c in found)}
