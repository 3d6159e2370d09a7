"""Outputs that are inputs handed back: a structure of features that a model returns as it was given.

In come calls; out go pairs of an output and the input that it is. A graph need not hold them, nor could it: the number
of tensors in them may change from call to call.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch

from exportkit.calls.call import Call
from exportkit.calls.observation import Observation

_STEPS = re.compile(r"\[(?P<index>\d+)\]|\['(?P<key>[^']*)'\]|\.?(?P<name>[^.\[]+)")


def find_echoes(observation: Observation, names: Collection[str]) -> dict[str, str]:
    """Returns outputs that are inputs: name of the output to path of the input, where that holds in all calls.

    Args:
        observation: The calls.
        names: Arguments that are looked at.
    """
    returned = dict.fromkeys(first_step(path) for call in observation.calls for path in call.outputs.tensors())
    found = {}
    for output in returned:
        calls = [call for call in observation.calls if _below(call.outputs.tensors(), output)]
        paths = {_echoed(call, output, names) for call in calls}
        if len(paths) == 1 and (path := paths.pop()) is not None:
            found[output] = path
    return found


def value_at(arguments: Mapping[str, Any], path: str) -> Any:
    """Returns the value at a path in arguments by name, or None where there is none."""
    value: Any = arguments
    for step in _STEPS.finditer(path):
        key = int(step["index"]) if step["index"] else step["key"] or step["name"]
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(key, int):
            value = value[key] if isinstance(value, list | tuple) and key < len(value) else None
        else:
            value = getattr(value, key, None)
    return value


def first_step(path: str) -> str:
    """Returns the name that a path begins with."""
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def _echoed(call: Call, output: str, names: Collection[str]) -> str | None:
    """The path of the input that an output of a call is, leaf by leaf; None if it is none, or a single tensor."""
    leaves = _below(call.outputs.tensors(), output)
    if "" in leaves:
        return None
    given = {path: tensor for path, tensor in call.tensors().items() if first_step(path) in names}
    inner, first = next(iter(leaves.items()))
    roots = [
        path.removesuffix(inner) for path, tensor in given.items() if path.endswith(inner) and _same(tensor, first)
    ]
    return next((root for root in roots if _is_same(leaves, given, root)), None)


def _is_same(leaves: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor], root: str) -> bool:
    return all(root + inner in given and _same(given[root + inner], tensor) for inner, tensor in leaves.items())


def _below(tensors: Mapping[str, torch.Tensor], output: str) -> dict[str, torch.Tensor]:
    return {path.removeprefix(output): tensor for path, tensor in tensors.items() if first_step(path) == output}


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.numel() > 0 and torch.equal(a, b)
