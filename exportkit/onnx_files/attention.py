"""Attention as one operator: what a traced program computes as attention becomes ``Attention`` of opset 23.

Attention is recognised in the program, where it still is an operator, and not by its decomposed arithmetic. Keys and
values go in as they are before heads are repeated, and before they are appended to those in a cache. Attention that
onnxruntime has no kernel for, or that is written differently, is translated as in any other graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from onnxscript import opset23
from onnxscript.function_libs.torch_lib.ops import nn

from exportkit._torch_compat.graph import (
    TO_COPY,
    UNSAFE_VIEW,
    arguments_of,
    copied_module,
    is_inactive_dropout,
    schema_of,
    with_graph_module,
)
from exportkit._torch_compat.symbolic_shapes import traced_expression
from exportkit._torch_compat.traced_values import depends_on_values
from exportkit.onnx_files.exact import any_visible, call_node, copied_before
from exportkit.onnx_files.preparation import erase_unused

aten = torch.ops.aten
op: Any = opset23  # its annotations know values of one graph, not numbers

_DTYPES = (torch.float32, torch.float16)  # for which onnxruntime has kernels on the CPU
_LOWEST = torch.finfo(torch.float32).min

# Symbols of a trace that are 0 together.
Zeros = Mapping[Any, int]


# Attention that a model writes out: a product, a scale, a soft cap, a mask, a softmax and another product.


def _written_attention(node: torch.fx.Node) -> dict[str, Any] | None:
    """Returns the arguments of the attention that a node is the last step of, by name; None if it is something else.

    Each step must have one user. ``filled`` is a mask of what is hidden, with the number that hides it.
    """
    if node.target is not aten.matmul.default:
        return None
    weights, value = node.args
    softmax = _step(weights, aten.softmax.int)
    if softmax is None or softmax.args[1] not in (-1, 3) or softmax.meta["val"].dtype is not torch.float32:
        return None
    scores = softmax.args[0]
    found = {"value": value, "attn_mask": None, "dropout_p": 0.0, "is_causal": False, "filled": None}
    if (sum_ := _step(scores, aten.add.Tensor)) is not None and not sum_.kwargs:
        for inner, mask in (sum_.args, sum_.args[::-1]):
            given = _scores(inner)
            if given is not None and _is_bias(mask, inner, sum_):
                return {**found, **given, "attn_mask": mask}
        return None
    if (fill := _step(scores, aten.masked_fill.Scalar)) is not None and fill.args[2] in (-math.inf, _LOWEST):
        given = _scores(fill.args[0])
        return None if given is None else {**found, **given, "attn_mask": fill.args[1], "filled": fill.args[2]}
    given = _scores(scores)
    return None if given is None else {**found, **given}


def _scores(value: Any) -> dict[str, Any] | None:
    """The arguments of a product of queries and keys, scaled, with a soft cap."""
    scale, softcap = 1.0, 0.0
    capped = _by_number(value, aten.mul.Tensor)
    if capped is not None and (bent := _step(capped[0], aten.tanh.default)) is not None:
        divided = _by_number(bent.args[0], aten.div.Tensor)
        if divided is None or divided[1] != capped[1] or not capped[1] > 0:
            return None
        value, softcap = divided[0], float(capped[1])
    for target, power in ((aten.mul.Tensor, 1), (aten.div.Tensor, -1)):
        if (scaled := _by_number(value, target)) is not None and scaled[1]:
            value, scale = scaled[0], scale * float(scaled[1]) ** power
    product = _step(value, aten.matmul.default)
    if product is None:
        return None
    query, turned = product.args
    if turned.target is not aten.transpose.int or {axis % 4 for axis in turned.args[1:]} != {2, 3}:
        return None
    return {"query": query, "key": turned.args[0], "scale": scale, "softcap": softcap}


def _step(value: Any, target: Any) -> Any:
    """The node that computes a value by this operator, behind steps that change nothing; None if none does."""
    while isinstance(value, torch.fx.Node) and len(value.users) == 1 and _changes_nothing(value):
        value = value.args[0]
    is_step = isinstance(value, torch.fx.Node) and value.target is target and len(value.users) == 1
    return value if is_step else None


def _changes_nothing(value: Any) -> bool:
    return is_inactive_dropout(value) or (
        value.target in (aten.to.dtype, TO_COPY, aten.contiguous.default)
        and value.meta["val"].dtype is value.args[0].meta["val"].dtype
    )


def _by_number(value: Any, target: Any) -> tuple[Any, Any] | None:
    """A value and the number that it is multiplied or divided by."""
    step = _step(value, target)
    return (step.args[0], step.args[1]) if step is not None and isinstance(step.args[1], int | float) else None


def _is_bias(mask: Any, scores: Any, result: Any) -> bool:
    """Whether a value is added to scores, and not the scores to a larger value."""
    if not isinstance(mask, torch.fx.Node) or not mask.meta["val"].is_floating_point():
        return False
    return bool(result.meta["val"].shape == scores.meta["val"].shape)


# The operators. They are torch's own, under names that are neither decomposed nor translated in the usual way, and with
# the arguments of the ONNX operator.

_OPTIONS = "*, bool is_causal=False, float? scale=None, float softcap=0.0"


@torch.library.custom_op(
    "exportkit::attention",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, Tensor? mask, {_OPTIONS}) -> Tensor",
)
def _attention(query: Any, key: Any, value: Any, mask: Any, *, softcap: float = 0.0, **options: Any) -> torch.Tensor:
    result: torch.Tensor
    if not softcap:
        attend: Any = torch.nn.functional.scaled_dot_product_attention
        result = attend(query, key, value, mask, enable_gqa=True, **options)
        return result
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    scores = (query @ key.mT * options["scale"] / softcap).tanh() * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    result = scores.softmax(-1) @ value
    return result


@torch.library.custom_op(
    "exportkit::cached_attention",
    mutates_args=(),
    schema=(
        "(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor past_key, Tensor past_value, "
        f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)"
    ),
)
def _cached_attention(
    query: Any, key: Any, value: Any, mask: Any, past_key: Any, past_value: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    keys, values = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
    return torch.ops.exportkit.attention(query, keys, values, mask, **options), keys, values


@_attention.register_fake
def _fake_attention(query: Any, _key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
    shape = (*query.shape[:3], value.shape[3])  # in memory, tokens come before heads, as from torch's kernel for CPUs
    return torch.empty_permuted(shape, (0, 2, 1, 3), dtype=query.dtype, device=query.device)


@_cached_attention.register_fake
def _fake_cached_attention(
    query: Any, key: Any, value: Any, _mask: Any, past_key: Any, past_value: Any, **_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _fake_attention(query, key, value), torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)


def _form(query: Any, key: Any, value: Any, mask: Any, *past: Any, is_causal: bool = False, **options: Any) -> Any:
    options = {"is_causal": int(is_causal), **{name: number for name, number in options.items() if number}}
    results = op.Attention(query, key, value, mask, *past, **options)
    return results[:3] if past else results[0]


ATTENTION_TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.exportkit.attention.default: _form,
    torch.ops.exportkit.cached_attention.default: _form,
    aten.scaled_dot_product_attention.default: nn.aten_scaled_dot_product_attention,  # torch has another for opset 23
}


# Where a program has attention that can be one of these.


def with_whole_attention(program: torch.export.ExportedProgram, zeros: Sequence[Zeros]) -> torch.export.ExportedProgram:
    """Returns the program with attention as an operator that is written as one operator in ONNX.

    Args:
        program: As torch.export returns it.
        zeros: The symbols that may be 0 together. onnxruntime's kernel takes no empty batch, query or key: attention
            that may get one stays as it is.
    """
    if not any(_is_fusible(node, zeros) for node in program.graph.nodes):
        return program
    module = copied_module(program)
    _drop_copies(module.graph)
    _reshape_views(module.graph)
    masks: dict[Any, Any] = {}
    for node in list(module.graph.nodes):
        if _is_fusible(node, zeros):
            choice = _choice_of_zeros(node)
            _make_whole(node, masks)
            if choice is not None:
                choice.replace_all_uses_with(node)
                erase_unused([choice])
    return with_graph_module(program, module)


def _drop_copies(graph: torch.fx.Graph) -> None:
    """Takes out copies of results, such as torch makes of each in half precision; outputs keep their names."""
    returned = graph.output_node()
    for node in list(graph.nodes):
        if node.target not in _COPIES or (source := _source(node)).op != "call_function":
            continue
        kept, other = (node, source) if returned in node.users else (source, node)
        if returned in other.users:
            continue
        if kept is node:  # it becomes what it was a copy of, and takes its place
            source.append(node)
            node.target, node.args, node.kwargs, node.meta = source.target, source.args, source.kwargs, source.meta
        other.replace_all_uses_with(kept, lambda user, kept=kept: user is not kept)
        erase_unused([other])


def _reshape_views(graph: torch.fx.Graph) -> None:
    """Lets views take a value in any layout: without copies, and after attention as one operator, layouts differ."""
    for target in (aten.view.default, UNSAFE_VIEW):
        for node in graph.find_nodes(op="call_function", target=target):
            node.target = aten.reshape.default


def _arguments(node: torch.fx.Node) -> dict[str, Any] | None:
    """The arguments of the attention that a node computes, by name."""
    if node.target is aten.scaled_dot_product_attention.default:
        return {**arguments_of(node), "softcap": 0.0}
    return _written_attention(node)


def _is_fusible(node: torch.fx.Node, zeros: Sequence[Zeros]) -> bool:
    given = _arguments(node)
    if given is None:
        return False
    query, key, value = (given[name].meta["val"] for name in ("query", "key", "value"))
    if any(part.ndim != 4 or part.dtype != query.dtype or part.dtype not in _DTYPES for part in (query, key, value)):
        return False
    if given["attn_mask"] is not None:
        mask = given["attn_mask"].meta["val"]
        if mask.dtype not in (torch.bool, query.dtype) or mask.ndim < 2 or not _same(mask.shape[-1], key.shape[2]):
            return False
    batches = [part.shape[0] for part in (query, key, value, node.meta["val"])]
    if not all(_same(batch, batches[0]) for batch in batches):
        return False  # the kernel does not broadcast
    heads, groups = query.shape[1], key.shape[1]
    if not (isinstance(heads, int) and isinstance(groups, int)) or heads % groups or value.shape[1] != groups:
        return False
    scale = given["scale"]
    if given["dropout_p"] or not (scale is None or (isinstance(scale, float) and scale > 0)):
        return False
    return not any(_may_be_empty(size, zeros) for size in (query.shape[0], query.shape[2], key.shape[2]))


def _may_be_empty(size: Any, zeros: Sequence[Zeros]) -> bool:
    if isinstance(size, int):
        return size == 0
    return depends_on_values(size) or any(traced_expression(size).xreplace(symbols) == 0 for symbols in zeros)


def _same(first: Any, second: Any) -> bool:
    """Whether two sizes are the same, whatever the sizes of the inputs are."""
    if isinstance(first, int) or isinstance(second, int):
        return isinstance(first, int) and isinstance(second, int) and first == second
    return bool(traced_expression(first) == traced_expression(second))


def _make_whole(node: torch.fx.Node, masks: dict[Any, Any]) -> None:
    """Makes a node the operator itself: the program knows its outputs by name."""
    given, graph = _arguments(node) or {}, node.graph
    query, mask, old = given["query"], given["attn_mask"], (given["key"], given["value"])
    is_written = node.target is aten.matmul.default
    if is_written and mask is not None:
        with graph.inserting_before(node):
            if given["filled"] is not None:
                mask = call_node(graph, aten.where.Scalar, mask, given["filled"], 0.0)
            visible = any_visible(graph, mask)
        inner = copied_before(node)
        # without a visible key, the softmax that the model computes itself is not a number
        node.target, node.args, node.kwargs = aten.where.ScalarOther, (visible, inner, math.nan), {}
        node = inner
    single = [_unrepeated(part) for part in old[:2]]
    heads = {None if part is None else part.meta["val"].shape[1] for part in single}
    key, value = map(_source, old[:2] if None in heads or len(heads) > 1 else single)
    mask = mask if mask is None else _full_mask(node, mask, query, masks)
    options = {name: given[name] for name in ("is_causal", "scale", "softcap") if given[name]}
    old = *old, *node.args
    node.target, node.args, node.kwargs = torch.ops.exportkit.attention.default, (query, key, value, mask), options
    erase_unused([other for other in old if isinstance(other, torch.fx.Node)])
    if not _is_cached(node, query, key, value):
        return
    (past_key, new_key), (past_value, new_value) = key.args[0], value.args[0]
    with graph.inserting_before(node):
        arguments = (query, new_key, new_value, mask, past_key, past_value)
        whole = graph.call_function(torch.ops.exportkit.cached_attention.default, arguments, options)
    whole.meta = {**node.meta, "val": tuple(result.meta["val"] for result in (node, key, value))}
    node.append(key)  # which moves it behind the node
    key.append(value)
    for place, result in enumerate((node, key, value)):
        result.target, result.args, result.kwargs = operator.getitem, (whole, place), {}


def _choice_of_zeros(node: torch.fx.Node) -> torch.fx.Node | None:
    """The node that puts zeros where a boolean mask leaves a query no key, as the operator itself does, or None."""
    mask, users = (_arguments(node) or {})["attn_mask"], list(node.users)
    if mask is None or mask.meta["val"].dtype is not torch.bool or len(users) != 1:
        return None
    choice = users[0]
    if choice.target is not aten.where.ScalarOther or choice.args[1:] != (node, 0.0):
        return None
    visible: Any = choice.args[0]
    is_its = visible.target is aten.any.dim and visible.args == (mask, -1, True)
    return None if not is_its or any(user.op == "output" for user in choice.users) else choice


_VIEWS = (aten.reshape.default, aten.view.default, UNSAFE_VIEW, aten.flatten.using_ints)
_COPIES = (aten.contiguous.default, aten.clone.default, aten.alias.default)


def _source(value: Any) -> Any:
    """The node whose values and axes a node only passes on."""
    while value.target in _COPIES or (
        value.target is aten.slice.Tensor
        and all(map(_same, value.meta["val"].shape, value.args[0].meta["val"].shape))  # it takes all
    ):
        if any(getattr(schema_of(user.target), "is_mutable", False) for user in value.args[0].users):
            break
        value = value.args[0]
    return value


def _unrepeated(value: Any) -> Any:
    """What a value (batch, heads, tokens, size) repeats each head of; None if it repeats none."""
    view = _source(value)
    if view.target is aten.repeat_interleave.self_int and arguments_of(view)["dim"] in (1, -3):
        return view.args[0]
    if view.target not in _VIEWS or (repeated := _source(view.args[0])).target is not aten.expand.default:
        return None
    single = _source(repeated.args[0])
    if single.target is not aten.unsqueeze.default or repeated.meta["val"].ndim != 5 or single.args[1] not in (2, -3):
        return None
    batch, groups, times, tokens, size = repeated.meta["val"].shape
    before = map(_same, single.args[0].meta["val"].shape, (batch, groups, tokens, size))
    after = map(_same, view.meta["val"].shape, (batch, groups * times, tokens, size))
    return single.args[0] if all(before) and all(after) else None


def _is_cached(node: torch.fx.Node, query: Any, key: Any, value: Any) -> bool:
    """Whether keys and values are a cache with the keys and values of the query's own tokens appended.

    Not in cross attention, which may have no new keys: the kernel rejects that. And not where something reads the
    whole keys before, such as a window that cuts them.
    """
    if key is value or node.kwargs.get("is_causal"):  # causal is counted from the end, if there is a cache
        return False
    order = {other: place for place, other in enumerate(node.graph.nodes)}
    for whole in (key, value):
        if whole.target is not aten.cat.default or len(whole.args[0]) != 2 or whole.args[1:] not in ((2,), (-2,)):
            return False
        if whole.args[0][0].meta["val"].ndim != 4:  # the empty tensor that an unused cache begins with
            return False
        if any(order[user] < order[node] for user in whole.users):
            return False
    tokens = query.meta["val"].shape[2]
    return all(_same(whole.args[0][1].meta["val"].shape[2], tokens) for whole in (key, value))


def _full_mask(node: torch.fx.Node, mask: Any, query: Any, masks: dict[Any, Any]) -> Any:
    """A mask as onnxruntime takes it, which repeats masks over batch and heads, but not over queries.

    onnxruntime returns zeros for a row that is full of the smallest number, where torch returns an average of all
    values. Half of that number gives the average in both: next to it, scores make no difference either.
    """
    shape, tokens = mask.meta["val"].shape, query.meta["val"].shape[2]
    known = mask, str(tokens)
    if known not in masks:
        with node.graph.inserting_before(node):
            if mask.meta["val"].is_floating_point():
                lowest = torch.finfo(query.meta["val"].dtype).min
                is_lowest = call_node(node.graph, aten.eq.Scalar, mask, lowest)
                mask = call_node(node.graph, aten.masked_fill.Scalar, mask, is_lowest, lowest / 2)
            if not _same(shape[-2], tokens):
                rows = tokens if isinstance(tokens, int) else call_node(node.graph, aten.sym_size.int, query, 2)
                mask = call_node(node.graph, aten.expand.default, mask, [*[-1] * (len(shape) - 2), rows, -1])
        masks[known] = mask
    return masks[known]
