"""The inverse of the short-time Fourier transform, to a length of any kind: torch's own operator fixes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_OPTIONS = ("hop_length", "win_length", "window", "center", "normalized", "onesided", "length", "return_complex")
_original = {torch: torch.istft, torch.Tensor: torch.Tensor.istft}

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
    given = {**dict(zip(_OPTIONS, options, strict=False)), **named}
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
        return _original[owner](spectrum, n_fft, *options, **named)

    return istft


# What takes the place of attributes, by their owner.
INVERSE_TRANSFORMS: list[tuple[Any, dict[str, Any]]] = [(each, {"istft": _to_any_length(each)}) for each in _original]
