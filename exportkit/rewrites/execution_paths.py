"""The execution paths of calls: the branches on tensor values that a model takes, as recorded in eager mode."""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from exportkit.overrides import Attribute, replaced, with_imports
from exportkit.rewrites.branches import EQUALITIES, deciding, instructions_by_line, place_asking, tracing
from exportkit.rewrites.model_code import Place

ExecutionPath = Mapping[Place, Sequence[bool]]  # what each place decides, in the order of a call


@contextlib.contextmanager
def path_noted(of_numbers: Collection[Place]) -> Iterator[dict[Place, list[bool]]]:
    """Notes the execution path of a call.

    Args:
        of_numbers: The places that decide by numbers read from tensors, which are plain numbers in eager mode.
    """
    noted: dict[Place, list[bool]] = defaultdict(list)

    def note(place: Place, found: torch.Tensor) -> None:
        noted[place].append(bool(found.detach().numpy(force=True)))

    with (
        deciding(note),
        asked_for_equality(note),
        _jumps_noted(of_numbers, noted) if of_numbers else contextlib.nullcontext(),
    ):
        yield noted


@contextlib.contextmanager
def _jumps_noted(places: Collection[Place], noted: Mapping[Place, list[bool]]) -> Iterator[None]:
    """Notes what places decide, as seen from where the interpreter goes on."""

    def enter(frame: FrameType, _event: str, _argument: Any) -> Callable[..., Any] | None:
        jumps = _jumps_of(frame.f_code, frozenset(places))
        if not jumps:
            return None
        frame.f_trace_opcodes = True
        pending: _Jump | None = None

        def step(frame: FrameType, event: str, _argument: Any) -> Callable[..., Any]:
            nonlocal pending
            if event == "opcode":
                if pending is not None:
                    noted[pending.place].append((frame.f_lasti == pending.target) is pending.if_true)
                pending = jumps.get(frame.f_lasti)
            return step

        return step

    with tracing(enter):
        yield


class _Jump(NamedTuple):
    place: Place
    target: int
    if_true: bool


@functools.lru_cache(maxsize=4096)
def _jumps_of(code: CodeType, places: frozenset[Place]) -> Mapping[int, _Jump]:
    """The conditional jumps of some code that decide at these places, by their offset."""
    if all(file != code.co_filename for file, _, _ in places):
        return {}
    found, lines = dict[int, _Jump](), instructions_by_line(code)
    for instruction in dis.get_instructions(code):
        place = code.co_filename, *lines[instruction.offset]
        if place in places and "JUMP" in instruction.opname and "_IF_" in instruction.opname:
            found[instruction.offset] = _Jump(place, int(instruction.argval), "IF_TRUE" in instruction.opname)
    return found


def asked_for_equality(
    decide: Callable[[Place, torch.Tensor], bool | None],
) -> contextlib.AbstractContextManager[None]:
    """Asks a function where code decides whether tensors are equal, for which torch returns a Python value.

    Args:
        decide: Returns what a place decides, given whether they are equal as a tensor; None leaves it to the values.
    """

    def asking(real: Callable[..., bool], are_equal: Callable[..., torch.Tensor]) -> Callable[..., bool]:
        @functools.wraps(real)
        def value(left: torch.Tensor, right: torch.Tensor, *args: Any, **options: Any) -> bool:
            if left.shape != right.shape and real.__name__ == "equal":
                return False
            decided = decide(place_asking(sys._getframe(1)), are_equal(left, right, *args, **options).all())
            return real(left, right, *args, **options) if decided is None else decided

        return value

    return replaced(
        with_imports(
            (Attribute(owner, name), asking(getattr(owner, name), function))
            for name, function in EQUALITIES.items()
            for owner in (torch, torch.Tensor)
        )
    )
