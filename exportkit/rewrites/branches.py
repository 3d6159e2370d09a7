"""Decisions by the values of tensors, such as ``if mask.any():`` and ``assert (lengths > 0).all()``, in a trace.

A trace cannot know which way such a line goes, and there are two kinds of lines for which a graph need not know:

- A branch that changes nothing where a mask has no places, such as an assignment to them. It is taken in every case.
  Whether a branch is one of these is found by running the model.
- A check, one side of which does nothing but raise. A graph goes on with the other side, and asserts that this is the
  model's.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from exportkit._torch_compat.symbolic_shapes import asserted
from exportkit.overrides import Attribute, replaced

Place = tuple[str, int, int]  # file, line, and the instruction
_MASK = "exportkit_mask"  # set on the result of any() and all(): the mask, and the function's name
_ASKING, _OWNERS = ("any", "all"), (torch, torch.Tensor)
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
def decisions_noted(forced: Mapping[Place, bool] | None = None, emptied: Collection[Place] = ()) -> Iterator[Decisions]:
    """Notes where code decides by the value of a tensor.

    Args:
        forced: What places decide, whatever the values are.
        emptied: Places whose masks have no places when they decide.
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
        with _deciding(decide):
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
            asserted(condition if forced[place] else ~condition, f"the check in {place[0]}:{place[1]}")
        if forced is not None:
            return forced.get(place)
        return vars(found)[_MASK][1] == "any" if hasattr(found, _MASK) else None

    with _deciding(decide):
        yield


def _deciding(decide: Callable[[Place, torch.Tensor], bool | None]) -> contextlib.AbstractContextManager[None]:
    def noting(real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)  # modes go by the name
        def some(*args: Any, **kwargs: Any) -> Any:
            found = real(*args, **kwargs)
            if len(args) == 1 and not kwargs and args[0].dtype is torch.bool:
                setattr(found, _MASK, (args[0], real.__name__))
            return found

        return some

    def deciding(real: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        @functools.wraps(real)
        def value(self: torch.Tensor) -> Any:
            if self.numel() != 1 or (real.__name__ == "item" and not hasattr(self, _MASK)):
                return real(self)
            caller = sys._getframe(1)
            decided = decide((caller.f_code.co_filename, caller.f_lineno, caller.f_lasti), self)
            return real(self) if decided is None else decided

        return value

    made = {name: deciding(getattr(torch.Tensor, name)) for name in ("__bool__", "item")}
    return replaced(
        [
            *((Attribute(torch.Tensor, name), function) for name, function in made.items()),
            *((Attribute(owner, name), noting(getattr(owner, name))) for name in _ASKING for owner in _OWNERS),
        ]
    )


def is_check(place: Place) -> bool:
    """Returns whether a place belongs to the condition of a check: a line one side of which does nothing but raise."""
    file, line, _ = place
    return any(test.lineno <= line <= (test.end_lineno or 0) for test in _tests_of_checks(file))


@functools.lru_cache(maxsize=64)
def _tests_of_checks(file: str) -> tuple[ast.expr, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    found = []
    for node in ast.walk(tree):
        sides = [node.body, node.orelse] if isinstance(node, ast.If) else []
        if isinstance(node, ast.Assert | ast.If) and (not sides or any(map(_only_raises, sides))):
            found.append(node.test)
    return tuple(found)


def _only_raises(statements: list[ast.stmt]) -> bool:
    simple = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)
    is_raised = bool(statements) and isinstance(statements[-1], ast.Raise)
    return is_raised and all(isinstance(statement, simple) for statement in statements[:-1])
