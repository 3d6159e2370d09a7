"""How many tokens came before a call, where the windows of caches do not show it: their counters and positions do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from exportkit.calls.call import shapes_of, shapes_text
from exportkit.errors import ArgumentError
from exportkit.plan.plan import Plan
from exportkit.plan.solved_sizes import cached_length, is_hidden, solve_sizes
from exportkit.trees import unfilled_layers

_POSITIONS = ("position_ids", "cache_position")


def hidden_past(plan: Plan, given: Mapping[str, torch.Tensor], counted: int) -> int | None:
    """Returns the number of cached tokens if missing inputs need it, and full windows of caches do not show it.

    Then the counters of the caches say it, which the model goes by too; for caches without a counter, the positions of
    the new tokens do.

    Args:
        plan: The plan.
        given: The inputs that are given, by path.
        counted: How many tokens the caches have counted; 0 without a counter.

    Raises:
        ArgumentError: if neither says it.
    """
    past, missing = plan.with_role("past"), plan.depending_on_past.difference(given)
    if past is None or not missing:
        return None
    shapes = shapes_of(given)
    if not is_hidden(plan, past.name, shapes):
        return None
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
            got=shapes_text(given),
            hint="give the inputs that were left out.",
        )
    return counted


def zeros_of_unfilled(
    plan: Plan, given: Mapping[str, torch.Tensor], values: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Returns the tensors of cache layers of a fixed length that hold none yet, by path.

    Args:
        plan: The plan.
        given: The inputs that are given, by path.
        values: The arguments by name.
    """
    found: dict[str, torch.Tensor] = {}
    if plan.by_path.keys() <= given.keys():
        return found
    for name, value in values.items():
        for path, layer in unfilled_layers(value, name):
            for part in ("keys", "values"):
                leaf = plan.by_path.get(f"{path}.{part}")
                if leaf is not None and leaf.path not in given:
                    sizes = solve_sizes(plan, shapes_of(given))
                    batch, heads, _, width = plan.shapes(sizes)[leaf.path]
                    shape = batch, heads, layer.max_cache_len, width
                    device = next((tensor.device for tensor in given.values()), None)
                    found[leaf.path] = torch.zeros(shape, dtype=getattr(torch, leaf.dtype), device=device)
    return found


def check_counted(plan: Plan, given: Mapping[str, torch.Tensor], counted: int) -> None:
    """Raises ArgumentError if caches have counted more or fewer tokens than a graph can know of.

    A graph has no counters: sizes show how many tokens came before. If all caches have windows, and no size of another
    input shows it, the graph takes a full window for all there is. Its positions are wrong then, and so is what it
    reads of a mask over all tokens.

    Args:
        plan: The plan.
        given: The inputs that are given, by path.
        counted: How many tokens the caches have counted; 0 without a counter.
    """
    past = plan.with_role("past")
    has_positions = any(path.rpartition(".")[2] in _POSITIONS for path in given)
    if not counted or (has_positions and not any("mask" in path for path in given)):
        return
    shapes = shapes_of(given)
    if past is not None and is_hidden(plan, past.name, shapes) and past.maximum is None:
        return  # the counter is what says it then
    shown = cached_length(plan, shapes) if past is None else solve_sizes(plan, shapes)[past.name]
    if shown is not None and counted != shown:
        compared = "more" if counted > shown else "fewer"
        raise ArgumentError(
            f"The caches have counted {compared} tokens than the sizes of the inputs show.",
            where="a cache" if past is None else past.name,
            expected=f"{shown} tokens",
            got=str(counted),
            hint="record calls with a mask over all tokens, or with their positions alone, then export again.",
        )
