"""Prepares a traced program for the translation to ONNX: replaces what torch.onnx cannot translate.

Each step returns the program itself if it has nothing to replace; otherwise a new one that shares its weights and
computes the same numbers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch

from exportkit._torch_compat.graph import (
    arguments_of,
    copied_module,
    is_assertion,
    is_inactive_dropout,
    schema_of,
    with_graph_module,
)
from exportkit.onnx_files.complex_numbers import complex_decompositions
from exportkit.onnx_files.exact import (
    EXACT,
    is_plain_cross_entropy,
    is_plain_pool,
    with_checked_indices,
    with_zeros_for_masked_rows,
)

aten = torch.ops.aten


def translatable(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program without run-time assertions and without operators that torch.onnx cannot translate."""
    for step in (
        without_assertions,
        with_constants,
        with_complex_as_pairs,
        with_zeros_for_masked_rows,
        with_checked_indices,
        decomposed,
    ):
        program = step(program)
    return program


# Run-time assertions, which ONNX has no form for.


def without_assertions(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program without run-time assertions, and without what only they read."""
    if not any(is_assertion(node) for node in program.graph.nodes):
        return program
    module = copied_module(program)
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            _erase_assertions(part)
    return with_graph_module(program, module)


def _erase_assertions(module: torch.fx.GraphModule) -> None:
    feeders = []
    for node in reversed(list(module.graph.nodes)):
        if is_assertion(node):
            feeders += node.all_input_nodes
            module.graph.erase_node(node)
    erase_unused(feeders)
    module.recompile()


def erase_unused(nodes: Sequence[torch.fx.Node]) -> None:
    """Erases nodes that compute values without users, and then those of their inputs that are left without users."""
    left, gone = list(nodes), set[torch.fx.Node]()
    while left:
        node = left.pop()
        if node not in gone and _is_removable(node):
            left += node.all_input_nodes
            node.graph.erase_node(node)
            gone.add(node)


def _is_removable(node: torch.fx.Node) -> bool:
    """Whether a node computes a value without users. Nodes that write in place have no users either, and must stay.

    Sizes stay as well: torch.fx keeps track of them, and an unused size costs nothing.
    """
    if node.op != "call_function" or node.users or (node.is_impure() and not is_inactive_dropout(node)):
        return False
    return not getattr(schema_of(node.target), "is_mutable", False) and "sym_size" not in str(node.target)


# Numbers that depend on constants alone, computed here where ONNX has no operator for them. An example is the quantile
# of a normal distribution that a model looks up for a threshold: ``erfinv`` of a constant.

_UNTRANSLATED = (aten.erfinv.default, aten.special_ndtri.default)


def with_constants(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program with numbers in place of operators on constants that ONNX does not have."""
    if not any(node.target in _UNTRANSLATED for node in program.graph.nodes):
        return program
    module = copied_module(program)
    known = _given(program, module.graph)
    for node in list(module.graph.nodes):
        if node.op == "call_function" and _depends_on(node, known):
            arguments, options = torch.fx.map_arg((node.args, node.kwargs), known.__getitem__)
            value = node.target(*arguments, **options)
            if isinstance(value, torch.Tensor):
                known[node] = value
                if node.target in _UNTRANSLATED and not value.ndim:
                    _put_number(module.graph, node, value)
    module.graph.eliminate_dead_code()
    module.recompile()
    return with_graph_module(program, module)


def _given(program: torch.export.ExportedProgram, graph: torch.fx.Graph) -> dict[torch.fx.Node, torch.Tensor]:
    """The constants that the model creates itself, by their placeholder."""
    names = program.graph_signature.inputs_to_lifted_tensor_constants
    placeholders = [node for node in graph.nodes if node.op == "placeholder" and node.name in names]
    return {node: program.constants[names[node.name]] for node in placeholders}


def _depends_on(node: torch.fx.Node, known: dict[torch.fx.Node, Any]) -> bool:
    """Whether a node only reads constants, and neither writes nor draws random numbers."""
    if not node.all_input_nodes or any(other not in known for other in node.all_input_nodes):
        return False
    target: Any = node.target
    schema = schema_of(target)
    writes = schema is None or (schema.is_mutable and target is not aten.detach_.default)
    return not writes and torch.Tag.nondeterministic_seeded not in target.tags


def _put_number(graph: torch.fx.Graph, node: torch.fx.Node, value: torch.Tensor) -> None:
    with graph.inserting_before(node):
        number = graph.call_function(aten.full.default, ([], value.item()), {"dtype": value.dtype})
    number.meta = dict(node.meta)
    node.replace_all_uses_with(number)
    graph.erase_node(node)


# Complex numbers. torch.onnx stores a complex tensor as a real one with a last axis of 2. It translates arithmetic on
# these, but only some of the operators that pick, repeat or rearrange; the others work on the pairs here.

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
    if not any(map(_moves_complex, _nodes(program.graph_module))):
        return program
    module = copied_module(program)
    for node in filter(_moves_complex, _nodes(module)):
        _move_pairs(node)
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            part.recompile()
    return with_graph_module(program, module)


def _nodes(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for part in module.modules() if isinstance(part, torch.fx.GraphModule) for node in part.graph.nodes]


def _moves_complex(node: torch.fx.Node) -> bool:
    return node.target in _MOVES and any(map(_is_complex, node.all_input_nodes[:1]))


def _is_complex(value: Any) -> bool:
    tensor = value.meta.get("val") if isinstance(value, torch.fx.Node) else None
    return isinstance(tensor, torch.Tensor) and tensor.is_complex()


def _move_pairs(node: torch.fx.Node) -> None:
    """Lets the operator take and return pairs, which are made before it and made complex again after it."""
    given = arguments_of(node)
    with node.graph.inserting_before(node):
        node.args = ()
        node.kwargs = {name: _for_pairs(name, value, node) for name, value in given.items()}
    members = [user for user in node.users if user.target is operator.getitem]
    for result in members or [node]:
        with node.graph.inserting_after(result):
            again = node.graph.call_function(aten.view_as_complex.default, (result,))
        again.meta = dict(result.meta)
        result.replace_all_uses_with(again, delete_user_cb=partial(operator.is_not, again))
    for result in {node, *members}:
        result.meta["val"] = _pairs_of(result.meta["val"])


def _for_pairs(name: str, value: Any, node: torch.fx.Node) -> Any:
    if _is_complex(value):
        pairs = node.graph.call_function(aten.view_as_real.default, (value,))
        pairs.meta = {**node.meta, "val": _pairs_of(value.meta["val"])}
        return pairs
    return _FOR_PAIRS[name](value) if name in _FOR_PAIRS else value


def _pairs_of(value: Any) -> Any:
    return (
        torch.view_as_real(value) if isinstance(value, torch.Tensor) else [torch.view_as_real(item) for item in value]
    )


# Operators without a translation, in terms of others, at any size.


def decomposed(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program without operators that torch.onnx has no translation for."""
    targets = {node.target for node in program.graph.nodes if node.target in _DECOMPOSITIONS and not _is_known(node)}
    table = {**complex_decompositions(program), **{target: _DECOMPOSITIONS[target] for target in targets}}
    return program.run_decompositions(table) if table else program


def _is_known(node: torch.fx.Node) -> bool:
    """Whether torch.onnx translates this use: attention over heads, pools to a single output."""
    first, *others = cast(tuple[Any, ...], node.args)
    if node.target is aten.cross_entropy_loss.default:
        return is_plain_cross_entropy(first, *others)
    if node.target in (aten.avg_pool2d.default, aten.avg_pool3d.default):
        return is_plain_pool(first, *others)
    if node.target is aten.roll.default:
        return all(isinstance(shift, int) for shift in others[0])
    if node.target is aten.scatter_reduce.two:
        return bool(others[3] != "mean")
    if node.target is aten.scaled_dot_product_attention.default:
        return bool(first.meta["val"].ndim >= _RANK)
    return node.target in _POOLS and set(others[0]) == {1}


def _masked_select(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    values, mask = torch.broadcast_tensors(values, mask)
    return values[mask]


def _median(values: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    median, index = _kthvalue(values, (values.shape[dim] + 1) // 2, dim, keepdim)
    if not values.is_floating_point():
        return median, index
    unknown = values.isnan()  # a median with NaN is the first one of them
    has_unknown = unknown.any(dim, keepdim)
    first = unknown.to(torch.float32).argmax(dim, keepdim)
    return torch.where(has_unknown, math.nan, median), torch.where(has_unknown, first, index)


def _median_of_all(values: torch.Tensor) -> torch.Tensor:
    return _median(values.flatten(), 0)[0]


def _kthvalue(values: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    found = [part.narrow(dim, k - 1, 1) for part in torch.sort(values, dim)]
    smallest, index = found if keepdim else [part.squeeze(dim) for part in found]
    return smallest, index


def _cumprod(values: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    factors = values.to(dtype or values.dtype).movedim(dim, -1)
    length = factors.shape[-1]
    position = torch.arange(length, device=values.device)
    one = torch.ones((), dtype=factors.dtype, device=values.device)
    return torch.where(position <= position[:, None], factors[..., None, :], one).prod(-1).movedim(-1, dim)


def _cdist(one: torch.Tensor, other: torch.Tensor, p: float = 2.0, _mode: int | None = None) -> torch.Tensor:
    distance = (one[..., :, None, :] - other[..., None, :, :]).abs()
    if math.isinf(p):
        return distance.amax(-1)
    return distance.sum(-1) if p == 1 else distance.pow(p).sum(-1).pow(1 / p)


def _searchsorted(
    limits: torch.Tensor,
    values: torch.Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: torch.Tensor | None = None,
) -> Any:
    if sorter is not None:
        return NotImplemented
    limits, places = limits if limits.ndim == 1 else limits[..., None, :], values[..., None]
    # counted so that NaN, for which no comparison holds, is behind all limits
    before = ~(limits > places) if right or side == "right" else ~(limits >= places)
    return before.sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def _bucketize(values: torch.Tensor, limits: torch.Tensor, *, out_int32: bool = False, right: bool = False) -> Any:
    return _searchsorted(limits, values, out_int32=out_int32, right=right)


def _adaptive_avg_pool1d(values: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    return _adaptive_avg_pool2d(values.unsqueeze(-2), [1, *sizes]).squeeze(-2)


def _adaptive_avg_pool2d(values: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    rows, columns = (inside.to(values.dtype) for inside in _windows(values, sizes))
    summed = rows @ values @ columns.transpose(0, 1)
    return summed / (rows.sum(1)[:, None] * columns.sum(1))


def _adaptive_max_pool1d(values: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    largest, index = _adaptive_max_pool2d(values.unsqueeze(-2), [1, *sizes])
    return largest.squeeze(-2), index.squeeze(-2)


def _adaptive_max_pool2d(values: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = _windows(values, sizes)
    inside = rows[:, None, :, None] & columns[None, :, None, :]
    seen = values[..., None, None, :, :].masked_fill(~inside, -math.inf).flatten(-2)
    return seen.amax(-1), seen.argmax(-1)


def _windows(values: torch.Tensor, sizes: Sequence[int]) -> Iterator[torch.Tensor]:
    """Which inputs an adaptive pool looks at for each of its outputs, (size, length), for the last two axes.

    torch.onnx uses the window size of the trace if the length is a multiple of the outputs.
    """
    for length, size in zip(values.shape[-2:], sizes, strict=True):
        position = torch.arange(length, device=values.device)
        output = torch.arange(size, device=values.device)[:, None]
        first, end = output * length // size, ((output + 1) * length + size - 1) // size
        yield (position >= first) & (position < end)


def _roll(values: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> torch.Tensor:
    if not dims:
        return _roll(values.flatten(), shifts, [0]).view(values.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        length = values.shape[dim]
        start = (length - shift) % length
        values = torch.cat([values.narrow(dim, start, length - start), values.narrow(dim, 0, start)], dim)
    return values


def _fftshift(values: torch.Tensor, dim: Sequence[int] | None = None) -> torch.Tensor:
    dims = range(values.ndim) if dim is None else dim
    return _roll(values, [values.shape[axis] // 2 for axis in dims], dims)


def _ifftshift(values: torch.Tensor, dim: Sequence[int] | None = None) -> torch.Tensor:
    dims = range(values.ndim) if dim is None else dim
    return _roll(values, [(values.shape[axis] + 1) // 2 for axis in dims], dims)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None, *rest: Any, **more: Any
) -> Any:
    """Attention without an axis for heads, as attention with one."""
    if query.ndim >= _RANK:
        return NotImplemented
    added = _RANK - query.ndim
    parts = [part[(None,) * added] for part in (query, key, value)]
    hidden = mask[(None,) * added] if mask is not None and mask.ndim == query.ndim else mask
    attend: Any = torch.nn.functional.scaled_dot_product_attention
    found = attend(*parts, hidden, *rest, **more)
    return found[(0,) * added]


_RANK = 4  # batch, heads, tokens, size
_POOLS = {
    aten.adaptive_avg_pool1d.default: _adaptive_avg_pool1d,
    aten.adaptive_avg_pool2d.default: _adaptive_avg_pool2d,
    aten.adaptive_max_pool1d.default: _adaptive_max_pool1d,
    aten.adaptive_max_pool2d.default: _adaptive_max_pool2d,
}
_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.masked_select.default: _masked_select,
    aten.median.dim: _median,
    aten.median.default: _median_of_all,
    aten.kthvalue.default: _kthvalue,
    aten.cumprod.default: _cumprod,
    aten.cdist.default: _cdist,
    aten.bucketize.Tensor: _bucketize,
    aten.searchsorted.Tensor: _searchsorted,
    aten.roll.default: _roll,
    aten.fft_fftshift.default: _fftshift,
    aten.fft_ifftshift.default: _ifftshift,
    aten.scaled_dot_product_attention.default: _attention,
    **_POOLS,
    **EXACT,
}
