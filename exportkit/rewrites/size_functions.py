"""Functions that are given sizes: those of the module math, exact integers where they are rounded, and frequencies.

``int(math.log2(n))`` changes where a float reaches an integer, so a float that differs in its last digit is another
size. Values are therefore those of Python at powers of the base, and a rounded logarithm is computed in integers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from exportkit._torch_compat.size_arithmetic import exact_rounding
from exportkit._torch_compat.traced_values import at_least, depends_on_values

_LOGARITHMS = {"log": math.e, "log2": 2, "log10": 10, "log1p": math.e}
_POWERS = range(-31, 32)  # of the base; sizes, and quotients of sizes, are between 2**-31 and 2**31
_NEAR = 1e-9  # at this relative distance from a power, one term of the series is as exact as double precision
_LARGEST_SIZE = 2**31
_MOST_STEPS = 64  # of a function whose values are counted; a logarithm to the base of 2 has 31
_ROUNDED: dict[str, Callable[[Any], Any]] = {
    "__floor__": math.floor,
    "__ceil__": math.ceil,
    "__trunc__": math.trunc,
    "__round__": round,
}
_GROWING = ("__mul__", "__rmul__", "__truediv__", "__add__", "__radd__", "__sub__")  # with a number above 0
_ORIGIN = "_exportkit_origin"  # set on a logarithm of a size: the size, and the function of Python


def _function_of_size(name: str) -> Callable[..., Any]:
    """A function of the module math, computed by torch in double precision where it is given a size."""
    original = getattr(math, name)

    def compute(number: Any, *base: float) -> Any:
        if type(number) not in (torch.SymInt, torch.SymFloat):
            return original(number, *base)
        if name == "sqrt":
            return torch.sym_sqrt(number)
        exact = torch.scalar_tensor(number, dtype=torch.float64)
        value = getattr(torch, name)(exact)
        if base:
            value = value / original(*base)
        if name in _LOGARITHMS and name != "log1p":
            value = _exact_at_powers(value, exact, base[0] if base else _LOGARITHMS[name], original, base)
        found = value.item()
        if name in _LOGARITHMS and isinstance(number, torch.SymInt) and not depends_on_values(number):
            setattr(found, _ORIGIN, (number, lambda size: original(size, *base)))
        return found

    return compute


def _exact_at_powers(
    value: torch.Tensor, number: torch.Tensor, base: float, function: Callable[..., float], given: tuple[float, ...]
) -> torch.Tensor:
    """A logarithm with the values of Python at and around the powers of its base, where it is next to an integer."""
    if type(base) not in (int, float) or base < 2:
        return value
    powers = [float(base) ** power for power in _POWERS]
    logarithms = torch.tensor([function(power, *given) for power in powers], dtype=torch.float64)
    known = torch.tensor(powers, dtype=torch.float64)
    apart = (number - known) / known
    is_near = apart.abs() < _NEAR
    near = torch.where(is_near, logarithms + apart / math.log(base), 0.0).sum()
    return torch.where(is_near.any(), near, value)


def _scaled(name: str) -> Callable[..., Any]:
    """Arithmetic of a traced number, which leaves a growing function of a size one: ``2 * math.log(n) + 1``."""
    original = getattr(torch.SymFloat, name)

    def computed(number: Any, other: Any) -> Any:
        found = original(number, other)
        size, function = vars(number).get(_ORIGIN, (None, None))
        is_growing = isinstance(other, int | float) and math.isfinite(other) and ("mul" not in name or other > 0)
        if size is not None and is_growing and ("div" not in name or other > 0):
            setattr(found, _ORIGIN, (size, lambda value: getattr(float(function(value)), name)(float(other))))
        return found

    return computed


def _rounding(name: str) -> Callable[..., Any]:
    """A method that rounds a traced number: in integers for a logarithm of a size, and for a quotient of sizes."""
    original = getattr(torch.SymFloat, name) if name == "__round__" else exact_rounding(name)

    def rounded(number: Any, *digits: Any) -> Any:
        size, function = vars(number).get(_ORIGIN, (None, None))
        if size is None or digits:
            return original(number, *digits)
        counted = _counted(size, lambda value: _ROUNDED[name](function(value)), 1)
        return original(number) if counted is None else counted

    return rounded


def _counted(size: torch.SymInt, function: Callable[[int], int], least: int) -> Any:
    """A function of a size that never decreases, as its first value and the number of steps that it has taken since.

    Args:
        size: The size.
        function: The function of Python.
        least: The smallest size that it takes, 0 or 1.

    Returns:
        The number; None if the function takes too many steps.
    """
    first = function(least)
    places: list[int] = []
    for level in range(first + 1, function(_LARGEST_SIZE - 1) + 1):
        if len(places) == _MOST_STEPS:
            return None
        below, place = least, _LARGEST_SIZE
        while place - below > 1:
            middle = (below + place) // 2
            below, place = (below, middle) if function(middle) >= level else (middle, place)
        places.append(place)
    at_least(size, least)
    return first + torch.sym_sum([torch.sym_min(1, size // place) for place in places])


def _isqrt(number: Any) -> Any:
    """The integer below a square root, which double precision has exactly for sizes below 2**52."""
    return math.floor(torch.sym_sqrt(number)) if isinstance(number, torch.SymInt) else _original_isqrt(number)


_original_isqrt = math.isqrt

# Also methods of sizes: numpy computes ``np.sqrt(size)`` as ``size.sqrt()``.
_OF_SIZES = {name: _function_of_size(name) for name in ("sqrt", "log", "log2", "log10", "log1p", "exp", "sin", "cos")}


def _converted(number: Any, dtype: Any, **_options: Any) -> Any:
    """What ``np.ceil(np.log(size)).astype(int)`` does."""
    kind = np.dtype(dtype)
    if kind not in (np.int32, np.int64, np.float64):
        raise TypeError(f"a size becomes a number of {kind}")
    return torch.sym_float(number) if kind == np.float64 else torch.sym_int(number)


_OF_NUMPY: dict[str, Callable[..., Any]] = {
    "astype": _converted,
    "item": lambda number: number,
    "rint": lambda number: torch.sym_float(round(number)),
}


def _frequencies(name: str) -> Callable[..., Any]:
    """``fftfreq`` or ``rfftfreq`` of a symbolic length."""
    original = getattr(torch.fft, name)

    @functools.wraps(original)
    def made(n: Any, d: float = 1.0, **options: Any) -> Any:
        if not isinstance(n, torch.SymInt) or "out" in options:
            return original(n, d, **options)
        dtype = options.pop("dtype", None) or torch.get_default_dtype()
        places = [torch.arange(n // 2 + 1, **options)]
        if name == "fftfreq":
            places = [torch.arange((n + 1) // 2, **options), torch.arange(-(n // 2), 0, **options)]
        return torch.cat(places).to(dtype) * (1.0 / (n * d))

    return made


# What takes the place of attributes, by their owner.
SIZE_FUNCTIONS: list[tuple[Any, dict[str, Any]]] = [
    (torch.fft, {name: _frequencies(name) for name in ("fftfreq", "rfftfreq")}),
    (math, {**_OF_SIZES, "isqrt": _isqrt}),
    (torch.SymInt, {**_OF_SIZES, **_OF_NUMPY, "bit_length": lambda size: _counted(size, int.bit_length, 0)}),
    (
        torch.SymInt,
        {
            "__lshift__": lambda number, places: number * 2**places,
            "__rlshift__": lambda places, number: number * 2**places,
            "__rshift__": lambda number, places: number // 2**places,
            "__rrshift__": lambda places, number: number // 2**places,
        },
    ),
    (torch.SymFloat, {name: _rounding(name) for name in _ROUNDED}),
    (torch.SymFloat, {**_OF_NUMPY, **{name: _scaled(name) for name in _GROWING}}),
]
