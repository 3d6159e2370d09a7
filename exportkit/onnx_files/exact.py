"""Operators whose translation by torch.onnx computes other numbers than torch, in terms of operators where it does not.

These are written with torch's own operators, before the translation. ``translations`` has what needs operators
of ONNX.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from exportkit._torch_compat.graph import (
    BATCH_NORM,
    BATCH_NORM_WITHOUT_STATISTICS,
    arguments_of,
    call_inlined,
    copied_module,
    dtype_of,
    graphs_in,
    operator_name,
    rewritten,
    with_graph_module,
)
from exportkit.onnx_files.decomposition import Decomposition, computed_in, not_of
from exportkit.running.bounds import HALF

aten = torch.ops.aten


# Attention. A query that may see no key gets zeros in torch; the softmax of ONNX gives it an average of all values, or
# NaN.


def with_zeros_for_masked_rows(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program with zeros from attention for queries whose keys are all masked."""
    visible: dict[Any, torch.fx.Node] = {}  # by mask, which is usually the same in all layers

    def fill(node: torch.fx.Node) -> None:
        mask: Any = _mask_of(node)
        attention = copied_before(node)
        with node.graph.inserting_before(node):
            if mask not in visible:
                visible[mask] = any_visible(node.graph, mask)
        node.target, node.args, node.kwargs = aten.where.ScalarOther, (visible[mask], attention, 0.0), {}

    return rewritten(program, _mask_of, fill)


def _mask_of(node: torch.fx.Node) -> torch.fx.Node | None:
    """The mask of a node that computes attention; None if it has none, or is something else."""
    if node.target is not aten.scaled_dot_product_attention.default:
        return None
    mask = arguments_of(node)["attn_mask"]
    return mask if isinstance(mask, torch.fx.Node) else None


def any_visible(graph: torch.fx.Graph, mask: torch.fx.Node) -> torch.fx.Node:
    """Returns a new node that says, for each query, whether a mask leaves it a key."""
    shown = mask
    if mask.meta["val"].dtype is not torch.bool:
        shown = call_node(graph, aten.ne.Scalar, mask, -math.inf)
    return call_node(graph, aten.any.dim, shown, -1, True)


def call_node(graph: torch.fx.Graph, target: Any, value: torch.fx.Node, *options: Any) -> torch.fx.Node:
    """Returns a new node that calls an operator on the value of a node, with the value that it has in a trace."""
    node = graph.call_function(target, (value, *options))
    node.meta["val"] = target(value.meta["val"], *torch.fx.map_arg(options, lambda other: other.meta["val"]))
    return node


def copied_before(node: torch.fx.Node) -> torch.fx.Node:
    """Returns a new node before a node, which computes the same.

    The node itself can become something else then: a program knows its results by the names of their nodes.
    """
    with node.graph.inserting_before(node):
        copy = node.graph.create_node(node.op, node.target, node.args, node.kwargs)
    copy.meta = dict(node.meta)
    return copy


# Limits of which one is an integer and the other one is not, which torch.onnx does not bring to one dtype.


def _clamp(values: torch.Tensor, min: Any = None, max: Any = None) -> Any:
    if _has_limits_of_one_type(min, max):  # onnxruntime has no choice between 16-bit integers
        return values.int().clamp(min, max).to(torch.result_type(values, max if min is None else min))
    return values.clamp(*(None if limit is None else torch.sym_float(limit) for limit in (min, max)))


def _has_limits_of_one_type(*limits: Any) -> bool:
    return len({isinstance(limit, float | torch.SymFloat) for limit in limits if limit is not None}) < 2


def _is_plain_clamp(values: torch.Tensor, *limits: Any, **named: Any) -> bool:
    return values.dtype is not torch.int16 and _has_limits_of_one_type(*limits, *named.values())


# What is scattered, and losses: with label smoothing, with probabilities as targets, of nothing.


def _cross_entropy(
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    axis = min(scores.ndim - 1, 1)
    classes = scores.shape[axis]
    logs = torch.log_softmax(scores, axis)
    scale = torch.ones_like(logs[(0,) * logs.ndim].expand(classes)) if weight is None else weight
    scaled = logs * scale.reshape([-1] + [1] * (scores.ndim - 1 - axis))
    if target.is_floating_point():
        losses = -(scaled * (target * (1 - label_smoothing) + label_smoothing / classes)).sum(axis)
        return losses if reduction == 0 else losses.mean() if reduction == 1 else losses.sum()
    kept = target != ignore_index
    index = torch.where(kept, target, 0)
    picked = scaled.gather(axis, index.unsqueeze(axis)).squeeze(axis)
    if label_smoothing:
        picked = picked * (1 - label_smoothing) + scaled.sum(axis) * (label_smoothing / classes)
    losses = -torch.where(kept, picked, 0.0)
    if reduction == 0:
        return losses
    return losses.sum() / torch.where(kept, scale[index], 0.0).sum() if reduction == 1 else losses.sum()


def _mse_loss(values: torch.Tensor, target: torch.Tensor, reduction: int = 1) -> torch.Tensor:
    losses = (values - target).square()
    return losses if reduction == 0 else losses.mean() if reduction == 1 else losses.sum()


def _is_plain_cross_entropy(
    _scores: torch.Tensor,
    target: torch.Tensor,
    _weight: Any = None,
    _reduction: int = 1,
    ignore_index: Any = -100,
    label_smoothing: float = 0.0,
) -> bool:
    """Whether torch.onnx translates a loss: classes as targets, a known one to ignore, and no label smoothing."""
    return not target.is_floating_point() and not label_smoothing and isinstance(ignore_index, int)


def _scatter_reduce(
    values: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    scatter = torch.scatter_reduce
    if reduce != "mean":
        if values.is_floating_point():
            values = values.scatter(dim, index, math.inf if reduce == "amin" else -math.inf)
            include_self = True
        return scatter(values, dim, index, source, reduce, include_self=include_self)
    total = scatter(values, dim, index, source, "sum", include_self=include_self)
    ones, added = torch.ones_like(values), torch.ones_like(source)
    count = scatter(ones, dim, index, added, "sum", include_self=include_self)
    return total / count if values.is_floating_point() else torch.div(total, count, rounding_mode="floor")


def _is_plain_scatter(*arguments: Any, include_self: bool = True) -> bool:
    """Whether torch.onnx translates a reduction of what is scattered."""
    values, *_, reduce = arguments
    return reduce != "mean" and (include_self or reduce not in ("amax", "amin") or not values.is_floating_point())


_SCATTER_REDUCE = Decomposition(_scatter_reduce, _is_plain_scatter)


def _index_reduce(
    values: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    behind = values.ndim - 1 - dim % values.ndim if values.ndim else 0
    places = index.view(-1, *[1] * behind).expand(source.shape) if source.ndim else index.view(())
    given = values, dim, places, source, reduce
    found = _SCATTER_REDUCE(*given, include_self=include_self)
    return torch.scatter_reduce(*given, include_self=include_self) if found is NotImplemented else found


def _scatter_with(values: torch.Tensor, dim: int, index: torch.Tensor, source: Any, *, reduce: str) -> torch.Tensor:
    """``scatter`` with ``reduce``; the source may be a number."""
    if not isinstance(source, torch.Tensor):
        source = torch.full(index.shape, source, dtype=values.dtype)
    return torch.scatter_reduce(values, dim, index, source, {"add": "sum", "multiply": "prod"}[reduce])


_SCATTERS = {"scatter", "scatter_add", "scatter_reduce"}


def with_cut_sources(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program with sources of ``scatter`` that are as large as their indices, as ONNX needs them."""
    return rewritten(program, _is_larger, _cut_source)


def _is_larger(node: torch.fx.Node) -> bool:
    """Whether a node scatters a part of its source."""
    if operator_name(node.target).rstrip("_") not in _SCATTERS or len(node.args) < 4:
        return False
    index, source = cast(tuple[Any, ...], node.args)[2:4]
    if not isinstance(source, torch.fx.Node):
        return False
    sizes = zip(source.meta["val"].shape, index.meta["val"].shape, strict=False)
    return any(str(have) != str(used) for have, used in sizes)


def _cut_source(node: torch.fx.Node) -> None:
    with node.graph.inserting_before(node):
        cut = call_inlined(node.graph, _cut, {"source": node.args[3], "index": node.args[2]})
    node.update_arg(3, cut)


def _cut(given: Mapping[str, Any]) -> torch.Tensor:
    source: torch.Tensor = given["source"]
    for axis, size in enumerate(given["index"].shape):
        source = source.narrow(axis, 0, size)
    return source


# Half precision. onnxruntime adds to places of a tensor in float32 and float64 only. torch.onnx lets sums and other
# reductions compute in float32; if the program returns one, the cast back is lost.


def _in_float32(operator: Callable[..., torch.Tensor]) -> Decomposition:
    return Decomposition(computed_in(torch.float32, operator), not_of(*HALF))


def _scaled(operator: Callable[..., torch.Tensor]) -> Decomposition:
    """A product with a Python number that torch does not round before, as it does in sums (seen on the CPU)."""

    def is_plain(values: Any, number: Any, **_: Any) -> bool:
        is_number = isinstance(values, torch.Tensor) and type(number) in (int, float)
        return not is_number or values.dtype not in HALF or _has(values.dtype, number)

    return Decomposition(computed_in(torch.float32, operator), is_plain)


def _has(dtype: torch.dtype, number: float) -> bool:
    """Whether a number need not be rounded for a dtype."""
    info = torch.finfo(dtype)
    steps = math.frexp(number)[0] * 2 / info.eps  # what comes before the exponent, in units in the last place
    return not math.isfinite(number) or (
        steps.is_integer() and (not number or info.smallest_normal <= abs(number) <= info.max)
    )


ADDITIONS: dict[Any, Callable[..., Any]] = {
    aten.div.Tensor: _scaled(torch.div),
    aten.mul.Tensor: _scaled(torch.mul),
    aten.index_add.default: _in_float32(torch.index_add),
    aten.index_put.default: _in_float32(torch.index_put),
    aten.index_reduce.default: _in_float32(torch.index_reduce),
    aten.scatter_add.default: _in_float32(torch.scatter_add),
    aten.scatter_reduce.two: _in_float32(torch.scatter_reduce),
}


def _has_weights_of_its_dtype(values: torch.Tensor, _shape: Any, *options: Any) -> bool:
    """Whether the weights have the dtype of the values; if not, the norm computes in float32, as in torch."""
    return all(tensor.dtype is values.dtype for tensor in options if isinstance(tensor, torch.Tensor))


def with_half_outputs(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program with outputs in half precision as nodes of their own, which keep their dtype."""
    if not _half_outputs(program.graph_module):
        return program
    module = copied_module(program)
    for node in _half_outputs(module):
        inner = copied_before(node)
        node.replace_all_uses_with(inner, delete_user_cb=lambda user: user.op != "output")
        node.target, node.args, node.kwargs = aten.clone.default, (inner,), {}
    return with_graph_module(program, module)


def _half_outputs(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    outputs = [node for part in graphs_in(module) for node in part.graph.output_node().all_input_nodes]
    return [node for node in outputs if node.op == "call_function" and is_half(node)]


def is_half(node: torch.fx.Node) -> bool:
    """Returns whether a node computes a tensor in half precision."""
    return dtype_of(node) in HALF


# Tensors of several dtypes side by side, and of several lengths.


def _pad_sequence(
    sequences: Sequence[torch.Tensor], batch_first: bool = False, value: float = 0.0, side: str = "right"
) -> torch.Tensor:
    longest = functools.reduce(torch.sym_max, [sequence.shape[0] for sequence in sequences])
    padded = []
    for sequence in sequences:
        missing = longest - sequence.shape[0]
        ends = (0, missing) if side == "right" else (missing, 0)
        padded.append(torch.constant_pad_nd(sequence, (*[0, 0] * (sequence.ndim - 1), *ends), value))
    return torch.stack(padded, 0 if batch_first else 1)


def _joined(operator: Callable[..., torch.Tensor]) -> Decomposition:
    def joined(tensors: Sequence[torch.Tensor], *axis: int, **named: int) -> torch.Tensor:
        dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
        return operator([tensor.to(dtype) for tensor in tensors], *axis, **named)

    return Decomposition(joined, lambda tensors, *_, **__: len({tensor.dtype for tensor in tensors}) == 1)


_JOINS: dict[Any, Callable[..., Any]] = {
    aten.cat.default: _joined(torch.cat),
    aten.column_stack.default: _joined(torch.column_stack),
    aten.concat.default: _joined(torch.cat),
    aten.concatenate.default: _joined(torch.cat),
    aten.dstack.default: _joined(torch.dstack),
    aten.hstack.default: _joined(torch.hstack),
    aten.row_stack.default: _joined(torch.vstack),
    aten.stack.default: _joined(torch.stack),
    aten.vstack.default: _joined(torch.vstack),
}


# Norms of a batch by its own statistics, as models in training mode have them: onnxruntime takes the running ones.


def _batch_norm(  # noqa: PLR0917 (torch's positions)
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """The result, the mean and the scale of the batch, and the new running statistics if there are some."""
    if not training:
        return NotImplemented
    dtype, x = x.dtype, x.float() if x.dtype in HALF else x
    dims, shape = [0, *range(2, x.ndim)], [1, -1, *[1] * (x.ndim - 2)]
    mean = x.mean(dims)
    centred = x - mean.view(shape)
    total = centred.square().sum(dims)
    count = math.prod(x.shape[axis] for axis in dims)
    scale = (total / count + eps).rsqrt()
    result = centred * scale.view(shape)
    result = result if weight is None else result * weight.view(shape)
    result = result if bias is None else result + bias.view(shape)
    pairs = ((running_mean, mean), (running_var, total / (count - 1)))
    running = [old * (1 - momentum) + new * momentum for old, new in pairs if old is not None]
    return result.to(dtype), mean, scale, *running


def _native_batch_norm(*arguments: Any) -> Any:
    """The result, the mean and the scale of the batch: nothing in a program writes the running statistics."""
    found = _batch_norm(*arguments)
    return found if found is NotImplemented else found[:3]


def _batch_norm_without_statistics(x: torch.Tensor, weight: Any, bias: Any, *options: Any) -> Any:
    return _native_batch_norm(x, weight, bias, None, None, *options)


EXACT: dict[Any, Callable[..., Any]] = {
    **_JOINS,
    BATCH_NORM: _batch_norm,
    BATCH_NORM_WITHOUT_STATISTICS: _batch_norm_without_statistics,
    aten.native_batch_norm.default: _native_batch_norm,
    aten.clamp.default: Decomposition(_clamp, _is_plain_clamp),
    aten.cross_entropy_loss.default: Decomposition(_cross_entropy, _is_plain_cross_entropy),
    aten.mse_loss.default: _mse_loss,
    aten.index_reduce.default: _index_reduce,
    aten.pad_sequence.default: _pad_sequence,
    aten.scatter.reduce: _scatter_with,
    aten.scatter.value_reduce: _scatter_with,
    aten.scatter_reduce.two: _SCATTER_REDUCE,
    aten.layer_norm.default: Decomposition(
        computed_in(torch.float32, aten.layer_norm.default), _has_weights_of_its_dtype
    ),
}
