"""Models with a default way to run them: the three of the demo, and whatever a local checkpoint holds.

A `Case` goes in at the start of the line: `Case.observe` runs the model and returns the observer that saw it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from exportkit.calls.observer import InputObserver

__all__ = ["Case"]

_MOST_CALLS = 16  # more than any scenario makes: all of its calls are stored


@dataclass(frozen=True)
class Case:
    """A model and a run of it that is worth observing.

    Attributes:
        name: What the model is, in a few words.
        observed: What the run does, in a few words.
        model: The model, in evaluation mode.
        run: Runs it.
    """

    name: str
    observed: str
    model: torch.nn.Module
    run: Callable[[], object]

    def observe(self) -> InputObserver:
        """Returns an observer that has seen the run."""
        observer = InputObserver()
        with observer(self.model, store_n_calls=_MOST_CALLS), torch.no_grad():
            self.run()
        return observer
