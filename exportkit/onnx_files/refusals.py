"""Calls that a model refuses by the values of its tensors: an ONNX graph, which cannot raise, has to fail as well.

A model raises where an index is out of range, where an assertion such as ``torch._check(n.item() < 5)`` does not hold,
and where an operator does not take a value, as ``one_hot`` does not take a class that does not exist. What makes
onnxruntime fail, on the CPU, is an index out of range. An index that ONNX would take becomes one that it does not, and
the first result of the graph is looked up by an index that is out of range unless everything holds.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from exportkit._torch_compat.graph import (
    ITEM,
    arguments_of,
    asserts_recorded_path,
    asserts_values,
    call_inlined,
    copied_module,
    graphs_in,
    nodes_in,
    operator_name,
    with_graph_module,
)
from exportkit._torch_compat.traced_values import is_counted
from exportkit.errors import ExportError
from exportkit.onnx_files.exact import call_node, copied_before
from exportkit.running.session import REFUSED_INDEX

aten = torch.ops.aten

# Indices. ONNX counts negative ones from the end, where these operators raise. A range that nothing checks becomes a
# Slice in onnxruntime, which ends with the last row.

_INDEXED = {
    "embedding": "indices",
    **dict.fromkeys(
        [
            "gather", "index_add", "index_copy", "index_reduce", "index_select", "scatter", "scatter_add",
            "scatter_reduce",
        ],
        "index",
    ),
}  # fmt: skip
# Operators whose results are never negative, those whose second result is not, and those that copy their input.
_COUNTS = {"argmax", "argmin", "argsort", "bucketize", "nonzero", "searchsorted"}
_COUNTS_SECOND = {"kthvalue", "max", "median", "min", "sort", "topk"}
# Operators that raise where no element is left to reduce.
_LARGEST = ("amax", "amin", "aminmax", "argmax", "argmin", "max", "median", "min", "nanmedian")
_LEAVE_OUT = ("corrcoef", "cov", "squeeze")  # operators that leave out axes of one element
_COPIES = {"_to_copy", "clone", "detach_", "lift_fresh_copy", "repeat"}


def with_checked_indices(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program with indices below 0 made too large for operators that do not take them."""
    given = {*program.graph_signature.user_inputs}

    def to_check(part: torch.fx.GraphModule) -> list[torch.fx.Node]:
        known = given if part.graph is outermost.graph else None
        return [node for node in part.graph.nodes if _has_negative_index(node, known)]

    outermost = program.graph_module
    if not any(map(to_check, graphs_in(outermost))):
        return program
    outermost = copied_module(program)
    for part in graphs_in(outermost):
        for node in to_check(part):
            _check_index(node)
    return with_graph_module(program, outermost)


def _has_negative_index(node: torch.fx.Node, given: Collection[str] | None) -> bool:
    name = _index_of(node)
    index = arguments_of(node)[name] if name else None
    return isinstance(index, torch.fx.Node) and _may_be_negative(index, given)


def _check_index(node: torch.fx.Node) -> None:
    name, arguments = _index_of(node), arguments_of(node)
    index, place = arguments[name], [*arguments].index(name)
    with node.graph.inserting_before(node):
        negative = call_node(node.graph, aten.lt.Scalar, index, 0)
        checked = node.graph.call_function(aten.where.ScalarSelf, (negative, REFUSED_INDEX, index))
    checked.meta["val"] = index.meta["val"]
    if place < len(node.args):
        node.update_arg(place, checked)
    else:
        node.update_kwarg(name, checked)


def _index_of(node: torch.fx.Node) -> str:
    """The name of the argument that is an index which may not be negative, or an empty string."""
    return _INDEXED.get(operator_name(node.target).rstrip("_"), "")


def _may_be_negative(index: torch.fx.Node, given: Collection[str] | None) -> bool:
    """Whether indices may be negative, as far as the operators show that they come from.

    Args:
        index: The indices.
        given: The inputs of the graph that the caller gives; None for the graph of a loop, for all of its inputs.
    """
    source, result = _origin(index)
    if source.op == "placeholder":
        return given is None or source.name in given  # constants were in use when the model ran
    name = operator_name(source.target)
    return name not in _COUNTS and not (name in _COUNTS_SECOND and result == 1)


def _origin(index: torch.fx.Node) -> tuple[torch.fx.Node, Any]:
    """The node that makes indices, which others pass on, and which of its results they are."""
    result: Any = None
    while True:
        if index.target is operator.getitem:
            index, result = index.all_input_nodes[0], index.args[1]
        elif operator_name(index.target) in _COPIES or getattr(index.target, "is_view", False):
            index, result = index.all_input_nodes[0], None
        else:
            return index, result


# Operators that do not take all values of an argument, or do something else for some, and have some result for these in
# ONNX.


def _all_within(values: torch.Tensor, least: float, limit: Any) -> torch.Tensor:
    valid: torch.Tensor = (values >= least) & (values < limit)
    return valid.all()


def _are_classes(scores: torch.Tensor, target: torch.Tensor, ignored: int | None = None) -> torch.Tensor:
    valid = (target >= 0) & (target < (scores.shape[min(scores.ndim - 1, 1)] if scores.ndim else 1))
    return (valid if ignored is None else valid | (target == ignored)).all()


def _begin_bags(offsets: torch.Tensor, count: Any) -> torch.Tensor:
    ends = torch.cat([offsets, offsets.new_full((1,), count)])
    return (ends[1:] >= offsets).all() & (offsets[:1] == 0).all()


def _are_probabilities(*values: torch.Tensor) -> torch.Tensor:
    return functools.reduce(operator.and_, (((part >= 0) & (part <= 1)).all() for part in values))


def _counted_axes(name: str, given: Mapping[str, Any], shape: torch.Size) -> list[int]:
    """The axes that an operator leaves out if they have one element, and whose size is a count."""
    axes: Sequence[int] = range(len(shape))
    if name != "squeeze":
        axes = axes[:1] if len(shape) > 1 else ()  # the covariance of a single variable has none
    elif given.get("dim") is not None:
        axes = [given["dim"]] if isinstance(given["dim"], int) else given["dim"]
    return [axis for axis in axes if is_counted(shape[axis])]


def _keeps_axes(name: str) -> Callable[[Mapping[str, Any]], torch.Tensor]:
    """Whether no count is 1: the trace took it for granted, and the graph keeps an axis that the model leaves out."""

    def holds(given: Mapping[str, Any]) -> torch.Tensor:
        values = given["self"]
        return torch.stack([_count(values, axis) != 1 for axis in _counted_axes(name, given, values.shape)]).all()

    return holds


def _reduced_counts(given: Mapping[str, Any], shape: torch.Size) -> list[int]:
    """The axes that an operator reduces, and whose size is a count."""
    dim = given.get("dim")
    axes = range(len(shape)) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    return [axis for axis in axes if is_counted(shape[axis])]


def _has_elements(given: Mapping[str, Any]) -> torch.Tensor:
    values = given["self"]
    return torch.stack([_count(values, axis) != 0 for axis in _reduced_counts(given, values.shape)]).all()


def _is_solved(matrices: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Numbers, for matrices of numbers; a matrix that has no inverse, or no root, leads to others."""
    return (result - result == 0).all() | (matrices - matrices != 0).any()


# What has to hold for the arguments and the result of an operator, by the name of the operator.
_CONDITIONS: dict[str, Callable[[Mapping[str, Any]], torch.Tensor]] = {
    "bincount": lambda given: (given["self"] >= 0).all(),
    "binary_cross_entropy": lambda given: _are_probabilities(given["self"], given["target"]),
    "histc": lambda given: (given["self"] - given["self"] == 0).all(),
    "embedding_bag": lambda given: _begin_bags(given["offsets"], given["indices"].shape[0]),
    "multilabel_margin_loss": lambda given: _all_within(given["target"], -1, max(given["self"].shape[-1:], default=1)),
    "one_hot": lambda given: _all_within(given["self"], 0, given["num_classes"]),
    **dict.fromkeys(
        ["cholesky", "inverse", "linalg_cholesky", "linalg_inv", "linalg_solve"],
        lambda given: _is_solved(given["A"] if "A" in given else given["self"], given["result"]),
    ),
    **dict.fromkeys(
        ["max_unpool2d", "max_unpool3d"],
        lambda given: _all_within(given["indices"], 0, math.prod(given["output_size"])),
    ),
    **{name: _keeps_axes(name) for name in _LEAVE_OUT},
    **dict.fromkeys(_LARGEST, _has_elements),
    **dict.fromkeys(["quantile", "nanquantile"], lambda given: _are_probabilities(given["q"])),
    "repeat_interleave": lambda given: (given["repeats"] >= 0).all(),
    **dict.fromkeys(
        ["cross_entropy_loss", "multi_margin_loss", "nll_loss", "nll_loss2d", "nll_loss_nd"],
        lambda given: _are_classes(given["self"], given["target"], given.get("ignore_index")),
    ),
}


def with_refusals(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program with a first result that cannot be computed if a condition about values does not hold.

    In the graph of a loop, this is the first result of an iteration. The assertions themselves stay;
    `without_assertions` takes them out.
    """
    if not any(map(_refuses, nodes_in(program.graph_module))):
        return program
    module = copied_module(program)
    for part in graphs_in(module):
        _refuse(part)
    return with_graph_module(program, module)


def refusing_result(graph: torch.fx.Graph) -> torch.fx.Node | None:
    """Returns the first result that a graph computes, which cannot be computed where a condition does not hold."""
    return next((value for value in graph.output_node().all_input_nodes if _is_computed(value)), None)


def _refuse(module: torch.fx.GraphModule) -> None:
    graph = module.graph
    output, result = graph.output_node(), refusing_result(graph)
    stated = [node for node in graph.nodes if _refuses(node)]
    stated += [found for node in list(graph.nodes) for found in _unused_results(module, node)]
    if result is None and any(map(asserts_recorded_path, stated)):
        raise ExportError(
            "A graph that computes none of its results cannot refuse a branch that no recorded call took."
        )
    if result is None or not stated:
        return
    found = dict[Any, torch.fx.Node]()  # whether a condition holds, by what it says: layers repeat the same ones
    for node in stated:
        with graph.inserting_before(node.next):
            if asserts_values(node):
                condition = node.args[0]
                value = condition.meta["val"]
                says = condition if isinstance(value, torch.Tensor) or str(value) == "True" else str(value)
                if says not in found:
                    found[says] = _holds(condition, result.meta["val"].fake_mode)
            elif node.target is operator.getitem:
                found[node] = call_inlined(graph, lambda given: _is_a_value(given["it"]), {"it": node})
            else:
                given = arguments_of(node)
                if isinstance(node.meta["val"], torch.Tensor):
                    given["result"] = node
                found[node] = call_inlined(graph, _CONDITIONS[operator_name(node.target)], given)
    _look_up(result, output, list(found.values()))


def _unused_results(module: torch.fx.GraphModule, node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yields nodes for the results of a loop or branch that cannot be computed where it refuses values, if unused."""
    for given in node.args if node.op == "call_function" else ():
        body = getattr(module, str(given.target), None) if isinstance(given, torch.fx.Node) else None
        if not isinstance(body, torch.fx.GraphModule) or not any(map(_refuses, nodes_in(body))):
            continue
        returned: Any = body.graph.output_node().args[0]
        result, results, values = refusing_result(body.graph), list(returned), node.meta.get("val")
        if result is None or not isinstance(values, tuple | list) or len(values) != len(results):
            continue
        place = results.index(result)
        uses = [user for user in node.users if user.target is operator.getitem and user.args[1] == place]
        if not any(user.users for user in uses):
            with module.graph.inserting_after(node):
                found = module.graph.call_function(operator.getitem, (node, place))
            found.meta = {"val": values[place]}
            yield found


def _is_a_value(tensor: torch.Tensor) -> torch.Tensor:
    """True, for any values."""
    return ((tensor == tensor) | (tensor != tensor)).all()  # noqa: PLR0124


def _refuses(node: torch.fx.Node) -> bool:
    """Whether a node states a condition about values that need not hold."""
    name = operator_name(node.target)
    if asserts_values(node):
        return True
    if name not in _CONDITIONS:
        return False
    given = arguments_of(node)
    if name in _LEAVE_OUT:
        return bool(_counted_axes(name, given, given["self"].meta["val"].shape))
    if name in _LARGEST:
        if name.endswith("median") and "dim" not in given:  # that of nothing is NaN
            return False
        return "other" not in given and bool(_reduced_counts(given, given["self"].meta["val"].shape))
    if name == "histc":
        return bool(given["min"] == given["max"])  # the limits are those of the values
    if name == "one_hot":
        return not _is_below(given["self"], given["num_classes"])
    if name == "cross_entropy_loss" and given["target"].meta["val"].is_floating_point():
        return False  # probabilities
    values = [given[key] for key in ("q", "repeats") if key in given]
    return all(isinstance(it, torch.fx.Node) and isinstance(it.meta["val"], torch.Tensor) for it in values)


def _is_below(index: torch.fx.Node, count: Any) -> bool:
    """Whether indices are numbers of as many elements as there are at most, as far as the operators show."""
    source, result = _origin(index)
    name = operator_name(source.target)
    if not (name in _COUNTS - {"nonzero"} or (name in _COUNTS_SECOND and result == 1)):
        return False
    given = arguments_of(source)
    size = given["self"].meta["val"].shape[given["dim"]] if isinstance(given.get("dim"), int) else None
    return isinstance(size, int) and isinstance(count, int) and size <= count


def _is_computed(value: Any) -> bool:
    tensor = value.meta.get("val") if isinstance(value, torch.fx.Node) and value.op == "call_function" else None
    return isinstance(tensor, torch.Tensor) and not tensor.is_complex()


def _holds(condition: torch.fx.Node, mode: Any) -> torch.fx.Node:
    """A new node that says whether what is asserted holds."""
    return call_inlined(condition.graph, lambda given: (given["it"] != 0).all(), {"it": _tensor_of(condition, mode)})


def _tensor_of(node: torch.fx.Node, mode: Any) -> torch.fx.Node:
    """A node for the value of a node, computed from tensors: among sizes, torch takes what it asserts for granted."""
    graph, target, value = node.graph, cast(Any, node.target), node.meta["val"]
    if isinstance(value, torch.Tensor):
        return node
    kind = torch.float64 if isinstance(value, torch.SymFloat | float) else torch.int64  # Python's own numbers
    if target in (aten.item.default, ITEM):
        return call_inlined(graph, lambda given: given["it"].reshape(()).to(kind), {"it": node.args[0]})
    if target is aten.sym_size.int and is_counted(value):
        return call_inlined(graph, lambda given: _count(given["it"], node.args[1]), {"it": node.args[0]})
    if getattr(target, "__module__", "") == "_operator":
        operands = [_tensor_of(it, mode) if isinstance(it, torch.fx.Node) else _limited(it) for it in node.args]
        return call_inlined(graph, lambda given: target(*given["operands"]), {"operands": operands})
    number = graph.call_function(aten.scalar_tensor.default, (node,), {"dtype": kind})
    with mode:
        number.meta["val"] = torch.scalar_tensor(value, dtype=kind)
    return number


def _limited(number: Any) -> Any:
    """A number that sizes are compared with, as int64: torch derives limits for them beyond their range."""
    return max(-(2**63), min(number, 2**63 - 1)) if isinstance(number, int) else number


def _count(values: torch.Tensor, axis: Any) -> torch.Tensor:
    """The size of an axis as it is, whatever a trace takes it for."""
    for other in range(values.ndim):
        if other != axis % values.ndim:
            is_empty = is_counted(values.shape[other]) or values.shape[other] == 0
            values = values.sum(other, keepdim=True) if is_empty else values.narrow(other, 0, 1)
    return torch.ones_like(values, dtype=torch.int64).sum()


def _look_up(result: torch.fx.Node, output: torch.fx.Node, conditions: list[torch.fx.Node]) -> None:
    """Makes a result the element 0 of a list of one if all conditions hold, and an element out of range otherwise."""
    graph = result.graph

    def chosen(given: Mapping[str, Any]) -> torch.Tensor:
        holds = functools.reduce(torch.logical_and, given["conditions"])
        index = holds.logical_not().to(torch.int64).mul(REFUSED_INDEX).reshape(1)
        found: torch.Tensor = given["result"].unsqueeze(0).index_select(0, index).squeeze(0)
        return found

    computed = copied_before(result)
    result.replace_all_uses_with(computed, delete_user_cb=lambda user: user is not output)
    with graph.inserting_before(output):
        last = call_inlined(graph, chosen, {"result": computed, "conditions": conditions})
    output.prepend(result)
    result.meta.pop("unbacked_bindings", None)  # sizes that the operator itself finds
    result.target, result.args, result.kwargs = last.target, last.args, last.kwargs
    graph.erase_node(last)
