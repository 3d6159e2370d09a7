"""Whether one forward can stand for another. In come two classes; out comes nothing, or an error that says why not."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence

import torch

from exportkit.errors import PatchError

_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_BY_POSITION = _NAMED[:2]


def require_same_forward(
    original: type[torch.nn.Module], replacement: type[torch.nn.Module], abstract: bool = False
) -> None:
    """Refuses a replacement whose forward cannot be called like that of the original.

    Args:
        original: The class to replace.
        replacement: The class in its place.
        abstract: Whether classes without a forward are let through.

    Raises:
        PatchError: naming the parameters, and those that come nearest.
    """
    without = [cls for cls in (original, replacement) if cls.forward is torch.nn.Module.forward]
    if without and abstract:
        return
    theirs, ours = inspect.signature(original.forward), inspect.signature(replacement.forward)
    reasons = [f"{replacement.__name__} has no forward"] if replacement in without else _differences(theirs, ours)
    if reasons:
        raise PatchError(
            f"{original.__name__} cannot be replaced by {replacement.__name__}: its forward has another signature.",
            where="; ".join(reasons),
            expected=f"forward{theirs}",
            got=f"forward{ours}",
        )


def _differences(theirs: inspect.Signature, ours: inspect.Signature) -> list[str]:
    have = list(ours.parameters.values())[1:]
    want = list(theirs.parameters.values())[1:]
    kinds = {parameter.kind for parameter in have}
    any_position, any_name = (
        kind in kinds for kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    )
    names = [parameter.name for parameter in have if parameter.kind in _NAMED]
    positions = [parameter.name for parameter in have if parameter.kind in _BY_POSITION]
    reasons = []
    for position, parameter in enumerate(want):
        if parameter.kind in _NAMED and parameter.name not in names and not any_name:
            reasons.append(f"no parameter {parameter.name!r}{_nearest(parameter.name, names)}")
        elif parameter.kind in _BY_POSITION and not (position < len(positions) or any_position):
            reasons.append(f"{parameter.name!r} cannot be given by position")
        elif (
            parameter.kind in _BY_POSITION
            and position < len(positions)
            and positions[position] != parameter.name
            and parameter.name in names
        ):
            reasons.append(f"parameter {position} is {positions[position]!r} instead of {parameter.name!r}")
    return reasons + _demands(want, have)


def _demands(want: Sequence[inspect.Parameter], have: Sequence[inspect.Parameter]) -> list[str]:
    known = {parameter.name for parameter in want if parameter.default is inspect.Parameter.empty}
    return [
        f"parameter {parameter.name!r} has no default"
        for parameter in have
        if parameter.kind in _NAMED and parameter.default is inspect.Parameter.empty and parameter.name not in known
    ]


def _nearest(name: str, names: Sequence[str]) -> str:
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    return f" (nearest: {found[0]!r})" if found else ""
