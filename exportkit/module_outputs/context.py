"""Captures the outputs of modules inside a model: around a ``with`` block, or around a single call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from exportkit._torch_compat.modules import put_hooks_in_trace, take_hooks_in_trace, uncompiled
from exportkit._torch_compat.transformers import (
    attention_implementation,
    recordable_outputs,
    set_attention_implementation,
)
from exportkit.errors import CaptureError, InvalidRequestError, require_module
from exportkit.module_outputs.collector import EAGER, Calls, Collector, begins_with_input, fused_configs
from exportkit.module_outputs.record import (
    FIRST_INPUT_KEY,
    Match,
    Record,
    Selection,
    first_input,
    keys_of,
    matches_of,
    pick,
    require_matches,
    targets_of,
)


class Captured(Mapping[str, tuple[Any, ...]]):
    """Captured values by key, from the latest call of the model."""

    def __init__(self, keys: list[str], calls: Calls) -> None:
        self._keys = keys
        self._calls = calls

    @property
    def calls(self) -> list[dict[str, tuple[Any, ...]]]:
        """The values by key, for each call of the model, in the order in which the calls began.

        Values from outside of calls come first: from modules that were called directly, or by a method other than
        ``forward``. A compiled model has only the latest call.
        """
        return [record.values() for record in self._calls.records()]

    def __getitem__(self, key: str) -> tuple[Any, ...]:
        if key not in self._keys:
            raise KeyError(key)
        records = self._calls.records()
        if not records:
            raise CaptureError(
                f"Nothing was captured as {key!r}: none of the modules was called.",
                hint="call the model inside the `with` block. A function that was compiled before does not see "
                "the capture: compile it inside the block, or call torch.compiler.reset() first.",
            )
        return records[-1].values()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"Captured({', '.join(self._keys)}; calls: {len(self._calls.records())})"


@contextlib.contextmanager
def capture(model: torch.nn.Module, specs: Mapping[str, Any] | None = None) -> Iterator[Captured]:
    r"""Captures what modules inside a model return, inside a ``with`` block.

    Values are the tensors that the modules returned. Under the key ``hidden_states``, they begin with the input of the
    first module. Modules that share a key are recorded in the order in which they are called or, if they run in several
    threads, in the order of the model. If attention weights are captured, the model computes eager attention inside the
    block. Calls from threads and tasks that were started elsewhere are not affected.

    Args:
        model: Any module. It is unchanged after the block.
        specs: What to record under each key: a module class, the end of a module's path, a compiled regular expression
            for paths, an `OutputRecorder`, or a list of these. If a module has several outputs, a spec that is not an
            OutputRecorder takes the first output if the key contains ``hidden_states``, and the second one otherwise.
            None means what the class of the model declares as ``_can_record_outputs``.

    Raises:
        InvalidRequestError: if a spec matches no module.
        InvalidTypeError: if the model is not a module, or a spec is not valid.
        CaptureError: raised by the call, if a module has no such output.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> with capture(model, {"hidden_states": torch.nn.Linear, "activations": "1"}) as captured:
        ...     _ = model(torch.ones(5, 4))
        >>> [tuple(state.shape) for state in captured["hidden_states"]]
        [(5, 4), (5, 3), (5, 2)]
    """
    require_module(model, "captured")
    targets = targets_of(_specs_of(model) if specs is None else specs)
    model = uncompiled(model)  # the hooks of a compiled model are on the original model
    matches = matches_of(model, targets)
    require_matches(model, targets, matches)
    keys = keys_of(targets)
    collector = Collector(model, matches, keys)
    calls = Calls(collector)
    with contextlib.ExitStack() as stack:
        stack.callback(calls.hook_begin().remove)
        stack.enter_context(collector)
        stack.callback(calls.hook_end().remove)
        yield Captured(keys, calls)


def _specs_of(model: torch.nn.Module) -> Mapping[str, Any]:
    declared = recordable_outputs(model)
    if not declared:
        raise InvalidRequestError(
            f"{type(model).__name__} does not declare what can be captured.",
            expected="`_can_record_outputs` on its class, or specs",
            hint='say what to capture: capture(model, {"hidden_states": LayerClass}).',
        )
    return declared


def with_captured(
    model: torch.nn.Module, specs: Mapping[str, Any], method: str = "forward"
) -> Callable[..., tuple[Any, dict[str, tuple[Any, ...]]]]:
    """Returns a function like ``model.forward`` whose result is ``(result, {key: values})``.

    It can be called inside a module that torch.export traces; the values become outputs of the graph.

    Args:
        model: The model, or a part of one.
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
    """Returns the result of ``call()``, and what the matched modules returned during it."""
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
    """The same for dynamo, which traces one thread, and supports neither context variables nor registering hooks."""
    configs: list[tuple[Any, Any]] = [
        (config, attention_implementation(config)) for config in fused_configs(model, matches)
    ]
    for config, _ in configs:
        set_attention_implementation(config, EAGER)
    tables = []
    for match in matches:
        before, after = _hooks_in_trace(record, match)
        tables.append(put_hooks_in_trace(match.module, before, after))
    try:
        result = call()
    finally:
        for match, table in zip(reversed(matches), reversed(tables), strict=True):
            take_hooks_in_trace(match.module, table)
        for config, implementation in configs:
            set_attention_implementation(config, implementation)
    return result, record.values()


def _hooks_in_trace(record: Record, match: Match) -> tuple[Callable[..., None], Callable[..., None]]:
    initial = begins_with_input(match)

    def before(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if initial and record.is_empty(FIRST_INPUT_KEY):
            record.add(match, first_input(args, kwargs))

    def after(_module: torch.nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], output: Any) -> None:
        record.add(match, pick(output, match))

    return before, after
