"""Calls with other values of the same shapes, for which code that decides by values may take another branch."""

from __future__ import annotations

import math

import torch

from exportkit.calls.call import Call
from exportkit.running.compare import same_value
from exportkit.running.masks import find_mask
from exportkit.trees import is_cache_class, join

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})  # that torch computes with
_WIDEST = 4.0  # exponent of 10 of the largest values that are tried


def with_wide_values(call: Call) -> Call:
    """Returns the call with random floating-point numbers of all magnitudes, those in caches left as they are."""
    changed = {}
    generator = torch.Generator().manual_seed(0)
    for name, tree in call.arguments.items():
        for path, tensor in tree.tensors().items():
            if tensor.is_floating_point() and not is_cache_class(tree.cls):
                most = min(_WIDEST, math.log10(torch.finfo(tensor.dtype).max) - 1)
                exponents = torch.rand(tensor.shape, generator=generator) * (most + 1) - 1
                values = torch.randn(tensor.shape, generator=generator) * 10**exponents
                changed[join(name, path)] = values.to(tensor)
    return call.with_tensors(changed)


def scaled(call: Call, scale: float, integer_scale: int = 1) -> Call:
    """Returns a call with other values of the same shapes.

    Args:
        call: The call.
        scale: The factor for floating-point tensors.
        integer_scale: The factor for tensors of integers.
    """
    changed = {}
    for path, tensor in call.tensors().items():
        if tensor.is_floating_point():
            changed[path] = tensor * scale
        elif tensor.dtype in _INTEGERS:
            changed[path] = tensor * integer_scale
    return call.with_tensors(changed)


def with_other_values(call: Call, of_all_magnitudes: bool = True) -> list[Call]:
    """Returns calls of the same shapes with values of other magnitudes and signs, and some in which no mask hides.

    Args:
        call: The call.
        of_all_magnitudes: Whether some have values of all magnitudes, for which results may depend on rounding.
    """
    given = call.tensors()
    flags = {path: torch.ones_like(tensor) for path, tensor in given.items() if _is_of_flags(tensor)}
    zeros = {path: torch.zeros_like(tensor) for path, tensor in given.items() if _is_of_integers(tensor)}
    zeros = {path: tensor for path, tensor in zeros.items() if path not in flags}
    unmasked = with_nothing_hidden(call)
    wide = with_wide_values(unmasked)
    found = [unmasked, *([wide, scaled(wide, -1.0)] if of_all_magnitudes else [])]
    found += [scaled(call, -1.0), *map(call.with_tensors, (flags, zeros))]
    kept, known = list[Call](), [given]
    for other in found:
        tensors = other.tensors()
        if not any(all(map(same_value, tensors.values(), before.values())) for before in known):
            kept.append(other)
            known.append(tensors)
    return kept


def _is_of_flags(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds booleans, or integers that are 0 or 1."""
    if tensor.dtype is torch.bool:
        return True
    return _is_of_integers(tensor) and tensor.ndim > 0 and bool(((tensor == 0) | (tensor == 1)).all())


def _is_of_integers(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _INTEGERS


def with_nothing_hidden(call: Call) -> Call:
    """Returns the call with an attention mask that hides nothing, if it has one: what it hides is arbitrary."""
    found = find_mask(call.tensors())
    if found is None:
        return call
    path, kept = found
    values = call.tensors()[path]
    return call.with_tensors({path: values.new_full(values.shape, values[kept][0].item())})
