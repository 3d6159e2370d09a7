"""Compares what onnxruntime returned with what the model returned, leaf by leaf, and says where they differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from exportkit.running.tolerances import tolerances


@dataclass(frozen=True)
class Difference:
    """How far two tensors are apart.

    Attributes:
        path: Path of the output leaf.
        reason: Why they count as different, or None where they agree.
        absolute: Largest absolute difference; NaN where there is nothing to compare.
        relative: Largest relative difference, to the expected value.
        index: Where the largest difference is.
    """

    path: str
    reason: str | None
    absolute: float = 0.0
    relative: float = 0.0
    index: tuple[int, ...] = ()


def compare_tensors(
    path: str, expected: torch.Tensor, got: torch.Tensor, visible: torch.Tensor | None = None
) -> Difference:
    """Returns how far ``got`` is from ``expected``.

    Shapes and types must be equal. Values must be within the tolerance of their type; NaN equals NaN, and an infinity
    the same infinity, and nothing else.

    Args:
        path: Path of the output leaf.
        expected: What the model returned.
        got: What the graph returned.
        visible: Booleans that broadcast to the shape; values elsewhere are arbitrary and not compared.
    """
    if expected.shape != got.shape:
        return Difference(path, f"shape {tuple(got.shape)} instead of {tuple(expected.shape)}", float("nan"))
    if expected.dtype != got.dtype:
        return Difference(path, f"type {_dtype(got)} instead of {_dtype(expected)}", float("nan"))
    if expected.numel() == 0:
        return Difference(path, None)
    rtol, atol = tolerances(expected.dtype)
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = expected.detach().cpu().to(wide), got.detach().cpu().to(wide)
    distance = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    distance = torch.where(distance.isnan(), torch.inf, distance)  # NaN or an infinity on one side only
    if visible is not None:
        distance = torch.where(visible.cpu().expand(distance.shape), distance, 0.0)
    scale = a.abs().nan_to_num(posinf=0.0)
    excess = distance - (atol + rtol * scale)
    largest = _position(distance)
    absolute = distance[largest].item()
    relative = (distance / scale.clamp_min(torch.finfo(torch.float64).tiny)).where(distance > 0, 0.0).max().item()
    if not bool((excess > 0).any()):
        return Difference(path, None, absolute, relative, largest)
    worst = _position(excess)
    reason = f"{expected[worst].item():.6g} became {got[worst].item():.6g} at {list(worst)}"
    return Difference(path, reason, absolute, relative, worst)


def visible_positions(
    mask: torch.Tensor | None, mask_axes: tuple[str | int, ...], axes: tuple[str | int, ...], shape: tuple[int, ...]
) -> torch.Tensor | None:
    """Returns which positions of an output an attention mask leaves visible, ready to broadcast; None for all.

    Args:
        mask: Attention mask ``(batch, length)``, or None.
        mask_axes: Names of its axes, such as ``("batch", "past_sequence + sequence")``.
        axes: Names of the output's axes.
        shape: Shape of the output.
    """
    if mask is None or mask.ndim != 2 or bool(mask.all()) or not axes or axes[0] != mask_axes[0]:
        return None
    if len(shape) != len(axes) or shape[0] != mask.shape[0]:
        return None
    length = set(_terms(mask_axes[1]))
    for axis, name in enumerate(axes[1:], start=1):
        size = shape[axis]
        # an axis of the mask's own length, or of its last part: the new tokens of "past + new"
        if length >= set(_terms(name)) and isinstance(name, str) and 0 < size <= mask.shape[1]:
            return visible_tail(mask, axis, shape)
    return None


def visible_by_shape(mask: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Returns what `visible_positions` does for an output whose axes have no names, going by sizes alone.

    The length is looked for where outputs of language models have it: axis 2 of caches ``(batch, heads, length, dim)``,
    axis 1 of anything else.
    """
    if mask is None or bool(mask.all()) or len(shape) < 2 or shape[0] != mask.shape[0]:
        return None
    axis = 2 if len(shape) == 4 else 1
    return visible_tail(mask, axis, shape) if 1 < shape[axis] <= mask.shape[1] else None


def visible_tail(mask: torch.Tensor, axis: int, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Returns the last columns of the mask, as many as the axis is long, ready to broadcast; None if it is longer."""
    size = shape[axis]
    if size > mask.shape[1] or shape[0] != mask.shape[0]:
        return None
    tail = mask[:, mask.shape[1] - size :].bool()
    return tail.reshape(len(tail), *(size if i == axis else 1 for i in range(1, len(shape))))


def find_mask(tensors: Mapping[str, torch.Tensor]) -> tuple[str, torch.Tensor] | None:
    """Returns path and value of the attention mask among the inputs of a call: rank 2, named so, of zeros and ones."""
    for path, tensor in tensors.items():
        if path.rpartition(".")[2] == "attention_mask" and tensor.ndim == 2:
            return path, tensor
    return None


def _terms(name: str | int) -> list[str]:
    return sorted(str(name).split(" + "))


def _position(values: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(values.argmax(), values.shape)) if values.ndim else ()


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
