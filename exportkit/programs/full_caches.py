"""Another export of a decoder with sliding windows, in which every layer keeps every token.

In comes an export whose caches hold a window each; out goes one whose attention masks do the sliding alone. Runtimes
that allocate the caches themselves, all of one length, need it. What it returns is confirmed with the model, at the
recorded calls and at lengths before and past each window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from exportkit.arguments.build import build_call
from exportkit.calls.call import Call
from exportkit.errors import ExportError
from exportkit.folder.genai import window_limits
from exportkit.probing.planning import plan_calls
from exportkit.programs.exported import Exported
from exportkit.programs.make import one_graph
from exportkit.running.compare import outputs_close
from exportkit.running.eager import run_eager
from exportkit.trees import Tree, flatten, is_cache_class, make_dynamic_cache


def with_full_caches(exported: Exported) -> Exported:
    """Returns the model exported again, with caches that hold every token.

    Raises:
        ExportError: if the model returns something else with such caches.
    """
    calls = [_full_call(exported, index) for index in range(len(exported.observation.calls))]
    for sizes in _sizes_around_windows(exported):
        arguments = build_call(exported.plan, exported.observation, sizes)
        _rerun(exported, arguments, flatten(run_eager(exported.model, exported.method, arguments)), f"sizes {sizes}")
    observation = replace(exported.observation, calls=tuple(calls), further=())
    return one_graph(exported.model, exported.method, plan_calls(observation, exported.model, exported.method))


def _full_call(exported: Exported, index: int) -> Call:
    call = exported.observation.calls[index]
    trees, outputs = _rerun(exported, call, call.outputs, f"recorded call {index}")
    return replace(call, arguments=trees, outputs=outputs)


def _rerun(exported: Exported, arguments: Call, expected: Tree, where: str) -> tuple[Mapping[str, Tree], Tree]:
    """Arguments with full caches and what the model returns for them, once that is seen to be the same."""
    trees = {name: flatten(_full(value)) for name, value in arguments.values().items()}
    full = Call(trees, arguments.signature)
    outputs = flatten(run_eager(exported.model, exported.method, full))
    if not outputs_close(expected.tensors(), _cut(outputs, expected)):
        raise ExportError(
            "With caches that hold every token the model returns something else than with sliding windows.",
            where=where,
            hint='save without runtime="genai": the caches then hold what the model keeps.',
        )
    return trees, outputs


def _full(value: Any) -> Any:
    """A cache whose layers hold every token: those before a window are never read, so zeros stand for them."""
    if not is_cache_class(type(value)):
        return value
    pairs = [(_padded(layer, layer.keys), _padded(layer, layer.values)) for layer in value.layers if _is_filled(layer)]
    return make_dynamic_cache(pairs)


def _is_filled(layer: Any) -> bool:
    return isinstance(layer.keys, torch.Tensor)


def _padded(layer: Any, states: torch.Tensor) -> torch.Tensor:
    gone = getattr(layer, "cumulative_length", states.shape[2]) - states.shape[2]
    return torch.nn.functional.pad(states, (0, 0, gone, 0)) if gone > 0 else states


def _cut(outputs: Tree, expected: Tree) -> dict[str, torch.Tensor]:
    """The outputs with as many tokens in each cache as were expected, the last ones."""
    found = outputs.tensors()
    for path, growth in expected.growing.items():
        length = expected.tensors()[path].shape[growth.axis]
        whole = found[path]
        found[path] = whole.narrow(growth.axis, whole.shape[growth.axis] - length, length)
    return found


def _sizes_around_windows(exported: Exported) -> list[dict[str, int]]:
    """Sizes of the variables with fewer tokens in the cache than each window holds, and with more.

    Where every layer has a window, the sizes do not show more; then the recorded calls do, if they went that far.
    """
    past = exported.plan.with_role("past")
    if past is None:
        return []
    limits = sorted(window_limits(exported))
    lengths = [length for limit in limits for length in (limit - 1, limit, limit + 3)]
    most = max(lengths, default=0) if past.maximum is None else past.maximum
    return [{**exported.sizes, past.name: length} for length in lengths if length <= most]
