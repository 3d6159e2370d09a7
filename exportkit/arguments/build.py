"""Builds a call from a plan, at chosen sizes: one merged call with all inputs that were ever seen.

The tensors are made of recorded ones, so that dtypes, devices, value ranges and masks stay valid, and integers keep
their order and the sizes that bound them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.errors import ArgumentError
from exportkit.plan.placeholders import Blocks, Marker, needed_tokens, place_blocks, tokens_fit
from exportkit.plan.plan import Plan
from exportkit.plan.solved_sizes import cached_length
from exportkit.trees import join
from exportkit.trees.tree import is_inexact, is_integer

_COMPUTED = 2  # bytes of the smallest floating-point dtype that torch computes with
_STEP = 8  # the first copy of repeated values is at most this part smaller than the last one
_MASK_VALUES = 2  # integers or booleans with at most this many different values are a mask


def build_call(plan: Plan, observation: Observation, sizes: Mapping[str, int], reaching: bool = True) -> Call:
    """Returns a call in which each leaf of the plan has the shape that the plan gives it for ``sizes``.

    Args:
        plan: The plan; inputs that it does not have are left out.
        observation: Calls whose values are used.
        sizes: Sizes of all variables.
        reaching: Whether integers reach the sizes that they always reached, as the longest of some lengths does.

    Raises:
        ArgumentError: if the token ids have no room for the placeholders that belong to these sizes.
    """
    shapes, dynamic = plan.shapes(plan.completed(sizes)), plan.dynamic_axes()
    sources, needed = largest_tensors(observation), needed_tokens(plan.placeholders, shapes, plan.grids)
    if not tokens_fit(plan.placeholders, shapes, plan.grids):
        raise ArgumentError(
            "There are fewer token ids than placeholders.",
            where=", ".join(needed),
            expected=", ".join(f"token {v} {n} times" for blocks in needed.values() for v, n in _counts(blocks)),
            got=", ".join(f"{path} {shapes[path]}" for path in needed),
            hint="choose more tokens, or fewer rows of features.",
        )
    made: dict[str, torch.Tensor] = {}
    merged = observation.merged_arguments
    for name, tree in merged.items():
        for path in tree.tensor_paths:
            full = join(name, path)
            if full in shapes:
                tensor = resize(sources[full], shapes[full], dynamic[full])
                tensor = padded(tensor) if plan.by_path[full].restored else tensor
                made[full] = fitted(full, tensor, observation, shapes, dynamic, reaching)
    for grid in plan.grids:
        taken = grid.taken(shapes[grid.path][0], shapes[grid.rows][grid.axis])
        made[grid.path] = torch.tensor(taken).reshape(shapes[grid.path]).to(made[grid.path])
    for path, blocks in needed.items():
        made[path] = with_tokens(made[path], [p.value for p in plan.placeholders if p.tokens == path], blocks)
    for marker in plan.markers:
        made[marker.path] = marked(made[marker.path], made[marker.tokens], marker)
    past = plan.with_role("past")
    cached = cached_length(plan, shapes) if past is None else sizes[past.name]
    return replace(observation.merged_call, cached_tokens=cached, sizes=dict(sizes)).with_tensors(made)


def with_integers_below(call: Call, limit: int) -> Call:
    """Returns the call with integers that can be indices along an axis of that size; masks are left as they are."""
    changed = {}
    for path, tensor in call.tensors().items():
        if is_integer(tensor) and limit > 0 and tensor.numel() and int(tensor.max()) >= _MASK_VALUES:
            changed[path] = tensor % limit
    return call.with_tensors(changed)


def _counts(blocks: Blocks) -> list[tuple[int, int]]:
    return [(value, sum(n for v, n in blocks if v == value)) for value in dict.fromkeys(v for v, _ in blocks)]


def largest_tensors(observation: Observation) -> dict[str, torch.Tensor]:
    """Returns for each leaf the recorded tensor with the most elements, which has the most varied values."""
    found: dict[str, torch.Tensor] = {}
    for call in observation.calls:
        for path, tensor in call.tensors().items():
            if path not in found or tensor.numel() > found[path].numel():
                found[path] = tensor
    return found


def resize(tensor: torch.Tensor, shape: Sequence[int], dynamic: Sequence[int] = ()) -> torch.Tensor:
    """Returns a tensor of ``shape`` made of the values of ``tensor``.

    Longer axes repeat the recorded values, slightly smaller at first; masks (integers or booleans with at most two
    values) are stretched, so that padding stays where it was, on the left or on the right. Repeated rows are rolled
    along another axis that varies, so that rows differ and an export that mixes them up is detected. Values along
    static axes stay in their places, as in a matrix of a transformation.

    Args:
        tensor: A recorded tensor of the same rank.
        shape: Wanted size of each axis.
        dynamic: Axes along which rows may be rolled.
    """
    if tuple(tensor.shape) == tuple(shape):
        return tensor.clone()
    if tensor.numel() == 0:
        return _invented(tensor, shape)
    is_mask = not is_inexact(tensor) and len(tensor.unique()) <= _MASK_VALUES
    result = tensor
    for axis, size in enumerate(shape):
        have = result.shape[axis]
        if size == have:
            continue
        if is_mask:
            result = result.index_select(axis, _stretched(result, axis, size))
            continue
        result = _repeated(result, axis, size)
        along = sorted({*dynamic} - {0})
        if size > have and axis == 0 and along:
            result = _rolled(result, torch.arange(size, device=result.device) // have, along[-1])
    return result.clone(memory_format=torch.contiguous_format)


def _rolled(tensor: torch.Tensor, turns: torch.Tensor, axis: int) -> torch.Tensor:
    """The tensor with each row rolled along an axis by as many places as ``turns`` says for it."""
    size, rows = tensor.shape[axis], torch.arange(len(turns), device=tensor.device)
    places = (torch.arange(size, device=tensor.device) - turns[:, None]) % max(size, 1)
    return tensor.movedim(axis, 1)[rows[:, None], places].movedim(1, axis)


def _repeated(tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """The values along an axis, repeated.

    In floating-point tensors, each copy is a little larger than the one before, whole numbers excepted: equal values
    would leave open which of them top-k takes, and hide a graph that reads only the sizes that it was traced with.
    """
    have = tensor.shape[axis]
    if size <= have:
        return tensor.narrow(axis, 0, size)
    index = torch.arange(size, device=tensor.device)
    result = tensor.index_select(axis, index % have)
    if not tensor.is_floating_point() or tensor.itemsize < _COMPUTED:
        return result
    copies = -(-size // have)
    smaller = (copies - 1 - index // have) / (_STEP * copies)
    factor = (1 - smaller).to(tensor.dtype).reshape([-1 if other == axis else 1 for other in range(tensor.ndim)])
    return torch.where(result == result.trunc(), result, result * factor)


def padded(mask: torch.Tensor) -> torch.Tensor:
    """Returns a mask of ones in which the first position of the first row is hidden, as padding on the left does."""
    if mask.shape[0] and mask.shape[-1] > 1:
        mask[0, 0] = 0
    return mask


def _stretched(mask: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Indices that shrink or stretch a mask; a single position is the one that most rows keep."""
    have = mask.shape[axis]
    if size == 1:
        others = [other for other in range(mask.ndim) if other != axis]
        kept = mask.to(torch.int64).sum(dim=others) if others else mask.to(torch.int64)
        return kept.argmax().reshape(1)
    return torch.linspace(0, have - 1, size, device=mask.device).round().to(torch.int64)


def _invented(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Values for a tensor that was only ever seen empty: standard normal, or zeros for integers."""
    if not tensor.is_floating_point():
        return tensor.new_zeros(tuple(shape))
    generator = torch.Generator(device=tensor.device).manual_seed(0)
    return torch.randn(tuple(shape), generator=generator, device=tensor.device, dtype=torch.float32).to(tensor.dtype)


def with_tokens(ids: torch.Tensor, values: Collection[int], blocks: Blocks) -> torch.Tensor:
    """Returns token ids in which tokens occur in the given runs, and nowhere else.

    Args:
        ids: Token ids ``(batch, length)``.
        values: The tokens.
        blocks: Token and length of each run; there must be room for them.
    """
    others = [value for value in ids.unique().tolist() if value not in values]
    result = ids.clone()
    for value in values:
        result[result == value] = others[0] if others else 0
    for value, row, column, length in place_blocks(blocks, ids.shape) or ():
        result[row, column : column + length] = value
    return result


def marked(tensor: torch.Tensor, ids: torch.Tensor, marker: Marker) -> torch.Tensor:
    """Returns a tensor with the dtype of ``tensor`` that marks where a placeholder is in token ids."""
    inside, outside = (tensor.new_full((), value) for value in (marker.inside, marker.outside))
    return torch.where(ids == marker.value, inside, outside)


# Made-up integers keep what the recorded ones have in common: their order, and the sizes that bound them
#
# Lengths of sequences, offsets of bags and the ends of edges have to fit the sizes of other inputs. What holds in every
# recorded call holds in a made-up one: the longest sequence has as many steps as there are, lengths fall, offsets rise.


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
