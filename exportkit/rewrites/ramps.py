"""Evenly spaced numbers and windows of a symbolic length, written with operators that take sizes of any kind.

The windows are those of torch: https://docs.pytorch.org/docs/stable/generated/torch.hann_window.html and the like.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from exportkit.rewrites.symbolic_lists import any_symbolic

_original: dict[str, Callable[..., Any]] = {
    name: getattr(torch, name)
    for name in ("linspace", "logspace", "bartlett_window", "blackman_window", "hamming_window", "hann_window")
}


def _linspace(start: Any, end: Any, steps: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    if not any_symbolic(steps) or "out" in options or (dtype is not None and dtype.is_complex):
        return _original["linspace"](start, end, steps, dtype=dtype, **options)
    place = torch.arange(steps, dtype=torch.float64, **options)
    last = torch.full((), steps - 1, dtype=torch.float64, device=place.device)
    step = (end - start) / last.clamp(min=1)  # a single step is the start
    values = torch.where(2 * place < steps, start + step * place, end - step * (last - place))
    return values.to(dtype or torch.get_default_dtype())


def _logspace(start: Any, end: Any, steps: Any, base: float = 10.0, **options: Any) -> Any:
    if not any_symbolic(steps) or "out" in options:
        return _original["logspace"](start, end, steps, base, **options)
    dtype = options.pop("dtype", None) or torch.get_default_dtype()
    return (base ** _linspace(start, end, steps, dtype=torch.float64, **options)).to(dtype)


def _window(name: str, form: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A window of a symbolic length.

    Args:
        name: The name of torch's function.
        form: Computes the window, given the places as parts of its period, and its own coefficients.
    """
    original = _original[name]

    @functools.wraps(original)
    def made(window_length: Any, periodic: bool = True, *given: Any, **options: Any) -> Any:
        if not any_symbolic(window_length):
            return original(window_length, periodic, *given, **options)
        named = {key: options.pop(key) for key in ("alpha", "beta") if key in options}  # of a Hamming window
        dtype = options.pop("dtype", None) or torch.get_default_dtype()
        options = {key: value for key, value in options.items() if key in ("device", "requires_grad")}
        # in the precision of torch, as terms of some windows cancel out at their ends
        place = torch.arange(window_length, dtype=torch.promote_types(dtype, torch.float32), **options)
        length: torch.Tensor = torch.full((), window_length, dtype=place.dtype, device=place.device)
        period = (length if periodic else length - 1).clamp(min=1)
        window = form(place / period, *given, **named)
        return torch.where(length == 1, 1.0, window).to(dtype)  # a single place is 1

    return made


def _cosines(place: torch.Tensor, *coefficients: float) -> torch.Tensor:
    found = torch.zeros_like(place)
    for order, factor in enumerate(coefficients):
        found = found + (-1) ** order * factor * torch.cos(2 * math.pi * order * place)
    return found


def _hamming(place: torch.Tensor, alpha: float = 0.54, beta: float = 0.46) -> torch.Tensor:
    return _cosines(place, alpha, beta)


RAMPS: dict[str, Callable[..., Any]] = {
    "linspace": _linspace,
    "logspace": _logspace,
    "bartlett_window": _window("bartlett_window", lambda place: 1 - (2 * place - 1).abs()),
    "blackman_window": _window("blackman_window", lambda place: _cosines(place, 0.42, 0.5, 0.08)),
    "hamming_window": _window("hamming_window", _hamming),
    "hann_window": _window("hann_window", lambda place: _cosines(place, 0.5, 0.5)),
}
