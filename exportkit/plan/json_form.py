"""A plan as JSON and back: everything but the recorded calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from exportkit.errors import PlanError
from exportkit.plan.expression import Expression
from exportkit.plan.placeholder import Grids, Marker, Placeholder
from exportkit.plan.plan import Constant, Finding, Plan, PlannedLeaf, Variable

_FORMAT = "exportkit-plan"
_VERSION = 1


def dump_plan(plan: Plan) -> str:
    """Returns the plan as JSON text."""
    data = {
        "format": _FORMAT,
        "version": _VERSION,
        "variables": [_fields(variable) for variable in plan.variables],
        "leaves": [_fields(leaf) | {"sizes": [size.to_json() for size in leaf.sizes]} for leaf in plan.leaves],
        "constants": [_fields(constant) | {"value": _plain(constant.value)} for constant in plan.constants],
        "findings": [_fields(finding) for finding in plan.findings],
        "placeholders": [_fields(placeholder) for placeholder in plan.placeholders],
        "grids": [_fields(grid) for grid in plan.grids],
        "markers": [_fields(marker) for marker in plan.markers],
        "joined": list(plan.joined),
        "unused": list(plan.unused),
        "echoes": dict(plan.echoes),
        "structure": {name: _tagged(value) for name, value in plan.structure.items()},
    }
    return json.dumps(data, indent=1)


def load_plan(text: str) -> Plan:
    """Returns the plan that `dump_plan` wrote.

    Raises:
        PlanError: if the text is no such plan.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError("This is no plan: it is no JSON.", got=str(error)) from error
    if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (_FORMAT, _VERSION):
        found = f"{data.get('format')} {data.get('version')}" if isinstance(data, dict) else type(data).__name__
        raise PlanError("This is no plan that this version reads.", expected=f"{_FORMAT} {_VERSION}", got=found)
    try:
        return Plan(
            tuple(_leaf(item) for item in data["leaves"]),
            tuple(Variable(**(item | {"seen": tuple(item["seen"])})) for item in data["variables"]),
            tuple(Constant(**item) for item in data["constants"]),
            tuple(Finding(**item) for item in data["findings"]),
            tuple(Placeholder(**item) for item in data["placeholders"]),
            tuple(data["joined"]),
            tuple(data["unused"]),
            dict(data["echoes"]),
            {name: _untagged(value) for name, value in data["structure"].items()},
            tuple(Grids(**(item | {"examples": tuple(map(tuple, item["examples"]))})) for item in data["grids"]),
            tuple(Marker(**item) for item in data["markers"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise PlanError("This plan is damaged.", got=f"{type(error).__name__}: {error}") from error


def _fields(value: Any) -> dict[str, Any]:
    return dict(vars(value))


def _leaf(item: Mapping[str, Any]) -> PlannedLeaf:
    shapes = tuple(None if shape is None else tuple(shape) for shape in item["shapes"])
    sizes = tuple(Expression.from_json(size) for size in item["sizes"])
    return PlannedLeaf(**{**item, "shapes": shapes, "sizes": sizes})


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def _tagged(value: Any) -> Any:
    """Lists as they are; tuples and dicts with a tag, as JSON has one kind of list, and keys that are strings."""
    if isinstance(value, tuple):
        return {"tuple": [_tagged(item) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[key, _tagged(item)] for key, item in value.items()]}
    return [_tagged(item) for item in value] if isinstance(value, list) else value


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if "tuple" in value:
        return tuple(_untagged(item) for item in value["tuple"])
    return {key: _untagged(item) for key, item in value["dict"]}
