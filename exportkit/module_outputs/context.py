"""Capturing for models that one cannot edit. In come a model and specs; out come values by key, call by call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from exportkit.errors import CaptureError, InvalidRequestError, InvalidTypeError
from exportkit.module_outputs.collector import Calls, Collector
from exportkit.module_outputs.specs import keys_of, matches_of, require_matches, targets_of


class Captured(Mapping[str, tuple[Any, ...]]):
    """What was captured: values by key, those of the latest call of the model."""

    def __init__(self, keys: list[str], calls: Calls) -> None:
        self._keys = keys
        self._calls = calls

    @property
    def calls(self) -> list[dict[str, tuple[Any, ...]]]:
        """The values by key, for each call of the model, in the order in which the calls began.

        Values from outside of calls come first: of modules that were called by themselves, or of another method than
        ``forward``. Of a compiled model there is the latest call only.
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
    r"""Captures what modules inside a model return, for the time of a ``with`` block.

    Values are the tensors that the modules returned. Under the key ``hidden_states`` they begin with the input of the
    first module. Modules that share a key are recorded as they are called; those of one call that run in several
    threads, in the order of the model. Attention weights are there whatever attention the model computes: in the block
    it computes the eager one. Calls from threads and tasks that were started elsewhere are left alone.

    Args:
        model: Any module. It is as before afterwards.
        specs: What to record under each key: a module class, the end of a module's path, a compiled regular expression
            for paths, an `OutputRecorder`, or a list of those. Of modules with several outputs, a spec that is no
            OutputRecorder takes the first if the key has ``hidden_states`` in it, and the second otherwise. If None,
            what the model's class declares as ``_can_record_outputs``.

    Raises:
        InvalidRequestError: if a spec matches no module.
        InvalidTypeError: if something is no module, or no spec.
        CaptureError: by the call, if a module has no such output.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> with capture(model, {"hidden_states": torch.nn.Linear, "activations": "1"}) as captured:
        ...     _ = model(torch.ones(5, 4))
        >>> [tuple(state.shape) for state in captured["hidden_states"]]
        [(5, 4), (5, 3), (5, 2)]
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidTypeError("Only modules can be captured.", expected="torch.nn.Module", got=type(model).__name__)
    targets = targets_of(_specs_of(model) if specs is None else specs)
    model = getattr(model, "_orig_mod", model)  # a compiled model has its hooks on the model itself
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
    declared: Mapping[str, Any] | None = getattr(model, "_can_record_outputs", None)
    if not declared:
        raise InvalidRequestError(
            f"{type(model).__name__} does not declare what can be captured.",
            expected="`_can_record_outputs` on its class, or specs",
            hint='say what to capture: capture(model, {"hidden_states": LayerClass}).',
        )
    return declared
