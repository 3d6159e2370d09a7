"""Restores an attention mask that the caller may have had and the model never saw.

``generate`` drops a mask that is all ones (transformers 5.23), and a graph without a mask cannot serve a padded batch.
So where a decoder with a cache takes a mask and was given none, a mask of ones is added to each call, if the model
returns the same with it. It is over all tokens; where the cache holds a state instead of tokens, over the new ones.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from exportkit.arguments.tensors import padded
from exportkit.calls.observation import Observation
from exportkit.plan.leaves import Finding
from exportkit.plan.plan import Plan
from exportkit.probing.ask import AskedModel
from exportkit.probing.missing import solve_sizes
from exportkit.running.runner import compare_runs, recorded
from exportkit.trees import flatten, is_cache_class, stored_length

MASK = "attention_mask"


def restore_mask(plan: Plan, asked: AskedModel) -> Observation | None:
    """Returns the calls with a mask of ones, or None where there is nothing to restore.

    The mask is ``(batch, past + new)``, and ``(batch, new)`` for a model whose cache does not grow.

    Args:
        plan: What the calls without a mask suggest.
        asked: The model.
    """
    observation = asked.observation
    wanted = MASK in observation.signature.plain() and MASK not in observation.removed
    if not wanted or any(call.has(MASK) for call in observation.calls):
        return None
    masked = _with_masks(plan, observation)
    if masked is None:
        return None
    whole = [masked.calls[0], *masked.calls[1:][-1:]]
    if not all(outcome.agrees for outcome in compare_runs(recorded, asked.run, whole)):
        return None
    # A 0 in the mask has to change a result: otherwise it is a mask over something else, or is ignored. In a call past
    # the window of a model, what the mask hides may have left the window before.
    hiding = [
        replace(call, arguments={**call.arguments, MASK: call.arguments[MASK].map(lambda leaf: padded(leaf.clone()))})
        for call in whole
    ]
    if not any(outcome.wrong for outcome in compare_runs(recorded, asked.run, hiding)):
        return None
    return replace(masked, restored=observation.restored | {MASK})


def restored_finding() -> Finding:
    """Returns what a person should know about a restored mask."""
    text = (
        f"{MASK} was never given to forward, as generate drops a mask of ones; it is an input of the graph all the "
        "same, so that padded batches can be served. Left out, it is all ones."
    )
    return Finding("restored input", MASK, text)


def _with_masks(plan: Plan, observation: Observation) -> Observation | None:
    past, new, batch = (plan.with_role(role) for role in ("past", "sequence", "batch"))
    if new is None or batch is None or (past is None and not _has_state(observation)):
        return None
    calls = []
    for call in observation.calls:
        shapes = {path: tuple(tensor.shape) for path, tensor in call.tensors().items()}
        sizes = solve_sizes(plan, shapes)
        device = next(iter(call.tensors().values())).device
        stored = 0 if past is None else max(sizes[past.name], *(stored_length(v) for v in call.values().values()), 0)
        length = sizes[new.name] + stored
        mask = torch.ones(sizes[batch.name], length, dtype=torch.int64, device=device)
        arguments = {**call.arguments, MASK: flatten(mask)}
        ordered = {name: arguments[name] for name in observation.signature.names if name in arguments}
        calls.append(replace(call, arguments=ordered, named=call.named | {MASK}))
    return replace(observation, calls=tuple(calls))


def _has_state(observation: Observation) -> bool:
    """Whether there is a cache, and none that grows."""
    trees = [tree for call in observation.calls for tree in call.arguments.values() if is_cache_class(tree.cls)]
    return any(tree.tensor_paths for tree in trees) and not any(tree.growing for tree in trees)
