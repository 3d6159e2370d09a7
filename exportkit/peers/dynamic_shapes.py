"""The dynamic shapes that ``torch.onnx.InputObserver`` infers: the axes whose size varied between the recorded calls.

Leaves are aligned by path, so calls need not have the same inputs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from exportkit.arguments.table import call_table, growth_by_path, shapes_by_path, structure_of
from exportkit.calls.observation import Observation
from exportkit.errors import InvalidRequestError, InvalidTypeError, PlanError, UnknownInputError
from exportkit.plan.infer import infer_plan
from exportkit.plan.leaves import Leaf, is_below
from exportkit.trees import Tree, flatten, join

# What yobx, optimum and onnxruntime-genai call the axes that they know.
_COMMON_NAMES = {
    "batch": "batch_size",
    "sequence": "sequence_length",
    "past_sequence": "past_sequence_length",
    "past_sequence + sequence": "total_sequence_length",
    "attention_sequence": "total_sequence_length",
    "encoder_sequence": "encoder_sequence_length",
    "decoder_sequence": "decoder_sequence_length",
}

BatchHints = set[int | str] | bool | None
DimNames = bool | Mapping[str | int, Mapping[int, str]] | None


def recorded_dynamic_shapes(
    observation: Observation, batch_hints: BatchHints, dim_names: DimNames
) -> tuple[Any, ...] | dict[str, Any]:
    """Returns dynamic shapes: axes whose size varied, and the batch axis of the hinted inputs.

    The arguments are those of `InputObserver.infer_dynamic_shapes`.
    """
    observation.require_calls()
    _check_consistent(observation)
    structure, catch_all = structure_of(observation), observation.signature.var_keyword
    if catch_all is not None and catch_all in structure:
        caught = structure.pop(catch_all)
        kept = without_caught_flags(observation.merged_arguments, observation)
        if catch_all in kept:
            structure[catch_all] = {key: caught[key] for key in kept[catch_all].build()}
    axes, dynamic = dynamic_axes(observation, batch_hints), torch.export.Dim.DYNAMIC
    name_of = _namer(observation, dim_names) if dim_names else None

    def spec_of(path: str) -> dict[int, Any]:
        if name_of is None:
            return dict.fromkeys(axes[path], dynamic)
        return {axis: name_of(path, axis) for axis in axes[path]}

    specs = {name: _marked(value, spec_of) for name, value in structure.items()}
    _check_collisions(observation.merged_arguments, observation)
    if observation.signature.var_positional is not None or any_named(observation):
        return specs
    names = observation.signature.names
    last = max((names.index(name) for name in specs), default=-1)
    return tuple(specs.get(name) for name in names[: last + 1])


def _marked(value: Any, spec_of: Callable[[str], dict[int, Any]]) -> Any:
    """A structure with ``{axis: ...}`` in the place of each path."""
    if value is None:
        return None
    if isinstance(value, str):
        return spec_of(value)
    if isinstance(value, dict):
        return {key: _marked(item, spec_of) for key, item in value.items()}
    items = [_marked(item, spec_of) for item in value]
    cls: Any = type(value)
    return cls._make(items) if hasattr(value, "_fields") else cls(items)


def without_caught_flags(trees: Mapping[str, Tree], observation: Observation) -> dict[str, Tree]:
    """Returns the arguments without flags (booleans and None) that ``**kwargs`` caught, such as ``return_dict=True``.

    ``generate`` passes such flags to every model, and torch.export accepts no Python value there, in whatever form its
    dynamic shapes are written (seen in torch 2.13). Other values are kept, so that torch.export raises an error:
    without them, it would take the model's own defaults, unnoticed. `exportkit.export` needs none of this, as it makes
    all of them part of the graph.
    """
    kept = dict(trees)
    catch_all = observation.signature.var_keyword
    if catch_all in kept:
        extra = {key: value for key, value in kept.pop(catch_all).build().items() if not isinstance(value, bool | None)}
        if extra:
            kept[catch_all] = flatten(extra)
    return kept


def any_named(observation: Observation) -> bool:
    """Returns whether some call gave an argument by name."""
    return any(call.named for call in observation.calls)


def dynamic_axes(observation: Observation, batch_hints: BatchHints) -> dict[str, list[int]]:
    """Returns by path the axes that varied or grow with a cache, and the batch axis of hinted inputs."""
    varying = _varying(observation)
    if not batch_hints:
        return varying
    table = call_table(observation, stored_only=True)
    leading = Counter(leaf.seen(0) for leaf in table.leaves if leaf.rank)
    batch = max(leading, key=leading.__getitem__, default=None)  # the sizes that lead most inputs
    hinted = _hinted(observation, batch_hints)
    found = dict(varying)
    for leaf in table.leaves:
        if leaf.rank and hinted(leaf):
            found[leaf.path] = sorted({*found[leaf.path], _batch_axis(leaf, batch)})
    return found


def _varying(observation: Observation) -> dict[str, list[int]]:
    growing = {path: growth.axis for path, growth in growth_by_path(observation).items()}
    found: dict[str, list[int]] = {}
    axes: list[int] = []
    last: Any = None
    for path, shapes in shapes_by_path(observation).items():
        key = shapes, growing.get(path)
        if key != last:  # most leaves are like the one before
            if len({len(shape) for shape in shapes if shape is not None}) > 1:
                call_table(observation, stored_only=True)  # raises an error that says where the ranks differ
            axes, last = _varying_axes(*key), key
        found[path] = axes
    return found


def _varying_axes(shapes: tuple[tuple[int, ...] | None, ...], growing: int | None) -> list[int]:
    given = [shape for shape in shapes if shape is not None]
    axes = {axis for axis, sizes in enumerate(zip(*given, strict=True)) if len(set(sizes)) > 1}
    if growing is not None and len({0 if shape is None else shape[growing] for shape in shapes}) > 1:
        axes.add(growing)  # of length 0 where it is absent
    return sorted(axes)


def _check_collisions(trees: Mapping[str, Tree], observation: Observation) -> None:
    signature = observation.signature
    catch_all = signature.var_keyword
    extra = trees[catch_all].build() if catch_all is not None and catch_all in trees else {}
    for name in (signature.var_keyword, signature.var_positional):
        if name in extra:
            raise InvalidRequestError(
                f"Keyword argument name collision: {name!r} is given by name, and is the name of *{name} or **{name}.",
                hint="rename the keyword argument; dynamic shapes cannot tell the two apart.",
            )


def _hinted(observation: Observation, hints: Any) -> Callable[[Leaf], bool]:
    """A test whether the user named a leaf's input, by name or position; elements of *args have positions too."""
    if not hints or isinstance(hints, bool):
        return lambda _leaf: bool(hints)
    if not isinstance(hints, Iterable) or isinstance(hints, str):
        raise InvalidTypeError(
            "set_batch_dimension_for names inputs.", expected="True, or a set of names or positions", got=repr(hints)
        )
    signature = observation.signature
    known = {leaf for call in observation.calls for leaf in call.shapes()}
    roots: set[str] = set()
    for hint in hints:
        roots.add(_root(hint, signature.names, signature.var_positional, signature.var_keyword, known))
    return lambda leaf: any(is_below(leaf.path, root) for root in roots)


def _root(
    hint: int | str, names: tuple[str, ...], var_positional: str | None, var_keyword: str | None, known: set[str]
) -> str:
    if isinstance(hint, int) and var_positional is not None and hint >= names.index(var_positional):
        root = f"{var_positional}[{hint - names.index(var_positional)}]"
    elif isinstance(hint, int):
        root = names[hint] if 0 <= hint < len(names) else "?"
    else:
        root = hint if hint in names else join(var_keyword or "?", hint)
    if root not in names and not any(is_below(path, root) for path in known):
        raise UnknownInputError(
            f"set_batch_dimension_for names an input {hint!r} that was not observed; a position is out of range "
            "if the method has fewer inputs.",
            expected=f"names or positions of {', '.join(names)}",
            got=repr(hint),
        )
    return root


def _batch_axis(leaf: Leaf, batch: tuple[int | None, ...] | None) -> int:
    """The axis that has the batch's size in every call; the first one where none has."""

    def matches(axis: int) -> bool:
        pairs = zip(leaf.seen(axis), batch or (), strict=False)
        return all(a == b for a, b in pairs if a is not None and b is not None)

    varies = len({size for size in leaf.seen(0) if size is not None}) > 1
    if varies or matches(0):
        return 0
    return next((axis for axis in range(1, leaf.rank) if matches(axis)), 0)


def _namer(observation: Observation, dim_names: DimNames) -> Callable[[str, int], str]:
    table = call_table(observation, stored_only=True)
    if dim_names is True:
        plan = infer_plan(table)

        def from_plan(path: str, axis: int) -> str:
            size = plan.by_path[path].sizes[axis]
            return _fallback(path, axis) if size.is_static else _COMMON_NAMES.get(str(size), str(size))

        return from_plan
    if not isinstance(dim_names, Mapping) or not all(isinstance(axes, Mapping) for axes in dim_names.values()):
        raise InvalidTypeError(
            "dim_names names axes.", expected="True, or a dict of names by input and axis", got=repr(dim_names)
        )
    names = {observation.signature.name_of(key): axes for key, axes in dim_names.items()}
    arguments = {leaf.path: leaf.argument for leaf in table.leaves}
    return lambda path, axis: names.get(arguments[path], {}).get(axis) or _fallback(path, axis)


def _fallback(path: str, axis: int) -> str:
    return f"{re.sub(r'[^0-9A-Za-z_]+', '_', path).strip('_')}_dim_{axis}"


def _check_consistent(observation: Observation) -> None:
    """Raises PlanError where calls contradict each other, so that no one graph can serve them."""
    constants: dict[str, Any] = {}
    lengths: dict[str, int] = {}
    for call in observation.calls:
        for path, value in call.constants().items():
            if isinstance(value, bool | int | float | str) and constants.setdefault(path, value) != value:
                raise PlanError(
                    "Two calls were made with different constant values.",
                    where=f"{path}, call {call.index}",
                    expected=repr(constants[path]),
                    got=repr(value),
                    hint="a constant becomes part of the graph: observe each value with an observer of its own.",
                )
        for name, tree in call.arguments.items():
            count = len(tree.tensor_paths) if tree.paths and tree.paths[0].startswith("[") else 0
            if count and lengths.setdefault(name, count) != count:
                named = any(name in call.named for call in observation.calls)
                position = observation.signature.names.index(name)
                raise PlanError(
                    f"{f'Named argument {name!r}' if named else f'Positional argument {position}'} has {count} "
                    f"tensors, and had {lengths[name]} in an earlier call.",
                    where=f"{name}, call {call.index}",
                    hint="a graph has a fixed number of inputs: pass one tensor, or lists of one length.",
                )
