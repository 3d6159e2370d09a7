"""A plan as Python code to paste: dynamic shapes for torch.export, and the same with names for torch.onnx."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from exportkit.plan.plan import Plan, PlannedLeaf

_HEADER = "import torch\n\nDYNAMIC = torch.export.Dim.DYNAMIC\n"


def plan_source(plan: Plan) -> str:
    """Returns code that defines ``dynamic_shapes`` and ``named_dynamic_shapes``.

    Both are for calls by name: ``torch.export.export(model, (), kwargs=..., dynamic_shapes=dynamic_shapes)`` and
    ``torch.onnx.export(model, (), kwargs=..., dynamic_shapes=named_dynamic_shapes)``.
    """
    variables = ", ".join(variable.name for variable in plan.variables) or "none"
    parts = [_HEADER, f"# Sizes that vary: {variables}.\n"]
    parts += [_assignment("dynamic_shapes", plan, lambda _leaf, _axis: "DYNAMIC")]
    parts += [_assignment("named_dynamic_shapes", plan, lambda leaf, axis: repr(str(leaf.sizes[axis])))]
    return "".join(parts)


def _assignment(name: str, plan: Plan, mark: Callable[[PlannedLeaf, int], str]) -> str:
    items = {argument: _render(value, plan, mark) for argument, value in plan.structure.items()}
    return f"{name} = {_lines(items)}\n"


def _lines(items: Mapping[str, str]) -> str:
    return "{\n" + "".join(f"    {key!r}: {text},\n" for key, text in items.items()) + "}"


def _render(value: Any, plan: Plan, mark: Callable[[PlannedLeaf, int], str]) -> str:
    if value is None:
        return "None"
    if isinstance(value, str):
        leaf = plan.by_path[value]
        axes = [axis for axis, size in enumerate(leaf.sizes) if not size.is_static]
        return "{" + ", ".join(f"{axis}: {mark(leaf, axis)}" for axis in axes) + "}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_render(item, plan, mark)}" for key, item in value.items()) + "}"
    items = [_render(item, plan, mark) for item in value]
    if isinstance(value, tuple):
        return "(" + ", ".join(items) + ("," if len(items) == 1 else "") + ")"
    if len(items) > 1 and len(set(items)) == 1:
        return f"[{items[0]}] * {len(items)}"
    return "[" + ", ".join(items) + "]"
