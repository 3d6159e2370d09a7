"""Models that also return what modules inside them return: hidden states, attentions, or anything else.

In come a model, its recorded calls, and what to capture; out come a model with these values in its result, and the
calls as they would have been made to that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from exportkit.calls.observation import Observation
from exportkit.module_outputs.context import with_captured
from exportkit.running.eager import replayed

RESULT = "result"


class WithOutputs(torch.nn.Module):
    """A model whose result has captured values under their keys.

    A result that is no mapping is under ``result``; one of a class without such fields becomes a dict.

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


def _takes(result: Mapping[str, Any], keys: Iterable[str]) -> bool:
    """Whether a result has a place for these keys: outputs of transformers have fields, a plain dict takes any."""
    return not is_dataclass(result) or {*keys} <= {field.name for field in fields(result)}


def with_outputs(
    model: torch.nn.Module, method: str, observation: Observation, specs: Mapping[str, Any]
) -> tuple[WithOutputs, Observation]:
    """Returns the model with more outputs, and its calls with these, from running it again.

    Args:
        model: The model.
        method: The observed method.
        observation: Its calls.
        specs: What to capture under each key.

    Raises:
        InvalidRequestError: if a spec matches no module.
    """
    extended = WithOutputs(model, method, specs)
    return extended, replayed(replace(observation, has_values=False, method_name="forward"), extended, "forward")
