"""Builds arguments of a model from a plan: one merged call with all inputs that were ever seen, at wanted sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from exportkit.arguments.tensors import padded, resize, with_tokens
from exportkit.axes import Plan, needed_tokens, tokens_fit
from exportkit.errors import ArgumentError
from exportkit.observe import Observation
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
    sources, needed = largest_tensors(observation), needed_tokens(plan.placeholders, shapes)
    if not tokens_fit(plan.placeholders, shapes):
        raise ArgumentError(
            "The token ids have no room for their placeholders.",
            where=", ".join(needed),
            expected=", ".join(f"token {value} {n} times" for counts in needed.values() for value, n in counts.items()),
            got=", ".join(f"{path} {shapes[path]}" for path in needed),
            hint="choose more tokens, or fewer rows of features.",
        )
    trees = {}
    for name, tree in merged_trees(observation).items():
        made = {}
        for path in tree.tensors():
            full = join(name, path)
            if full in shapes:
                tensor = resize(sources[full], shapes[full], dynamic[full])
                tensor = padded(tensor) if plan.by_path[full].restored else tensor
                made[path] = with_tokens(tensor, needed[full]) if full in needed else tensor
        trees[name] = tree.with_leaves(made)
    past = plan.with_role("past")
    return Arguments(trees, observation, None if past is None else sizes[past.name])


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
