"""Calls without an attention mask: which inputs they have instead, and whether a mask of ones is equivalent.

``generate`` drops a mask that is all ones (transformers 5.23), and passes positions that follow from the mask. Without
a mask, transformers takes positions that do not increase for packed sequences. So a call that loses its mask needs the
positions of tokens without padding.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.plan.plan import Plan
from exportkit.probing.model_probe import ModelProbe
from exportkit.running.compare import Tensors
from exportkit.running.runner import compare_calls
from exportkit.trees import is_cache_class
from exportkit.trees.tree import is_integer

MASK = "attention_mask"


def with_optional_mask(plan: Plan, probe: ModelProbe) -> Plan:
    """Returns the plan in which a mask that all stored calls gave may be left out, if a mask of ones stands for none.

    Args:
        plan: The plan of the calls.
        probe: The model and its calls.
    """
    observation = probe.observation
    leaf = plan.by_path.get(MASK)
    trees = [tree for call in observation.calls for tree in call.arguments.values()]
    has_cache = any(is_cache_class(tree.cls) and tree.tensor_paths for tree in trees)
    if leaf is None or not has_cache or observation.signature.defaults.get(MASK, ...) is not None:
        return plan
    if not all(call.has(MASK) for call in observation.calls):  # what these calls returned shows what stands for none
        return plan
    unpadded = [without_padding(observation, call) for call in (observation.calls[0], *observation.calls[1:][-1:])]

    def without_mask(call: Call) -> Tensors:
        return probe.run(call.without({MASK}))

    agreeing = [outcome.agrees for outcome in compare_calls(probe.run, without_mask, unpadded)]
    if len(agreeing) < len(unpadded) or not all(agreeing):
        return plan
    leaves = [replace(each, ones_if_missing=each.path == MASK) for each in plan.leaves]
    return replace(plan, leaves=tuple(leaves))


def without_padding(observation: Observation, call: Call) -> Call:
    """Returns a call, not made yet, with a mask of ones and the positions of tokens without padding.

    Args:
        observation: Recorded calls, which show which inputs are positions: where the mask is 1, they count its ones.
        call: The call.
    """
    tensors = call.tensors()
    mask = tensors.get(MASK)
    if mask is None or mask.ndim != 2:
        return call
    changed = {MASK: torch.ones_like(mask)}
    for path, tensor in tensors.items():
        fits = is_integer(tensor) and tensor.ndim > 1 and tensor.shape[-1] <= mask.shape[1]
        if path != MASK and fits and _are_positions(observation, path):
            changed[path] = torch.arange(mask.shape[1]).to(tensor)[-tensor.shape[-1] :].expand_as(tensor).clone()
    return call.with_tensors(changed)


def _are_positions(observation: Observation, path: str) -> bool:
    """Whether an input counts the ones of the mask, where that is 1, in all calls that have both."""
    found = False
    for call in observation.calls:
        tensors = call.tensors()
        mask, tensor = tensors.get(MASK), tensors.get(path)
        if mask is None or tensor is None:
            continue
        if mask.ndim != 2 or tensor.ndim < 2 or not is_integer(tensor) or tensor.shape[-1] > mask.shape[1]:
            return False
        new = slice(mask.shape[1] - tensor.shape[-1], None)
        kept = mask[:, new] != 0
        if tensor.shape[-2] not in (1, len(mask)):
            return False
        counted = mask.to(tensor.dtype).cumsum(-1)[:, new] - 1
        if not bool(((tensor == counted) | ~kept).all()):
            return False
        found = True
    return found
