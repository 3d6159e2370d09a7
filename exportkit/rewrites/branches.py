"""Decisions by the values of tensors, such as ``if mask.any():`` and ``assert (lengths > 0).all()``, in a trace.

A trace cannot know which branch such a line takes, and there are two kinds of lines for which a graph need not know:

- A branch that changes nothing where a mask is False everywhere, such as an assignment to the places of the mask. It is
  taken in every case. Whether a branch is one of these is found by running the model.
- A check, one side of which does nothing but raise. A graph goes on with the other side, and asserts that this is the
  model's. It may test a tensor, or a number that was read from one: ``if mask.sum().item() != len(rows): raise``.

Branches on sizes become conditions of the graph: the comparisons of sizes in the code are recorded here.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from exportkit._torch_compat.size_arithmetic import is_of_slices
from exportkit._torch_compat.symbolic_shapes import Question, line_of_strict_trace, relation_answered
from exportkit._torch_compat.traced_values import (
    as_if_many,
    asserted,
    is_counted,
    number_asserted,
    questions_about_sizes,
    value_error,
)
from exportkit.overrides import Attribute, replaced, replaced_attributes, with_imports
from exportkit.rewrites.model_code import EXPORTKIT, TORCH, Place, is_model_code, line_text, value_to_pass

# What compares the elements of tensors, by the functions of torch that return one Python value for all of them.
EQUALITIES: Mapping[str, Callable[..., torch.Tensor]] = {"equal": torch.eq, "allclose": torch.isclose}

_MASK = "exportkit_mask"  # set on the result of any() and all(): the mask, and the function's name
_ASKING, _OWNERS = ("any", "all"), (torch, torch.Tensor)
_OWN_FILES = f"{EXPORTKIT}{os.sep}"
_REWRITES = f"{Path(__file__).parent}{os.sep}"  # which take the place of functions of the model
_OFTEN = 300  # decisions of one line in one call; `while mask.any()` does not end if it goes on in every case


@dataclass
class Decisions:
    """Where code decided by the value of a tensor.

    Attributes:
        outcomes: How it decided, by place.
        for_some: The places that decided by ``any()`` or ``all()`` of a mask: what they decide if the branch is taken.
    """

    outcomes: dict[Place, set[bool]] = field(default_factory=lambda: defaultdict(set))
    for_some: dict[Place, bool] = field(default_factory=dict)


@contextlib.contextmanager
def decisions_noted(forced: Mapping[Place, bool] | None, emptied: Collection[Place] = ()) -> Iterator[Decisions]:
    """Notes where code decides by the value of a tensor.

    Args:
        forced: What places decide, whatever the values are.
        emptied: Places whose masks are False everywhere when they decide.
    """
    noted, masks, counts = Decisions(), list[tuple[torch.Tensor, torch.Tensor]](), defaultdict[Place, int](int)

    def decide(place: Place, found: torch.Tensor) -> bool:
        mask, name = getattr(found, _MASK, (None, ""))
        if mask is not None:
            noted.for_some[place] = name == "any"
        if mask is not None and place in emptied:
            masks.append((mask, mask.clone()))
            mask.fill_(name == "all")
            outcome = name == "all"
        else:
            outcome = bool(found.detach().numpy(force=True))
        noted.outcomes[place].add(outcome)
        made = outcome if forced is None else forced.get(place, outcome)
        counts[place] += made != outcome
        if counts[place] > _OFTEN:
            raise RuntimeError("a loop does not end if it goes on in every case")
        return made

    try:
        with deciding(decide):
            yield noted
    finally:
        for mask, values in reversed(masks):
            mask.copy_(values)


@contextlib.contextmanager
def decisions_made(
    _model: torch.nn.Module, forced: Mapping[Place, bool] | None = None, checks: Collection[Place] = ()
) -> Iterator[None]:
    """Lets places decide what they are told; by default, every branch by ``any()`` and ``all()`` is taken.

    Args:
        _model: The model.
        forced: What places decide.
        checks: Those that are asserted to decide so.
    """

    def decide(place: Place, found: torch.Tensor) -> bool | None:
        if place in checks and forced is not None:
            condition = found.detach().reshape(()).bool()
            asserted(condition if forced[place] else ~condition, f"the check in {line_text(place)}")
        if forced is not None:
            return forced.get(place)
        return vars(found)[_MASK][1] == "any" if hasattr(found, _MASK) else None

    with deciding(decide):
        yield


def deciding(decide: Callable[[Place, torch.Tensor], bool | None]) -> contextlib.AbstractContextManager[None]:
    """Asks a function what code decides by the value of a tensor.

    Args:
        decide: Returns what a place decides, given the tensor; None leaves it to the value.
    """

    def noting(real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)  # modes go by the name
        def some(*args: Any, **kwargs: Any) -> Any:
            found = real(*args, **kwargs)
            if len(args) == 1 and not kwargs and args[0].dtype is torch.bool:
                setattr(found, _MASK, (args[0], real.__name__))
            return found

        return some

    is_asking = False  # modes call the function that takes the place of the real one again

    def asking(real: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        @functools.wraps(real)
        def value(self: torch.Tensor) -> Any:
            nonlocal is_asking
            frame = sys._getframe(1)
            if is_asking or self.numel() != 1 or (real.__name__ == "item" and not hasattr(self, _MASK)):
                return real(self)
            if is_own_code(frame.f_code.co_filename):
                return real(self)  # exportkit compares values for itself
            is_asking = True
            try:
                decided = decide(place_asking(frame), self)
                return real(self) if decided is None else decided
            finally:
                is_asking = False

        return value

    made = [(Attribute(torch.Tensor, name), asking(getattr(torch.Tensor, name))) for name in ("__bool__", "item")]
    made += [(Attribute(owner, name), noting(getattr(owner, name))) for name in _ASKING for owner in _OWNERS]
    return replaced(with_imports(made))


def is_own_code(file: str) -> bool:
    """Returns whether a file is exportkit's own, other than one whose functions take the place of the model's."""
    return file.startswith(_OWN_FILES) and not file.startswith(_REWRITES)


def frame_asking(frame: FrameType) -> FrameType:
    """Returns the frame that asks for a value.

    It is behind what exportkit puts in the place of functions of Python, and behind torch, which asks whether a number
    is 0 in ``__bool__``.
    """
    while frame.f_back is not None and (
        frame.f_code.co_name == "__bool__" or frame.f_code.co_filename.startswith(_OWN_FILES)
    ):
        frame = frame.f_back
    return frame


@contextlib.contextmanager
def tracing(enter: Callable[[FrameType, str, Any], Callable[..., Any] | None]) -> Iterator[None]:
    """Has Python call a function for each call of a function, as `sys.settrace` does, and restores what it called."""
    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


def place_asking(frame: FrameType) -> Place:
    """Returns the place that asks for a value."""
    frame = frame_asking(frame)
    places = instructions_by_line(frame.f_code)
    offset = max((offset for offset in places if offset <= frame.f_lasti), default=0)  # it may be inside of a call
    return frame.f_code.co_filename, *places[offset]


@functools.lru_cache(maxsize=1024)
def instructions_by_line(code: CodeType) -> Mapping[int, tuple[int, int]]:
    """Returns the line of each instruction, by its offset, and its number in that line.

    These stay the same if another line of a function is rewritten.
    """
    counts, found = Counter[int](), dict[int, tuple[int, int]]()
    for instruction in dis.get_instructions(code):
        line = (instruction.positions and instruction.positions.lineno) or 0
        found[instruction.offset] = line, counts[line]
        counts[line] += 1
    return found


@contextlib.contextmanager
def checks_of_numbers(_model: torch.nn.Module) -> Iterator[None]:
    """Lets checks pass that test numbers read from tensors, and asserts what they test.

    In eager mode, these numbers are Python's, so that only a trace shows where they are tested.
    """
    decide: Callable[[torch.SymBool], bool] = torch.SymBool.__bool__

    def value(self: torch.SymBool) -> bool:
        try:
            return decide(self)
        except value_error():
            passing = value_to_pass(frame_asking(sys._getframe(1)))
            if passing is None:
                raise
        number_asserted(self if passing else torch.sym_not(self))
        return passing

    with replaced_attributes(torch.SymBool, {"__bool__": value}):
        yield


def expected_counts(_model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Makes ``bincount`` return ``minlength`` counts, and asserts that no value is larger than that allows.

    Args:
        _model: The model.
    """

    def counting(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(real)
        def counts(values: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
            found = real(values, weights, minlength)
            if not minlength or not is_counted(found.shape[0]):
                return found
            number_asserted(found.shape[0] == minlength)  # type: ignore[arg-type]
            return found.narrow(0, 0, minlength)

        return counts

    owners = (torch, torch.Tensor)
    return replaced(with_imports((Attribute(owner, "bincount"), counting(owner.bincount)) for owner in owners))


@contextlib.contextmanager
def many_values(_model: torch.nn.Module) -> Iterator[None]:
    """Lets the code of torch assume that numbers of selected values are neither 0 nor 1, and asserts that.

    Some operators ask for that on the way to the same result, and others to raise, which a trace cannot decide.
    """
    owner, name = questions_about_sizes()
    decide = getattr(owner, name)

    def answer(self: Any, question: Any, *args: Any, **options: Any) -> Any:
        try:
            return decide(self, question, *args, **options)
        except value_error():
            found = None if is_model_code(_asking(sys._getframe(1))[0]) else as_if_many(self, question)
            if found is None:
                raise
        return found

    with replaced_attributes(owner, {name: answer}):
        yield


@contextlib.contextmanager
def questions_noted(strict: bool) -> Iterator[Collection[Question]]:
    """Notes what the code of a model asks about sizes in a trace, as relations that hold, with the line that asked.

    torch makes a guard only of what it does not know by then. How long slices are is noted as well, and where code gets
    a number for what follows from sizes, as by ``int(0.5 * n)``.

    Args:
        strict: Whether the trace is a strict one, which interprets the code.
    """
    owner, name = questions_about_sizes()
    decide, noted = getattr(owner, name), dict[Question, None]()

    def answer(self: Any, question: Any, *args: Any, **options: Any) -> Any:
        made = decide(self, question, *args, **options)
        relation = relation_answered(question, made)
        if relation is not None:
            file, number, function = (*line_of_strict_trace(self), "") if strict else _asking(sys._getframe(1))
            if is_model_code(file) or is_of_slices(file, function):
                noted.setdefault(Question(*relation, file, number), None)
        return made

    with replaced_attributes(owner, {name: answer}):
        yield noted


def _asking(frame: FrameType | None) -> tuple[str, int, str]:
    """The line and the function that ask: not of torch's symbolic numbers, nor of what takes their place."""
    while frame is not None and _passes_questions_on(frame.f_code.co_filename):
        frame = frame.f_back
    return ("", 0, "") if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


@functools.lru_cache(maxsize=1024)
def _passes_questions_on(file: str) -> bool:
    asking_for_others = TORCH / "fx" / "experimental", TORCH / "__init__.py", EXPORTKIT
    return any(Path(file).is_relative_to(each) for each in asking_for_others)
