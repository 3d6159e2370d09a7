"""The strategies for getting a program that serves a whole plan: one ordered table, and the loop that walks it.

To change what is tried, or when, edit `STRATEGIES`. No other module has fallbacks of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Literal

import torch

from exportkit.errors import ArgumentError, ExportError, ExportkitError, PlanError
from exportkit.overrides import called_namespaces
from exportkit.plan.leaves import Finding
from exportkit.probing.planning import BoundPlan
from exportkit.programs.absences import find_absences
from exportkit.programs.audit import Audit, audit_effects, audit_sizes, findings_of, rule_findings
from exportkit.programs.example import chosen_example, rules_for_decisions
from exportkit.programs.failure import is_data_dependent
from exportkit.programs.kinds import Split
from exportkit.programs.left_out import with_harmless_constants, with_traits
from exportkit.programs.patterns import ProgramProbe, add_patterns
from exportkit.programs.program import TracedProgram, trace
from exportkit.programs.stages import TRACE_PER_MODULE, stage
from exportkit.programs.traced_method import Example
from exportkit.rewrites.branches import is_model_code
from exportkit.rewrites.lengths import SYMBOLIC_LENGTH
from exportkit.rewrites.table import (
    BUFFER_VALUES,
    COUNTS,
    LIBRARY_PATCHES,
    LISTS_OF_ONE,
    LOOPS,
    MANY_VALUES,
    NUMBER_CHECKS,
    STRICT,
    SYMBOLIC_LENGTHS,
    Rewrite,
)
from exportkit.running.eager import run_eager

Programs = tuple[Mapping[str, TracedProgram], Split]


@dataclass(frozen=True)
class Attempt:
    """One strategy that was tried.

    Attributes:
        strategy: Its name.
        outcome: Whether it gave a program; ``not better``: a program that serves no more than the one before.
        reason: Why it failed.
    """

    strategy: str
    outcome: Literal["succeeded", "failed", "not better"]
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.strategy}: {self.outcome}" + (f", {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class Strategy:
    """A row of the table.

    Attributes:
        name: Its name, for reports.
        applies: Whether it applies, given how far the search has come.
        adds: Rewrites that are put in force, besides those that the structure of the model asks for.
        drops: Rewrites that are left out.
        enlarges: Whether the model is traced at sizes beyond the recorded ones.
        between: Whether the model is traced at sizes that are not multiples of what it may pad to.
        decides: Whether decisions by the values of tensors are looked into. What is found stays in force afterwards.
        replans: Returns another plan to begin again with.
        splits: Whether it makes a program for each kind of calls.
    """

    name: str
    applies: Callable[[Search], bool]
    adds: tuple[Rewrite, ...] = ()
    drops: tuple[Rewrite, ...] = ()
    enlarges: bool = False
    between: bool = False
    decides: bool = False
    replans: Callable[[BoundPlan], BoundPlan | None] | None = None
    splits: bool = False


def _with_static_lengths(plan: BoundPlan) -> BoundPlan | None:
    """The plan in which lengths that no recorded call varied are static; None if there are none.

    The model accepts other lengths in eager mode, but a trace may fix them, for instance in a Python loop.
    """
    extended = [v.name for v in plan.variables if v.role != "batch" and len({s for s in v.seen if s is not None}) == 1]
    if not extended:
        return None
    for name in extended:
        plan = plan.static(name)
    text = f"torch.export fixed {', '.join(extended)}, which no recorded call varied; static at the recorded size."
    return plan.with_findings([Finding("fixed by the trace", ", ".join(extended), text)])


STRATEGIES = (
    Strategy("plain trace", lambda _: True),
    # Lists as one tensor are guessed from how the model reads them.
    Strategy(
        "lists as separate tensors",
        lambda search: search.has_failed and LISTS_OF_ONE in search.rules,
        drops=(LISTS_OF_ONE,),
    ),
    # The value of a tensor that the trace needed may follow from buffers alone, or make no difference.
    Strategy(
        "decisions by values",
        lambda search: search.needs_values,
        adds=(BUFFER_VALUES, NUMBER_CHECKS, COUNTS),
        decides=True,
    ),
    # It may be how many values are selected, asked by torch itself.
    Strategy(
        "selections of several values",
        lambda search: search.needs_values,
        adds=(BUFFER_VALUES, NUMBER_CHECKS, COUNTS, MANY_VALUES),
    ),
    # Padding to a multiple, which adds nothing in the trace, may be the reason.
    Strategy(
        "sizes between the multiples",
        lambda search: search.leaves_out_between or search.leaves_out_calls,
        between=True,
    ),
    # A size that is 1 at the sizes of the trace, or was cached by an earlier call, may be the reason.
    Strategy(
        "larger sizes",
        lambda search: search.size_fixed or search.leaves_out_calls or search.refuses_sizes,
        enlarges=True,
    ),
    Strategy(
        "lengths kept symbolic",
        lambda search: search.size_fixed or search.leaves_out_calls or search.keeps_decision or search.needs_values,
        adds=(SYMBOLIC_LENGTHS,),
    ),
    Strategy(
        "loops as one operator",
        lambda search: search.size_fixed or search.leaves_out_calls or search.keeps_loop or search.needs_values,
        adds=(SYMBOLIC_LENGTHS, LOOPS),
        drops=(LISTS_OF_ONE,),
    ),
    Strategy(
        "strict tracing",
        lambda search: search.size_fixed or search.leaves_out_calls,
        adds=(STRICT,),
        drops=(BUFFER_VALUES, NUMBER_CHECKS, COUNTS, MANY_VALUES),  # which strict tracing would trace, too
    ),
    # For any model, they are also tried if the translation to ONNX fails.
    Strategy(
        "transformers' export patches",
        lambda search: search.trace_failed and search.is_of_library,
        adds=(LIBRARY_PATCHES,),
    ),
    Strategy(
        "static lengths",
        lambda search: search.has_failed and not search.required,
        replans=_with_static_lengths,
    ),
    # If there is a program, only one that some recorded call fails with gives way.
    Strategy("several programs", lambda _: True, splits=True),
)
_IMPROVING = next(number for number, strategy in enumerate(STRATEGIES) if strategy.between)


class Search:
    """One walk over the table, for one model and its calls.

    Args:
        model: The model in the form to export.
        method: The method.
        plan_of: Makes the plan.
        check: Returns what is wrong with a program for some recorded call, or an empty string.
        split: Makes a program for each kind of calls, given why no single one serves; None if that fails.
        required: Rewrites that are in force in every attempt.
        seconds: Takes the duration of each stage.

    Attributes:
        attempts: What was tried, in order.
        result: The program, once there is one.
        several: The programs for the kinds of calls, if there are several.
        required: Rewrites that are in force in every attempt.
        rules: These, and the rewrites that the structure of the model asks for.
        error: What the plainest attempt raised: it decides what else may help.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        method: str,
        plan_of: Callable[[], BoundPlan],
        *,
        check: Callable[[TracedProgram], str] | None = None,
        split: Callable[[str | ExportkitError], Programs | None] | None = None,
        required: Sequence[Rewrite] = (),
        seconds: dict[str, float] | None = None,
    ) -> None:
        self.model, self.method = model, method
        self._plan_of, self._check, self._split = plan_of, check, split
        self.required: Sequence[Rewrite] = required
        self._seconds: dict[str, float] = {} if seconds is None else seconds
        self.attempts: list[Attempt] = []
        self.result: TracedProgram | None = None
        self.several: Programs | None = None
        self.rules: list[Rewrite] = []
        self.error: ExportkitError | None = None
        self._raised: ExportkitError | None = None  # what is raised if nothing helps
        self._loops: BaseException | None = None  # what torch raised when loops were to become operators
        self._plan: BoundPlan | None = None
        self._example: Example | None = None
        self._audit: Audit | None = None  # of the result
        self._called: Sequence[ModuleType] | None = None  # Python modules whose functions the model calls
        self._enlarged = False  # whether a trace at larger sizes got further

    @property
    def has_failed(self) -> bool:
        """Whether no program has been found yet: every trace failed, or its program serves less than the plan."""
        return self.result is None and isinstance(self.error, ExportError)

    @property
    def trace_failed(self) -> bool:
        """Whether torch could not trace the model; other errors say that its program serves less than the plan."""
        return isinstance(self.error, ExportError) and self.error.__cause__ is not None

    @property
    def size_fixed(self) -> bool:
        """Whether torch could not trace the model because its code fixes a dynamic size."""
        message = str(self.error.__cause__) if self.error is not None and self.trace_failed else ""
        return any(text in message for text in ("specialized", SYMBOLIC_LENGTH, "unhashable type: non-nested SymInt"))

    @property
    def needs_values(self) -> bool:
        """Whether torch could not trace the model because its code decides by the values of tensors."""
        return self.trace_failed and self.error is not None and is_data_dependent(self.error.__cause__)

    @property
    def leaves_out_calls(self) -> bool:
        """Whether there is a program, and it does not serve every recorded call."""
        return self.has_failed and not self.trace_failed

    @property
    def keeps_decision(self) -> bool:
        """Whether the program keeps a decision by size of the model that leaves out sizes, and another one may not."""
        if self.result is None or self._audit is None or SYMBOLIC_LENGTHS.name in self.result.rules:
            return False
        return self._audit.by_model

    @property
    def keeps_loop(self) -> bool:
        """Whether the program leaves out sizes for which a loop of the model has more turns, or fewer."""
        return self.result is not None and self._audit is not None and self._audit.by_loop

    @property
    def leaves_out_between(self) -> bool:
        """Whether the program serves only multiples of a number, and the model accepts other sizes."""
        return self.result is not None and self._audit is not None and self._audit.between

    @property
    def refuses_sizes(self) -> bool:
        """Whether the program leaves out sizes because of the model's code, or of a size that is 1 in the trace."""
        if self._audit is None or not self._audit.refused:
            return False
        return self._audit.by_model or any(item.text.endswith("== 1") for item in self._audit.domain.conditions)

    @property
    def is_of_library(self) -> bool:
        """Whether some module of the model is one of transformers."""
        return any(type(module).__module__.startswith("transformers.") for module in self.model.modules())

    def walk(self) -> None:
        """Tries the strategies in order; afterwards `result` or `several` holds what serves the plan.

        Raises:
            ArgumentError: if the model raises for the arguments that the plan leads to.
            PlanError: if the recorded calls contradict each other.
            ExportError: if nothing helps.
        """
        position, suffix = 0, "".join(f", {rule.name}" for rule in self.required)
        try:
            with stage("plan", self._seconds):
                self._plan = self._plan_of()
        except (ArgumentError, ExportError, PlanError) as error:  # a plan for each kind of calls may still help
            self.attempts.append(Attempt(STRATEGIES[0].name + suffix, "failed", _reason(error)))
            self.error = self._raised = error
        while position < len(STRATEGIES):
            strategy = STRATEGIES[position]
            position += 1
            name = strategy.name + suffix
            if not strategy.applies(self) or any(attempt.strategy == name for attempt in self.attempts):
                continue
            if strategy.splits:
                self._make_several(strategy.name)
            elif self._plan is None:
                continue
            elif strategy.replans is not None:
                plan = strategy.replans(self._plan)
                if plan is not None:  # begin again with this plan
                    self._plan, self._example, self.error, self._raised = plan, None, None, None
                    position, suffix = 0, f"{suffix}, {strategy.name}"
            else:
                is_first = self.result is None
                self._try(strategy, name, self._plan)
                if is_first and (self.keeps_decision or self.refuses_sizes or self.leaves_out_between):
                    position = _IMPROVING
        if self._raised is not None and self.result is None and self.several is None:
            if isinstance(self._raised, ExportError):
                self._raised.loops = self._loops
            raise self._raised

    def found(self) -> TracedProgram:
        """Returns the program that the walk found, with all findings."""
        if self.result is None:
            raise ExportError("No strategy applies to this model.", hint="this is a bug: please report it.")
        with stage("domain", self._seconds):
            found = with_traits(with_harmless_constants(add_patterns(self.result)))
        return replace(found, plan=found.plan.with_findings(findings_of(found)))

    def _try(self, strategy: Strategy, name: str, plan: BoundPlan) -> None:
        """Traces with the rewrites of a strategy, and keeps the program if it is the first one or a better one."""
        enlarges = strategy.enlarges or self._enlarged
        try:
            if self._example is None:
                with stage("arguments", self._seconds):
                    self._example, self.rules = chosen_example(self.model, self.method, plan, self.required)
                    if plan.observation.signature.numbers:  # a model may ask whether a number is an int
                        self.rules = [SYMBOLIC_LENGTHS, *self.rules]
            example = self._example
            if enlarges:
                with stage("arguments", self._seconds):
                    example, _ = chosen_example(self.model, self.method, plan, self.required, larger=True)
                if example.outputs.paths != self._example.outputs.paths:
                    raise ExportError("The model returns something else at larger sizes.")
            if strategy.between:
                with stage("arguments", self._seconds):
                    example, _ = chosen_example(self.model, self.method, plan, self.required, between=True)
                if example.sizes == self._example.sizes:
                    raise ExportError("The model was already traced at these sizes.")
            if strategy.decides:
                with stage("arguments", self._seconds):
                    found_rules = rules_for_decisions(self.model, self.method, plan.observation.calls)
                self.rules = [*strategy.adds, *found_rules, *self.rules]
            rules = [*strategy.adds, *(rule for rule in self.rules if rule not in (*strategy.adds, *strategy.drops))]
            with stage("export", self._seconds, TRACE_PER_MODULE * len(list(self.model.modules()))):
                everywhere = self._in_called_code(rules, plan)
                traced = trace(self.model, self.method, plan.plan, plan.observation, example, everywhere)
                audit = audit_sizes(traced)
                is_guess = enlarges or strategy.between or LISTS_OF_ONE in rules or traced.skips_entry
                if is_guess and (difference := ProgramProbe(traced).difference(traced.sizes)):
                    raise ExportError("The program does not return what the model returns.", got=difference)
                found = plan.plan.with_findings([*audit.findings, *audit_effects(traced)])
        except (ArgumentError, ExportError, PlanError) as error:
            self.attempts.append(Attempt(name, "failed", _reason(error)))
            self._learn(strategy, error, enlarges)
            return
        self.error = None
        if self._audit is None or audit.refused < self._audit.refused:
            absences = find_absences(replace(traced, domain=audit.domain))
            domain = replace(audit.domain, absent=absences.allowed)
            traced = replace(traced, plan=found, domain=domain, absences=absences, crossings=audit.crossings)
            self.result = replace(traced, seconds=self._seconds)
            self._audit = audit
            self.attempts.append(Attempt(name, "succeeded"))
        else:
            self.attempts.append(Attempt(name, "not better", "it serves no more sizes"))

    def _learn(self, strategy: Strategy, error: ExportkitError, enlarges: bool) -> None:
        """Keeps what a failed attempt says about the next ones, and its error if that says more than earlier ones."""
        if LOOPS in strategy.adds:
            self._loops = error.__cause__
        is_refused = error.__cause__ is None  # it could be traced, and serves less than the plan
        if enlarges:  # the model may have no more positions, which says nothing about its trace
            self._enlarged |= is_refused and self.size_fixed
            return
        if strategy.between:  # the model may raise for such sizes
            return
        is_plainer = bool(strategy.drops and not strategy.adds)  # less of it is a guess
        is_other = strategy.decides and not is_data_dependent(error.__cause__)
        if self.error is None or is_refused or is_plainer or is_other:
            self.error = error
        if self.result is not None:
            self.rules = [*strategy.adds, *self.rules] if SYMBOLIC_LENGTHS in strategy.adds else self.rules
            return
        says_where = is_refused and error.where is not None
        if self._raised is None or is_plainer or (says_where and self._raised.__cause__ is not None):
            self._raised = error

    def _in_called_code(self, rules: Sequence[Rewrite], plan: BoundPlan) -> list[Rewrite]:
        """The rewrites; those that replace names do so in all Python modules whose functions the model calls."""
        if self._called is None and not {SYMBOLIC_LENGTHS, LOOPS}.isdisjoint(rules):
            call = plan.observation.calls[0]
            modules = called_namespaces(lambda: run_eager(self.model, self.method, call))
            self._called = [module for module in modules if is_model_code(getattr(module, "__file__", None) or "")]
        return [
            replace(rule, applied=partial(rule.applied, called=self._called))
            if rule in (SYMBOLIC_LENGTHS, LOOPS)
            else rule
            for rule in rules
        ]

    def _make_several(self, name: str) -> None:
        """Replaces a program that fails for some recorded call, or none at all, by one for each kind of calls."""
        if self._split is None:
            return
        why: str | ExportkitError | None = self._raised
        if self.result is not None:
            why = self._check(self.result) if self._check is not None else None
        if not why:
            return
        self.several = self._split(why)
        if self.several is None:
            reason = "there is one kind of calls, or no program can be proven for one of the kinds"
            self.attempts.append(Attempt(name, "failed", reason))
        else:
            self.result = None
            self.attempts.append(Attempt(name, "succeeded", self.several[1].reason))


def export_program(model: torch.nn.Module, method: str, plan: BoundPlan) -> tuple[TracedProgram, tuple[Attempt, ...]]:
    """Returns the model traced for a plan, with all findings, and what was tried.

    Args:
        model: The model in the form to export.
        method: The method.
        plan: The plan.

    Raises:
        ArgumentError: if the model raises for the arguments that the plan leads to.
        ExportError: if torch cannot trace the model, or its program serves less than the plan.
    """
    search = Search(model, method, lambda: plan)
    search.walk()
    return search.found(), tuple(search.attempts)


def after_failed_translation(traced: TracedProgram) -> tuple[TracedProgram, tuple[Attempt, ...]] | None:
    """Returns a program traced again with transformers' export patches, and what was tried; None if that fails.

    Args:
        traced: A program that cannot be translated to ONNX.
    """
    if LIBRARY_PATCHES.name in traced.rules:
        return None
    plan = BoundPlan.of(traced.plan, traced.observation)
    search = Search(traced.model, traced.method, lambda: plan, required=[LIBRARY_PATCHES], seconds=traced.seconds)
    try:
        search.walk()
    except ExportError:
        return None
    if search.result is None:
        return None
    again = add_patterns(search.result)
    again = replace(again, domain=replace(again.domain, values=traced.domain.values, traits=traced.domain.traits))
    return replace(again, plan=again.plan.with_findings(rule_findings(again))), tuple(search.attempts)


def _reason(error: ExportkitError) -> str:
    """What went wrong, in one short line, without looking for the root cause."""
    cause: BaseException = error if error.__cause__ is None else error.__cause__
    name = "" if cause is error else f"{type(cause).__name__}: "
    return name + next((line.strip() for line in str(cause).splitlines() if line.strip()), "")[:200]
