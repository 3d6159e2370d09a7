"""Declarations of what can be captured, pointed at replacements.

In comes a model, whose declarations follow the registry; out comes what undoes that.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from exportkit.patching.attributes import replaced_attributes
from exportkit.patching.mapping import Entry, entries, entry_for

DECLARATION = "_can_record_outputs"


class PatchedRecorders(contextlib.AbstractContextManager["PatchedRecorders"]):
    """Changed declarations; `undo`, or leaving a ``with`` block, puts them back."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack

    def undo(self) -> None:
        """Puts the declarations back."""
        self._stack.close()

    def __exit__(self, *_error: object) -> None:
        self.undo()


def patch_output_recorders(model: torch.nn.Module) -> PatchedRecorders:
    """Returns what undoes this: the model's ``_can_record_outputs`` name registered replacements from now on.

    Only this model changes. Its class, and other models of that class, keep their declarations.

    Args:
        model: The model, whose modules may declare what can be captured.

    Example:
        >>> class Quiet(torch.nn.Linear):
        ...     pass
        >>> class Model(torch.nn.Sequential):
        ...     _can_record_outputs = {"hidden_states": torch.nn.Linear}
        >>> register_patch_mapping({"Linear": Quiet})
        >>> model = Model(Quiet(2, 2))
        >>> with patch_output_recorders(model):
        ...     print(model._can_record_outputs["hidden_states"].__name__)
        Quiet
        >>> clear_patch_mapping()
    """
    registered = entries()
    with contextlib.ExitStack() as stack:
        for module in model.modules() if registered else ():
            declared = getattr(module, DECLARATION, None)
            if declared:
                changed = {key: _patched(spec, registered) for key, spec in declared.items()}
                stack.enter_context(replaced_attributes(module, {DECLARATION: changed}))  # type: ignore[arg-type]
        return PatchedRecorders(stack.pop_all())


def _patched(spec: Any, registered: Sequence[Entry]) -> Any:
    if isinstance(spec, list | tuple):
        return [_patched(one, registered) for one in spec]
    if isinstance(spec, str | type):
        entry = _entry_for(spec, registered)
        return spec if entry is None else entry.replacement
    if dataclasses.is_dataclass(spec) and hasattr(spec, "target_class"):
        entry = _entry_for(spec.target_class or spec.class_name, registered)
        return spec if entry is None else dataclasses.replace(spec, target_class=entry.replacement)
    return spec


def _entry_for(target: Any, registered: Sequence[Entry]) -> Entry | None:
    if isinstance(target, type):
        return entry_for(registered, target)
    return next((entry for entry in registered if target and entry.means(target, target)), None)
