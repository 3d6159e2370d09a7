"""Dynamic shapes in the forms that torch wants: nested like the arguments, with ``Dim.DYNAMIC`` or with names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from exportkit._torch_compat.pytree import registered_node
from exportkit.trees import Tree, flatten, join, joined, opens_in_order


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
        specs = list(map(spec_of, joined(name, tree.paths)))
        return specs or (None if registered_node(tree.cls) is None else specs)
    marked: dict[int, Any] = {}
    for path, tensor in tree.tensors().items():
        marked.setdefault(id(tensor), spec_of(join(name, path)))
    return _spec(tree.build(), marked)


def _spec(value: Any, marked: Mapping[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return marked[id(value)]
    if type(value) in (list, tuple):
        return type(value)(_spec(item, marked) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_spec(item, marked) for item in value))
    if type(value) is dict:
        return {key: _spec(item, marked) for key, item in value.items()}
    node = registered_node(type(value))
    if node is not None:
        return [_spec(item, marked) for item in node.flatten(value)[0]]
    return [marked[id(tensor)] for tensor in flatten(value).tensors().values()] or None
