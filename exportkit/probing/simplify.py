"""Recorded calls in a form that a graph can take, in which the model was seen to return the same.

A graph has a fixed number of inputs. But a structure that an encoder returned holds more than a decoder reads, and a
list with a tensor for each image has a different length in each call. So tensors that the model never reads are left
out, a list becomes one tensor, and outputs that are inputs handed back need not be outputs of the graph.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from exportkit.calls.call import Call
from exportkit.calls.observation import Observation, SeenShapes
from exportkit.probing.model_probe import ModelProbe
from exportkit.probing.other_values import scaled, with_wide_values
from exportkit.probing.size_reads import tensors_read
from exportkit.running.compare import Tensors
from exportkit.running.eager import replayed
from exportkit.running.runner import compare_calls, recorded
from exportkit.trees import Tree, first_name, is_cache_class, join, with_list
from exportkit.trees.structure import LIST_MEMBER, without_indices
from exportkit.trees.tree import is_inexact

Value = TypeVar("Value")

_STEPS = re.compile(r"\[(?P<index>\d+)\]|\['(?P<key>[^']*)'\]|\.?(?P<name>[^.\[]+)")


@dataclass(frozen=True)
class Simplified:
    """Calls that a graph can take.

    Attributes:
        observation: The calls.
        joined: Paths of lists of tensors that became a list of one, their concatenation.
        unused: Paths of tensors that were taken out.
        passed_through: Outputs that are inputs handed back: name of the output to path of the input.
    """

    observation: Observation
    joined: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    passed_through: Mapping[str, str] = field(default_factory=dict)


def simplify_calls(observation: Observation, model: torch.nn.Module, method: str) -> Simplified:
    """Returns the calls in the simplest form in which the model returns the same.

    Only arguments are considered that some calls lack, or whose number of tensors changes: all others have a fixed
    place in a graph as they are.

    Args:
        observation: The calls.
        model: The model, which is run to find out.
        method: The observed method.
    """
    names = _irregular(observation)
    if not names:
        return Simplified(observation)
    found = _passed_through([(call.tensors(), call.outputs.tensors()) for call in observation.calls], names)
    probe = ModelProbe(model, method, observation)
    passed = {name: path for name, path in found.items() if _is_passed_through(name, probe, names)}
    probe = ModelProbe(model, method, _without_outputs(observation, passed))
    nested = _nested(observation, names)
    read = tensors_read(model, method, probe.observation.calls) if nested else set[str]()
    unused = [path for path in nested if path not in read and _is_unread(probe, path)]
    probe = ModelProbe(model, method, _without(probe.observation, unused))
    joined = [path for path in _joinable(probe.observation, names) if _is_read_as_one(probe, path)]
    if not unused and not joined:
        return Simplified(observation)
    simple = replace(_with_joined(probe.observation, joined), has_values=False)
    return Simplified(replayed(simple, model, method), tuple(joined), tuple(unused), passed)


def as_simplified(
    tensors: Mapping[str, torch.Tensor], joined: Iterable[str], unused: Iterable[str] = ()
) -> dict[str, torch.Tensor]:
    """Returns the tensors of a call by the paths that they have in simplified calls.

    Args:
        tensors: Tensors by path, as the call gives them.
        joined: Paths of lists that are one tensor.
        unused: Paths of tensors that the model never reads; they count at all positions of a list.
    """
    return _simplified(tensors, joined, unused, torch.cat)


def _simplified(
    by_path: Mapping[str, Value], joined: Iterable[str], unused: Iterable[str], merge: Callable[[list[Value]], Value]
) -> dict[str, Value]:
    hidden, kept = set(map(without_indices, unused)), dict(by_path)
    if hidden:
        kept = {path: value for path, value in by_path.items() if without_indices(path) not in hidden}
    for parent in joined:
        members = _members(kept, parent)
        if members:
            kept = {path: value for path, value in kept.items() if path not in members}
            kept[f"{parent}[0]"] = merge(list(members.values()))
    return kept


def lists_of_many(calls: Sequence[Mapping[str, torch.Tensor]]) -> tuple[str, ...]:
    """Returns the paths of lists whose number of tensors differs between calls, and whose tensors could be one.

    Args:
        calls: Tensors by path, for each call; for example what the model returned.
    """
    counts: dict[str, set[int]] = defaultdict(set)
    for tensors in calls:
        for parent, members in _lists_in(tensors).items():
            counts[parent].add(len(members) if _are_alike(members.values()) else -1)
    return tuple([parent for parent, found in counts.items() if len(found) > 1 and -1 not in found])


def rows_of_members(calls: Sequence[Mapping[str, torch.Tensor]], parents: Iterable[str]) -> dict[str, int]:
    """Returns the number of rows of every tensor in a list, by path of the lists where it is always the same.

    Args:
        calls: Tensors by path, for each call.
        parents: Paths of the lists.
    """
    rows = {}
    for parent in parents:
        found = {member.shape[0] for tensors in calls for member in _members(tensors, parent).values()}
        if len(found) == 1 and min(found) > 0:
            rows[parent] = min(found)
    return rows


def with_split_lists(tree: Tree, rows: Mapping[str, int]) -> Tree:
    """Returns the tree in which lists of one tensor hold its parts again.

    Args:
        tree: A nested value.
        rows: Number of rows of each part, by path of the list.
    """
    for parent, count in rows.items():
        members = list(_members(tree.tensors(), parent).values())
        if members:
            tree = with_list(tree, members, list(members[0].split(count)) if len(members[0]) else [])
    return tree


def with_joined_lists(tree: Tree, parents: Iterable[str]) -> Tree:
    """Returns the tree in which lists of tensors hold one, their concatenation.

    Args:
        tree: A nested value.
        parents: Paths of the lists.
    """
    for parent in parents:
        members = list(_members(tree.tensors(), parent).values())
        if len(members) > 1:
            tree = with_list(tree, members, [torch.cat(members)])
    return tree


def value_at(value: Any, path: str) -> Any:
    """Returns the value at a path in a nested value, such as arguments by name, or None if there is none."""
    for step in _STEPS.finditer(path):
        key = _key(step)
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(key, int):
            value = value[key] if isinstance(value, list | tuple) and key < len(value) else None
        else:
            value = getattr(value, key, None)
    return value


def with_value_at(value: Any, path: str, made: Any) -> Any:
    """Returns a nested value with another one at a path; only tuples that lead there are replaced."""
    step = _STEPS.match(path)
    if step is None:
        return made
    key = _key(step)
    inside = with_value_at(value_at(value, step.group()), path[step.end() :], made)
    if isinstance(value, tuple):
        items = [inside if position == key else item for position, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, MutableMapping | list):
        value[key] = inside
    return value


def _key(step: re.Match[str]) -> Any:
    return int(step["index"]) if step["index"] else step["key"] or step["name"]


def _irregular(observation: Observation) -> set[str]:
    """Parameters that some calls lack, or whose number of tensors changes."""
    counts: dict[str, int] = {}
    found = set()
    for call in observation.calls:
        for name in observation.signature.plain():
            count = len(call.arguments[name].tensors()) if name in call.arguments else 0
            if counts.setdefault(name, count) != count:
                found.add(name)
    return found


def _passed_through(calls: Iterable[tuple[Tensors, Tensors]], names: Collection[str]) -> dict[str, str]:
    """Outputs that are inputs handed back: name of the output to path of the input, if that holds in all calls.

    A graph need not return them, and could not: the number of tensors in them may change from call to call.
    """
    sources: dict[str, set[str | None]] = defaultdict(set)
    for tensors, returned in calls:
        given = {path: tensor for path, tensor in tensors.items() if first_name(path) in names}
        outputs: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for path, tensor in returned.items():
            name = first_name(path)
            outputs[name][path.removeprefix(name)] = tensor
        for name, leaves in outputs.items():
            sources[name].add(_source(given, leaves))
    found = {}
    for name, paths in sources.items():
        source = paths.pop()
        if source is not None and not paths:
            found[name] = source
    return found


def _is_passed_through(output: str, probe: ModelProbe, names: Collection[str]) -> bool:
    """Whether an output is an input handed back for other values, too, if the model accepts them."""
    wide = [with_wide_values(call) for call in probe.observation.calls[:1]]
    for call in (*wide, *(scaled(call, -1.0) for call in wide)):
        returned = probe.outputs(call)
        if returned is not None and output not in _passed_through([(call.tensors(), returned)], names):
            return False
    return True


def _source(given: Mapping[str, torch.Tensor], leaves: Mapping[str, torch.Tensor]) -> str | None:
    """The path of the input whose leaves are the leaves of an output; None for a single tensor, or if there is none."""
    first = next(iter(leaves))
    for path in given if "" not in leaves else ():
        root = path.removesuffix(first)
        if path.endswith(first):
            for inner, leaf in leaves.items():
                same = given.get(root + inner)
                if same is None or same.dtype != leaf.dtype or not same.numel() or not torch.equal(same, leaf):
                    break
            else:
                return root
    return None


def _nested(observation: Observation, names: set[str]) -> list[str]:
    """Paths of tensors inside the arguments, without caches, which one call reads and another does not."""
    found: dict[str, None] = {}
    for call in observation.calls:
        for name, tree in call.arguments.items():
            if name in names and not is_cache_class(type(tree.build())):
                found |= dict.fromkeys(join(name, path) for path in tree.tensors() if path)
    return list(found)


def _is_unread(probe: ModelProbe, path: str) -> bool:
    """Whether the model returns the same for other values of a tensor, and without it, in every call that has it."""
    changed = (
        replace(call, arguments=call.with_tensors({path: other}).arguments)
        for call in probe.observation.calls
        if path in call.tensors()
        for other in (_other_values(call.tensors()[path]), None)
    )
    return probe.repeats(changed)


def _without_outputs(observation: Observation, names: Collection[str]) -> Observation:
    """The calls without some outputs."""
    if not names:
        return observation
    calls = []
    for call in observation.calls:
        left_out = {path: None for path in call.outputs.tensors() if first_name(path) in names}
        calls.append(replace(call, outputs=call.outputs.with_leaves(left_out)))
    return replace(observation, calls=tuple(calls))


def _other_values(tensor: torch.Tensor) -> torch.Tensor:
    if is_inexact(tensor):
        return torch.full_like(tensor, torch.nan)
    return ~tensor if tensor.dtype is torch.bool else tensor + 1


def _without(observation: Observation, paths: Sequence[str]) -> Observation:
    if not paths:
        return observation
    calls = []
    for call in observation.calls:
        calls.append(replace(call, arguments=call.with_tensors(dict.fromkeys(paths)).arguments))
    further = tuple([_seen(shapes, (), paths) for shapes in observation.further])
    return replace(observation, calls=tuple(calls), further=further)


def _joinable(observation: Observation, names: set[str]) -> list[str]:
    """Paths of lists whose elements are tensors of one dtype that differ in their first axis at most, in each call."""
    found: dict[str, bool] = {}
    for call in observation.calls:
        for parent, members in _lists_in(call.tensors()).items():
            is_alike = _are_alike(members.values(), least_rank=2)
            found[parent] = found.get(parent, True) and is_alike and first_name(parent) in names
    return [parent for parent, is_joinable in found.items() if is_joinable]


def _are_alike(tensors: Iterable[torch.Tensor], least_rank: int = 1) -> bool:
    """Whether tensors have one dtype, and differ in the size of their first axis at most."""
    kinds = {(tensor.ndim, tensor.shape[1:], tensor.dtype) for tensor in tensors}
    return len(kinds) == 1 and next(iter(kinds))[0] >= least_rank


def _is_read_as_one(probe: ModelProbe, parent: str) -> bool:
    """Whether the model returns the same for the list's concatenation as for the list, in every call that has it."""
    changed, further = list[Call](), list[Call]()
    most = 1 + max(len(_members(call.tensors(), parent)) for call in probe.observation.calls)
    for call in probe.observation.calls:
        members = list(_members(call.tensors(), parent).values())
        if not members:
            continue
        whole = torch.cat(members)
        if len(members) == 1 and len(whole) < 2:
            return False
        other = [whole] if len(members) > 1 else [whole[:1], whole[1:]]
        changed.append(_with_list(call, parent, members, other))
        if changed[-1].shapes() == call.shapes():  # a list of an object stays as it is
            return False
        for parts in (whole.split(1), whole.tensor_split(most)):
            further.append(_with_list(call, parent, members, list(parts)))
    if not probe.repeats(changed):
        return False
    outcomes = compare_calls(recorded, probe.run, further)  # a model may raise for short tensors
    return all(outcome.agrees or outcome.error is not None for outcome in outcomes)


def _with_list(call: Call, parent: str, members: list[torch.Tensor], tensors: list[torch.Tensor]) -> Call:
    name = first_name(parent)
    return replace(call, arguments={**call.arguments, name: with_list(call.arguments[name], members, tensors)})


def _with_joined(observation: Observation, parents: Sequence[str]) -> Observation:
    if not parents:
        return observation
    calls = list(observation.calls)
    for parent in parents:
        for number, call in enumerate(calls):
            members = list(_members(call.tensors(), parent).values())
            if members:
                calls[number] = _with_list(call, parent, members, [torch.cat(members)])
    further = tuple([_seen(shapes, parents, ()) for shapes in observation.further])
    return replace(observation, calls=tuple(calls), further=further)


def _seen(seen: SeenShapes, joined: Sequence[str], unused: Sequence[str]) -> SeenShapes:
    """The shapes of a call in the form of simplified calls."""

    def merge(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
        return sum(shape[0] for shape in shapes), *shapes[0][1:]

    return replace(seen, inputs=_simplified(seen.inputs, joined, unused, merge))


def _lists_in(by_path: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The entries for the elements of each list, in the order of their numbers."""
    paths: dict[str, dict[int, str]] = defaultdict(dict)
    for path in by_path:
        match = LIST_MEMBER.match(path)
        if match:
            paths[match["list"]][int(match["index"])] = path
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for parent, numbered in paths.items():
        for _, path in sorted(numbered.items()):
            found[parent][path] = by_path[path]
    return found


def _members(by_path: Mapping[str, Any], parent: str) -> dict[str, Any]:
    return _lists_in(by_path).get(parent, {})
