"""Finds relations between values and sizes: placeholders in token ids and marks of them, grids of patches, lengths.

Multimodal models replace each placeholder token by a row of image or audio features, so the number of rows follows from
values; the products of grids say how many patches there are, and lengths how many rows the parts of a tensor have
together. Each relation is confirmed by running the model.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from exportkit.arguments.build import marked, with_tokens
from exportkit.calls.call import shapes_of
from exportkit.plan.infer import name_variables, with_grids, with_rows
from exportkit.plan.placeholders import Grids, Marker, Placeholder, needed_tokens, tokens_fit
from exportkit.plan.plan import Plan
from exportkit.probing.model_probe import ModelProbe

_MOST_TRIALS = 24  # groups of inputs and tokens that are tried, an eager run or two each
_TOKENS_RANK = 2
_GRID_AXES = (2, 3)
_NONE = torch.zeros(0)


@dataclass(frozen=True)
class ValueRelations:
    """Relations between values and sizes.

    Attributes:
        placeholders: Tokens that stand for rows of other inputs.
        grids: Inputs that say how many rows other inputs have.
        markers: Inputs that say where placeholders are.
    """

    placeholders: tuple[Placeholder, ...] = ()
    grids: tuple[Grids, ...] = ()
    markers: tuple[Marker, ...] = ()

    def added_to(self, plan: Plan) -> Plan:
        """Returns the plan with the relations in it."""
        if self.grids:
            plan = with_grids(plan, self.grids)
        if self.placeholders:
            plan = with_rows(plan, self.placeholders)
        tied = {(m.path, axis): size for m in self.markers for axis, size in enumerate(plan.by_path[m.tokens].sizes)}
        varying = {key: size for key, size in tied.items() if not size.is_static}
        return name_variables(replace(plan, markers=self.markers).with_sizes(varying))


def find_value_relations(probe: ModelProbe) -> ValueRelations:
    """Returns the relations that the recorded calls suggest and the model confirms.

    A token qualifies if in every call it occurs as often as the input has rows, or a multiple of that; with a grid, a
    fraction is enough. It is confirmed if the model raises for a different number of rows alone, and accepts this
    number together with as many tokens.
    """
    grids = (*_grids(probe), *_lengths(probe))
    found = ValueRelations(grids=grids)
    for number, group in enumerate(_candidates(probe, grids)):
        if number >= _MOST_TRIALS:
            break
        taken = {placeholder.rows for placeholder in found.placeholders}
        rest = [placeholder for placeholder in group if placeholder.rows not in taken]
        markers = tuple(_markers(probe, rest[0])) if rest else ()
        tried = ValueRelations(tuple(rest), grids, markers)
        if rest and _confirmed(probe, tried):
            found = ValueRelations((*found.placeholders, *rest), grids, (*found.markers, *markers))
    return found


def _grids(probe: ModelProbe) -> Iterator[Grids]:
    """Yields integer inputs whose products are the number of rows of another input, if the model insists on it."""
    taken: set[str] = set()
    for leaf in probe.table.leaves:
        if leaf.rank == 2 and leaf.is_integer and {shape[1] for shape in leaf.shapes if shape} <= {*_GRID_AXES}:
            for other in probe.table.leaves:
                calls = [tensors for call in probe.observation.calls if leaf.path in (tensors := call.tensors())]
                fits = other.path not in taken and not other.is_integer and other.rank >= 2
                found = _axis_of_patches(calls, leaf.path, other.path) if fits and calls else None
                if found is not None and _is_needed(probe, leaf.path, other.path, *found):
                    examples = dict.fromkeys(tuple(grid) for tensors in calls for grid in tensors[leaf.path].tolist())
                    taken.add(other.path)
                    yield Grids(leaf.path, other.path, tuple(examples), *found)
                    break


def _lengths(probe: ModelProbe) -> Iterator[Grids]:
    """Yields inputs of lengths whose sum is the number of rows of another input, if the model insists on it.

    It has to raise without the rows of the last part, and to take all parts twice. A proof runs it with more rows.
    """
    taken: set[str] = set()
    for leaf in probe.table.leaves:
        calls = [tensors for call in probe.observation.calls if leaf.path in (tensors := call.tensors())]
        if leaf.rank != 1 or not leaf.is_integer or any((tensors[leaf.path] < 0).any() for tensors in calls):
            continue
        sums = [int(tensors[leaf.path].sum()) for tensors in calls]
        rows, parts = _as_long(calls, sums), _as_long(calls, [len(tensors[leaf.path]) for tensors in calls])
        ending = [call for call in probe.observation.calls if call.tensors().get(leaf.path, _NONE)[-1:].any()]
        if len({*sums}) == 1 or not rows or taken.intersection(rows) or leaf.path in rows or not ending:
            continue
        call, tensors = ending[0], ending[0].tensors()
        without = {path: tensors[path][: -int(tensors[leaf.path][-1])] for path in rows}
        twice = {path: torch.cat([tensors[path]] * 2) for path in (*rows, *parts)}
        if probe.outputs(call.with_tensors(without)) is None and probe.outputs(call.with_tensors(twice)) is not None:
            lengths = {(int(length),) for tensors in calls for length in tensors[leaf.path]}
            taken.update(rows)
            yield Grids(leaf.path, rows[0], tuple(sorted(lengths, reverse=True)))


def _as_long(calls: Sequence[Mapping[str, torch.Tensor]], sizes: Sequence[int]) -> list[str]:
    """The inputs whose first axis has these sizes in the calls."""
    return [
        path
        for path in calls[0]
        if all(
            path in tensors and tensors[path].shape[:1] == (size,) for tensors, size in zip(calls, sizes, strict=True)
        )
    ]


def _axis_of_patches(calls: Sequence[Mapping[str, torch.Tensor]], grid: str, rows: str) -> tuple[int, int] | None:
    """The axis of an input that the products of grids give, and how much of it each patch takes; None if there is none.

    An axis other than the first one has to be seen at several sizes.
    """
    if any(rows not in tensors or not len(tensors[grid]) or tensors[grid].prod(-1).min() <= 1 for tensors in calls):
        return None
    counts = [int(tensors[grid].prod(-1).sum()) for tensors in calls]
    if all(count == tensors[rows].shape[0] for count, tensors in zip(counts, calls, strict=True)):
        return 0, 1
    for axis in range(1, calls[0][rows].ndim if len(set(counts)) > 1 else 1):
        if per := _ratio([tensors[rows].shape[axis] for tensors in calls], counts):
            return axis, per
    return None


def _is_needed(probe: ModelProbe, grid: str, rows: str, axis: int, per: int) -> bool:
    """Whether the model raises for a patch less; beside the first axis, also whether it takes all images twice.

    In a batch of images of one size, too, an axis may be as long as the products of grids say.
    """
    call = next(call for call in probe.observation.calls if rows in call.tensors())
    tensor, grids = call.tensors()[rows], call.tensors()[grid]
    less = {rows: tensor.narrow(axis, 0, tensor.shape[axis] - per)}
    twice = {rows: torch.cat([tensor] * 2, axis), grid: torch.cat([grids] * 2)}
    return probe.outputs(call.with_tensors(less)) is None and (
        axis == 0 or probe.outputs(call.with_tensors(twice)) is not None
    )


def _candidates(probe: ModelProbe, grids: Sequence[Grids]) -> Iterator[list[Placeholder]]:
    """Yields inputs that may have a placeholder in common: all with the same token first, then each alone."""
    groups: dict[tuple[str, int], list[Placeholder]] = defaultdict(list)
    counted = {grid.rows for grid in grids if grid.axis == 0}
    for leaf in probe.table.leaves:
        if leaf.growing is None and not leaf.is_integer and leaf.rank >= 2:
            for placeholder in _fitting(probe, leaf.path, leaf.path in counted):
                groups[placeholder.tokens, placeholder.value].append(placeholder)
    yield from groups.values()
    yield from ([placeholder] for group in groups.values() if len(group) > 1 for placeholder in group)


def _fitting(probe: ModelProbe, path: str, in_grids: bool) -> Iterator[Placeholder]:
    calls = [tensors for call in probe.observation.calls if path in (tensors := call.tensors())]
    rows = [tensors[path].shape[0] for tensors in calls]
    if min(rows) == 0:
        return
    for leaf in probe.table.leaves:
        if leaf.rank == _TOKENS_RANK and "int" in leaf.dtype and all(leaf.path in tensors for tensors in calls):
            ids = [tensors[leaf.path] for tensors in calls]
            for value in ids[0].unique().tolist():
                counts = [int((i == value).sum()) for i in ids]
                factor = _ratio(counts, rows)
                per = _ratio(rows, counts) if in_grids and min(counts) > 0 else 0
                if factor:
                    yield Placeholder(leaf.path, int(value), path, factor)
                elif per:
                    yield Placeholder(leaf.path, int(value), path, 1, per)


def _ratio(numbers: Sequence[int], others: Sequence[int]) -> int:
    """By which whole number the others have to be multiplied to give the numbers; 0 if it is not the same for all."""
    found = {divmod(number, other) for number, other in zip(numbers, others, strict=True)}
    quotient, rest = found.pop()
    return 0 if found or rest else quotient


def _markers(probe: ModelProbe, placeholder: Placeholder) -> Iterator[Marker]:
    """Yields inputs of integers that have one value where the placeholder is, and another value elsewhere."""
    tokens = placeholder.tokens
    calls = [tensors for call in probe.observation.calls if tokens in (tensors := call.tensors())]
    for leaf in probe.table.leaves:
        pairs = [
            (tensors[tokens] == placeholder.value, tensors[leaf.path]) for tensors in calls if leaf.path in tensors
        ]
        if not leaf.is_integer or leaf.path == tokens or any(m.shape != marks.shape for m, marks in pairs):
            continue
        inside = {value for m, marks in pairs for value in marks[m].unique().tolist()}
        outside = {value for m, marks in pairs for value in marks[~m].unique().tolist()}
        if len(inside) == len(outside) == 1 and inside != outside:
            yield Marker(leaf.path, tokens, placeholder.value, int(inside.pop()), int(outside.pop()))


def _confirmed(probe: ModelProbe, tried: ValueRelations) -> bool:
    """Whether the model raises for the rows of one image more or less, and accepts them with as many tokens."""
    first = tried.placeholders[0]
    calls = [call for call in probe.observation.calls if first.rows in call.tensors()]
    for call, change in itertools.product(calls, (1, -1)):
        changed = _with_images(call.tensors(), tried, change)
        related = None if changed is None else _related(call.tensors(), changed, tried)
        if changed is not None and related is not None:
            raised = probe.outputs(call.with_tensors(changed)) is None
            return raised and probe.outputs(call.with_tensors({**changed, **related})) is not None
    return False


def _with_images(
    tensors: Mapping[str, torch.Tensor], tried: ValueRelations, change: int
) -> dict[str, torch.Tensor] | None:
    """The rows and their grids, with the first image twice (1) or without the last one (-1); None if there is none."""
    changed: dict[str, torch.Tensor] = {}
    for p in tried.placeholders:
        if p.rows not in tensors:
            return None
        grid = next((grid for grid in tried.grids if grid.rows == p.rows and grid.axis == 0), None)
        sizes = torch.ones(len(tensors[p.rows])) if grid is None else _rows_of(tensors[grid.path]).prod(-1)
        if len(sizes) + change < 1:
            return None
        changed[p.rows] = _one_image_changed(tensors[p.rows], int(sizes[0 if change > 0 else -1]), change)
        if grid is not None:
            changed[grid.path] = _one_image_changed(tensors[grid.path], 1, change)
    return changed


def _one_image_changed(tensor: torch.Tensor, rows: int, change: int) -> torch.Tensor:
    return torch.cat([tensor, tensor[:rows]]) if change > 0 else tensor[: len(tensor) - rows]


def _rows_of(grids: torch.Tensor) -> torch.Tensor:
    """The grids, or lengths as grids of one number each: (images, axes)."""
    return grids.reshape(len(grids), -1)


def _related(
    tensors: Mapping[str, torch.Tensor], changed: Mapping[str, torch.Tensor], tried: ValueRelations
) -> dict[str, torch.Tensor] | None:
    """Token ids, and marks in other inputs, that belong to changed rows; None if there is no room for them."""
    first = tried.placeholders[0]
    grids = [
        replace(grid, examples=tuple(map(tuple, _rows_of(changed[grid.path]).tolist())))
        for grid in tried.grids
        if grid.path in changed
    ]
    shapes = shapes_of({**tensors, **changed})
    if not tokens_fit(tried.placeholders, shapes, grids):
        return None
    blocks = needed_tokens(tried.placeholders, shapes, grids)[first.tokens]
    ids = with_tokens(tensors[first.tokens], [first.value], blocks)
    marks = {m.path: marked(tensors[m.path], ids, m) for m in tried.markers if m.path in tensors}
    return {first.tokens: ids, **marks}
