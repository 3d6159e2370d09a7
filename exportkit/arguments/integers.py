"""Made-up integers that keep what the recorded ones have in common: their order, and the sizes that bound them.

Lengths of sequences, offsets of bags and the ends of edges have to fit the sizes of other inputs. What holds in every
recorded call holds in a made-up one: the longest sequence has as many steps as there are, lengths fall, offsets rise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from exportkit.calls.observation import Observation
from exportkit.trees.tree import is_integer

Shapes = Mapping[str, Sequence[int]]

_FLAGS = 2  # integers that are all below it are flags
_MOST_APART = 1  # the largest one can be a size, or an index up to it


def fitted(
    path: str,
    made: torch.Tensor,
    observation: Observation,
    shapes: Shapes,
    dynamic: Mapping[str, Sequence[int]],
    reaching: bool = True,
) -> torch.Tensor:
    """Returns made-up integers of an input with what the recorded ones have in common.

    Only integers along one axis that varies, and single numbers, are fitted: token ids have their own meaning. Flags,
    and negative numbers, are left as they are.

    Args:
        path: The input.
        made: Its made-up integers, of the right shape.
        observation: The recorded calls.
        shapes: The shapes of all inputs in the made-up call.
        dynamic: Axes that vary, by path.
        reaching: Whether the largest one reaches the size that it always reached, or only half of it.
    """
    if not is_integer(made) or len(dynamic[path]) > 1:
        return made
    given = [(tensors[path], call.shapes()) for call in observation.calls if path in (tensors := call.tensors())]
    calls = [(tensor.flatten(), found) for tensor, found in given if tensor.numel()]
    if not made.numel() or not calls or min(int(values.min()) for values, _ in calls) < 0:
        return made
    if max(int(values.max()) for values, _ in calls) < _FLAGS:
        return made
    values, vectors = made.flatten().to(torch.int64), [values.to(torch.int64) for values, _ in calls]
    if values.numel() == max(made.shape, default=1):
        values = _in_order(values, vectors)
    elif dynamic[path]:
        values = _rows_in_order(made, [tensor for tensor, _ in given if tensor.numel()], *dynamic[path]).flatten()
    exactly, most = _largest(calls, shapes, [(other, axis) for other, axes in dynamic.items() for axis in axes])
    least = min(1, *(int(recorded.min()) for recorded in vectors))
    if exactly is not None and max(map(len, vectors)) == 1 < len(values):  # only single rows were recorded
        values = exactly - torch.arange(len(values), device=values.device)
    low, high = int(values.min()), int(values.max())
    wanted = min(high, most) if exactly is None else exactly if reaching else max(exactly // 2, least)
    lowest = min(max(round(low * wanted / max(high, 1)), least), wanted)
    if (lowest, wanted) == (low, high):
        return values.to(made.dtype).reshape(made.shape)
    if low == high:
        return torch.full_like(made, wanted)
    scaled = (values - low).to(torch.float64) * ((wanted - lowest) / (high - low)) + lowest
    return scaled.round().to(made.dtype).reshape(made.shape)


def _rows_in_order(made: torch.Tensor, recorded: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    """Numbers that rise or fall along an axis if the recorded ones do, such as the offsets of several tables."""
    rows, *others = (tensor.to(torch.int64).movedim(axis, -1).flatten(0, -2) for tensor in (made, *recorded))
    ordered = [_in_order(row, [other[number] for other in others]) for number, row in enumerate(rows)]
    return torch.stack(ordered).reshape(made.movedim(axis, -1).shape).movedim(-1, axis)


def _in_order(made: torch.Tensor, recorded: Sequence[torch.Tensor]) -> torch.Tensor:
    """Numbers that rise or fall if the recorded ones do: the recorded steps from one to the next, repeated."""
    steps = torch.cat([values.diff() for values in recorded])
    if not steps.any() or ((steps < 0).any() and (steps > 0).any()):
        return made
    longest = max(recorded, key=len)
    turns = torch.arange(len(made) - 1, device=made.device) % (len(longest) - 1)
    repeated = longest.diff()[turns]
    return torch.cat([longest[:1], longest[0] + repeated.cumsum(0)])


def _largest(
    calls: Sequence[tuple[torch.Tensor, Shapes]], shapes: Shapes, axes: Sequence[tuple[str, int]]
) -> tuple[int | None, int]:
    """What the largest number is if it follows from a size, or None; and how large it may be."""
    largest = [int(values.max()) for values, _ in calls]
    follows, bounds = [], []
    for path, axis in axes:
        if any(path not in found for _, found in calls):
            continue
        apart = [found[path][axis] - most for (_, found), most in zip(calls, largest, strict=True)]
        if len(set(apart)) == 1 < len(set(largest)) and 0 <= apart[0] <= _MOST_APART:
            follows.append(shapes[path][axis] - apart[0])
        elif min(apart) >= 0:
            bounds.append(shapes[path][axis] - min(_MOST_APART, *apart))
    return min(follows, default=None), min(bounds, default=max(largest))
