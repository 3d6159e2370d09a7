"""Finds which token stands for rows of features, and puts the right number of such tokens into token ids.

Multimodal models look for a placeholder token and put a row of image or audio features wherever it stands, so the
number of rows follows from values. In come recorded calls and the model; out go placeholders, each confirmed by a run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch

from exportkit.arguments.ask import AskedModel
from exportkit.arguments.build import Arguments, recorded_call
from exportkit.arguments.tensors import with_tokens
from exportkit.axes import Placeholder
from exportkit.trees import join

_MOST_TRIALS = 24  # groups of inputs and tokens that are tried, an eager run or two each
_TOKENS_RANK = 2


def find_placeholders(asked: AskedModel) -> tuple[Placeholder, ...]:
    """Returns the placeholders that the recorded calls suggest and the model confirms.

    A token qualifies if in every call it occurs as often as the input has rows, or a multiple of that. It is confirmed
    if the model refuses another number of rows alone, and accepts it together with as many tokens.
    """
    found: list[Placeholder] = []
    for number, group in enumerate(_candidates(asked)):
        if number >= _MOST_TRIALS:
            break
        taken = {placeholder.rows for placeholder in found}
        rest = [placeholder for placeholder in group if placeholder.rows not in taken]
        if rest and _confirmed(asked, rest):
            found += rest
    return tuple(found)


def _candidates(asked: AskedModel) -> Iterator[list[Placeholder]]:
    """Yields inputs that may have a placeholder in common: all with the same token first, then each alone."""
    groups: dict[tuple[str, int], list[Placeholder]] = defaultdict(list)
    for leaf in asked.table.leaves:
        if leaf.growing is None and not leaf.is_integer and leaf.rank >= 2:
            for placeholder in _fitting(asked, leaf.path):
                groups[placeholder.tokens, placeholder.value].append(placeholder)
    yield from groups.values()
    yield from ([placeholder] for group in groups.values() if len(group) > 1 for placeholder in group)


def _fitting(asked: AskedModel, path: str) -> list[Placeholder]:
    calls = [tensors for call in asked.observation.calls if path in (tensors := call.tensors())]
    rows = [tensors[path].shape[0] for tensors in calls]
    found = []
    for leaf in asked.table.leaves:
        if leaf.rank == _TOKENS_RANK and "int" in leaf.dtype and all(leaf.path in tensors for tensors in calls):
            ids = [tensors[leaf.path] for tensors in calls]
            for value in ids[0].unique().tolist():
                factors = {divmod(int((i == value).sum()), max(n, 1)) for i, n in zip(ids, rows, strict=True)}
                if len(factors) == 1 and (pair := factors.pop())[1] == 0 and pair[0] > 0 and min(rows) > 0:
                    found.append(Placeholder(leaf.path, int(value), path, pair[0]))
    return found


def _confirmed(asked: AskedModel, group: Sequence[Placeholder]) -> bool:
    first = group[0]
    index = next(call.index for call in asked.observation.calls if first.rows in call.tensors())
    recorded = recorded_call(asked.observation, index)
    tensors = recorded.tensors()
    more = {p.rows: torch.cat([tensors[p.rows], tensors[p.rows][:1]]) for p in group}
    count = first.factor * more[first.rows].shape[0]
    if tensors[first.tokens].numel() <= count:
        return False
    tokens = {first.tokens: with_tokens(tensors[first.tokens], {first.value: count})}
    if asked.outputs(_changed(recorded, more)) is not None:
        return False
    return asked.outputs(_changed(recorded, {**more, **tokens})) is not None


def _changed(recorded: Arguments, tensors: Mapping[str, torch.Tensor]) -> Arguments:
    trees = {
        name: tree.with_leaves(
            {path: tensors[full] for path in tree.tensors() if (full := join(name, path)) in tensors}
        )
        for name, tree in recorded.trees.items()
    }
    return Arguments(trees, recorded.observation)
