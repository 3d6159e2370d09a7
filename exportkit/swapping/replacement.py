"""Whether a class can replace another one, and how it is built from a module of the other."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence

import torch

from exportkit.errors import PatchError

FACTORY = "from_module"
_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_BY_POSITION = _NAMED[:2]


def require_same_forward(
    original: type[torch.nn.Module], replacement: type[torch.nn.Module], abstract: bool = False
) -> None:
    """Requires that the forward of a replacement can be called like the original's.

    Args:
        original: The class to replace.
        replacement: The class in its place.
        abstract: Whether classes without a forward are accepted.

    Raises:
        PatchError: if it cannot; names the parameters, and similar ones of the replacement.
    """
    without = [cls for cls in (original, replacement) if cls.forward is torch.nn.Module.forward]
    if without and abstract:
        return
    theirs, ours = inspect.signature(original.forward), inspect.signature(replacement.forward)
    reasons = [f"{replacement.__name__} has no forward"] if replacement in without else _differences(theirs, ours)
    if reasons:
        raise PatchError(
            f"{original.__name__} cannot be replaced by {replacement.__name__}: its forward has a different signature.",
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
    given = {parameter.name for parameter in want if parameter.default is inspect.Parameter.empty}
    for parameter in have:
        if parameter.kind in _NAMED and parameter.default is inspect.Parameter.empty and parameter.name not in given:
            reasons.append(f"parameter {parameter.name!r} has no default")
    return reasons


def _nearest(name: str, names: Sequence[str]) -> str:
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    return f" (nearest: {found[0]!r})" if found else ""


def is_rebuilt(replacement: type) -> bool:
    """Returns whether instances of a class are built from the module that they replace."""
    return hasattr(replacement, FACTORY)


def rebuilt(module: torch.nn.Module, replacement: type[torch.nn.Module]) -> torch.nn.Module:
    """Returns the module that the class builds from a module, with the same tensors where name and shape are equal.

    Raises:
        PatchError: if the class builds something else.
    """
    new = getattr(replacement, FACTORY)(module)
    if not isinstance(new, torch.nn.Module):
        raise PatchError(f"{replacement.__qualname__}.{FACTORY} did not return a module.", got=type(new).__name__)
    own = {**dict(new.named_parameters()), **dict(new.named_buffers())}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in own and own[name] is not tensor and own[name].shape == tensor.shape:
            path, _, attribute = name.rpartition(".")
            setattr(new.get_submodule(path), attribute, tensor)
    return new.train(module.training)
