"""One call with what its modules return. In come matches and a call; out come its result and the values by key."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from exportkit import _torch_compat
from exportkit.module_outputs.attention import EAGER, fused_configs
from exportkit.module_outputs.collector import Collector, begins_with_input
from exportkit.module_outputs.record import Record, Selection, first_input, pick
from exportkit.module_outputs.specs import FIRST_INPUT_KEY, Match, keys_of, matches_of, require_matches, targets_of


def with_captured(
    model: torch.nn.Module, specs: Mapping[str, Any], method: str = "forward"
) -> Callable[..., tuple[Any, dict[str, tuple[Any, ...]]]]:
    """Returns a function like ``model.forward`` whose result is ``(result, {key: values})``.

    It can be called inside a module that torch.export traces: the values become outputs of the graph.

    Args:
        model: The model, or the part of one.
        specs: What to record under each key; see `capture`.
        method: The method to call.

    Raises:
        InvalidRequestError: if a spec matches no module.
    """
    targets = targets_of(specs)
    require_matches(model, targets, matches_of(model, targets))
    call = getattr(model, method)

    @functools.wraps(call)
    def captured_call(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, tuple[Any, ...]]]:
        matches = matches_of(model, targets)
        return run_captured(model, matches, keys_of(targets), lambda: call(*args, **kwargs))

    return captured_call


def run_captured(
    model: torch.nn.Module,
    matches: Sequence[Match],
    keys: Iterable[str],
    call: Callable[[], Any],
    selections: Mapping[str, Selection] | None = None,
) -> tuple[Any, dict[str, tuple[Any, ...]]]:
    """Returns ``call()`` and what the matched modules returned in it."""
    if torch.compiler.is_dynamo_compiling():
        return _run_in_trace(model, matches, Record(keys, selections), call)
    with Collector(model, matches, keys, selections, one_call=True) as collector:
        result = call()
    values = collector.outside.values()
    collector.warn_of_unclaimed(values)
    return result, values


def _run_in_trace(
    model: torch.nn.Module, matches: Sequence[Match], record: Record, call: Callable[[], Any]
) -> tuple[Any, dict[str, tuple[Any, ...]]]:
    """The same for dynamo, which traces one thread, and neither context variables nor registrations of hooks."""
    configs: list[tuple[Any, Any]] = [
        (config, _torch_compat.attention_implementation(config)) for config in fused_configs(model, matches)
    ]
    for config, _ in configs:
        _torch_compat.set_attention_implementation(config, EAGER)
    tables = []
    for match in matches:
        before, after = _hooks_in_trace(record, match)
        tables.append(_torch_compat.put_hooks_in_trace(match.module, before, after))
    try:
        result = call()
    finally:
        for match, table in zip(reversed(matches), reversed(tables), strict=True):
            _torch_compat.take_hooks_in_trace(match.module, table)
        for config, implementation in configs:
            _torch_compat.set_attention_implementation(config, implementation)
    return result, record.values()


def _hooks_in_trace(record: Record, match: Match) -> tuple[Callable[..., None], Callable[..., None]]:
    initial = begins_with_input(match)

    def before(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if initial and record.is_empty(FIRST_INPUT_KEY):
            record.add(match, first_input(args, kwargs))

    def after(_module: torch.nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], output: Any) -> None:
        record.add(match, pick(output, match))

    return before, after
