"""Finds relations between values and sizes: placeholders in token ids, grids of patches, and marks of placeholders.

Multimodal models look for a placeholder token and put a row of image or audio features wherever it stands, so the
number of rows follows from values; and grids say by their products how many patches there are. In come recorded calls
and the model; out go relations, each confirmed by a run.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from exportkit.arguments.tensors import marked, with_tokens
from exportkit.plan.infer import with_grids, with_rows
from exportkit.plan.placeholders import Grids, Marker, Placeholder, needed_tokens, tokens_fit
from exportkit.plan.plan import Plan
from exportkit.probing.ask import AskedModel

_MOST_TRIALS = 24  # groups of inputs and tokens that are tried, an eager run or two each
_TOKENS_RANK = 2
_GRID_AXES = (2, 3)


@dataclass(frozen=True)
class ValueRelations:
    """Relations between values and sizes.

    Attributes:
        placeholders: Tokens that stand for rows of other inputs.
        grids: Inputs that say how many rows other inputs have.
        markers: Inputs that say where placeholders stand.
    """

    placeholders: tuple[Placeholder, ...] = ()
    grids: tuple[Grids, ...] = ()
    markers: tuple[Marker, ...] = ()

    def added_to(self, plan: Plan) -> Plan:
        """Returns the plan with the relations in it."""
        return replace(with_rows(with_grids(plan, self.grids), self.placeholders), markers=self.markers)


def find_relations(asked: AskedModel) -> ValueRelations:
    """Returns the relations that the recorded calls suggest and the model confirms.

    A token qualifies if in every call it occurs as often as the input has rows, or a multiple of that; with a grid, a
    fraction is enough. It is confirmed if the model refuses another number of rows alone, and accepts it together with
    as many tokens.
    """
    grids = tuple(_grids(asked))
    found = ValueRelations(grids=grids)
    for number, group in enumerate(_candidates(asked, grids)):
        if number >= _MOST_TRIALS:
            break
        taken = {placeholder.rows for placeholder in found.placeholders}
        rest = [placeholder for placeholder in group if placeholder.rows not in taken]
        markers = tuple(_markers(asked, rest[0])) if rest else ()
        tried = ValueRelations(tuple(rest), grids, markers)
        if rest and _confirmed(asked, tried):
            found = ValueRelations((*found.placeholders, *rest), grids, (*found.markers, *markers))
    return found


def _grids(asked: AskedModel) -> Iterator[Grids]:
    """Yields inputs of integers whose products are the rows of another input, which the model needs to be so many."""
    taken: set[str] = set()
    for leaf in asked.table.leaves:
        if leaf.rank == 2 and leaf.is_integer and {shape[1] for shape in leaf.shapes if shape} <= {*_GRID_AXES}:
            for other in asked.table.leaves:
                calls = [tensors for call in asked.observation.calls if leaf.path in (tensors := call.tensors())]
                fits = other.path not in taken and not other.is_integer and other.rank >= 2
                if fits and calls and all(_is_product(tensors, leaf.path, other.path) for tensors in calls):
                    examples = dict.fromkeys(tuple(grid) for tensors in calls for grid in tensors[leaf.path].tolist())
                    if _refuses_a_row_less(asked, other.path):
                        taken.add(other.path)
                        yield Grids(leaf.path, other.path, tuple(examples))
                        break


def _is_product(tensors: Mapping[str, torch.Tensor], grid: str, rows: str) -> bool:
    counts = [math.prod(sizes) for sizes in tensors[grid].tolist()]
    return rows in tensors and len(counts) > 0 and min(counts) > 1 and sum(counts) == tensors[rows].shape[0]


def _refuses_a_row_less(asked: AskedModel, path: str) -> bool:
    call = next(call for call in asked.observation.calls if path in call.tensors())
    return asked.outputs(call.with_tensors({path: call.tensors()[path][:-1]})) is None


def _candidates(asked: AskedModel, grids: Sequence[Grids]) -> Iterator[list[Placeholder]]:
    """Yields inputs that may have a placeholder in common: all with the same token first, then each alone."""
    groups: dict[tuple[str, int], list[Placeholder]] = defaultdict(list)
    counted = {grid.rows for grid in grids}
    for leaf in asked.table.leaves:
        if leaf.growing is None and not leaf.is_integer and leaf.rank >= 2:
            for placeholder in _fitting(asked, leaf.path, leaf.path in counted):
                groups[placeholder.tokens, placeholder.value].append(placeholder)
    yield from groups.values()
    yield from ([placeholder] for group in groups.values() if len(group) > 1 for placeholder in group)


def _fitting(asked: AskedModel, path: str, in_grids: bool) -> Iterator[Placeholder]:
    calls = [tensors for call in asked.observation.calls if path in (tensors := call.tensors())]
    rows = [tensors[path].shape[0] for tensors in calls]
    if min(rows) == 0:
        return
    for leaf in asked.table.leaves:
        if leaf.rank == _TOKENS_RANK and "int" in leaf.dtype and all(leaf.path in tensors for tensors in calls):
            ids = [tensors[leaf.path] for tensors in calls]
            for value in ids[0].unique().tolist():
                counts = [int((i == value).sum()) for i in ids]
                factors = {divmod(count, n) for count, n in zip(counts, rows, strict=True)}
                if len(factors) == 1 and (pair := factors.pop())[1] == 0 and pair[0] > 0:
                    yield Placeholder(leaf.path, int(value), path, pair[0])
                elif (
                    in_grids and min(counts) > 0 and _is_one({divmod(n, c) for c, n in zip(counts, rows, strict=True)})
                ):
                    yield Placeholder(leaf.path, int(value), path, 1, rows[0] // counts[0])


def _is_one(factors: set[tuple[int, int]]) -> bool:
    return len(factors) == 1 and next(iter(factors))[1] == 0


def _markers(asked: AskedModel, placeholder: Placeholder) -> Iterator[Marker]:
    """Yields inputs of integers that have one value where the placeholder stands, and another one elsewhere."""
    tokens = placeholder.tokens
    calls = [tensors for call in asked.observation.calls if tokens in (tensors := call.tensors())]
    for leaf in asked.table.leaves:
        pairs = [
            (tensors[tokens] == placeholder.value, tensors[leaf.path]) for tensors in calls if leaf.path in tensors
        ]
        if not leaf.is_integer or leaf.path == tokens or any(m.shape != marks.shape for m, marks in pairs):
            continue
        inside = {value for m, marks in pairs for value in marks[m].unique().tolist()}
        outside = {value for m, marks in pairs for value in marks[~m].unique().tolist()}
        if len(inside) == len(outside) == 1 and inside != outside:
            yield Marker(leaf.path, tokens, placeholder.value, int(inside.pop()), int(outside.pop()))


def _confirmed(asked: AskedModel, tried: ValueRelations) -> bool:
    """Whether the model refuses the rows of an image more or less, and accepts them with tokens that stand for them."""
    first = tried.placeholders[0]
    calls = [call for call in asked.observation.calls if first.rows in call.tensors()]
    for call, change in itertools.product(calls, (1, -1)):
        changed = _with_images(call.tensors(), tried, change)
        related = None if changed is None else _related(call.tensors(), changed, tried)
        if changed is not None and related is not None:
            refused = asked.outputs(call.with_tensors(changed)) is None
            return refused and asked.outputs(call.with_tensors({**changed, **related})) is not None
    return False


def _with_images(
    tensors: Mapping[str, torch.Tensor], tried: ValueRelations, change: int
) -> dict[str, torch.Tensor] | None:
    """The rows, and their grids, with the first image once more (1) or without the last one (-1)."""
    changed: dict[str, torch.Tensor] = {}
    for p in tried.placeholders:
        grid = next((grid for grid in tried.grids if grid.rows == p.rows), None)
        sizes = tensors[p.rows].new_ones(len(tensors[p.rows])) if grid is None else tensors[grid.path].prod(-1)
        if len(sizes) + change < 1:
            return None
        changed[p.rows] = _one_image_changed(tensors[p.rows], int(sizes[0 if change > 0 else -1]), change)
        if grid is not None:
            changed[grid.path] = _one_image_changed(tensors[grid.path], 1, change)
    return changed


def _one_image_changed(tensor: torch.Tensor, rows: int, change: int) -> torch.Tensor:
    return torch.cat([tensor, tensor[:rows]]) if change > 0 else tensor[:-rows]


def _related(
    tensors: Mapping[str, torch.Tensor], changed: Mapping[str, torch.Tensor], tried: ValueRelations
) -> dict[str, torch.Tensor] | None:
    """Token ids, and marks in other inputs, that belong to changed rows; None if there is no room for them."""
    first = tried.placeholders[0]
    grids = [
        replace(grid, examples=tuple(map(tuple, changed[grid.path].tolist())))
        for grid in tried.grids
        if grid.path in changed
    ]
    shapes = {path: tuple(tensor.shape) for path, tensor in {**tensors, **changed}.items()}
    if not tokens_fit(tried.placeholders, shapes, grids):
        return None
    blocks = needed_tokens(tried.placeholders, shapes, grids)[first.tokens]
    ids = with_tokens(tensors[first.tokens], [first.value], blocks)
    marks = {m.path: marked(tensors[m.path], ids, m) for m in tried.markers if m.path in tensors}
    return {first.tokens: ids, **marks}
