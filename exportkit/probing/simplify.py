"""Recorded calls as a graph can take them: without tensors that the model never reads, and with lists as one tensor.

Structures that an encoder returned hold more than a decoder reads, and lists with a tensor for each image have another
length in each call, while a graph has a fixed number of inputs. In come calls; out go calls in which the model was seen
to return the same.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.calls.seen import SeenShapes
from exportkit.probing.ask import AskedModel
from exportkit.probing.echoes import find_echoes, first_step
from exportkit.running.compare import outputs_close
from exportkit.running.eager import replayed
from exportkit.trees import Tree, is_cache_class, join, with_list

_MEMBER = re.compile(r"^(?P<list>.+)\[(?P<index>\d+)\]$")


@dataclass(frozen=True)
class Simplified:
    """Calls that a graph can take.

    Attributes:
        observation: The calls.
        joined: Paths of lists of tensors that became a list of one, their concatenation.
        unused: Paths of tensors that were taken out.
        echoes: Outputs that are inputs handed back: name of the output to path of the input.
    """

    observation: Observation
    joined: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    echoes: Mapping[str, str] = field(default_factory=dict)


def simplify_calls(observation: Observation, model: torch.nn.Module, method: str) -> Simplified:
    """Returns the calls in the simplest form in which the model returns the same.

    Only arguments that some calls lack, or whose number of tensors changes, are looked at: all others have a fixed
    place in a graph as they are.

    Args:
        observation: The calls.
        model: The model, which is run to find out.
        method: The observed method.
    """
    names = _irregular(observation)
    if not names:
        return Simplified(observation)
    echoes = find_echoes(observation, names)
    asked = AskedModel(model, method, _without_echoes(observation, echoes))
    unused = [path for path in _nested(observation, names) if _is_unread(asked, path)]
    asked = AskedModel(model, method, _without(asked.observation, unused))
    joined = [path for path in _lists(asked.observation, names) if _is_read_as_one(asked, path)]
    if not unused and not joined:
        return Simplified(observation)
    simple = _with_joined(asked.observation, joined)
    return Simplified(replayed(replace(simple, has_values=False), model, method), tuple(joined), tuple(unused), echoes)


def as_simplified(
    tensors: Mapping[str, torch.Tensor], joined: Iterable[str], unused: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Returns the tensors of a call by the paths that they have in simplified calls.

    Args:
        tensors: Tensors by path, as the call gives them.
        joined: Paths of lists that are one tensor.
        unused: Paths of tensors that the model never reads; the same ones at other positions of a list count too.
    """
    hidden = {_unnumbered(path) for path in unused}
    kept = {path: tensor for path, tensor in tensors.items() if _unnumbered(path) not in hidden}
    for parent in joined:
        members = _members(kept, parent)
        if members:
            kept = {path: tensor for path, tensor in kept.items() if path not in members}
            kept[f"{parent}[0]"] = torch.cat(list(members.values()))
    return kept


def lists_of_many(calls: Sequence[Mapping[str, torch.Tensor]]) -> tuple[str, ...]:
    """Returns the paths of lists whose number of tensors differs between calls, while the tensors could be one.

    Args:
        calls: Tensors by path, of each call; what the model returned, for instance.
    """
    counts: dict[str, set[int]] = defaultdict(set)
    for tensors in calls:
        for parent in dict.fromkeys(match["list"] for path in tensors if (match := _MEMBER.match(path))):
            members = list(_members(tensors, parent).values())
            kinds = {(member.dtype, tuple(member.shape[1:])) for member in members}
            counts[parent].add(len(members) if len(kinds) == 1 and members[0].ndim else -1)
    return tuple(parent for parent, found in counts.items() if len(found) > 1 and -1 not in found)


def rows_of_members(calls: Sequence[Mapping[str, torch.Tensor]], parents: Iterable[str]) -> dict[str, int]:
    """Returns the number of rows that every tensor of a list has, by path of those lists where it is always the same.

    Args:
        calls: Tensors by path, of each call.
        parents: Paths of the lists.
    """
    rows = {p: {member.shape[0] for tensors in calls for member in _members(tensors, p).values()} for p in parents}
    return {parent: min(found) for parent, found in rows.items() if len(found) == 1 and min(found) > 0}


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


def _irregular(observation: Observation) -> set[str]:
    counts: dict[str, set[int]] = defaultdict(set)
    for call in observation.calls:
        for name in observation.signature.names:
            counts[name].add(len(call.arguments[name].tensors()) if name in call.arguments else 0)
    plain = observation.signature.plain()
    return {name for name, found in counts.items() if len(found) > 1 and name in plain}


def _nested(observation: Observation, names: set[str]) -> list[str]:
    """Paths of tensors inside the arguments, caches left out: these are read or not from call to call."""
    found: dict[str, None] = {}
    for call in observation.calls:
        for name, tree in call.arguments.items():
            if name in names and not is_cache_class(type(tree.build())):
                found |= dict.fromkeys(join(name, path) for path in tree.tensors() if path)
    return list(found)


def _is_unread(asked: AskedModel, path: str) -> bool:
    """Whether the model returns the same for other values of a tensor, and without it, in every call that has it."""
    calls = [call for call in asked.observation.calls if path in call.tensors()]
    return all(_same(asked, call, _other_values, path) and _same(asked, call, lambda _: None, path) for call in calls)


def _same(asked: AskedModel, call: Call, change: Callable[[torch.Tensor], torch.Tensor | None], path: str) -> bool:
    outputs = asked.outputs(call.with_tensors({path: change(call.tensors()[path])}))
    return outputs is not None and _returns(call, outputs)


def _returns(call: Call, outputs: Mapping[str, torch.Tensor]) -> bool:
    """Whether outputs are those of a call, echoes left out."""
    expected = call.outputs.tensors()
    return outputs_close(expected, outputs)


def _without_echoes(observation: Observation, echoes: Mapping[str, str]) -> Observation:
    if not echoes:
        return observation
    calls = []
    for call in observation.calls:
        echoed = {path: None for path in call.outputs.tensors() if first_step(path) in echoes}
        calls.append(replace(call, outputs=call.outputs.with_leaves(echoed)))
    return replace(observation, calls=tuple(calls))


def _other_values(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.full_like(tensor, torch.nan)
    return ~tensor if tensor.dtype is torch.bool else tensor + 1


def _without(observation: Observation, paths: Sequence[str]) -> Observation:
    if not paths:
        return observation
    calls = []
    for call in observation.calls:
        calls.append(replace(call, arguments=call.with_tensors(dict.fromkeys(paths)).arguments))
    return replace(observation, calls=tuple(calls), further=tuple(_seen(s, (), paths) for s in observation.further))


def _lists(observation: Observation, names: set[str]) -> list[str]:
    """Paths of lists whose elements are tensors of one type that differ in their first axis at most."""
    found: dict[str, None] = {}
    for call in observation.calls:
        tensors = {path: tensor for path, tensor in call.tensors().items() if first_step(path) in names}
        parents = dict.fromkeys(match["list"] for path in tensors if (match := _MEMBER.match(path)))
        for parent in parents:
            members = list(_members(tensors, parent).values())
            kinds = {(member.dtype, tuple(member.shape[1:])) for member in members}
            if len(kinds) == 1 and min(member.ndim for member in members) > 1:
                found[parent] = None
    return list(found)


def _is_read_as_one(asked: AskedModel, parent: str) -> bool:
    """Whether the model returns the same for the list's concatenation as for the list, in every call that has it."""
    calls = [call for call in asked.observation.calls if _members(call.tensors(), parent)]
    return all(_same_as_one(asked, call, parent) for call in calls)


def _same_as_one(asked: AskedModel, call: Call, parent: str) -> bool:
    members = list(_members(call.tensors(), parent).values())
    whole = torch.cat(members)
    if len(members) == 1 and len(whole) < 2:
        return False
    other = [whole] if len(members) > 1 else [whole[:1], whole[1:]]
    outputs = asked.outputs(call.with_arguments(_with_list(call, parent, other)))
    return outputs is not None and _returns(call, outputs)


def _with_list(call: Call, parent: str, tensors: list[torch.Tensor]) -> dict[str, Tree]:
    name = first_step(parent)
    members = list(_members(call.tensors(), parent).values())
    if not members:
        return dict(call.arguments)
    return {**call.arguments, name: with_list(call.arguments[name], members, tensors)}


def _with_joined(observation: Observation, parents: Sequence[str]) -> Observation:
    if not parents:
        return observation
    calls = list(observation.calls)
    for parent in parents:
        for number, call in enumerate(calls):
            members = list(_members(call.tensors(), parent).values())
            one = [torch.cat(members)] if members else []
            calls[number] = replace(call, arguments=_with_list(call, parent, one))
    return replace(observation, calls=tuple(calls), further=tuple(_seen(s, parents, ()) for s in observation.further))


def _seen(seen: SeenShapes, joined: Sequence[str], unused: Sequence[str]) -> SeenShapes:
    """Shapes of a call in the form of simplified calls."""
    hidden = {_unnumbered(path) for path in unused}
    inputs = {path: shape for path, shape in seen.inputs.items() if _unnumbered(path) not in hidden}
    for parent in joined:
        members = _members(inputs, parent)
        if members:
            inputs = {path: shape for path, shape in inputs.items() if path not in members}
            first = next(iter(members.values()))
            inputs[f"{parent}[0]"] = (sum(shape[0] for shape in members.values()), *first[1:])
    return replace(seen, inputs=inputs)


def _members(by_path: Mapping[str, Any], parent: str) -> dict[str, Any]:
    """What belongs to the elements of a list, in the order of their numbers."""
    found = [
        (int(match["index"]), path) for path in by_path if (match := _MEMBER.match(path)) and match["list"] == parent
    ]
    return {path: by_path[path] for _, path in sorted(found)}


def _unnumbered(path: str) -> str:
    return re.sub(r"\[\d+\]", "[]", path)
