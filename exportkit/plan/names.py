"""Names the variables of a plan with the field's standard terms, from where they stand in the inputs."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

from exportkit.plan.plan import Plan, PlannedLeaf, Role, Variable

_IMAGE_RANK, _IMAGE_CHANNELS = 4, (1, 3, 4)
_TOKENS_RANK = 2
_SUFFIXES = re.compile(r"_(ids|mask|values|features|embeds|states)$")


def name_variables(plan: Plan) -> Plan:
    """Returns the plan with each variable named ``batch``, ``sequence``, ``past_sequence``, ... and its role set."""
    batch = _batch(plan)
    names: dict[str, str] = {}
    roles: dict[str, Role] = {}
    for variable in plan.variables:
        taken = set(names.values())
        name, role = ("batch", "batch") if variable.name == batch else _name_and_role(plan, variable, taken)
        unique = next(n for n in (name, *(f"{name}_{i}" for i in range(2, 1000))) if n not in taken)
        names[variable.name], roles[variable.name] = unique, role  # type: ignore[assignment]
    leaves = tuple(replace(leaf, sizes=tuple(size.renamed(names) for size in leaf.sizes)) for leaf in plan.leaves)
    variables = tuple(
        replace(v, name=names[v.name], role=roles[v.name], follows=names.get(v.follows or "")) for v in plan.variables
    )
    return replace(plan, leaves=leaves, variables=variables)


def _batch(plan: Plan) -> str | None:
    """The variable that leads the caches, else the one that leads most leaves; None if that is a length of tokens."""
    rows = {placeholder.rows for placeholder in plan.placeholders} | {p for g in plan.grids for p in (g.path, g.rows)}
    free = [leaf for leaf in plan.leaves if leaf.sizes and leaf.path not in rows]
    leading = [leaf for leaf in free if leaf.sizes[0].variable is not None]
    caches = [leaf for leaf in leading if leaf.growing is not None]
    counts = Counter(leaf.sizes[0].variable for leaf in caches or leading)
    best = counts.most_common(1)
    if not best:
        return None
    name = best[0][0]
    ranks = {len(leaf.sizes) for leaf in leading if leaf.sizes[0].variable == name}
    return name if max(ranks) > 1 else None


def _name_and_role(plan: Plan, variable: Variable, taken: set[str]) -> tuple[str, Role]:
    leaves = [(leaf, axis) for path, axis in plan.axes_of(variable.name) for leaf in (plan.by_path[path],)]
    if not leaves and variable.role == "past":  # it only follows from others: every cache has a window
        return "past_sequence", "past"
    for grid in plan.grids:
        if (plan.by_path[grid.path], 0) in leaves:
            return f"{_stem(grid.path)}s", "other"
        if (plan.by_path[grid.rows], 0) in leaves:
            return f"{_stem(grid.path)}_patches", "other"
    rows = {placeholder.rows for placeholder in plan.placeholders}
    if any(leaf.path in rows and axis == 0 for leaf, axis in leaves):
        return _rows_name(next(leaf for leaf, axis in leaves if leaf.path in rows and axis == 0)), "other"
    if any(leaf.growing == axis for leaf, axis in leaves):
        crossing = all(".cross_attention_cache." in leaf.path for leaf, axis in leaves if leaf.growing == axis)
        return ("past_encoder_sequence", "other") if crossing else ("past_sequence", "past")
    past = {v.name for v in plan.variables if v.role == "past"}
    sums = [size for leaf in plan.leaves for size in leaf.sizes if len(size.terms) > 1]
    if any(variable.name in size.variables() and size.variables() & past for size in sums):
        return "sequence", "sequence"
    tokens = [leaf for leaf, axis in leaves if axis == 1 and len(leaf.sizes) == _TOKENS_RANK and _is_integer(leaf)]
    if tokens:
        return _token_name(tokens[0], taken)
    if any(other.follows == variable.name for other in plan.variables):
        return "encoder_sequence", "other"
    leaf, axis = leaves[0] if leaves else (plan.leaves[0], 0)
    if _is_image(leaf) and axis >= _IMAGE_RANK - 2:
        return ("height", "width")[axis - 2], "other"
    return f"{_identifier(leaf.path)}_axis_{axis}", "other"


def _stem(path: str) -> str:
    """``image`` for ``image_grid_thw``."""
    return _identifier(path).partition("_grid")[0].partition("_size")[0] or "image"


def _rows_name(leaf: PlannedLeaf) -> str:
    """Rows of images are ``images``; rows in ``mm_encoder_outputs.image.pooler_output[0]`` are ``image_rows``."""
    if _is_image(leaf):
        return "images"
    steps = leaf.path.split(".")
    return f"{_identifier(steps[1] if len(steps) > 2 else _SUFFIXES.sub('', leaf.argument).removesuffix('s'))}_rows"


def _token_name(leaf: PlannedLeaf, taken: set[str]) -> tuple[str, Role]:
    """The first length of tokens is ``sequence``; further ones are ``decoder_sequence`` and the like."""
    if "sequence" not in taken:
        return "sequence", "sequence"
    stem = _SUFFIXES.sub("", leaf.argument).removesuffix("_input").removesuffix("_attention")
    return f"{_identifier(stem)}_sequence", "sequence"


def _is_integer(leaf: PlannedLeaf) -> bool:
    return leaf.dtype == "bool" or "int" in leaf.dtype


def _is_image(leaf: PlannedLeaf) -> bool:
    channels = leaf.sizes[1] if len(leaf.sizes) == _IMAGE_RANK else None
    return channels is not None and channels.is_static and channels.constant in _IMAGE_CHANNELS


def _identifier(path: str) -> str:
    return re.sub(r"\W+", "_", path).strip("_")
