"""Builds a call from a plan: one merged call with all inputs that were ever seen, at chosen sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from exportkit.arguments.tensors import integers_below, marked, padded, resize, with_tokens
from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.errors import ArgumentError
from exportkit.plan.placeholders import Blocks, needed_tokens, tokens_fit
from exportkit.plan.plan import Plan
from exportkit.trees import Tree, check_opened, join


def merged_trees(observation: Observation) -> dict[str, Tree]:
    """Returns one tree for each argument that some call gave: the one with the most tensors, the first of equals.

    Arguments that were only ever None are left out, unless the method cannot do without them.
    """
    return dict(observation.remembered("merged trees", lambda: _merged_trees(observation)))


def _merged_trees(observation: Observation) -> dict[str, Tree]:
    best: dict[str, Tree] = {}
    for name in observation.signature.names:
        trees = [call.arguments[name] for call in observation.calls if name in call.arguments]
        if not trees:
            continue
        tree = max(trees, key=lambda t: (len(t.tensor_paths), _has_any(t)))
        only_none = tree.constants() == {"": None}
        if not only_none or observation.signature.defaults.get(name, ...) is not None:
            best[name] = tree
    for name, tree in best.items():
        check_opened(name, tree)
    return best


def _has_any(tree: Tree) -> bool:
    return bool(tree.tensor_paths) or any(leaf is not None for leaf in tree.constants().values())


def build_call(plan: Plan, observation: Observation, sizes: Mapping[str, int]) -> Call:
    """Returns a call in which each leaf of the plan has the shape that the plan gives it for ``sizes``.

    Args:
        plan: The plan; inputs that it does not have are left out.
        observation: Calls whose values are used.
        sizes: Sizes of all variables.

    Raises:
        ArgumentError: if the token ids have no room for the placeholders that belong to these sizes.
    """
    shapes, dynamic = plan.shapes(sizes), plan.dynamic_axes()
    sources, needed = largest_tensors(observation), needed_tokens(plan.placeholders, shapes, plan.grids)
    if not tokens_fit(plan.placeholders, shapes, plan.grids):
        raise ArgumentError(
            "The token ids have no room for their placeholders.",
            where=", ".join(needed),
            expected=", ".join(
                f"token {value} {n} times" for blocks in needed.values() for value, n in _counts(blocks)
            ),
            got=", ".join(f"{path} {shapes[path]}" for path in needed),
            hint="choose more tokens, or fewer rows of features.",
        )
    made: dict[str, torch.Tensor] = {}
    for name, tree in merged_trees(observation).items():
        for path in tree.tensors():
            full = join(name, path)
            if full in shapes:
                tensor = resize(sources[full], shapes[full], dynamic[full])
                made[full] = padded(tensor) if plan.by_path[full].restored else tensor
    _relate_values(plan, shapes, needed, made)
    trees = {
        name: tree.with_leaves({path: made[full] for path in tree.tensors() if (full := join(name, path)) in made})
        for name, tree in merged_trees(observation).items()
    }
    past = plan.with_role("past")
    cached = None if past is None else sizes[past.name]
    return Call(trees, observation.signature, cached_tokens=cached, sizes=dict(sizes))


def with_integers_below(call: Call, limit: int) -> Call:
    """Returns the call with integers that can be indices along an axis of that size."""
    return call.with_tensors({path: integers_below(tensor, limit) for path, tensor in call.tensors().items()})


def with_ones(call: Call, paths: Collection[str]) -> Call:
    """Returns the call with ones in the tensors at these paths: masks that hide nothing."""
    return call.with_tensors({p: torch.ones_like(t) for p, t in call.tensors().items() if p in paths})


def _relate_values(
    plan: Plan, shapes: Mapping[str, tuple[int, ...]], needed: Mapping[str, Blocks], made: dict[str, torch.Tensor]
) -> None:
    """Puts values in force that belong to the sizes: grids, placeholders, and marks where these are."""
    for grid in plan.grids:
        made[grid.path] = torch.tensor(grid.taken(shapes[grid.path][0])).reshape(shapes[grid.path]).to(made[grid.path])
    for path, blocks in needed.items():
        values = [p.value for p in plan.placeholders if p.tokens == path]
        made[path] = with_tokens(made[path], values, blocks)
    for marker in plan.markers:
        made[marker.path] = marked(made[marker.path], made[marker.tokens], marker)


def _counts(blocks: Blocks) -> list[tuple[int, int]]:
    return [(value, sum(n for v, n in blocks if v == value)) for value in dict.fromkeys(v for v, _ in blocks)]


def largest_tensors(observation: Observation) -> dict[str, torch.Tensor]:
    """Returns for each leaf the recorded tensor with the most elements, which shows most of what its values can be."""
    found: dict[str, torch.Tensor] = {}
    for call in observation.calls:
        for path, tensor in call.tensors().items():
            if path not in found or tensor.numel() > found[path].numel():
                found[path] = tensor
    return found
