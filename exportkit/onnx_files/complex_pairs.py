"""Writes operators that move complex numbers around as ones that move pairs of reals, which ONNX has forms for.

In comes a program; out goes one without such operators on complex tensors, sharing its weights. torch.onnx stores a
complex tensor as a real one with a last axis of 2. It translates arithmetic on that, but only some of the operators
that pick, repeat or rearrange: those that it lacks are done on the pairs here.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from exportkit._torch_compat.graph import schema_of, with_graph_module

_aten = torch.ops.aten

# They treat all numbers alike, and say by arguments of the names below what they do with the axes.
_MOVES = {
    _aten.broadcast_to.default, _aten.chunk.default, _aten.expand.default, _aten.expand_as.default, _aten.index.Tensor,
    _aten.index_select.default, _aten.repeat.default, _aten.select.int, _aten.split.Tensor,
    _aten.split_with_sizes.default, _aten.tile.default, _aten.unbind.int, _aten.unsqueeze.default,
}  # fmt: skip

# What an argument for a complex tensor is for its pairs, whose axis comes last and stays as it is.
_FOR_PAIRS: dict[str, Callable[[Any], Any]] = {
    "dim": lambda dim: dim if dim >= 0 else dim - 1,
    "dims": lambda repeats: [*repeats, 1],
    "repeats": lambda repeats: [*repeats, 1],
    "size": lambda size: [*size, 2],
}


def with_complex_as_pairs(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program with complex numbers moved as pairs of reals, or the program itself if it moves none.

    Args:
        program: As torch.export.export returns it. A view stays a view of the same tensor, as it may be written to.
    """
    if not any(map(_moves_complex, _nodes(program.graph_module))):
        return program
    module = copy.deepcopy(program.graph_module)
    for node in filter(_moves_complex, _nodes(module)):
        _move_pairs(node)
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            part.recompile()
    return with_graph_module(program, module)


def _nodes(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    parts = [part for part in module.modules() if isinstance(part, torch.fx.GraphModule)]
    return [node for part in parts for node in part.graph.nodes]


def _moves_complex(node: torch.fx.Node) -> bool:
    return node.target in _MOVES and any(map(_is_complex, node.all_input_nodes[:1]))


def _is_complex(value: Any) -> bool:
    tensor = value.meta.get("val") if isinstance(value, torch.fx.Node) else None
    return isinstance(tensor, torch.Tensor) and tensor.is_complex()


def _move_pairs(node: torch.fx.Node) -> None:
    """Lets the operator take and return pairs, as they are made before it, and made complex again after it."""
    names = [argument.name for argument in schema_of(node.target).arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    with node.graph.inserting_before(node):
        node.args = ()
        node.kwargs = {name: _for_pairs(name, value, node) for name, value in given.items()}
    members = [user for user in node.users if user.target is operator.getitem]
    for result in members or [node]:
        with node.graph.inserting_after(result):
            again = node.graph.call_function(_aten.view_as_complex.default, (result,))
        again.meta = dict(result.meta)
        result.replace_all_uses_with(again, delete_user_cb=partial(operator.is_not, again))
    for result in {node, *members}:
        result.meta["val"] = _pairs_of(result.meta["val"])


def _for_pairs(name: str, value: Any, node: torch.fx.Node) -> Any:
    if _is_complex(value):
        pairs = node.graph.call_function(_aten.view_as_real.default, (value,))
        pairs.meta = {**node.meta, "val": _pairs_of(value.meta["val"])}
        return pairs
    return _FOR_PAIRS[name](value) if name in _FOR_PAIRS else value


def _pairs_of(value: Any) -> Any:
    return (
        torch.view_as_real(value) if isinstance(value, torch.Tensor) else [torch.view_as_real(item) for item in value]
    )
