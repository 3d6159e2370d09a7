"""The strategies for getting a program that serves a whole plan: one ordered table.

To change what is tried, or when, edit `STRATEGIES`. No other module has fallbacks of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from exportkit._torch_compat.traced_values import is_data_dependent
from exportkit.errors import ExportError, ExportkitError
from exportkit.plan.leaves import Finding
from exportkit.probing.planning import BoundPlan
from exportkit.programs.audit import Audit
from exportkit.programs.program import TracedProgram
from exportkit.rewrites.symbolic_lists import SYMBOLIC_LENGTH
from exportkit.rewrites.table import (
    ARRAYS,
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

# In what torch says if code fixes the size of a dynamic axis.
_SIZE_FIXED = ("specialized", SYMBOLIC_LENGTH, "unhashable type: non-nested SymInt")
# In what torch says if numpy is given sizes that have no numbers, or tensors that have no values.
_IN_NUMPY = (
    "numpy.object_",
    "loop of ufunc does not support",
    "dtype('O')",
    *(f"'{kind}' object has no attribute" for kind in ("SymInt", "SymFloat", "int", "float")),
    ".numpy() is not supported",
)


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


class SearchState:
    """How far the search for a program has come, which decides what else may help.

    Args:
        model: The model in the form to export.
        required: Rewrites that are in force in every attempt.

    Attributes:
        result: The program, once there is one.
        audit: What the audit of it found.
        rules: The rewrites that are required, and those that the structure of the model asks for; once there is a
            program, those that it was traced with.
        rules_between: The rewrites of the last trace at sizes between the multiples.
        error: What the plainest attempt raised.
        error_of_paths: What the attempt with all recorded paths raised.
    """

    def __init__(self, model: torch.nn.Module, required: Sequence[Rewrite] = ()) -> None:
        self.model = model
        self.required: Sequence[Rewrite] = required
        self.result: TracedProgram | None = None
        self.audit: Audit | None = None
        self.rules: list[Rewrite] = []
        self.rules_between: list[Rewrite] = []
        self.error: ExportkitError | None = None
        self.error_of_paths: ExportkitError | None = None

    @property
    def has_failed(self) -> bool:
        """Whether no program has been found yet: every trace failed, or its program serves less than the plan."""
        return self.result is None and isinstance(self.error, ExportError)

    @property
    def trace_failed(self) -> bool:
        """Whether torch could not trace the model; other errors say that its program serves less than the plan."""
        return isinstance(self.error, ExportError) and self.error.__cause__ is not None

    @property
    def _trace_message(self) -> str:
        """What torch said as it could not trace the model; empty if it could."""
        return str(self.error.__cause__) if self.error is not None and self.trace_failed else ""

    @property
    def size_fixed(self) -> bool:
        """Whether torch could not trace the model because its code fixes a dynamic size."""
        return any(text in self._trace_message for text in _SIZE_FIXED)

    @property
    def paths_failed(self) -> bool:
        """Whether the attempt with all recorded paths failed: a loop on one of them may be the reason."""
        return self.error_of_paths is not None

    @property
    def needs_values(self) -> bool:
        """Whether torch could not trace the model because its code decides by the values of tensors."""
        return self.trace_failed and self.error is not None and is_data_dependent(self.error.__cause__)

    @property
    def guesses_lists(self) -> bool:
        """Whether torch could not trace the model with lists as one tensor, which is a guess."""
        return self.trace_failed and LISTS_OF_ONE in self.rules

    @property
    def computes_in_numpy(self) -> bool:
        """Whether torch could not trace the model because numpy had no numbers for its arrays, but symbols."""
        return any(text in self._trace_message for text in _IN_NUMPY)

    @property
    def leaves_out_calls(self) -> bool:
        """Whether there is a program, and it does not serve every recorded call."""
        return self.has_failed and not self.trace_failed

    @property
    def keeps_decision(self) -> bool:
        """Whether the program keeps a decision by size of the model that leaves out sizes, and another one may not."""
        if self.result is None or self.audit is None or SYMBOLIC_LENGTHS.name in self.result.rules:
            return False
        return self.audit.by_model

    @property
    def keeps_loop(self) -> bool:
        """Whether the program leaves out sizes for which a loop of the model has more iterations, or fewer."""
        return self.result is not None and self.audit is not None and self.audit.by_loop

    @property
    def leaves_out_between(self) -> bool:
        """Whether the program serves only multiples of a number, and the model accepts other sizes."""
        return self.result is not None and self.audit is not None and self.audit.between

    @property
    def refuses_sizes(self) -> bool:
        """Whether the program leaves out sizes because of the model's code, or of a size that is 1 in the trace."""
        if self.audit is None or not self.audit.refused:
            return False
        return self.audit.by_model or any(item.text.endswith("== 1") for item in self.audit.domain.conditions)

    @property
    def is_of_library(self) -> bool:
        """Whether some module of the model is one of transformers."""
        return any(type(module).__module__.startswith("transformers.") for module in self.model.modules())


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
        recorded_paths: Whether the model is traced on every execution path of the recorded calls.
        replans: Returns another plan to begin again with.
        splits: Whether it makes a program for each kind of call.
    """

    name: str
    applies: Callable[[SearchState], bool]
    adds: tuple[Rewrite, ...] = ()
    drops: tuple[Rewrite, ...] = ()
    enlarges: bool = False
    between: bool = False
    decides: bool = False
    recorded_paths: bool = False
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
    text = f"torch.export fixed {', '.join(extended)}, which had one size in all recorded calls; static at that size."
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
    # How much is padded may go through `int`.
    Strategy(
        "lengths kept symbolic between the multiples",
        lambda search: search.leaves_out_between and SYMBOLIC_LENGTHS not in search.rules_between,
        adds=(SYMBOLIC_LENGTHS,),
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
        lambda search: (
            search.size_fixed
            or search.leaves_out_calls
            or search.keeps_loop
            or search.needs_values
            or search.guesses_lists
        ),
        adds=(SYMBOLIC_LENGTHS, LOOPS),
        drops=(LISTS_OF_ONE,),
    ),
    # A value may decide what is computed: the recorded calls show the results that there are to choose between.
    Strategy(
        "all recorded paths",
        lambda search: search.needs_values,
        adds=(BUFFER_VALUES, NUMBER_CHECKS, COUNTS, SYMBOLIC_LENGTHS),
        recorded_paths=True,
    ),
    Strategy(
        "all recorded paths, with loops",
        lambda search: search.paths_failed,
        adds=(BUFFER_VALUES, NUMBER_CHECKS, COUNTS, SYMBOLIC_LENGTHS, LOOPS),
        drops=(LISTS_OF_ONE,),
        recorded_paths=True,
    ),
    Strategy(
        "strict tracing",
        lambda search: search.size_fixed or search.leaves_out_calls or search.computes_in_numpy,
        adds=(STRICT,),
        drops=(BUFFER_VALUES, NUMBER_CHECKS, COUNTS, MANY_VALUES),  # which strict tracing would trace, too
    ),
    Strategy(
        "arrays of numpy as tensors",
        lambda search: search.computes_in_numpy,
        adds=(SYMBOLIC_LENGTHS, ARRAYS),
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
