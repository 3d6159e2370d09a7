"""Functions of torch that read sizes as numbers, written with operators that take sizes of any kind.

There are pools, statistics, resizing, ramps and windows, and the inverse of the short-time Fourier transform.
`exportkit.rewrites.sized_operators` has the shorter ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from exportkit.rewrites.symbolic_lists import any_symbolic
from exportkit.trees.tree import is_inexact

aten = torch.ops.aten


# Pools whose windows, or whose results, have symbolic sizes.


_Reduction = Callable[[torch.Tensor, torch.Tensor], Any]


def _sizes_of(given: Any, axes: int) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, list | tuple) else (given,) * axes


def _pool(name: str, over: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A pool, which is a reduction where its window is as large as the input: ``max_pool1d(x, x.shape[-1])``."""
    original, axes = getattr(torch.nn.functional, name), int(name[-2])

    def pool(input: torch.Tensor, kernel_size: Any, *options: Any, **named: Any) -> Any:
        sizes = _sizes_of(kernel_size, axes)
        if not (any_symbolic(*sizes) and _same_sizes(sizes, input.shape[-axes:])) or options or named:
            return original(input, kernel_size, *options, **named)
        return over(input, dim=[*range(-axes, 0)], keepdim=True)

    return pool


def _same_sizes(sizes: Any, others: Any) -> bool:
    """Whether sizes are the same expressions; comparing them would make a condition of them."""
    pairs = [[getattr(getattr(n, "node", None), "expr", n) for n in pair] for pair in zip(sizes, others, strict=False)]
    return len(sizes) == len(others) and all(one == other for one, other in pairs)


def _adaptive_pool(name: str, over: _Reduction) -> Callable[..., Any]:
    """A pool to symbolic sizes, ``adaptive_avg_pool1d(x, x.shape[-1] // 2)``, one axis after the other."""
    original, axes = getattr(torch.nn.functional, name), int(name[-2])

    def pool(input: torch.Tensor, output_size: Any, *options: Any, **named: Any) -> Any:
        sizes = _sizes_of(output_size, axes)
        if not any_symbolic(*sizes) or options or named:
            return original(input, output_size, *options, **named)
        for axis, size in enumerate(sizes, -axes):
            if size is not None:
                input = over(*_windows(input.movedim(axis, -1), size)).movedim(-1, axis)
        return input

    return pool


def _windows(values: torch.Tensor, size: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The values that each result is made of, as torch chooses them, and which places are beyond its window."""
    length, results = values.shape[-1], torch.arange(size, device=values.device)
    start, end = results * length // size, ((results + 1) * length + size - 1) // size
    places = start[:, None] + torch.arange(length // size + 2, device=values.device)
    return values[..., places.clamp(max=length - 1)], places >= end[:, None]


def _averages(windows: torch.Tensor, is_beyond: torch.Tensor) -> torch.Tensor:
    precise = torch.promote_types(windows.dtype, torch.float32)  # a sum in half precision may overflow
    return (windows.masked_fill(is_beyond, 0).sum(-1, dtype=precise) / (~is_beyond).sum(-1)).to(windows.dtype)


def _largest(windows: torch.Tensor, is_beyond: torch.Tensor) -> torch.Tensor:
    return windows.masked_fill(is_beyond, -torch.inf).amax(-1)


POOLS: dict[str, Callable[..., Any]] = {
    **{name: _pool(name, torch.amax) for name in ("max_pool1d", "max_pool2d", "max_pool3d")},
    **{name: _pool(name, torch.mean) for name in ("avg_pool1d", "avg_pool2d", "avg_pool3d")},
    **{f"adaptive_avg_pool{n}d": _adaptive_pool(f"adaptive_avg_pool{n}d", _averages) for n in (1, 2, 3)},
    **{f"adaptive_max_pool{n}d": _adaptive_pool(f"adaptive_max_pool{n}d", _largest) for n in (1, 2, 3)},
}


# Covariances and quantiles of any number of values, which torch computes in C++ for numbers it knows only. A trace that
# comes to torch's own ``quantile`` may also leave torch in a state in which it traces nothing else.


def _cov(
    values: torch.Tensor,
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:
    """The covariance of rows; torch asks for the values of the number of observations."""
    rows = values[None] if values.ndim < 2 else values
    rows = rows if is_inexact(rows) else rows.to(torch.get_default_dtype())
    weights = torch.ones_like(rows[0].real)
    for given in (fweights, aweights):
        weights = weights if given is None else weights * given
    total = weights.sum()
    mean = (rows * weights).sum(1, keepdim=True) / total
    taken = correction if aweights is None else correction * (weights * aweights).sum() / total
    rows = rows - mean
    found = (rows * weights) @ rows.mH / (total - taken).clamp(min=0)
    return found[0, 0] if values.ndim < 2 else found


def _corrcoef(values: torch.Tensor) -> torch.Tensor:
    found = _cov(values)
    if values.ndim < 2:
        return found / found
    deviation = found.diagonal().real.sqrt()
    ratio = found / deviation[:, None] / deviation[None]
    if ratio.is_complex():
        return torch.complex(ratio.real.clamp(-1, 1), ratio.imag.clamp(-1, 1))
    return ratio.clamp(-1, 1)


def _quantile(
    values: torch.Tensor,
    q: torch.Tensor | float,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
    leaves_out_nan: bool = False,
) -> torch.Tensor:
    """Elements at places in the order, or between two of them; torch counts places in the dtype of the values."""
    probabilities = q if isinstance(q, torch.Tensor) else torch.full((), q, dtype=values.dtype, device=values.device)
    rows = values.flatten() if dim is None else values.movedim(dim, -1)
    unknown = rows.isnan()
    ordered = rows.sort(-1).values  # NaN comes last
    if leaves_out_nan:
        last = ((~unknown).sum(-1, keepdim=True) - 1).clamp(min=0)
        places = probabilities.reshape(-1) * last
    else:
        places = probabilities.reshape(-1) * (rows.shape[-1] - 1)
        places = torch.where(unknown.any(-1, keepdim=True), rows.shape[-1] - 1, places)
    rounding = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}.get(interpolation)
    if rounding is not None:
        found = ordered.gather(-1, rounding(places).to(torch.int64))
    else:
        below, above = (rounded(places).to(torch.int64) for rounded in (torch.floor, torch.ceil))
        between = torch.full_like(places, 0.5) if interpolation == "midpoint" else places - below
        found = torch.lerp(ordered.gather(-1, below), ordered.gather(-1, above), between)
    if keepdim:
        found = found.reshape([*[1] * values.ndim, -1]) if dim is None else found.unsqueeze(dim % values.ndim)
    return found.movedim(-1, 0) if probabilities.ndim else found.squeeze(-1)


STATISTICS: dict[Any, Callable[..., Any]] = {
    aten.corrcoef.default: _corrcoef,
    aten.cov.default: _cov,
    aten.nanquantile.default: functools.partial(_quantile, leaves_out_nan=True),
    aten.nanquantile.scalar: functools.partial(_quantile, leaves_out_nan=True),
    aten.quantile.default: _quantile,
    aten.quantile.scalar: _quantile,
}


# Resizing by factors that are made of sizes, such as ``F.interpolate(positions, scale_factor=x.shape[2] / 14)``.
# torch's operators take factors as numbers, which a trace would fix. Here the places of the new pixels are computed
# with tensors, axis by axis. As in torch, linear modes, and ``nearest`` for images, do not change an axis that keeps
# its size, whatever the factor is; and ``nearest`` for images takes each pixel twice if the size doubles.


_torch_interpolate = torch.nn.functional.interpolate
_LINEAR = ("linear", "bilinear", "trilinear")
_MODES = {*_LINEAR, "bicubic", "nearest", "nearest-exact", "area"}
_CUBIC = -0.75  # the coefficient of torch's cubic convolution


@functools.wraps(_torch_interpolate)  # modes know it by its name
def interpolate(  # noqa: PLR0917  # as in torch
    input: torch.Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """Returns the resized input."""
    factors = [*scale_factor] if isinstance(scale_factor, list | tuple) else [scale_factor] * (input.ndim - 2)
    is_symbolic = any(isinstance(factor, torch.SymFloat | torch.SymInt) for factor in factors)
    if antialias or mode not in _MODES or not (is_symbolic and input.is_floating_point()):
        return _torch_interpolate(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    sizes = [torch.sym_int(length * factor) for length, factor in zip(input.shape[2:], factors, strict=True)]
    if recompute_scale_factor or align_corners or mode == "area":  # the factors are those of the sizes
        return _torch_interpolate(input, sizes, mode=mode, align_corners=align_corners)
    found = input.to(torch.promote_types(input.dtype, torch.float32))
    for axis, (wanted, factor) in enumerate(zip(sizes, factors, strict=True), 2):
        found = _resized(found, axis, wanted, factor, mode)
    return found.to(input.dtype)


def _resized(values: torch.Tensor, axis: int, wanted: Any, factor: Any, mode: str) -> torch.Tensor:
    length = values.shape[axis]
    options: dict[str, Any] = {"dtype": values.dtype, "device": values.device}
    new = torch.arange(wanted, **options)
    step = torch.full((), 1 / torch.sym_float(factor), **options)
    keeps, doubles = (torch.full_like(new, wanted) == torch.full_like(new, times * length) for times in (1, 2))

    def taken(places: torch.Tensor) -> torch.Tensor:
        return values.index_select(axis, places.long().clamp(0, length - 1))

    if mode == "nearest-exact":
        return taken(((new + 0.5) * step).floor())
    if mode == "nearest":
        places = (new * step).floor()
        is_image = values.ndim == 4
        return taken(torch.where(keeps, new, torch.where(doubles, new // 2, places)) if is_image else places)
    shape = [-1 if other == axis else 1 for other in range(values.ndim)]
    if mode in _LINEAR:
        places = torch.where(keeps, new, ((new + 0.5) * step - 0.5).clamp(min=0))
        share = (places - places.floor()).view(shape)
        return taken(places.floor()) * (1 - share) + taken(places.floor() + 1) * share
    places = (new + 0.5) * step - 0.5
    share = places - places.floor()
    weights = [_far(share + 1), _close(share), _close(1 - share), _far(2 - share)]
    parts = [taken(places.floor() + by - 1) * weight.view(shape) for by, weight in enumerate(weights)]
    return parts[0] + parts[1] + parts[2] + parts[3]


def _close(distance: torch.Tensor) -> torch.Tensor:
    """The weight of a pixel at most one away, by cubic convolution."""
    return ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance * distance + 1


def _far(distance: torch.Tensor) -> torch.Tensor:
    """The weight of a pixel one to two away."""
    return ((_CUBIC * distance - 5 * _CUBIC) * distance + 8 * _CUBIC) * distance - 4 * _CUBIC


# Evenly spaced numbers and windows of a symbolic length. The windows are those of torch:
# https://docs.pytorch.org/docs/stable/generated/torch.hann_window.html and the like.


_torch_ramps: dict[str, Callable[..., Any]] = {
    name: getattr(torch, name)
    for name in ("linspace", "logspace", "bartlett_window", "blackman_window", "hamming_window", "hann_window")
}


def _linspace(start: Any, end: Any, steps: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    if not any_symbolic(steps) or "out" in options or (dtype is not None and dtype.is_complex):
        return _torch_ramps["linspace"](start, end, steps, dtype=dtype, **options)
    place = torch.arange(steps, dtype=torch.float64, **options)
    last = torch.full((), steps - 1, dtype=torch.float64, device=place.device)
    step = (end - start) / last.clamp(min=1)  # a single step is the start
    values = torch.where(2 * place < steps, start + step * place, end - step * (last - place))
    return values.to(dtype or torch.get_default_dtype())


def _logspace(start: Any, end: Any, steps: Any, base: float = 10.0, **options: Any) -> Any:
    if not any_symbolic(steps) or "out" in options:
        return _torch_ramps["logspace"](start, end, steps, base, **options)
    dtype = options.pop("dtype", None) or torch.get_default_dtype()
    return (base ** _linspace(start, end, steps, dtype=torch.float64, **options)).to(dtype)


def _window(name: str, form: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A window of a symbolic length.

    Args:
        name: The name of torch's function.
        form: Computes the window, given the places as parts of its period, and its own coefficients.
    """
    original = _torch_ramps[name]

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


# The inverse of the short-time Fourier transform, to a length of any kind: torch's own operator fixes it.


_ISTFT_OPTIONS = ("hop_length", "win_length", "window", "center", "normalized", "onesided", "length", "return_complex")
_torch_istft = {torch: torch.istft, torch.Tensor: torch.Tensor.istft}

# Returns `n` real values from the frequencies along the last axis, which are normalised or not.
ToReal = Callable[[torch.Tensor, int, bool], torch.Tensor]


def inverse_short_transform(to_real: ToReal, spectrum: torch.Tensor, n_fft: int, *options: Any, **named: Any) -> Any:
    """Returns what `torch.istft` does: the sum of the frames where they overlap, divided by that of squared windows.

    Args:
        to_real: The inverse transform of frames.
        spectrum: Frequencies ``([batch,] n_fft // 2 + 1, frames)``.
        n_fft: The length of a frame.
        *options: The other arguments of `torch.istft`, in order.
        **named: The other arguments by name.

    Returns:
        The samples ``([batch,] length)``; NotImplemented for complex ones.
    """
    given = {**dict(zip(_ISTFT_OPTIONS, options, strict=False)), **named}
    if given.get("return_complex") or given.get("onesided") is False:
        return NotImplemented
    width, length = given.get("win_length") or n_fft, given.get("length")
    hop, window = given.get("hop_length") or width // 4, given.get("window")
    rows = spectrum if spectrum.ndim == 3 else spectrum[None]
    window = torch.ones(width, dtype=spectrum.dtype.to_real()) if window is None else window
    left = (n_fft - width) // 2
    window = torch.nn.functional.pad(window, (left, n_fft - width - left))
    frames = to_real(rows.transpose(1, 2), n_fft, bool(given.get("normalized"))) * window
    count = rows.shape[2]
    total = n_fft + hop * (count - 1)
    fold = torch.nn.functional.fold
    added = fold(frames.transpose(1, 2), (1, total), (1, n_fft), stride=(1, hop))[:, 0, 0]
    squares = (window * window)[None, :, None].expand(1, n_fft, count)
    weight = fold(squares, (1, total), (1, n_fft), stride=(1, hop))[0, 0, 0]
    start = n_fft // 2 if given.get("center", True) else 0
    result = added[:, start:] / weight[start:]
    if length is None:
        result = result[:, : total - 2 * start]
    else:
        result = torch.nn.functional.pad(result, (0, length))[:, :length]
    return result if spectrum.ndim == 3 else result[0]


def _frames(spectrum: torch.Tensor, n_fft: int, normalized: bool) -> torch.Tensor:
    found: torch.Tensor = torch.fft.irfft(spectrum, n_fft, norm="ortho" if normalized else "backward")
    return found


def _to_any_length(owner: Any) -> Callable[..., Any]:
    def istft(spectrum: torch.Tensor, n_fft: int, *options: Any, **named: Any) -> Any:
        length = named.get("length", options[6] if len(options) > 6 else None)
        if isinstance(length, torch.SymInt):
            found = inverse_short_transform(_frames, spectrum, n_fft, *options, **named)
            if found is not NotImplemented:
                return found
        return _torch_istft[owner](spectrum, n_fft, *options, **named)

    return istft


# What takes the place of attributes, by their owner.
INVERSE_TRANSFORMS: list[tuple[Any, dict[str, Any]]] = [
    (each, {"istft": _to_any_length(each)}) for each in _torch_istft
]
