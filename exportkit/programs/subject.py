"""The model in the form that is exported: everything that a call does is part of its result.

A graph has no memory, so a state that a model keeps on its modules between calls becomes an argument and a result.
Arguments that the model changes in place become results. What modules inside the model return can be added to its
result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from exportkit._torch_compat.modules import has_hooks
from exportkit.calls.application import require_parameters
from exportkit.calls.observation import Observation
from exportkit.probing.effects import written_arguments
from exportkit.programs.kept_state import RESULT, WithEffects, with_module_state
from exportkit.programs.number_inputs import Numbers, with_numbers
from exportkit.running.compare import compare_outputs
from exportkit.running.eager import IN_TF32, replayed
from exportkit.trees import join


def exported_form(
    model: torch.nn.Module,
    observation: Observation,
    outputs: Mapping[str, Any],
    carries_state: bool = True,
    numbers: Numbers = MappingProxyType({}),
) -> tuple[torch.nn.Module, Observation]:
    """Returns the model in the form to export, and its calls as they would have been made to that.

    Args:
        model: The model, as the recorded calls left it.
        observation: Its calls.
        outputs: What modules inside the model return and the graph shall return too, by key.
        carries_state: Whether a state that the model keeps on its modules becomes an argument and a result.
        numbers: Python numbers that become inputs, with their types.

    Raises:
        InvalidRequestError: if ``outputs`` names modules that the model does not have, or the model does not take the
            arguments of the calls.
    """
    target = observation.method_name
    given = {name for call in observation.calls for name in call.names()}
    require_parameters(model, target, filter(given.__contains__, observation.signature.names), observation.model_name)
    if outputs:
        model, observation = with_outputs(model, observation.method_name, observation, outputs)
    method = observation.method_name
    written = written_arguments(observation, model, method)
    lost = [name for name, item in written.items() if item.place is None]
    hooked = method == "forward" and has_hooks(model)
    if numbers:
        model, observation = with_numbers(model, observation, numbers)
        method = "forward"
    stateful = with_module_state(model, method, observation, lost) if carries_state else None
    if stateful is not None:
        model, observation = stateful
    elif lost or (hooked and not numbers):
        model = WithEffects(model, observation, written=lost)
        observation = _made_again(observation, model, repeats=not hooked)  # what was recorded went through no hook
    if isinstance(model, WithEffects) and model.wraps:
        for name, item in written.items():
            written[name] = replace(item, place=name if item.place is None else join(RESULT, item.place))
    if hooked and (numbers or isinstance(model, WithEffects)):
        target = "__call__"
    return model, replace(observation, written=written, target=target)


class WithOutputs(torch.nn.Module):
    """A model whose result has captured values under their keys.

    A result that is not a mapping is under ``result``; one of a class without such fields becomes a dict.

    Args:
        model: The model.
        method: The method to call.
        specs: What to capture under each key, as `exportkit.capture` takes it.

    Raises:
        InvalidRequestError: if a spec matches no module.
    """

    def __init__(self, model: torch.nn.Module, method: str, specs: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        from exportkit.module_outputs.context import with_captured  # only where outputs are asked for

        self._call = with_captured(model, specs, method)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of the model with the captured values in it."""
        result, captured = self._call(*args, **kwargs)
        if not isinstance(result, dict):
            return {RESULT: result, **captured}
        if not _takes(result, captured):
            return {**result, **captured}
        for key, values in captured.items():
            result[key] = values
        return result


def _takes(result: Any, keys: Iterable[str]) -> bool:
    """Whether a result has a place for these keys: outputs of transformers have fields, a plain dict takes any key."""
    return not is_dataclass(result) or {*keys} <= {field.name for field in fields(result)}


def with_outputs(
    model: torch.nn.Module, method: str, observation: Observation, specs: Mapping[str, Any]
) -> tuple[WithOutputs, Observation]:
    """Returns the model with more outputs, and its calls with these outputs; the model runs again to get them.

    Args:
        model: The model.
        method: The observed method.
        observation: Its calls.
        specs: What to capture under each key.

    Raises:
        InvalidRequestError: if a spec matches no module.
    """
    extended = WithOutputs(model, method, specs)
    return extended, _made_again(observation, extended)


def _made_again(observation: Observation, model: torch.nn.Module, repeats: bool = True) -> Observation:
    """The calls as they are made to another form of the model; what it should repeat stays if it does not."""
    again = replayed(replace(observation, has_values=False, method_name="forward"), model, "forward")
    calls = []
    for call, other in zip(observation.calls, again.calls, strict=True):
        made = other.outputs.tensors() if observation.has_values and repeats else {}
        outputs = call.outputs.tensors().items()
        recorded = {p: t for path, t in outputs for p in (path, join(RESULT, path)) if p in made}
        found = compare_outputs(recorded, {path: made[path] for path in recorded}, bound=IN_TF32)
        kept = {item.path: recorded[item.path] for item in found if item.reason is not None}
        calls.append(replace(other, outputs=other.outputs.with_leaves(kept)) if kept else other)
    return replace(again, calls=tuple(calls))
