"""A plan as text: a table for people, the reason for one axis, Python code to paste, and JSON."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from exportkit.errors import PlanError, described
from exportkit.json_data import InvalidDataError, as_tuples, parse_json, read
from exportkit.plan.leaves import Constant, Finding, PlannedLeaf, Variable, known, listed
from exportkit.plan.placeholders import Grids, Marker, Placeholder
from exportkit.plan.tables import aligned, first_of, html_lines, html_of, html_table

_FORMAT = "exportkit-plan"
_VERSION = 1
_LISTS = {
    "leaves": PlannedLeaf,
    "variables": Variable,
    "constants": Constant,
    "findings": Finding,
    "placeholders": Placeholder,
    "grids": Grids,
    "markers": Marker,
}
_HEADER = "import torch\n\nDYNAMIC = torch.export.Dim.DYNAMIC\n"


def plan_table(leaves: Sequence[PlannedLeaf], variables: Sequence[Variable], findings: Sequence[Finding]) -> str:
    """Returns a row for each input (alike ones together), the variables and their evidence, and the findings."""
    lines = aligned(_input_rows(leaves))
    if variables:
        lines += ["", *aligned(_variable_rows(variables))]
    if findings:
        lines += ["", *(f"note: {finding.text}" for finding in findings)]
    return "\n".join(lines)


def plan_html(leaves: Sequence[PlannedLeaf], variables: Sequence[Variable], findings: Sequence[Finding]) -> str:
    """Returns the same as `plan_table`, as HTML for notebooks."""
    evidence = html_table(_variable_rows(variables)) if variables else ""
    return html_of(html_table(_input_rows(leaves)), evidence, html_lines([finding.text for finding in findings]))


def _input_rows(leaves: Sequence[PlannedLeaf]) -> list[tuple[str, ...]]:
    rows = [("input", "type", "shape", "seen")]
    for label, leaf in alike_leaves(leaves):
        rows.append((label, leaf.dtype, f"({', '.join(map(str, leaf.sizes))})", seen_shapes(leaf)))
    return [*rows]


def _variable_rows(variables: Sequence[Variable]) -> list[tuple[str, ...]]:
    return [("variable", "evidence"), *((variable.name, variable.evidence) for variable in variables)]


def alike_leaves(leaves: Sequence[PlannedLeaf]) -> list[tuple[str, PlannedLeaf]]:
    """Returns one input for all that are alike, such as the layers of a cache, each with a label that says how many."""
    groups: dict[object, list[PlannedLeaf]] = {}
    for leaf in leaves:
        groups.setdefault((leaf.argument, leaf.dtype, leaf.sizes, leaf.shapes), []).append(leaf)
    return [(f"{g[0].path} and {len(g) - 1} alike" if len(g) > 1 else g[0].path, g[0]) for g in groups.values()]


def seen_shapes(leaf: PlannedLeaf) -> str:
    """Returns the shapes that an input had in the recorded calls, each once."""
    shapes = ["absent" if shape is None else "x".join(map(str, shape)) or "scalar" for shape in leaf.shapes]
    return " ".join(dict.fromkeys(shapes))


def explain_axis(leaf: PlannedLeaf, axis: int, leaves: Sequence[PlannedLeaf], variables: Sequence[Variable]) -> str:
    """Returns what a plan knows of one axis of an input.

    Args:
        leaf: The input.
        axis: The axis.
        leaves: All inputs of the plan.
        variables: Its variables.
    """
    size, seen, by_name = leaf.sizes[axis], leaf.seen(axis), {variable.name: variable for variable in variables}
    where = f"Axis {axis} of {leaf.path}"
    if size.is_static:
        count = sum(one is not None for one in seen)
        return f"{where} is static, {size}. It was {size} in every call that had it ({count} of {len(seen)})."
    if size.variable is None:
        parts = [f"{name} was {listed(by_name[name].seen)}" for name, _ in size.terms]
        return f"{where} is {size}. It was {listed(seen)} in the calls, where {' and '.join(parts)}."
    variable = by_name[size.variable]
    shared, used = [], []
    for other in leaves:
        for i, expression in enumerate(other.sizes):
            if expression == size and (other.path, i) != (leaf.path, axis):
                shared.append(f"axis {i} of {other.path}")
            elif expression.variable is None and variable.name in expression.variables():
                used.append(f"axis {i} of {other.path}")
    sentences = [f"{where} is the variable {variable.name}.", f"It was {listed(seen)} in the calls."]
    sentences.append(f"Evidence: {variable.evidence}.")
    if shared:
        sentences.append(f"Shared with {first_of(shared, 3)}.")
    if used:
        sentences.append(f"Part of the size of {first_of(used, 3)}.")
    if variable.minimum or variable.maximum is not None:
        most = "any" if variable.maximum is None else variable.maximum
        sentences.append(f"Allowed sizes: {variable.minimum} to {most}.")
    return " ".join(sentences)


def plan_source(structure: Mapping[str, Any], leaves: Mapping[str, PlannedLeaf], variables: Sequence[Variable]) -> str:
    """Returns code that defines ``dynamic_shapes`` and ``named_dynamic_shapes``.

    Both are for calls by name: ``torch.export.export(model, (), kwargs=..., dynamic_shapes=dynamic_shapes)`` and
    ``torch.onnx.export(model, (), kwargs=..., dynamic_shapes=named_dynamic_shapes)``.
    """
    names = ", ".join(variable.name for variable in variables) or "none"
    parts = [_HEADER, f"# Sizes that vary: {names}.\n"]
    for target, is_named in (("dynamic_shapes", False), ("named_dynamic_shapes", True)):
        lines = [f"    {argument!r}: {_code(value, leaves, is_named)},\n" for argument, value in structure.items()]
        parts.append(f"{target} = {{\n{''.join(lines)}}}\n")
    return "".join(parts)


def _code(value: Any, leaves: Mapping[str, PlannedLeaf], is_named: bool) -> str:
    """The dynamic shapes of one value as code; sizes have names, or are all ``DYNAMIC``."""
    if value is None:
        return "None"
    if isinstance(value, str):
        sizes = enumerate(leaves[value].sizes)
        axes = [f"{i}: {repr(str(size)) if is_named else 'DYNAMIC'}" for i, size in sizes if not size.is_static]
        return f"{{{', '.join(axes)}}}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_code(item, leaves, is_named)}" for key, item in value.items()) + "}"
    items = [_code(item, leaves, is_named) for item in value]
    if isinstance(value, tuple):
        return "(" + ", ".join(items) + ("," if len(items) == 1 else "") + ")"
    if len(items) > 1 and len(set(items)) == 1:
        return f"[{items[0]}] * {len(items)}"
    return "[" + ", ".join(items) + "]"


def dump_plan(fields: Mapping[str, Any]) -> str:
    """Returns JSON text for the fields of a plan."""
    data: dict[str, Any] = {"format": _FORMAT, "version": _VERSION}
    for name in _LISTS:
        data[name] = [dict(vars(item)) for item in fields[name]]
    for leaf in data["leaves"]:
        leaf["sizes"] = [size.to_json() for size in leaf["sizes"]]
    for constant in data["constants"]:
        constant["value"] = _plain(constant["value"])
    for name in ("joined", "unused"):
        data[name] = list(fields[name])
    data["echoes"] = dict(fields["passed_through"])  # the name under which version 1 keeps them
    data["structure"] = {name: _tagged(value) for name, value in fields["structure"].items()}
    return json.dumps(data, indent=1, allow_nan=False)


def _plain(value: Any) -> Any:
    """A value as it is if JSON can hold it, otherwise its repr."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def load_plan(text: str) -> dict[str, Any]:
    """Returns the fields of the plan that `dump_plan` wrote.

    Raises:
        PlanError: if the text is not such a plan.
    """
    try:
        data = parse_json(text)
    except (TypeError, ValueError) as error:
        raise PlanError("Not a plan: the text is not valid JSON.", got=str(error)) from error
    if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (_FORMAT, _VERSION):
        found = f"{data.get('format')} {data.get('version')}" if isinstance(data, dict) else type(data).__name__
        raise PlanError("Unsupported plan format.", expected=f"{_FORMAT} {_VERSION}", got=found)
    try:
        plan: dict[str, Any] = {name: read(tuple[kind, ...], data[name]) for name, kind in _LISTS.items()}  # type: ignore[valid-type]
        plan["constants"] = tuple(replace(c, fingerprint=as_tuples(c.fingerprint)) for c in plan["constants"])
        plan |= {name: read(tuple[str, ...], data[name]) for name in ("joined", "unused")}
        plan["passed_through"] = read(Mapping[str, str], data["echoes"])
        plan["structure"] = {name: _untagged(value) for name, value in data["structure"].items()}
        _require_consistent(plan)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise PlanError("This plan is damaged.", got=described(error)) from error
    return plan


def _require_consistent(plan: Mapping[str, Any]) -> None:
    """Raises InvalidDataError where parts of a plan contradict each other, such as a size of an unknown variable."""
    leaves: dict[str, PlannedLeaf] = {leaf.path: leaf for leaf in plan["leaves"]}
    variables: dict[str, Variable] = {variable.name: variable for variable in plan["variables"]}
    if len(leaves) < len(plan["leaves"]) or len(variables) < len(plan["variables"]):
        raise InvalidDataError("each input and each variable once", ", ".join([*leaves, *variables]))
    seen = {len(leaf.shapes) for leaf in leaves.values()} | {len(variable.seen) for variable in variables.values()}
    if len(seen) > 1:
        raise InvalidDataError("sizes for the same number of calls everywhere", sorted(seen))
    for path, leaf in leaves.items():
        ranks = {len(shape) for shape in leaf.shapes if shape is not None} | {len(leaf.sizes)}
        if len(ranks) > 1 or (leaf.growing is not None and leaf.growing >= len(leaf.sizes)):
            raise InvalidDataError("shapes of one rank", sorted(ranks), path)
        unknown = {name for size in leaf.sizes for name in size.variables()} - variables.keys()
        if unknown:
            raise InvalidDataError(f"sizes over {', '.join(variables)}", ", ".join(sorted(unknown)), path)
        if any(size.is_static and size.constant < 0 for size in leaf.sizes):
            raise InvalidDataError("sizes of at least 0", ", ".join(map(str, leaf.sizes)), path)
    for name, variable in variables.items():
        most = math.inf if variable.maximum is None else variable.maximum
        if any(not variable.minimum <= size <= most for size in known(variable.seen)):
            raise InvalidDataError(f"sizes from {variable.minimum} to {most}", listed(variable.seen), name)
        if variable.follows is not None and variable.follows not in variables:
            raise InvalidDataError(f"one of {', '.join(variables)}", variable.follows, name)
    mentioned = [path for item in plan["placeholders"] for path in (item.tokens, item.rows)]
    mentioned += [path for item in plan["grids"] for path in (item.path, item.rows) if item.examples]
    mentioned += [path for item in plan["markers"] for path in (item.path, item.tokens)]
    scalar = [path for path in mentioned if path not in leaves or not leaves[path].sizes]
    if scalar or not all(grid.examples for grid in plan["grids"]):
        raise InvalidDataError("inputs of the plan that have axes, and examples of grids", ", ".join(scalar) or "none")
    _require_leaves(plan["structure"], leaves)


def _require_leaves(value: Any, leaves: Mapping[str, PlannedLeaf]) -> None:
    """Raises InvalidDataError if a structure holds anything but containers, paths of inputs, and None."""
    if isinstance(value, dict | list | tuple | deque):
        for item in value.values() if isinstance(value, dict) else value:
            _require_leaves(item, leaves)
    elif value is not None and value not in leaves:
        raise InvalidDataError("a path of an input, or null", value)


def _tagged(value: Any) -> Any:
    """Lists as they are; others with a tag, as JSON has only one kind of list, and keys that are strings.

    Keys are shown in code, and nothing else, so a repr serves where JSON cannot hold one.
    """
    if isinstance(value, tuple | deque):
        return {"tuple" if isinstance(value, tuple) else "deque": [_tagged(item) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_plain(key), _tagged(item)] for key, item in value.items()]}
    return [_tagged(item) for item in value] if isinstance(value, list) else value


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if "tuple" in value:
        return tuple(_untagged(item) for item in value["tuple"])
    if "deque" in value:
        return deque(_untagged(item) for item in value["deque"])
    return {key: _untagged(item) for key, item in value["dict"]}
