"""Branches for empty selections, such as ``if len(rows) == 0: continue``, in a trace.

A trace does not know whether a mask selects anything. Where the code for some values does the same for none, such as a
loop over experts that adds to its rows what each expert returns, a graph runs that code in every case. Whether the code
does the same is found by running the model, with `sys.settrace` forcing either branch.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch

from exportkit._torch_compat.traced_values import answer_for_some
from exportkit.overrides import Attribute, replaced
from exportkit.rewrites.branches import frame_asking, tracing
from exportkit.rewrites.model_code import Line, is_model_code, parsed


class _Branch(NamedTuple):
    """A statement with two branches, one of which is for 0.

    Attributes:
        for_zero: What its test is for 0.
        is_equation: Whether the test compares with 0 by ``==`` or ``!=``, whatever the sign is.
        others: The first line of the branch for other numbers.
    """

    for_zero: bool
    is_equation: bool
    others: int


@contextlib.contextmanager
def branches_noted(forced: Collection[Line] = ()) -> Iterator[dict[Line, set[bool]]]:
    """Notes whether statements for empty selections, outside of torch's own code, take the branch for 0.

    Args:
        forced: Statements that take the other branch, whatever their test is.
    """
    taken: dict[Line, set[bool]] = {}

    def enter(frame: FrameType, _event: str, _argument: Any) -> Callable[..., Any] | None:
        file = frame.f_code.co_filename
        branches = _branches(file) if is_model_code(file) else {}
        pending: int | None = None

        def step(frame: FrameType, event: str, _argument: Any) -> Callable[..., Any]:
            nonlocal pending
            line = frame.f_lineno
            if event in ("line", "return") and pending is not None:
                taken.setdefault((file, pending), set()).add(line != branches[pending].others)
                pending = None
            if event == "line" and line in branches:
                if (file, line) in forced:
                    frame.f_lineno = branches[line].others  # type: ignore[misc]  # a tracing function may set it
                else:
                    pending = line
            return step

        return step if branches else None

    with tracing(enter):
        yield taken


@contextlib.contextmanager
def never_empty(_model: torch.nn.Module, places: Collection[Line] | None = None) -> Iterator[None]:
    """Makes statements take the branch for selections that are not empty.

    Args:
        _model: The model.
        places: The statements; by default, all.
    """

    def deciding(cls: Any, answer: Callable[[Any, _Branch], bool | None]) -> Callable[[Any], bool]:
        real = cls.__bool__

        @functools.wraps(real)
        def value(self: Any) -> bool:
            frame = frame_asking(sys._getframe(1))
            file, line = frame.f_code.co_filename, frame.f_lineno
            branch = _branches(file).get(line) if places is None or (file, line) in places else None
            found = None if branch is None else answer(self, branch)
            return bool(real(self)) if found is None else found

        return value

    def of_number(condition: torch.SymBool, _branch: _Branch) -> bool | None:
        return answer_for_some(condition)

    def of_tensor(_condition: torch.Tensor, branch: _Branch) -> bool | None:
        return not branch.for_zero if branch.is_equation else None

    changed = {cls: deciding(cls, answer) for cls, answer in ((torch.SymBool, of_number), (torch.Tensor, of_tensor))}
    with replaced([(Attribute(cls, "__bool__"), value) for cls, value in changed.items()]):
        yield


@functools.lru_cache(maxsize=64)
def _branches(file: str) -> Mapping[int, _Branch]:
    """The branches of a file by line."""
    found = {}
    for node in ast.walk(parsed(file)):
        for statements in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if not isinstance(statements, list) or not statements:
                continue
            for statement, following in zip(statements, [*statements[1:], None], strict=True):
                if isinstance(statement, ast.If) and (branch := _branch(statement, following)) is not None:
                    found[statement.lineno] = branch
    return found


def _branch(statement: ast.If, following: ast.stmt | None) -> _Branch | None:
    test, for_zero, is_equation = statement.test, False, True
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, for_zero = test.operand, not for_zero
    match test:
        case ast.Compare(_, [ast.Eq()], [ast.Constant(0)]):
            for_zero = not for_zero
        case ast.Compare(_, [ast.NotEq()], [ast.Constant(0)]):
            pass
        case ast.Compare(_, [ast.Gt()], [ast.Constant(0)]) | ast.Compare(_, [ast.GtE()], [ast.Constant(1)]):
            is_equation = False
        case ast.Compare(_, [ast.LtE()], [ast.Constant(0)]) | ast.Compare(_, [ast.Lt()], [ast.Constant(1)]):
            for_zero, is_equation = not for_zero, False
        case ast.Name() | ast.Attribute() | ast.Call() | ast.Subscript():  # a number, which is true unless it is 0
            is_equation = False
        case _:
            return None
    others = statement.body[0] if not for_zero else next(iter(statement.orelse), following)
    if others is None or others.lineno == statement.lineno or statement.test.end_lineno != statement.lineno:
        return None
    return _Branch(for_zero, is_equation, others.lineno)
