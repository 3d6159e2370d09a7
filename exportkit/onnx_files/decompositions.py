"""Prepares a traced program for the translation to ONNX: replaces what torch.onnx cannot translate.

Each step returns the program itself if it has nothing to replace; otherwise a new one that shares its weights and
computes the same numbers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, cast

import torch

from exportkit._torch_compat.graph import (
    BATCH_NORM,
    IS_ALL_TRUE,
    IS_ANY_TRUE,
    arguments_of,
    asserts_values,
    copied_module,
    draws_numbers,
    graphs_in,
    is_assertion,
    is_inactive_dropout,
    nodes_in,
    not_in_place,
    operator_name,
    schema_of,
    with_graph_module,
    written_tensors,
)
from exportkit._torch_compat.random_numbers import DROPOUT, RANDOM_OPERATORS
from exportkit._torch_compat.symbolic_shapes import traced_expression
from exportkit.onnx_files.complex_numbers import complex_decompositions, with_complex_as_pairs
from exportkit.onnx_files.exact import (
    ADDITIONS,
    EXACT,
    JOINS,
    is_half,
    is_plain_clamp,
    is_plain_cross_entropy,
    is_plain_join,
    is_plain_scatter,
    with_cut_sources,
    with_half_outputs,
    with_zeros_for_masked_rows,
)
from exportkit.onnx_files.ordering import ORDERING, POOLS, is_plain_pool
from exportkit.onnx_files.refusals import with_checked_indices, with_refusals
from exportkit.onnx_files.special_functions import SPECIAL_FUNCTIONS
from exportkit.rewrites.sized_operators import conv2d_in_groups, slices_of
from exportkit.running.program import tensor_placeholders

aten = torch.ops.aten


def translatable(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program without run-time assertions and without operators that torch.onnx cannot translate."""
    for step in (
        prepared,
        with_complex_as_pairs,
        with_zeros_for_masked_rows,
        with_checked_indices,
        decomposed,
        with_half_outputs,
    ):
        program = step(program)
    return program


def prepared(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program in a form in which its layers can be compared: without what may differ between them."""
    return with_cut_sources(with_constants(without_writes_to_inputs(without_assertions(with_refusals(program)))))


# Run-time assertions, which ONNX has no form for.


def without_assertions(
    program: torch.export.ExportedProgram, *, about_values: bool = True
) -> torch.export.ExportedProgram:
    """Returns the program without run-time assertions, and without what only they read.

    Args:
        program: The program.
        about_values: Whether those about values of tensors go as well.
    """
    if not any(map(is_assertion, nodes_in(program.graph_module))):
        return program
    module = copied_module(program)
    for part in graphs_in(module):
        _erase_assertions(part, about_values)
    return with_graph_module(program, module)


def _erase_assertions(module: torch.fx.GraphModule, about_values: bool) -> None:
    feeders = []
    for node in reversed(list(module.graph.nodes)):
        if is_assertion(node) and (about_values or not asserts_values(node)):
            feeders += node.all_input_nodes
            module.graph.erase_node(node)
    erase_unused(feeders)


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


# Inputs that a model overwrites, such as the states of a cache. A graph returns the new values instead.


def without_writes_to_inputs(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program without writes into whole inputs, unless a view of the old values is read afterwards."""
    if not _overwritten(program, program.graph):
        return program
    module = copied_module(program)
    for first, writer in _overwritten(program, module.graph):
        for user in _later(first.users, writer):
            user.replace_input_with(first, writer.args[1])
        writer.replace_all_uses_with(writer.args[1])
        module.graph.erase_node(writer)
    return with_graph_module(program, module)


def _overwritten(program: torch.export.ExportedProgram, graph: torch.fx.Graph) -> list[tuple[torch.fx.Node, Any]]:
    """Such inputs, with the node that writes."""
    names, written = set(tensor_placeholders(program)), written_tensors(graph)
    found = []
    for first, (family, (writer, *others)) in written.items():
        if first.name not in names or others or writer.target is not aten.copy_.default or writer.args[0] is not first:
            continue
        into, new = (cast(torch.fx.Node, value) for value in writer.args[:2])
        is_whole = into.meta["val"].dtype == new.meta["val"].dtype and _shape(into) == _shape(new)
        views = family[1 : family.index(writer)]
        is_last = not any(_later(view.users, writer) for view in views)
        if is_whole and is_last and not any(new in related for related, _ in written.values()):
            found.append((first, writer))
    return found


def _later(nodes: Iterable[torch.fx.Node], writer: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes that come after a given node."""
    return [node for node in nodes if node > writer]


def _shape(node: torch.fx.Node) -> list[Any]:
    return [size if type(size) is int else traced_expression(size) for size in node.meta["val"].shape]


# Functions of weights and constants alone that ONNX does not have: the quantile of a normal distribution that a model
# looks up for a threshold, a weight that is orthogonal by construction. Or that it rounds differently, such as the
# limits of bins.

_COMPUTED_HERE = (
    "cholesky", "digamma", "erfinv", "i0", "inverse", "lgamma", "linalg_", "linspace", "logdet", "logspace", "lu_",
    "matrix_exp", "pinverse", "polygamma", "qr", "slogdet", "special_", "svd",
)  # fmt: skip


def with_constants(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program with constants in place of functions of constants that ONNX does not have."""
    found = [node for node in program.graph.nodes if operator_name(node.target).startswith(_COMPUTED_HERE)]
    written = written_tensors(program.graph) if found else {}
    found = [node for node in found if node not in written]
    given = _given(program) if found else {}
    fixed = {node for root in found if (needed := _sources(root, given)) is not None for node in needed}
    if not fixed:
        return program
    module, constants = copied_module(program), dict[str, torch.Tensor]()
    values: dict[torch.fx.Node, Any] = {}
    for original, node in zip(list(program.graph.nodes), list(module.graph.nodes), strict=True):
        if original in given:
            values[node] = given[original]
        elif original in fixed or (node.target is operator.getitem and isinstance(values.get(node.args[0]), tuple)):
            arguments, options = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
            with torch.no_grad():
                values[node] = node.target(*arguments, **options)
            if isinstance(values[node], torch.Tensor) and (original in found or original not in fixed):
                constant = _put_constant(module.graph, node)
                values[constant] = constants[constant.name] = values[node].detach()
    module.graph.eliminate_dead_code()
    return with_graph_module(program, module, constants)


def _given(program: torch.export.ExportedProgram) -> dict[torch.fx.Node, torch.Tensor]:
    """The weights and constants of a program that it does not change, by their placeholder."""
    signature, tensors = program.graph_signature, {**program.state_dict, **program.constants}
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    changed = {*signature.buffers_to_mutate.values()}
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
    return {node: tensors[names[node.name]] for node in placeholders if names[node.name] not in changed}


def _sources(node: torch.fx.Node, given: Collection[torch.fx.Node]) -> set[torch.fx.Node] | None:
    """All nodes that a node is computed from, itself included; None if they need more than what is given."""
    found, left = set[torch.fx.Node](), [node]
    while left:
        node = left.pop()
        if node in given or node in found:
            continue
        schema = schema_of(node.target)
        fixed = node.op == "call_function" and (node.target is operator.getitem or schema is not None)
        writes = schema is not None and schema.is_mutable and node.target is not aten.detach_.default
        if not fixed or writes or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return None
        found.add(node)
        left += node.all_input_nodes
    return found


def _put_constant(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node:
    with graph.inserting_before(next(iter(graph.nodes))):
        constant = graph.placeholder(f"{node.name}_value")
    constant.meta = {"val": node.meta["val"]}
    if any(user.op == "output" for user in node.users):  # the signature has its name
        constant.name, node.name = node.name, constant.name
    constant.target = constant.name
    node.replace_all_uses_with(constant)
    return constant


# Operators without a translation, in terms of others, at any size.


def decomposed(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program without operators that torch.onnx has no translation for."""
    nodes = nodes_in(program.graph_module)
    targets = {node.target for node in nodes if node.target in _DECOMPOSITIONS and not _is_known(node)}
    targets |= _DECOMPOSITIONS.keys() & {not_in_place(node.target) for node in nodes}
    if any(node.target is aten.diagonal.default for node in nodes) and written_tensors(program.graph):
        targets.add(aten.diagonal_scatter.default)  # what a write to a diagonal becomes
    targets |= {DROPOUT[node.target] for node in nodes if node.target in DROPOUT and draws_numbers(node)}
    if any(node.target is aten.batch_norm.default and arguments_of(node)["training"] for node in nodes):
        targets.add(BATCH_NORM)  # what it becomes
    table = {**complex_decompositions(program), **{target: _DECOMPOSITIONS[target] for target in targets}}
    if any(map(is_half, nodes)):
        table |= ADDITIONS
    return program.run_decompositions(table) if table else program


def _is_known(node: torch.fx.Node) -> bool:
    """Whether torch.onnx translates this use: attention over heads, pools to a single output."""
    first, *others = cast(tuple[Any, ...], node.args)
    named = cast(dict[str, Any], node.kwargs)
    if node.target is aten.clamp.default:
        return is_plain_clamp(first, *others, **named)
    if node.target is aten.cross_entropy_loss.default:
        return is_plain_cross_entropy(first, *others)
    if node.target in (aten.layer_norm.default, aten.cumsum.default):
        return not is_half(node)
    if node.target in JOINS:
        return is_plain_join(first)
    if node.target in (aten.avg_pool2d.default, aten.avg_pool3d.default):
        return is_plain_pool(first, *others)
    if node.target is aten.rsub.Scalar:
        return not isinstance(others[0], torch.fx.Node) and node.meta["val"].dtype is first.meta["val"].dtype
    if node.target is aten.roll.default:
        return all(isinstance(shift, int) for shift in others[0])
    if node.target is aten.scatter_reduce.two:
        return is_plain_scatter(first, *others, **named)
    if node.target is aten.conv2d.default:
        return isinstance(arguments_of(node)["groups"], int)
    if node.target is aten.scaled_dot_product_attention.default:
        return bool(first.meta["val"].ndim >= _RANK)
    if node.target is aten.t.default:
        return bool(first.meta["val"].ndim == 2)
    return node.target in POOLS and set(others[0]) == {1}


def _cdist(one: torch.Tensor, other: torch.Tensor, p: float = 2.0, _mode: int | None = None) -> torch.Tensor:
    distance = (one[..., :, None, :] - other[..., None, :, :]).abs()
    if math.isinf(p):
        return distance.amax(-1)
    if p == 0:
        return torch.where(distance.isnan(), distance, (distance != 0).to(one.dtype)).sum(-1)
    return distance.sum(-1) if p == 1 else distance.pow(p).sum(-1).pow(1 / p)


def _shifted(shift: Callable[..., torch.Tensor], is_other_name: bool = False) -> Callable[..., Any]:
    """A shift; of small integers torch.onnx makes signed ones, and onnxruntime shifts only some of them."""

    def shifted(values: torch.Tensor, by: Any) -> Any:
        dtype = torch.result_type(values, by)
        if dtype not in (torch.uint8, torch.int8, torch.int16):
            return shift(values, by) if is_other_name else NotImplemented
        return shift(values.to(torch.int32), by.to(torch.int32) if isinstance(by, torch.Tensor) else by).to(dtype)

    return shifted


def _diagonal_scatter(
    values: torch.Tensor, source: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    """A choice between two tensors; torch's own form writes to a copy, which a program may not."""
    matrices = values.movedim((dim1, dim2), (-2, -1))
    rows, columns = (torch.arange(size, device=values.device) for size in matrices.shape[-2:])
    last = source.shape[-1] - 1
    if offset >= 0:
        spread = source.index_select(-1, rows.clamp(max=last))[..., :, None]
    else:
        spread = source.index_select(-1, columns.clamp(max=last))[..., None, :]
    return torch.where(columns - rows[:, None] == offset, spread, matrices).movedim((-2, -1), (dim1, dim2))


def _pow(values: torch.Tensor, exponents: torch.Tensor) -> Any:
    """Powers of integers with floats as exponents, which torch.onnx would round to integers."""
    dtype = torch.result_type(values, exponents)
    return NotImplemented if values.dtype is dtype else torch.pow(values.to(dtype), exponents)


def _roll(values: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> torch.Tensor:
    if not dims:
        return _roll(values.flatten(), shifts, [0]).view(values.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        length = values.shape[dim]
        start = (length - shift) % length
        values = torch.cat([values.narrow(dim, start, length - start), values.narrow(dim, 0, start)], dim)
    return values


def _split(values: torch.Tensor, size: Any, dim: int = 0) -> Any:
    """Slices where the size of the parts varies; torch.onnx's form is a list, which its optimiser cannot take."""
    return slices_of(values, size, dim) if isinstance(size, torch.SymInt) else NotImplemented


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
_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    IS_ALL_TRUE: torch.all,
    IS_ANY_TRUE: torch.any,
    aten.bitwise_left_shift.Tensor: _shifted(torch.bitwise_left_shift),
    aten.bitwise_left_shift.Tensor_Scalar: _shifted(torch.bitwise_left_shift),
    aten.bitwise_right_shift.Tensor: _shifted(torch.bitwise_right_shift),
    aten.bitwise_right_shift.Tensor_Scalar: _shifted(torch.bitwise_right_shift),
    aten.cdist.default: _cdist,
    aten.conv2d.default: conv2d_in_groups,
    # other names, which torch.onnx does not know, or with which it does not convert operands to one dtype
    aten.__lshift__.Scalar: _shifted(torch.bitwise_left_shift, True),
    aten.__lshift__.Tensor: _shifted(torch.bitwise_left_shift, True),
    aten.__rshift__.Scalar: _shifted(torch.bitwise_right_shift, True),
    aten.__rshift__.Tensor: _shifted(torch.bitwise_right_shift, True),
    aten.diagonal_scatter.default: _diagonal_scatter,
    aten.divide.Tensor: torch.div,
    aten.greater.Tensor: torch.gt,
    aten.greater_equal.Tensor: torch.ge,
    aten.less.Tensor: torch.lt,
    aten.less_equal.Tensor: torch.le,
    aten.multiply.Tensor: torch.mul,
    aten.subtract.Tensor: torch.sub,
    # a copy of a vector, which torch.onnx would return as the input itself
    aten.t.default: lambda x: x.transpose(0, 1) if x.ndim > 1 else x.clone(),
    aten.true_divide.Tensor: torch.div,
    aten.pow.Tensor_Tensor: _pow,
    # the number follows from a size, or is one of floats beside integers
    aten.rsub.Scalar: lambda x, number, alpha=1: number + x.to(torch.result_type(x, number)) * -alpha,
    aten.roll.default: _roll,
    aten.split.Tensor: _split,
    aten.fft_fftshift.default: _fftshift,
    aten.fft_ifftshift.default: _ifftshift,
    aten.scaled_dot_product_attention.default: _attention,
    **EXACT,
    **ORDERING,
    **POOLS,
    **RANDOM_OPERATORS,
    **SPECIAL_FUNCTIONS,
}
