"""The search for a program that serves a whole plan: the loop that walks the table of strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType

import torch

from exportkit._torch_compat.traced_values import is_data_dependent
from exportkit.errors import ArgumentError, ExportError, ExportkitError, PlanError
from exportkit.overrides import called_namespaces
from exportkit.probing.planning import BoundPlan
from exportkit.programs.absences import find_absences
from exportkit.programs.audit import audit_sizes
from exportkit.programs.decisions import rules_for_decisions, rules_for_recorded_paths
from exportkit.programs.example import chosen_example
from exportkit.programs.failure import fixed_axes
from exportkit.programs.findings import audit_effects, findings_of, rule_findings
from exportkit.programs.kinds import Split
from exportkit.programs.left_out import with_harmless_constants, with_traits
from exportkit.programs.loop_failures import deciding_line
from exportkit.programs.patterns import add_patterns
from exportkit.programs.program import TracedProgram, trace
from exportkit.programs.program_probe import ProgramProbe
from exportkit.programs.stages import TRACE_PER_MODULE, stage
from exportkit.programs.strategies import STRATEGIES, Attempt, SearchState, Strategy
from exportkit.programs.traced_method import Example
from exportkit.rewrites.model_code import Line, Place, is_model_code
from exportkit.rewrites.table import ARRAYS, LIBRARY_PATCHES, LISTS_OF_ONE, LOOPS, SYMBOLIC_LENGTHS, Rewrite
from exportkit.running.eager import run_eager

Programs = tuple[Mapping[str, TracedProgram], Split]

_MOST_NUMBERS = 16
_IMPROVING = next(number for number, strategy in enumerate(STRATEGIES) if strategy.between)


class Search(SearchState):
    """One walk over the table of strategies, for one model and its calls.

    Args:
        model: The model in the form to export.
        method: The method.
        plan_of: Makes the plan.
        check: Returns what is wrong with a program for some recorded call, if anything is, as text or an error.
        split: Makes a program for each kind of call, given why no single one serves; None if that fails.
        required: Rewrites that are in force in every attempt.
        seconds: Takes the duration of each stage.

    Attributes:
        attempts: What was tried, in order.
        several: The programs for the kinds of call, if there are several.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        method: str,
        plan_of: Callable[[], BoundPlan],
        *,
        check: Callable[[TracedProgram], str | ExportkitError] | None = None,
        split: Callable[[str | ExportkitError], Programs | None] | None = None,
        required: Sequence[Rewrite] = (),
        seconds: dict[str, float] | None = None,
    ) -> None:
        super().__init__(model, required)
        self.method = method
        self._plan_of, self._check, self._split = plan_of, check, split
        self._seconds: dict[str, float] = {} if seconds is None else seconds
        self.attempts: list[Attempt] = []
        self.several: Programs | None = None
        self._raised: ExportkitError | None = None  # what is raised if nothing helps
        self._loops: BaseException | None = None  # what torch raised when loops were to become operators
        self._plan: BoundPlan | None = None
        self._example: Example | None = None
        self._called: Sequence[ModuleType] | None = None  # Python modules whose functions the model calls
        self._enlarged = False  # whether a trace at larger sizes got further
        self._deciding: set[Line] = set()  # where loops, or functions that they call, decide by the values of tensors
        self._of_numbers: set[Place] = set()  # where code decides by numbers that it reads from tensors

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
        except (ArgumentError, ExportError, PlanError) as error:  # a plan for each kind of call may still help
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
        enlarges, known = strategy.enlarges or self._enlarged, len(self._of_numbers)
        try:
            example = self._example_at(plan, larger=enlarges, between=strategy.between)
            if strategy.decides:
                with stage("arguments", self._seconds):
                    found_rules = rules_for_decisions(self.model, self.method, plan.observation.calls)
                self.rules = [*strategy.adds, *found_rules, *self.rules]
            adds = strategy.adds
            if strategy.recorded_paths:
                calls = plan.observation.calls
                with stage("arguments", self._seconds):
                    paths = rules_for_recorded_paths(self.model, self.method, calls, self.rules, self._of_numbers)
                adds = *adds, *paths
            rules = [*adds, *(rule for rule in self.rules if rule not in (*adds, *strategy.drops))]
            if strategy.between:
                self.rules_between = rules
            with stage("export", self._seconds, TRACE_PER_MODULE * len(list(self.model.modules()))):
                everywhere = self._in_called_code(rules, plan)
                traced = trace(self.model, self.method, plan.plan, plan.observation, example, everywhere)
                audit = audit_sizes(traced)
                probe = ProgramProbe(traced)
                is_guess = enlarges or strategy.between or LISTS_OF_ONE in rules or traced.skips_entry
                if is_guess and (difference := probe.difference(traced.sizes)):
                    raise ExportError("The program does not return what the model returns.", got=difference)
                if LOOPS in rules and not probe.is_right_in_other_branches(traced.sizes):
                    raise ExportError("The program does not return what the model returns for other values.")
                found = plan.plan.with_findings([*audit.findings, *audit_effects(traced)])
        except (ArgumentError, ExportError, PlanError) as error:
            line = deciding_line(error.__cause__, self._deciding) or getattr(error, "decision", None)
            if LOOPS in strategy.adds and line and line not in self._deciding:
                self._deciding.add(line)  # of a loop that ends by values, or of a function that computes both sides
                self._try(strategy, name, plan)
                return
            if strategy.recorded_paths and known < len(self._of_numbers) <= _MOST_NUMBERS:
                self._try(strategy, name, plan)  # the calls show the outcome of the decision that the trace came to
                return
            self.attempts.append(Attempt(name, "failed", _reason(error)))
            self._learn(strategy, error, enlarges)
            return
        self.error = None
        if self.audit is None or audit.refused < self.audit.refused:
            absences = find_absences(replace(traced, domain=audit.domain))
            domain = replace(audit.domain, absent=absences.allowed)
            traced = replace(traced, plan=found, domain=domain, absences=absences, crossings=audit.crossings)
            self.result = replace(traced, seconds=self._seconds)
            self.audit, self.rules = audit, rules
            self.attempts.append(Attempt(name, "succeeded"))
        else:
            self.attempts.append(Attempt(name, "not better", "it serves no more sizes"))

    def _example_at(self, plan: BoundPlan, *, larger: bool, between: bool) -> Example:
        """The call to trace, at the usual sizes, larger ones, or sizes that are not multiples."""

        def chosen(**sizes: bool) -> tuple[Example, list[Rewrite]]:
            with stage("arguments", self._seconds):
                return chosen_example(self.model, self.method, plan, self.required, **sizes)

        if self._example is None:
            self._example, self.rules = chosen()
            if plan.observation.signature.numbers:  # a model may ask whether a number is an int
                self.rules = [SYMBOLIC_LENGTHS, *self.rules]
        example = self._example
        if larger:
            example, _ = chosen(larger=True)
            if example.outputs.paths != self._example.outputs.paths:
                raise ExportError("The model returns a different structure at larger sizes.")
        if between:
            example, _ = chosen(between=True)
            if example.sizes == self._example.sizes:
                raise ExportError("The model was already traced at these sizes.")
        return example

    def _learn(self, strategy: Strategy, error: ExportkitError, enlarges: bool) -> None:
        """Keeps what a failed attempt says about the next ones, and its error if that says more than earlier ones."""
        if LOOPS in strategy.adds:
            self._loops = error.__cause__
        is_refused = error.__cause__ is None  # it could be traced, and serves less than the plan
        says_more = error.where is not None or (isinstance(error, ExportError) and error.sides is not None)
        if enlarges:  # the model may have no more positions, which says nothing about its trace
            before = fixed_axes(self.error and self.error.__cause__)
            is_traced = isinstance(error, ExportError)  # and not refused by the model itself
            self._enlarged |= is_traced and self.size_fixed and (is_refused or fixed_axes(error.__cause__) < before)
            return
        if strategy.between:  # the model may raise for such sizes
            return
        if strategy.recorded_paths:  # that the model decides by values is known
            self.error_of_paths = error
            self._raised = error if is_refused and says_more else self._raised
            return
        is_plainer = bool(strategy.drops and not strategy.adds)  # less of it is a guess
        is_other = strategy.decides and not is_data_dependent(error.__cause__)
        if self.error is None or is_refused or is_plainer or is_other:
            self.error = error
        if self.result is not None:
            self.rules = [*strategy.adds, *self.rules] if SYMBOLIC_LENGTHS in strategy.adds else self.rules
            return
        if self._raised is None or is_plainer or (is_refused and says_more and self._raised.__cause__ is not None):
            self._raised = error

    def _in_called_code(self, rules: Sequence[Rewrite], plan: BoundPlan) -> list[Rewrite]:
        """The rewrites; those that replace names do so in all Python modules whose functions the model calls."""
        if self._called is None and not {SYMBOLIC_LENGTHS, LOOPS}.isdisjoint(rules):
            call = plan.observation.calls[0]
            modules = called_namespaces(lambda: run_eager(self.model, self.method, call))
            self._called = [module for module in modules if is_model_code(getattr(module, "__file__", None) or "")]
        inside = {
            SYMBOLIC_LENGTHS: partial(SYMBOLIC_LENGTHS.applied, called=self._called),
            ARRAYS: partial(ARRAYS.applied, called=self._called),
            LOOPS: partial(LOOPS.applied, called=self._called, deciding=self._deciding),
        }
        return [replace(rule, applied=inside[rule]) if rule in inside else rule for rule in rules]

    def _make_several(self, name: str) -> None:
        """Replaces a program that fails for some recorded call, or none at all, by one for each kind of call."""
        if self._split is None:
            return
        why: str | ExportkitError | None = self._raised
        if self.result is not None:
            why = self._check(self.result) if self._check is not None else None
        if not why:
            return
        self.several = self._split(why)
        if self.several is None:
            reason = "all calls are of one kind, or the program for one of the kinds could not be proven"
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
    except ExportkitError:
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
