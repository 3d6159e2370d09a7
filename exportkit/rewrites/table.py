"""The table of rewrites: what cannot be traced as it is, how a model that needs it is recognised, and what replaces it.

A rewrite changes nothing of what the model computes, is reported, and is undone. It is keyed by the structure of the
model and its arguments, never by the name of a model.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exportkit._torch_compat.transformers import can_choose_experts, exporter_patches
from exportkit.overrides import namespaces, replaced_attributes, replaced_functions
from exportkit.rewrites import (
    arrays,
    attention,
    branches,
    caches,
    empty_selections,
    grid_convolutions,
    grids,
    images,
    lengths,
    lists,
    loops,
    packed_sequences,
    positions,
    quantised,
    recorded_paths,
    token_scans,
)
from exportkit.rewrites.chunk_scans import delta_rule, state_space_scan


@dataclass(frozen=True)
class Rewrite:
    """One rewrite.

    It is needed by a model that has what `functions`, `parts`, `argument` and `matches` ask for; what is left out is
    not asked for.

    Attributes:
        name: A few words for reports, and for `apply_patches`.
        applied: Returns the context in which it is in force for a model.
        functions: Names of functions, one of which is in a Python module that defines a class of the model.
        parts: Names of attributes, all of which a module of the model has.
        argument: End of the name of an argument.
        matches: Returns something true if it is needed, given the model and the arguments by name.
        adapt: Changes the arguments of the traced call, by name, given the model and the names that the method takes;
            returns them with a function that completes the result. Such a rewrite works inside `exportkit.export` only.
    """

    name: str
    applied: Callable[..., contextlib.AbstractContextManager[None]]
    functions: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    argument: str | None = None
    matches: Callable[[torch.nn.Module, Mapping[str, Any]], object] | None = None
    adapt: Callable[[torch.nn.Module, dict[str, Any], Collection[str]], caches.Adapted] | None = None


def _of_functions(name: str, functions: Mapping[str, Callable[..., Any]]) -> Rewrite:
    """A rewrite that replaces functions of transformers, by name."""
    return Rewrite(name, functools.partial(replaced_functions, functions=functions), functions=tuple(functions))


@contextlib.contextmanager
def library_patches(_model: torch.nn.Module) -> Iterator[None]:
    """Applies all export patches of transformers, if it has any, and undoes them."""
    with contextlib.ExitStack() as stack:
        for backend in ("dynamo", "onnx"):
            for target, name, make in exporter_patches(backend):
                stack.enter_context(replaced_attributes(target, {name: make(getattr(target, name))}))
        yield


REWRITES = (
    Rewrite(
        "quantised layers as arithmetic on integers",
        quantised.dynamic_layers,
        matches=lambda model, _: quantised.layers_of(model),
    ),
    Rewrite("sliding windows of symbolic length", caches.symbolic_windows, matches=caches.has_sliding_window),
    Rewrite(
        "experts as batched matrix products",
        lists.batched_experts,
        matches=lambda model, _: any(map(can_choose_experts, model.modules())),
    ),
    Rewrite(
        "only uncached encoder states projected",
        caches.masks_over_states,
        argument="encoder_outputs",
        matches=caches.has_cross_cache,
        adapt=caches.with_uncached_states,
    ),
    Rewrite(
        "token types read while the cache is empty",
        caches.always_first,
        argument="token_type_ids",
        matches=caches.asks_for_first_call,
        adapt=caches.with_first_types,
    ),
    Rewrite(
        "selective scan as one loop operator",
        token_scans.traced_selective_scan,
        functions=(token_scans.SELECTIVE_SCAN,),
    ),
    _of_functions("state-space chunks as one loop operator", {"mamba2_chunk_scan": state_space_scan}),
    _of_functions(
        "delta rule as one loop operator",
        {"torch_chunk_gated_delta_rule": delta_rule, "chunk_kimi_delta_attention": delta_rule},
    ),
    _of_functions(
        "weighted average of tokens as one loop operator", {"rwkv_linear_attention": token_scans.weighted_average}
    ),
    Rewrite(
        "gated recurrence as one loop operator",
        token_scans.traced_gated_recurrence,
        parts=("conv1d_state", "rg_lru"),
        matches=lambda model, _: token_scans.recurrent_blocks(model),
    ),
    Rewrite(
        "lightning attention as one loop operator",
        token_scans.traced_lightning_attention,
        parts=token_scans.LIGHTNING_PARTS,
    ),
    Rewrite(
        "packed images as one masked attention",
        attention.packed_attention,
        matches=attention.has_packed_attention,
    ),
    Rewrite(
        "grids of patches read in the graph",
        grids.grids_in_graph,
        matches=grids.has_encoder_of_grids,
    ),
    Rewrite(
        "images convolved on one canvas",
        grid_convolutions.grids_on_a_canvas,
        matches=grid_convolutions.has_convolved_grids,
    ),
    Rewrite(
        "tables of positions resized in the graph",
        positions.table_in_graph,
        parts=(positions.TABLE_METHOD,),
        matches=lambda model, _: positions.resizing_classes(model),
    ),
    Rewrite(
        "positions of image tokens worked out in the graph",
        positions.rope_index_in_graph,
        parts=(positions.ROPE_INDEX_METHOD,),
        argument="image_grid_thw",
        matches=positions.has_rope_index,
    ),
    Rewrite(
        "tiles of images packed by one selection",
        images.tiles_in_graph,
        parts=(images.PACK_METHOD, "image_newline"),
        argument="image_sizes",
        matches=images.has_tiles,
    ),
    Rewrite(
        "images selected out of their padding",
        images.padded_images,
        parts=images.ENCODER_PARTS,
        argument="image_sizes",
        matches=images.has_padded_images,
    ),
    Rewrite(
        "projected states of an LSTM as one loop operator",
        packed_sequences.projected_layers,
        matches=packed_sequences.has_projected_layers,
    ),
    Rewrite("top-k attention over any number of keys", attention.symbolic_top_k, parts=(attention.TOP_K_METHOD,)),
    Rewrite(
        "masks applied without a check for causal masks",
        attention.skipped_causal_check,
        matches=attention.has_torch_transformer,
    ),
    Rewrite(
        "fully masked rows as in torch's inference kernels",
        attention.nan_for_hidden_rows,
        matches=lambda model, _: any(isinstance(part, torch.nn.MultiheadAttention) for part in model.modules()),
    ),
)

# The rest is chosen by `exportkit.export` for what a call does not show.

# Placeholders in the token ids stand for rows of an input, which their values show.
FEATURE_ROWS = Rewrite("placeholders without features left as they are", images.guarded_scatter)

# A list is made along an axis that varies, which a run of the model shows.
LISTS_OF_ONE = Rewrite("lists as one tensor", lists.lists_of_one)

# The same for a list of the chosen experts; applied after LISTS_OF_ONE, which would make one tensor of it. Some models
# have one more place in their mask, for tokens that are sent to no expert.
ALL_EXPERTS = Rewrite("loops over the chosen experts as loops over all", lists.loops_over_all)
ALL_BUT_NONE = Rewrite(ALL_EXPERTS.name, functools.partial(lists.loops_over_all, left_out=1))

# Branches such as `if mask.any()` that change nothing where they need not be taken; the lines are found by running.
EVERY_BRANCH = Rewrite("branches on any() and all() always taken", branches.decisions_made)
NEVER_EMPTY = Rewrite("branches for empty selections never taken", empty_selections.never_empty)
RECORDED_PATHS = Rewrite("both results of decisions by values", recorded_paths.recorded_paths)
ONE_PATH = "decisions by values asserted to be as in all recorded calls"
DECIDES = RECORDED_PATHS.name, ONE_PATH  # how the names of rewrites begin with which a graph decides by values
CHECKS = "checks of values as assertions"  # the name of a rewrite for lines that only raise, with their places

# A run of the model shows that padding may be left out, or that sequences of different lengths are packed.
ZEROS_AT_PADDING = Rewrite("zeros in place of padding behind the sequences", attention.zeros_at_padding)
PACKED_SEQUENCES = Rewrite("packed sequences as padded ones with a mask", packed_sequences.masked_layers)

# What is tried if a trace fails; the first two only if it fixed a size, the next four only if it needed a value.
SYMBOLIC_LENGTHS = Rewrite("lengths of tensors kept symbolic", lengths.symbolic_lengths)
ARRAYS = Rewrite("arrays of numpy as tensors", arrays.arrays_as_tensors)
LOOPS = Rewrite("loops over a length as one operator", loops.loops_as_operators)
NUMBER_CHECKS = Rewrite("checks of numbers read from tensors as assertions", branches.checks_of_numbers)
COUNTS = Rewrite("value counts of the expected length", branches.expected_counts)
MANY_VALUES = Rewrite("selections of values that are neither empty nor single", branches.many_values)
BUFFER_VALUES = Rewrite("buffers and sizes read as numbers", lambda _: contextlib.nullcontext())
GRADIENTS = Rewrite("gradients computed in the graph", lambda _: contextlib.nullcontext())
STRICT = Rewrite("traced from bytecode (strict)", lambda _: contextlib.nullcontext())
LIBRARY_PATCHES = Rewrite("transformers' own export patches", library_patches)

# By name, for `get_patch_mapping` and `apply_patches`. Gradients, strict tracing and values of buffers are left out, as
# they belong to a trace.
_CHOSEN = (
    FEATURE_ROWS,
    LISTS_OF_ONE,
    ALL_EXPERTS,
    EVERY_BRANCH,
    NEVER_EMPTY,
    PACKED_SEQUENCES,
    SYMBOLIC_LENGTHS,
    ARRAYS,
    LOOPS,
    NUMBER_CHECKS,
    COUNTS,
    MANY_VALUES,
    RECORDED_PATHS,
    LIBRARY_PATCHES,
)
BUILT_IN = {rewrite.name: rewrite for rewrite in (*REWRITES, *_CHOSEN)}


def matching_rewrites(model: torch.nn.Module, arguments: Mapping[str, Any]) -> list[Rewrite]:
    """Returns the rewrites that a model needs for a call with these arguments, by name."""
    named: dict[str, Any] = {}
    for value in arguments.values():
        if type(value) is dict:  # the arguments that **kwargs got, among them
            named |= {name: item for name, item in value.items() if isinstance(name, str)}
    named |= arguments
    modules = list(model.modules())
    functions: set[str] = set()
    for python_module in namespaces(model):
        functions |= {name for name, value in vars(python_module).items() if callable(value)}
    found = []
    for rewrite in REWRITES:
        end, parts = rewrite.argument, rewrite.parts
        if end is not None and not any(name.endswith(end) for name in named):
            continue
        if rewrite.functions and functions.isdisjoint(rewrite.functions):
            continue
        if parts and not any(all(hasattr(module, name) for name in parts) for module in modules):
            continue
        if rewrite.matches is None or rewrite.matches(model, named):
            found.append(rewrite)
    return found


def adapted_call(
    rewrites: Sequence[Rewrite],
    model: torch.nn.Module,
    arguments: dict[str, Any],
    names: Collection[str],
    call: Callable[[dict[str, Any]], Any],
) -> Any:
    """Returns ``call(arguments)`` with the arguments and the result as the rewrites need them.

    Args:
        rewrites: The rewrites.
        model: The model.
        arguments: Arguments by name.
        names: Names of all arguments that the method takes.
        call: Calls the method.
    """
    completing = []
    for rewrite in rewrites:
        if rewrite.adapt is not None:
            arguments, complete = rewrite.adapt(model, arguments, names)
            completing.append(complete)
    result = call(arguments)
    for complete in reversed(completing):
        result = complete(result)
    return result


@contextlib.contextmanager
def applied(rewrites: Sequence[Rewrite], model: torch.nn.Module) -> Iterator[None]:
    """Puts rewrites in force for the time of a ``with`` block."""
    with contextlib.ExitStack() as stack:
        for rewrite in rewrites:
            stack.enter_context(rewrite.applied(model))
        yield
