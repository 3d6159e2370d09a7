"""Models that also return what modules inside them return: hidden states, attentions, or anything else.

In come a model, its recorded calls, and what to capture; out come a model with these values in its result, and the
calls as they would have been made to that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from exportkit.arguments import replayed
from exportkit.capture import with_captured
from exportkit.observe import Observation

RESULT = "result"


class WithOutputs(torch.nn.Module):
    """A model whose result has captured values under their keys; a result that is no mapping is under ``result``.

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
        returned = result if isinstance(result, dict) else {RESULT: result}
        for key, values in captured.items():
            returned[key] = values
        return returned


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
