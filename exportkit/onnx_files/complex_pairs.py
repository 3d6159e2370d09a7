"""Complex tensors as pairs of reals, where operators pick, repeat or rearrange their elements."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from exportkit._torch_compat.graph import arguments_of, rewritten, schema_of
from exportkit.onnx_files.complex_arithmetic import has_complex

aten = torch.ops.aten

# torch.onnx stores a complex tensor as a real one with a last axis of 2. It translates arithmetic on these, but
# only some of the operators that pick, repeat or rearrange; the others work on the pairs here.

# Operators that treat all numbers alike; arguments of the names below say what they do with the axes.
_MOVES = {
    aten.broadcast_to.default, aten.chunk.default, aten.expand.default, aten.expand_as.default, aten.index.Tensor,
    aten.index_select.default, aten.repeat.default, aten.select.int, aten.split.Tensor,
    aten.split_with_sizes.default, aten.tile.default, aten.unbind.int, aten.unsqueeze.default,
}  # fmt: skip

# How to turn an argument for a complex tensor into one for its pairs, whose axis comes last and stays as it is.
_FOR_PAIRS: dict[str, Callable[[Any], Any]] = {
    "dim": lambda dim: dim if dim >= 0 else dim - 1,
    "dims": lambda repeats: [*repeats, 1],
    "repeats": lambda repeats: [*repeats, 1],
    "size": lambda size: [*size, 2],
}


def with_complex_as_pairs(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program with complex numbers moved as pairs of reals.

    Args:
        program: As torch.export.export returns it. A view stays a view of the same tensor: it may be written to.
    """
    return rewritten(program, _moves_complex, _move_pairs)


def _moves_complex(node: torch.fx.Node) -> bool:
    return node.target in _MOVES and has_complex(node.all_input_nodes[:1])


def _move_pairs(node: torch.fx.Node) -> None:
    """Lets the operator take and return pairs, which are made before it and made complex again after it."""
    named = {argument.name for argument in schema_of(node.target).arguments if argument.kwarg_only}
    with node.graph.inserting_before(node):
        given = {name: _for_pairs(name, value, node) for name, value in arguments_of(node).items()}
    node.args = tuple(value for name, value in given.items() if name not in named)
    node.kwargs = {name: value for name, value in given.items() if name in named}
    members = [user for user in node.users if user.target is operator.getitem]
    for result in members or [node]:
        with node.graph.inserting_after(result):
            again = node.graph.call_function(aten.view_as_complex.default, (result,))
        again.meta = {name: value for name, value in result.meta.items() if name != "unbacked_bindings"}
        result.replace_all_uses_with(again, delete_user_cb=functools.partial(operator.is_not, again))
    for result in {node, *members}:
        result.meta["val"] = _pairs_of(result.meta["val"])


def _for_pairs(name: str, value: Any, node: torch.fx.Node) -> Any:
    if isinstance(value, torch.fx.Node) and has_complex(value):
        pairs = node.graph.call_function(aten.view_as_real.default, (value,))
        pairs.meta = {**node.meta, "val": _pairs_of(value.meta["val"])}
        return pairs
    return _FOR_PAIRS[name](value) if name in _FOR_PAIRS else value


def _pairs_of(value: Any) -> Any:
    return (
        torch.view_as_real(value) if isinstance(value, torch.Tensor) else [torch.view_as_real(item) for item in value]
    )
