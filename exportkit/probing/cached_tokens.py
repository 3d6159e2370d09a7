"""How many tokens came before a call, where the windows of caches do not show it: their counters and positions do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from exportkit.errors import ArgumentError
from exportkit.plan.plan import Plan
from exportkit.plan.sizes import is_hidden, solve_sizes
from exportkit.trees import stored_length

_POSITIONS = ("position_ids", "cache_position")


def hidden_past(plan: Plan, given: Mapping[str, torch.Tensor], values: Iterable[Any]) -> int | None:
    """Returns the number of cached tokens if missing inputs need it, and full windows of caches do not show it.

    Then the counters of the caches say it, which the model goes by too; for caches without a counter, the positions of
    the new tokens do.

    Args:
        plan: The plan.
        given: The inputs that are given, by path.
        values: The arguments.

    Raises:
        ArgumentError: if neither says it.
    """
    past, missing = plan.with_role("past"), plan.depending_on_past.difference(given)
    if past is None or not missing:
        return None
    shapes = {path: tuple(tensor.shape) for path, tensor in given.items()}
    if not is_hidden(plan, past.name, shapes):
        return None
    counted = max(map(stored_length, values), default=0)
    full = plan.depending_on_past.intersection(given)
    windows = [size.cap or 0 for path in full for size in plan.by_path[path].sizes]
    positions = next((given[path] for path in given if path.rpartition(".")[2] in _POSITIONS), None)
    new = plan.new_tokens
    if counted < max(windows) and positions is not None and positions.numel():
        counted = int(positions.max()) + 1 - (1 if new is None else solve_sizes(plan, shapes)[new.name])
    if counted < max(windows):
        raise ArgumentError(
            "The windows of the caches are full, so they do not show how many tokens came before.",
            where=", ".join(sorted(missing)),
            expected=f"{', '.join(sorted(missing))}, or a cache that counts its tokens",
            got=", ".join(given),
            hint="give the inputs that were left out.",
        )
    return counted


def check_counted(plan: Plan, given: Mapping[str, torch.Tensor], values: Iterable[Any]) -> None:
    """Raises ArgumentError if caches have counted more tokens than a graph can know of.

    A graph has no counters. If all caches have windows, and neither sizes nor positions of other inputs show the tokens
    before, it takes a full window for all there is, and its positions are wrong.

    Args:
        plan: The plan.
        given: The inputs that are given, by path.
        values: The arguments.
    """
    past, counted = plan.with_role("past"), max(map(stored_length, values), default=0)
    if past is None or past.maximum is None or any(path.rpartition(".")[2] in _POSITIONS for path in given):
        return
    shown = solve_sizes(plan, {path: tuple(tensor.shape) for path, tensor in given.items()})[past.name]
    if counted > shown == past.maximum:
        raise ArgumentError(
            "The caches have counted more tokens than the graph can know of: their windows are all that it is given.",
            where=past.name,
            expected=f"at most {past.maximum}",
            got=str(counted),
            hint="record calls with a mask over all tokens, or with their positions, then export again.",
        )
