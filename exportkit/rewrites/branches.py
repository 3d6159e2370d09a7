"""Branches such as ``if mask.any():`` in a trace: they are taken in every case, where that was seen to change nothing.

A model skips an assignment to the places of a mask if there are none. A trace cannot know, and a graph need not: an
assignment to no places changes nothing. Whether a branch is one of these is found by running the model.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from exportkit.overrides import replaced_attributes

Line = tuple[str, int]  # file and number


@dataclass
class Branches:
    """The lines of code that decided by ``tensor.any()``.

    Attributes:
        reached: All of these lines.
        skipped: Those where there was none at least once.
    """

    reached: set[Line] = field(default_factory=set)
    skipped: set[Line] = field(default_factory=set)


@contextlib.contextmanager
def branches_noted(taken: bool) -> Iterator[Branches]:
    """Notes where code decides by ``tensor.any()``.

    Args:
        taken: Also let it decide as if there was one in every case.
    """
    noted = Branches()

    def decide(line: Line, found: torch.Tensor) -> bool:
        noted.reached.add(line)
        is_true = bool(found.item())
        noted.skipped |= set() if is_true else {line}
        return taken or is_true

    with _deciding(decide):
        yield noted


@contextlib.contextmanager
def branches_taken(_model: torch.nn.Module, lines: Collection[Line] | None = None) -> Iterator[None]:
    """Lets lines of code, by default all, decide as if there was one in every case."""
    with _deciding(lambda line, found: lines is None or line in lines or bool(found.item())):
        yield


def _deciding(decide: Callable[[Line, torch.Tensor], bool]) -> contextlib.AbstractContextManager[None]:
    real, decided = torch.Tensor.any, torch.Tensor.__bool__

    def any_of(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found = real(self, *args, **kwargs)
        if not args and not kwargs:
            found.exportkit_any = True  # type: ignore[attr-defined]
        return found

    def truth(self: torch.Tensor) -> bool:
        if not hasattr(self, "exportkit_any"):
            return decided(self)
        caller = sys._getframe(1)
        return decide((caller.f_code.co_filename, caller.f_lineno), self)

    return replaced_attributes(torch.Tensor, {"any": any_of, "__bool__": truth})
