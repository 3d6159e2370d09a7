"""Rules that rewrite what cannot be traced as it is, for the time of an export. Each is keyed by what it rewrites.

In come the model and the arguments of the trace; out come the rules that match them. A rule changes nothing of what the
model computes, is reported, and is undone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exportkit.rewrites.blind_rows import has_square_mask, zeros_for_blind_rows
from exportkit.rewrites.causal_hint import has_torch_transformer, masks_as_they_are
from exportkit.rewrites.chunks import has_chunk_scan, traced_chunk_scan
from exportkit.rewrites.delta_rule import has_delta_rule, traced_delta_rule
from exportkit.rewrites.encoder_decoder import has_cross_cache, masks_of_states, with_uncached_states
from exportkit.rewrites.expert_loops import loops_over_all
from exportkit.rewrites.experts import batched_experts, has_experts
from exportkit.rewrites.feature_rows import guarded_scatter
from exportkit.rewrites.first_call import always_first, asks_for_first_call, with_first_types
from exportkit.rewrites.gated_recurrence import has_gated_recurrence, traced_gated_recurrence
from exportkit.rewrites.grids import grids_in_graph, has_encoder_of_grids
from exportkit.rewrites.kept_keys import keeps_strongest_keys, traced_kept_keys
from exportkit.rewrites.library_patches import library_patches
from exportkit.rewrites.lightning import has_lightning_attention, traced_lightning_attention
from exportkit.rewrites.lists import lists_of_one
from exportkit.rewrites.packed_attention import has_packed_attention, masked_segments
from exportkit.rewrites.padded_images import has_padded_images, padded_images
from exportkit.rewrites.rope_index import has_rope_index, rope_index_in_graph
from exportkit.rewrites.selective_scan import has_selective_scan, traced_selective_scan
from exportkit.rewrites.symbolic_lengths import symbolic_lengths
from exportkit.rewrites.tiles import has_tiles, tiles_in_graph
from exportkit.rewrites.weighted_average import has_weighted_average, traced_weighted_average
from exportkit.rewrites.windows import has_windows, traced_windows

Adapt = Callable[[torch.nn.Module, dict[str, Any], Collection[str]], tuple[dict[str, Any], Callable[[Any], Any]]]


@dataclass(frozen=True)
class Rule:
    """One rewrite.

    Attributes:
        name: A few words for reports.
        matches: Whether it is needed, given the model and the arguments by name.
        applied: Context in which it is in force.
        adapt: Changes the arguments of the traced call, by name, given the model and the names that the method takes;
            returns them with what undoes that in its result. Then nothing is rewritten outside of `exportkit.export`.
    """

    name: str
    matches: Callable[[torch.nn.Module, Mapping[str, Any]], bool]
    applied: Callable[[torch.nn.Module], contextlib.AbstractContextManager[None]]
    adapt: Adapt | None = None


RULES = (
    Rule("sliding windows of symbolic length", has_windows, traced_windows),
    Rule("experts as batched matrix products", has_experts, batched_experts),
    Rule("encoder states projected as far as uncached", has_cross_cache, masks_of_states, with_uncached_states),
    Rule("token types read while the cache is empty", asks_for_first_call, always_first, with_first_types),
    Rule("selective scan as one loop operator", has_selective_scan, traced_selective_scan),
    Rule("state-space chunks as one loop operator", has_chunk_scan, traced_chunk_scan),
    Rule("delta rule as one loop operator", has_delta_rule, traced_delta_rule),
    Rule("weighted average of tokens as one loop operator", has_weighted_average, traced_weighted_average),
    Rule("gated recurrence as one loop operator", has_gated_recurrence, traced_gated_recurrence),
    Rule("lightning attention as one loop operator", has_lightning_attention, traced_lightning_attention),
    Rule("packed images as one masked attention", has_packed_attention, masked_segments),
    Rule("grids of patches read in the graph", has_encoder_of_grids, grids_in_graph),
    Rule("positions of image tokens worked out in the graph", has_rope_index, rope_index_in_graph),
    Rule("tiles of images packed by one selection", has_tiles, tiles_in_graph),
    Rule("images selected out of their padding", has_padded_images, padded_images),
    Rule("strongest keys picked at any number of them", keeps_strongest_keys, traced_kept_keys),
    Rule("masks applied without looking for causal ones", has_torch_transformer, masks_as_they_are),
    Rule("attention of tokens that see nothing is zero", has_square_mask, zeros_for_blind_rows),
)

# Needed where placeholders in the token ids stand for rows of an input, which is seen from values and not from a call.
FEATURE_ROWS = Rule("features scattered as far as there are any", lambda *_: False, guarded_scatter)

# Needed where a list is made along an axis that varies, which is seen when the model runs and not from a call.
LISTS_OF_ONE = Rule("lists as one tensor", lambda *_: False, lists_of_one)

# The same for a list of the experts that were chosen; put in force after the other, which would make one tensor of it.
# Some models have one place more in their mask, for tokens that are sent to no expert.
ALL_EXPERTS = Rule("loops over the chosen experts as loops over all", lambda *_: False, loops_over_all)
ALL_BUT_NONE = Rule(ALL_EXPERTS.name, lambda *_: False, functools.partial(loops_over_all, left_out=1))

# What is tried, one after the other, where a trace fails; the first ones only where it fixed a size.
SYMBOLIC_LENGTHS = Rule("lengths of tensors kept symbolic", lambda *_: False, symbolic_lengths)
STRICT = Rule("traced from bytecode (strict)", lambda *_: False, lambda _: contextlib.nullcontext())
LIBRARY_PATCHES = Rule("transformers' own export patches", lambda *_: False, library_patches)

# By name, as the registry of replacements shows them. Strict tracing is not among them: it rewrites nothing.
_ON_DEMAND = (FEATURE_ROWS, LISTS_OF_ONE, ALL_EXPERTS, SYMBOLIC_LENGTHS, LIBRARY_PATCHES)
BUILT_IN = {rule.name: rule for rule in (*RULES, *_ON_DEMAND)}


def matching_rules(model: torch.nn.Module, arguments: Mapping[str, Any]) -> list[Rule]:
    """Returns the rules that the model and its arguments need."""
    extra = [value for value in arguments.values() if type(value) is dict]  # what **kwargs got, among them
    named = {name: value for values in extra for name, value in values.items()} | dict(arguments)
    return [rule for rule in RULES if rule.matches(model, named)]


def adapted_call(
    rules: Sequence[Rule],
    model: torch.nn.Module,
    arguments: dict[str, Any],
    names: Collection[str],
    call: Callable[[dict[str, Any]], Any],
) -> Any:
    """Returns ``call(arguments)`` with the arguments and the result as the rules want them.

    Args:
        rules: The rules.
        model: The model.
        arguments: Arguments by name.
        names: Names of all arguments that the method takes.
        call: Calls the method.
    """
    undo = []
    for rule in rules:
        if rule.adapt is not None:
            arguments, finish = rule.adapt(model, arguments, names)
            undo.append(finish)
    result = call(arguments)
    for finish in reversed(undo):
        result = finish(result)
    return result


@contextlib.contextmanager
def applied(rules: Sequence[Rule], model: torch.nn.Module) -> Iterator[None]:
    """Puts rules in force for the time of a ``with`` block."""
    with contextlib.ExitStack() as stack:
        for rule in rules:
            stack.enter_context(rule.applied(model))
        yield
