"""Declarations of what can be captured, pointed at replacements.

In comes a model, whose declarations follow the registry; out comes what undoes that.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from exportkit._torch_compat.transformers import RECORDABLE_OUTPUTS, recordable_outputs
from exportkit.swapping.mapping import Entry, entries, entry_for


class _Declaration(dict[str, Any]):
    """A changed declaration, which knows what the module itself had before."""

    def __init__(self, changed: dict[str, Any], before: Any) -> None:
        super().__init__(changed)
        self.before = before
        self.undone = False


class PatchedRecorders(contextlib.AbstractContextManager["PatchedRecorders"]):
    """Changed declarations; `undo`, or leaving a ``with`` block, puts them back."""

    def __init__(self, declarations: Sequence[tuple[torch.nn.Module, _Declaration]]) -> None:
        self._declarations = list(declarations)

    def undo(self) -> None:
        """Puts the declarations back; those that were changed again since, when that is undone."""
        for module, declaration in self._declarations:
            declaration.undone = True
            _drop_undone(module)
        self._declarations = []

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
    declarations = []
    for module in model.modules() if registered else ():
        declared = recordable_outputs(module)
        if declared:
            changed = {key: _patched(spec, registered) for key, spec in declared.items()}
            declaration = _Declaration(changed, vars(module).get(RECORDABLE_OUTPUTS))
            setattr(module, RECORDABLE_OUTPUTS, declaration)
            declarations.append((module, declaration))
    return PatchedRecorders(declarations)


def _drop_undone(module: torch.nn.Module) -> None:
    current = vars(module).get(RECORDABLE_OUTPUTS)
    while isinstance(current, _Declaration) and current.undone:
        current = current.before
        if current is None:
            delattr(module, RECORDABLE_OUTPUTS)
        else:
            setattr(module, RECORDABLE_OUTPUTS, current)


def _patched(spec: Any, registered: Sequence[Entry]) -> Any:
    if isinstance(spec, list | tuple):
        return [_patched(one, registered) for one in spec]
    if isinstance(spec, str | type):
        entry = _entry_for(spec, registered)
        return spec if entry is None else entry.replacement
    if not hasattr(spec, "target_class"):
        return spec
    entry = _entry_for(spec.target_class or spec.class_name, registered)
    return spec if entry is None else dataclasses.replace(spec, target_class=entry.replacement)


def _entry_for(target: Any, registered: Sequence[Entry]) -> Entry | None:
    if isinstance(target, type):
        return entry_for(registered, target)
    return next((entry for entry in registered if target and entry.means(target, target)), None)
