"""Prepares a traced program for the translation to ONNX: takes out what ONNX has no form for.

These are run-time assertions, writes into inputs, and functions of constants. Each step returns the program itself if
it has nothing to take out; otherwise a new one that shares its weights and computes the same numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any, cast

import torch

from exportkit._torch_compat.graph import (
    ITEM,
    asserts_values,
    copied_module,
    graphs_in,
    is_assertion,
    is_inactive_dropout,
    nodes_in,
    operator_name,
    rewritten,
    schema_of,
    with_graph_module,
    written_tensors,
)
from exportkit._torch_compat.symbolic_shapes import traced_expression
from exportkit.onnx_files.exact import with_cut_sources
from exportkit.onnx_files.refusals import with_refusals
from exportkit.running.program import tensor_placeholders

aten = torch.ops.aten


def prepared(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program in a form in which its layers can be compared: without what may differ between them."""
    checked = without_assertions(with_refusals(_with_plain_reads(program)))
    return with_cut_sources(with_constants(without_writes_to_inputs(checked)))


def _with_plain_reads(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with numbers read by the operator that ``item`` is made of.

    torch fails to run ``item`` with fake tensors for a view that begins at a symbolic place, such as the last element.
    Seen in torch 2.13.
    """
    return rewritten(program, lambda node: node.target is aten.item.default, _read_plainly)


def _read_plainly(node: torch.fx.Node) -> None:
    node.target = ITEM


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
# looks up for a threshold, a weight that is orthogonal by construction. Or that it computes differently: it rounds the
# limits of bins differently, and HammingWindow has other coefficients than torch.hamming_window.

_COMPUTED_HERE = (
    "bartlett_window", "blackman_window", "cholesky", "digamma", "erfinv", "hamming_window", "hann_window", "i0",
    "inverse", "kaiser_window", "lgamma", "linalg_", "linspace", "logdet", "logspace", "lu_", "matrix_exp", "pinverse",
    "polygamma", "qr", "slogdet", "special_", "svd",
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
