"""Runs a model to find out whether it accepts calls of given sizes, and what it returns for them."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping, Set

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from exportkit.arguments.build import build_call
from exportkit.arguments.table import call_table
from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.errors import ExportkitError
from exportkit.plan.leaves import CallTable, known
from exportkit.plan.plan import Plan
from exportkit.plan.sizes import choose_sizes
from exportkit.running.eager import EagerRunner, sampled_answer
from exportkit.running.runner import compare_calls, recorded

_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71)


class ModelProbe:
    """A model and its recorded calls, with answers from running the model in eager mode."""

    def __init__(self, model: torch.nn.Module, method: str, observation: Observation) -> None:
        self.run, self.observation = EagerRunner(model, method), observation

    @functools.cached_property
    def table(self) -> CallTable:
        """The shapes of all calls."""
        return call_table(self.observation)

    def outputs(self, call: Call) -> dict[str, torch.Tensor] | None:
        """Returns the tensors that the model returns by path, with products sampled; None if it raises.

        They can be compared with each other, but not with what a recorded call returned.
        """
        try:
            return sampled_answer(self.run.model, lambda: self.run(call))
        except Exception:
            return None

    def repeats(self, calls: Iterable[Call]) -> bool:
        """Returns whether the model returns for calls what it returned in the calls that these were made of."""
        return all(outcome.agrees for outcome in compare_calls(recorded, self.run, calls))

    def accepts(
        self,
        plan: Plan,
        sizes: Mapping[str, int] | None = None,
        ones: Collection[str] = (),
        hiding: Collection[str] = (),
    ) -> bool:
        """Returns whether the model accepts a call of the given sizes, by default the sizes an export would use.

        Attention is computed as it is defined: the fused kernel of the CPU does not look at the length of the values,
        and reads beyond them.

        Args:
            plan: The plan.
            sizes: Sizes of all variables.
            ones: Paths of masks that hide nothing in this call.
            hiding: Paths of masks that hide one position in this call.
        """
        try:
            call = build_call(plan, self.observation, choose_sizes(plan) if sizes is None else sizes)
        except ExportkitError:
            return False
        if ones or hiding:
            masks = call.tensors()
            changed = {path: torch.ones_like(masks[path]) for path in ones}
            call = call.with_tensors(changed | {path: _hiding_one(masks[path]) for path in hiding})
        with sdpa_kernel(SDPBackend.MATH):  # which raises where keys and values differ in length
            return self.outputs(call) is not None

    def accepts_lengths(self, plan: Plan) -> bool:
        """Returns whether the model also accepts more new tokens than recorded: it may cut a mask that is too long."""
        if not self.accepts(plan):
            return False
        new = plan.new_tokens
        return new is None or self.accepts(plan, {**choose_sizes(plan), new.name: max(known(new.seen)) + 2})

    def accepts_apart(self, plan: Plan, first: str, second: str) -> bool:
        """Returns whether the model accepts two variables at different sizes, either of them the larger one.

        A model does not look at what an encoder returned if a cache holds what it made of it, so that is also tried
        with caches that are empty. It may not look at a mask that hides nothing either: if all masks of these sizes are
        like that, it is also tried with masks that hide a position. And a view such as ``(batch, -1, size)`` takes a
        tensor of another batch if that divides its elements, so two batches are also tried that divide no size.
        """
        try:
            sizes = choose_sizes(plan)
        except ExportkitError:
            return False
        swapped = {**sizes, first: sizes[second], second: sizes[first]}
        followers = [v.seen for v in plan.variables if v.follows is not None]
        unfilled = {number for seen in followers for number, size in enumerate(seen) if size == 0}
        empty = [v.name for v in plan.variables if unfilled and all(v.seen[number] == 0 for number in unfilled)]
        filled_or_not = [sizes, *([{**sizes, **dict.fromkeys(empty, 0)}] if empty else [])]
        tried = [swapped, *filled_or_not]
        if not all(self.accepts(plan, chosen) for chosen in tried):
            return False
        masks = self._idle_masks(plan, sizes, {first, second})
        is_asked = masks and self.accepts(plan, {**sizes, second: sizes[first]}, hiding=masks)
        if is_asked and not all(self.accepts(plan, chosen, hiding=masks) for chosen in tried):
            return False
        batch = plan.with_role("batch")
        if batch is None or first != batch.name:
            return True
        one, other = self._indivisible(plan, sizes)
        is_asked = self.accepts(plan, {**sizes, first: one, second: one})
        return not is_asked or all(self.accepts(plan, {**c, first: one, second: other}) for c in filled_or_not)

    def _indivisible(self, plan: Plan, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Two primes that divide no size of a call."""
        shapes = build_call(plan, self.observation, sizes).shapes().values()
        product = math.prod({size for shape in shapes for size in shape if size})
        one, other, *_ = (prime for prime in _PRIMES if product % prime)
        return one, other

    def _idle_masks(self, plan: Plan, sizes: Mapping[str, int], names: Set[str]) -> list[str]:
        """Paths of integers and booleans along a variable that are only ones, such as a mask that hides nothing."""
        leaves = {leaf.path for leaf in plan.leaves if any(names & size.variables() for size in leaf.sizes)}
        tensors = build_call(plan, self.observation, sizes).tensors()
        whole = {p: t for p, t in tensors.items() if p in leaves and t.numel() and not t.is_floating_point()}
        return [path for path, tensor in whole.items() if bool((tensor == 1).all())]


def _hiding_one(mask: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(mask).index_fill_(-1, torch.tensor([0], device=mask.device), 0)
