"""Asks a model by running it: does it accept calls of these sizes, and what does it return for them?"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping

import torch

from exportkit.arguments.build import build_call
from exportkit.arguments.table import call_table
from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.errors import ExportkitError
from exportkit.plan.leaves import CallTable, known
from exportkit.plan.plan import Plan
from exportkit.plan.sizes import choose_sizes
from exportkit.running.eager import EagerRunner, sampled_answer


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

    def accepts(self, plan: Plan, sizes: Mapping[str, int] | None = None, ones: Collection[str] = ()) -> bool:
        """Returns whether the model accepts a call of the given sizes, by default the sizes an export would use.

        Args:
            plan: The plan.
            sizes: Sizes of all variables.
            ones: Paths of masks that hide nothing in this call.
        """
        try:
            call = build_call(plan, self.observation, choose_sizes(plan) if sizes is None else sizes)
        except ExportkitError:
            return False
        if ones:
            call = call.with_tensors({path: torch.ones_like(call.tensors()[path]) for path in ones})
        return self.outputs(call) is not None

    def accepts_lengths(self, plan: Plan) -> bool:
        """Returns whether the model also accepts more new tokens than recorded: it may cut a mask that is too long."""
        if not self.accepts(plan):
            return False
        new = plan.with_role("sequence")
        return new is None or self.accepts(plan, {**choose_sizes(plan), new.name: max(known(new.seen)) + 2})

    def accepts_apart(self, plan: Plan, first: str, second: str) -> bool:
        """Returns whether the model accepts two variables at different sizes, either of them the larger one.

        A model does not look at what an encoder returned if a cache holds what it made of it, so that is also tried
        with caches that are empty.
        """
        try:
            sizes = choose_sizes(plan)
        except ExportkitError:
            return False
        swapped = {**sizes, first: sizes[second], second: sizes[first]}
        followers = [v.seen for v in plan.variables if v.follows is not None]
        unfilled = {number for seen in followers for number, size in enumerate(seen) if size == 0}
        empty = [v.name for v in plan.variables if unfilled and all(v.seen[number] == 0 for number in unfilled)]
        tried = [sizes, swapped, *([{**sizes, **dict.fromkeys(empty, 0)}] if empty else [])]
        return all(self.accepts(plan, chosen) for chosen in tried)
