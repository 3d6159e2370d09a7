"""What the reasoning needs to know of recorded calls: shapes, constants, and how the leaves are nested."""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from exportkit._torch_compat.pytree import registered_node
from exportkit.calls.call import Call
from exportkit.calls.observation import Observation, SeenShapes
from exportkit.calls.signature import NumberKind
from exportkit.plan.leaves import CallTable, Constant, Leaf
from exportkit.trees import (
    Growth,
    Tree,
    check_unchanged,
    fingerprint,
    first_name,
    flatten,
    join,
    joined,
    opens_in_order,
    stored_length,
)
from exportkit.trees.tree import dtype_name

_MOST_FURTHER_CALLS = 100  # with shapes that no stored call had; more of them would tell nothing new


def call_table(observation: Observation, stored_only: bool = False) -> CallTable:
    """Returns the shapes of all input tensors in all calls, and the shapes of the outputs.

    The stored calls come first, then the calls of which only the shapes were kept, if these shapes are new.

    Args:
        observation: The calls.
        stored_only: Leave the latter out.

    Raises:
        NoCallsError: if there is no call.
        PlanError: if an input has different ranks in different calls.
        UnregisteredClassError: if an input is an object that holds tensors out of reach.
    """
    observation.require_calls()
    growth = growth_by_path(observation)
    shapes, outputs, counted = [], [], list[int | None]()
    dtypes: dict[str, str] = {}
    for call in observation.calls:
        shapes.append(call.shapes())
        outputs.append(tuple(call.outputs.shapes()))
        counted.append(stored_length(call.values()) or None)
        for path, tensor in call.tensors().items():
            dtypes.setdefault(path, dtype_name(tensor.dtype))
    if not stored_only:
        known = {frozenset(found.items()) for found in shapes}
        for seen in observation.further:
            if len(shapes) == len(observation.calls) + _MOST_FURTHER_CALLS:
                break
            inputs = {path: tuple(shape) for path, shape in seen.inputs.items()}
            if frozenset(inputs.items()) not in known:
                known.add(frozenset(inputs.items()))
                shapes.append(inputs)
                outputs.append(tuple(map(tuple, seen.outputs.values())))
                counted.append(None)
    leaves = []
    for name, tree in observation.merged_arguments.items():
        for path in joined(name, tree.tensor_paths):
            found = growth.get(path)
            column = tuple([call_shapes.get(path) for call_shapes in shapes])
            ranks = [len(shape) for shape in column if shape is not None]  # a new layer may hold ``torch.tensor([])``
            axis, limit = (None, None) if found is None or found.axis >= min(ranks) else (found.axis, found.limit)
            leaves.append(Leaf(path, name, dtypes[path], column, axis, limit))
    return CallTable(tuple(leaves), tuple(outputs), tuple(counted))


def growth_by_path(observation: Observation) -> dict[str, Growth]:
    """Returns by full path how the leaves of caches grow."""
    found: dict[str, Growth] = {}
    for name, tree in observation.merged_arguments.items():
        found |= zip(joined(name, tuple(tree.growing)), tree.growing.values(), strict=True)
    return found


def shapes_by_path(observation: Observation) -> dict[str, tuple[tuple[int, ...] | None, ...]]:
    """Returns by full path the shapes of a leaf in the stored calls, None where one lacks it."""
    merged = {name: tree for name, tree in observation.merged_arguments.items() if tree.tensor_paths}
    paths = [path for name, tree in merged.items() for path in joined(name, tree.tensor_paths)]
    columns = [_shapes_in(call, merged, paths) for call in observation.calls]
    return dict(zip(paths, zip(*columns, strict=True), strict=True))


def _shapes_in(call: Call, merged: Mapping[str, Tree], paths: list[str]) -> Iterable[tuple[int, ...] | None]:
    """The shape of each leaf in one call; most calls have them all, in the same order."""
    trees = [call.arguments[name] for name in merged if name in call.arguments]
    if [tree.tensor_paths for tree in trees] == [tree.tensor_paths for tree in merged.values()]:
        return itertools.chain.from_iterable(map(Tree.shapes, trees))
    return map(call.shapes().get, paths)


def constants_of(observation: Observation) -> tuple[Constant, ...]:
    """Returns the inputs that are not tensors, as the merged call has them.

    Raises:
        PlanError: if an object among them was changed after it was recorded.
    """
    for call in observation.calls:
        for name, tree in call.arguments.items():
            check_unchanged(name, tree)
    found = []
    for name, tree in observation.merged_arguments.items():
        for path, value in tree.constants().items():
            found.append(Constant(join(name, path), name, value, fingerprint(value)))
    return tuple(found)


def varying_numbers(observation: Observation) -> dict[str, NumberKind]:
    """Returns the Python numbers among the arguments that are of one type in all calls, and vary, by path.

    Calls in which the whole object is absent say nothing about a number in it.
    """
    calls = [dict(numbers_of(call)) for call in observation.calls]
    found: dict[str, NumberKind] = {}
    for path in dict.fromkeys(path for numbers in calls for path in numbers):
        name = first_name(path)
        told = [n for n, call in zip(calls, observation.calls, strict=True) if name == path or call.has(name)]
        values = [numbers.get(path) for numbers in told]
        values += [numbers[path] for numbers in map(further_numbers, observation.further) if path in numbers]
        if len({type(value) for value in values}) == 1 and len(set(map(repr, values))) > 1:
            found[path] = "int" if type(values[0]) is int else "float"
    return found


def numbers_of(call: Call) -> Iterator[tuple[str, float]]:
    """Yields the Python numbers of a call by path, those in defaults of arguments that it leaves out included."""
    defaults = {name: flatten(call.signature.defaults[name]) for name in call.signature.defaults}
    for name, tree in {**defaults, **call.arguments}.items():
        for path, value in tree.constants().items():
            if type(value) in (int, float):
                yield join(name, path), value


def further_numbers(seen: SeenShapes) -> dict[str, float]:
    """Returns the Python numbers of calls that are not stored, by path."""
    return {path: v for path, v in seen.constants.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def structure_of(observation: Observation) -> dict[str, Any]:
    """Returns how the leaves are nested in each argument, as torch's dynamic shapes are, with a path for each leaf."""
    return {name: nested_spec(name, tree, str) for name, tree in observation.merged_arguments.items()}


def nested_spec(name: str, tree: Tree, spec_of: Callable[[str], Any]) -> Any:
    """Returns the dynamic shapes of one argument, nested as ``torch.export`` expects them.

    Tensors become ``{axis: ...}``, constants None; lists, tuples and dicts stay what they are; an object of a class
    registered with torch, and a cache, is the list of its children.

    Args:
        name: The parameter.
        tree: Its value.
        spec_of: Gives what stands for a leaf, such as ``{axis: ...}``, by its full path.
    """
    if tree.paths == ("",):
        return spec_of(name) if tree.tensor_paths else None
    if opens_in_order(tree.cls):
        specs = list(map(spec_of, joined(name, tree.tensor_paths)))
        return specs or (None if registered_node(tree.cls) is None else specs)
    marked: dict[int, Any] = {}
    for path, tensor in tree.tensors().items():
        marked.setdefault(id(tensor), spec_of(join(name, path)))
    return _spec(tree.build(), marked)


def _spec(value: Any, marked: Mapping[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return marked.get(id(value), {})  # a registration of others may list tensors that follow from the others
    if type(value) in (list, tuple, deque):
        return type(value)(_spec(item, marked) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        cls: Any = type(value)
        return cls._make(_spec(item, marked) for item in value)  # its constructor may take tensors only
    if type(value) in (dict, OrderedDict, defaultdict):
        specs = {key: _spec(item, marked) for key, item in value.items()}
        return defaultdict(None, specs) if type(value) is defaultdict else type(value)(specs)
    node = registered_node(type(value))
    if node is not None:
        return [_spec(item, marked) for item in node.flatten(value)[0]]
    return [marked[id(tensor)] for tensor in flatten(value).tensors().values()] or None
