"""Builds arguments of a model from a plan: one merged call with all inputs that were ever seen, at wanted sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from exportkit.arguments.tensors import integers_below, marked, padded, resize, with_tokens
from exportkit.calls.observation import Observation
from exportkit.errors import ArgumentError
from exportkit.plan.placeholder import Blocks, needed_tokens, tokens_fit
from exportkit.plan.plan import Plan
from exportkit.trees import Tree, check_opened, join, set_stored_length


@dataclass(frozen=True)
class Arguments:
    """Arguments of one call.

    Attributes:
        trees: Each argument's tree, in signature order.
        observation: The calls they were made from.
        stored: Number of tokens in the caches, or None to leave their counters as they were recorded.
    """

    trees: Mapping[str, Tree]
    observation: Observation
    stored: int | None = None

    def values(self) -> dict[str, Any]:
        """Returns the nested values by parameter; each time new containers and caches around the same tensors."""
        return self._built(self.trees)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors by full path."""
        return {join(name, p): t for name, tree in self.trees.items() for p, t in tree.tensors().items()}

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns ``args, kwargs`` with copies of the tensors, so that a model may change them in place."""
        return self.observation.signature.unbind(self.copies())

    def copies(self) -> dict[str, Any]:
        """Returns the nested values by parameter, with copies of the tensors."""
        return self._built({name: tree.map(_copied) for name, tree in self.trees.items()})

    def _built(self, trees: Mapping[str, Tree]) -> dict[str, Any]:
        values = {name: tree.build() for name, tree in trees.items()}
        if self.stored is not None:
            for value in values.values():
                set_stored_length(value, self.stored)
        return values


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


def build_arguments(plan: Plan, observation: Observation, sizes: Mapping[str, int]) -> Arguments:
    """Returns arguments in which each leaf of the plan has the shape that the plan gives it for ``sizes``.

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
    return Arguments(trees, observation, None if past is None else sizes[past.name])


def with_integers_below(arguments: Arguments, limit: int) -> Arguments:
    """Returns the arguments with integers that can be indices along an axis of that size."""
    trees = {
        name: tree.with_leaves({path: integers_below(tensor, limit) for path, tensor in tree.tensors().items()})
        for name, tree in arguments.trees.items()
    }
    return replace(arguments, trees=trees)


def with_ones(arguments: Arguments, paths: Collection[str]) -> Arguments:
    """Returns the arguments with ones in the tensors at these paths: masks that hide nothing."""
    trees = {
        name: tree.with_leaves(
            {p: torch.ones_like(t) if join(name, p) in paths else t for p, t in tree.tensors().items()}
        )
        for name, tree in arguments.trees.items()
    }
    return replace(arguments, trees=trees)


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


def recorded_call(observation: Observation, index: int) -> Arguments:
    """Returns the arguments of a recorded call, as they were given."""
    return Arguments(observation.calls[index].arguments, observation)


def largest_tensors(observation: Observation) -> dict[str, torch.Tensor]:
    """Returns for each leaf the recorded tensor with the most elements, which shows most of what its values can be."""
    found: dict[str, torch.Tensor] = {}
    for call in observation.calls:
        for path, tensor in call.tensors().items():
            if path not in found or tensor.numel() > found[path].numel():
                found[path] = tensor
    return found


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
