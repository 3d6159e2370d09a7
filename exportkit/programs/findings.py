"""What a person should know of an export, beside its plan: findings, for its report.

In comes an `Exported`; out go `Finding`s. Those about its sizes are in audit.py, those about its outputs in effects.py.
"""

from __future__ import annotations

import torch

from exportkit.overrides import replaced_classes
from exportkit.plan.leaves import Finding
from exportkit.probing.missing import MissingDefaults
from exportkit.programs.exported import Exported
from exportkit.programs.module_state import STATE, WithState


def findings_of(exported: Exported) -> list[Finding]:
    """Returns the findings on the rewrites in force, on missing inputs, and on the mode and the state of the model."""
    fills, model = exported.fills, exported.model
    return [*rule_findings(exported), *_fill_findings(fills), *_mode_findings(model), *_state_findings(model)]


def rule_findings(exported: Exported) -> list[Finding]:
    """Returns what a person should know of the rewrites that were in force, and of classes that were replaced."""
    swaps = [
        f"{original.__name__} replaced by {replacement.__name__} ({count} module{'s' if count > 1 else ''})"
        for original, replacement, count in replaced_classes(exported.model)
    ]
    rewrites = ", ".join((*exported.captured.rules, *swaps))
    return [Finding("exported with", rewrites, f"exported with: {rewrites}.")] if rewrites else []


def _mode_findings(model: torch.nn.Module) -> list[Finding]:
    if not model.training:
        return []
    text = "the model is in training mode: dropout and batch statistics differ from call to call; model.eval() first."
    return [Finding("training mode", "", text)]


def _state_findings(model: torch.nn.Module) -> list[Finding]:
    if not isinstance(model, WithState):
        return []
    text = f"the model keeps its state on its modules; the graph takes it as {STATE} and returns it."
    return [Finding("module state", STATE, text)]


def _fill_findings(fills: MissingDefaults) -> list[Finding]:
    if not fills.unproven:
        return []
    calls = ", ".join(map(str, fills.unproven))
    text = f"calls {calls} lack inputs for which no stand-in gives the same result; the graph does not serve them."
    return [Finding("missing input", f"calls {calls}", text)]
