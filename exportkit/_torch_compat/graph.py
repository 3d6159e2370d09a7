"""Graphs of torch.export and their operators: schemas, assertions, decompositions."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils._pytree import tree_flatten

from exportkit._torch_compat import require
from exportkit._torch_compat.traced_values import UNRECORDED_PATH_TEXT, depends_on_values

# Operators that check something at run time and compute nothing.
_CONDITIONS = ("_assert_scalar", "_assert_async")
_ASSERTIONS = (*_CONDITIONS, "_assert_tensor_metadata", "sym_constrain_range", "sym_constrain_range_for_size")
_COUNTED = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_storage_offset.default)
# Operators of aten with private names.
FFT_R2C, FFT_C2C, FFT_C2R = torch.ops.aten._fft_r2c, torch.ops.aten._fft_c2c, torch.ops.aten._fft_c2r
DISTANCES = torch.ops.aten._cdist_forward
# Resizing to the nearest pixels of sequences, images and volumes, and of images without aliases.
NEAREST_EXACT = (
    torch.ops.aten._upsample_nearest_exact1d.vec,
    torch.ops.aten._upsample_nearest_exact2d.vec,
    torch.ops.aten._upsample_nearest_exact3d.vec,
)
BILINEAR_ANTIALIASED = torch.ops.aten._upsample_bilinear2d_aa.vec
BICUBIC_ANTIALIASED = torch.ops.aten._upsample_bicubic2d_aa.vec
ITEM = torch.ops.aten._local_scalar_dense.default  # what item() calls
IS_ALL_TRUE, IS_ANY_TRUE = torch.ops.aten._is_all_true.default, torch.ops.aten._is_any_true.default
BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
BATCH_NORM_WITHOUT_STATISTICS = torch.ops.aten._native_batch_norm_legit.no_stats
BATCH_NORMS = (torch.ops.aten.batch_norm.default, torch.ops.aten._native_batch_norm_legit.default)  # what becomes it
CONJUGATE = torch.ops.aten._conj_physical
UNSAFE_VIEW, TO_COPY = torch.ops.aten._unsafe_view.default, torch.ops.aten._to_copy.default


def schema_of(target: Any) -> Any:
    """Returns the schema of what a node calls, or None if it is not an operator of torch. Seen in torch 2.13."""
    return getattr(target, "_schema", None)


def graphs_in(module: torch.nn.Module) -> list[torch.fx.GraphModule]:
    """Returns the graph of a traced module, and those of the loops and branches inside of it."""
    return [part for part in module.modules() if isinstance(part, torch.fx.GraphModule)]


def nodes_in(module: torch.nn.Module) -> list[torch.fx.Node]:
    """Returns the nodes of all of these graphs."""
    return [node for part in graphs_in(module) for node in part.graph.nodes]


def dtype_of(node: torch.fx.Node) -> torch.dtype | None:
    """Returns the dtype of the tensor that a node computes; None if it does not compute a tensor."""
    return getattr(node.meta.get("val"), "dtype", None)


class WrittenTensor(NamedTuple):
    """What a graph does with a tensor that it writes to.

    Attributes:
        family: The node that makes the tensor, its views, and the nodes that write to any of them, in order.
        writers: The nodes that write.
    """

    family: list[torch.fx.Node]
    writers: list[torch.fx.Node]


def written_tensors(graph: torch.fx.Graph) -> dict[torch.fx.Node, WrittenTensor]:
    """Returns the tensors that a graph writes to, by the node that makes each. Seen in torch 2.13."""
    made_from: dict[torch.fx.Node, torch.fx.Node] = {}  # a view, or the result of writing, and what it was made as
    writers: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        for argument, value in zip(getattr(schema_of(node.target), "arguments", ()), node.args, strict=False):
            if argument.alias_info is not None and isinstance(value, torch.fx.Node):
                made_from[node] = made_from.get(value, value)
                if argument.alias_info.is_write:
                    writers.setdefault(made_from[node], []).append(node)
    families: dict[torch.fx.Node, list[torch.fx.Node]] = {first: [first] for first in writers}
    for node, first in made_from.items():
        if first in families:
            families[first].append(node)
    return {first: WrittenTensor(families[first], nodes) for first, nodes in writers.items()}


def operator_name(target: Any) -> str:
    """Returns the name of what a node calls, such as ``embedding``; empty if it is not an operator of torch."""
    return getattr(schema_of(target), "name", "").partition("::")[2]


def not_in_place(target: Any) -> Any:
    """Returns the operator that leaves its input alone for one that works in place; None for others.

    Seen in torch 2.13.
    """
    name = operator_name(target)
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") and not name.startswith("_") else None
    return getattr(packet, getattr(target, "_overloadname", ""), None)


def given_by_name(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that an operator is given, by name. Seen in torch 2.13."""
    names = (argument.name for argument in schema_of(target).arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def arguments_of(node: torch.fx.Node) -> dict[str, Any]:
    """Returns the arguments of a node that calls an operator, by name; those that it leaves out have their defaults.

    Seen in torch 2.13.
    """
    defaults = {argument.name: argument.default_value for argument in schema_of(node.target).arguments}
    return defaults | given_by_name(node.target, node.args, node.kwargs)


def takes_number(node: torch.fx.Node, number: torch.fx.Node) -> bool:
    """Returns whether an operator calculates with a number, and makes no size or index of it. Seen in torch 2.13."""
    schema = schema_of(node.target)
    if schema is None:
        return False
    kinds = {argument.name: str(argument.type) for argument in schema.arguments}
    given = [kinds[name] for name, value in arguments_of(node).items() if value is number]
    return bool(given) and all(kind in ("number", "Optional[number]", "Tensor") for kind in given)


def is_assertion(node: torch.fx.Node) -> bool:
    """Returns whether a node only asserts something. Seen in torch 2.13."""
    return node.op == "call_function" and getattr(node.target, "_opname", None) in _ASSERTIONS


def asserts_values(node: torch.fx.Node) -> bool:
    """Returns whether a node asserts something about values of tensors that need not hold. Seen in torch 2.13."""
    if node.op != "call_function" or getattr(node.target, "_opname", None) not in _CONDITIONS:
        return False
    condition = node.args[0]
    if not isinstance(condition, torch.fx.Node):
        return False
    value = condition.meta.get("val")
    if str(value) == "True" and condition.target is operator.eq:
        return True  # since then, torch has one symbol for both
    if not depends_on_values(value):
        return False
    # counts, which are not negative; torch assumes that sizes are not 0 or 1
    counted, limit = condition.args if condition.target is operator.ge else (None, None)
    is_size = isinstance(counted, torch.fx.Node) and counted.target in _COUNTED
    return not (is_size and limit in (0, 2)) and not (limit == 0 and _is_count_of_mask(counted))


def _is_count_of_mask(node: Any) -> bool:
    """Whether a node reads how many elements of a mask are true."""
    read = node.args[0] if isinstance(node, torch.fx.Node) and node.target is torch.ops.aten.item.default else None
    if not isinstance(read, torch.fx.Node) or read.target is not torch.ops.aten.sum.default:
        return False
    (mask,) = read.all_input_nodes
    return mask.meta["val"].dtype is torch.bool


def asserts_recorded_path(node: torch.fx.Node) -> bool:
    """Returns whether a node asserts that the model decides by values as in some recorded call."""
    return is_assertion(node) and len(node.args) > 1 and str(node.args[1]).startswith(UNRECORDED_PATH_TEXT)


def call_inlined(
    graph: torch.fx.Graph, function: Callable[[Mapping[str, Any]], torch.Tensor], given: Mapping[str, Any]
) -> torch.fx.Node:
    """Returns a new node for the result of a function, whose operators are put into a graph. Seen in torch 2.13.

    Args:
        graph: The graph, with the point at which to insert.
        function: What to call, with one dict.
        given: The dict; nodes stand for their values.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    nodes = list[torch.fx.Node]()
    torch.fx.map_arg(dict(given), nodes.append)

    def call(*values: Any) -> torch.Tensor:
        by_node = dict(zip(nodes, values, strict=True))
        return function(torch.fx.map_arg(dict(given), by_node.__getitem__))

    traced = make_fx(call)(*(node.meta["val"] for node in nodes)).graph
    copies: dict[Any, torch.fx.Node] = dict(zip(traced.find_nodes(op="placeholder"), nodes, strict=True))
    for node in traced.nodes:
        if node.op == "call_function":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return copies[traced.output_node().all_input_nodes[0]]


def draws_numbers(node: torch.fx.Node) -> bool:
    """Returns whether a node makes random numbers; dropout, also the one inside attention, does if it is active.

    Seen in torch 2.13.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names, given = {argument.name for argument in schema_of(node.target).arguments}, arguments_of(node)
    if "train" in names or "training" in names:
        rates = [given[name] for name in ("p", "dropout") if name in names]
        return bool(given.get("train") or given.get("training")) and all(rates)
    return "dropout_p" not in names or bool(given.get("dropout_p"))


def is_inactive_dropout(node: torch.fx.Node) -> bool:
    """Returns whether a node is a dropout that leaves its input as it is. Seen in torch 2.13."""
    return node.target is torch.ops.aten.dropout.default and not draws_numbers(node)


def copied_module(program: torch.export.ExportedProgram) -> torch.fx.GraphModule:
    """Returns a copy of a program's graph, for `with_graph_module`. Seen in torch 2.13.

    A signature knows its nodes by name, and torch.fx renames those that are called like a function of Python, such as
    ``input``, when it copies a graph.
    """
    module: torch.fx.GraphModule = copy.deepcopy(program.graph_module)
    for node, original in zip(module.graph.nodes, program.graph.nodes, strict=True):
        node.name = original.name
    return module


def with_graph_module(
    program: torch.export.ExportedProgram,
    module: torch.fx.GraphModule,
    constants: Mapping[str, torch.Tensor] | None = None,
) -> torch.export.ExportedProgram:
    """Returns the program with a different graph for the same inputs and outputs; weights are shared.

    Seen in torch 2.13.

    Args:
        program: The program.
        module: The graph; those inside may have changed, too.
        constants: Tensors for placeholders that the program does not have, each put before all other nodes.
    """
    added = dict(constants or {})
    specs = [InputSpec(InputKind.BUFFER, TensorArgument(name=name), name, persistent=True) for name in added][::-1]
    signature = program.graph_signature
    for part in graphs_in(module):
        part.recompile()
    return torch.export.ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=ExportGraphSignature([*specs, *signature.input_specs], signature.output_specs),
        state_dict={**program.state_dict, **added},
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=require(program, "verifiers"),
    )


def rewritten(
    program: torch.export.ExportedProgram,
    applies: Callable[[torch.fx.Node], object],
    change: Callable[[torch.fx.Node], None],
) -> torch.export.ExportedProgram:
    """Returns the program with each node changed that ``applies`` holds for; the program itself if there is none."""
    if not any(map(applies, nodes_in(program.graph_module))):
        return program
    module = copied_module(program)
    for node in filter(applies, nodes_in(module)):
        change(node)
    return with_graph_module(program, module)


def without_regions(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program with the nodes of its regions among the others, and the casts of autocast as nodes.

    torch puts what a model computes under ``torch.autocast`` or ``torch.enable_grad`` into a graph of its own, which an
    operator runs. The program is returned as it is if it has no such graph, or changes its buffers or inputs. Seen in
    torch 2.13.
    """
    parts = graphs_in(program.graph_module)
    regions = [
        getattr(part, str(value.target))
        for part in parts
        for node in part.graph.nodes
        if str(node.target).startswith("wrap_with_")
        for value in node.all_input_nodes
        if value.op == "get_attr"
    ]
    if not regions:
        return program
    try:
        for part in regions:  # node by node: the code of a graph does not say which module a node comes from
            vars(part)["forward"] = torch.fx.Interpreter(part).run
        found = program.run_decompositions({})
    finally:
        for part in regions:
            del vars(part)["forward"]
    signature = found.graph_signature
    return program if signature.buffers_to_mutate or signature.user_inputs_to_mutate else found


def program_of(
    program: torch.export.ExportedProgram,
    graph: torch.fx.Graph,
    inputs: list[InputSpec],
    outputs: list[OutputSpec],
    example: Sequence[torch.Tensor] | None = None,
) -> torch.export.ExportedProgram:
    """Returns a program of its own for a graph that was made from a part of another program. Seen in torch 2.13.

    Args:
        program: The program, whose weights and submodules are used.
        graph: The graph.
        inputs: Its inputs, weights included.
        outputs: Its outputs.
        example: Tensors of the sizes that it was traced with, which AOTInductor wants to have.
    """
    module = torch.fx.GraphModule(program.graph_module, graph)
    module.meta.update(program.graph_module.meta)
    names = [str(getattr(spec.arg, "name", "")) for spec in inputs if spec.kind is InputKind.USER_INPUT]
    given: Any = ((0,) * len(names), {})
    returned: Any = (0,) * sum(spec.kind is OutputKind.USER_OUTPUT for spec in outputs)
    signature = ModuleCallSignature([], [], tree_flatten(given)[1], tree_flatten(returned)[1], names)
    weights = {spec.target for spec in inputs if spec.target is not None}
    made = torch.export.ExportedProgram(
        root=module,
        graph=graph,
        graph_signature=ExportGraphSignature(inputs, outputs),
        state_dict={name: value for name, value in program.state_dict.items() if name in weights},
        range_constraints=program.range_constraints,
        module_call_graph=[ModuleCallEntry("", signature)],
        example_inputs=None if example is None else (tuple(example), {}),
        constants={name: value for name, value in program.constants.items() if name in weights},
        verifiers=require(program, "verifiers"),
    )
    return without_guards(made)  # they name the inputs of the other program


def without_guards(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program without the checks of sizes that its module makes, which it was traced for.

    Seen in torch 2.13.
    """
    made = copy.copy(program)
    require(made, "_guards_code")
    made._guards_code = []
    return made


def decomposition_attributes(kernels: Mapping[Any, Callable[..., Any]]) -> list[tuple[Any, dict[str, Any]]]:
    """Returns the attributes to replace, each with its owner, so that a trace decomposes operators differently.

    Eager results are not affected. Seen in torch 2.13.

    Args:
        kernels: For each composite operator, such as ``torch.ops.aten.max_pool1d.default``, the function that
            computes it during a trace.
    """
    import torch._decomp

    key = torch._C.DispatchKey.CompositeImplicitAutograd
    table = {**require(torch._decomp, "decomposition_table"), **kernels}
    found: list[tuple[Any, dict[str, Any]]] = [(torch._decomp, {"decomposition_table": table})]
    for composite, kernel in kernels.items():
        known = require(composite, "py_kernels")
        found.append((composite, {"py_kernels": {**known, key: kernel}, "_dispatch_cache": {}}))
    return found


def trace_module() -> ModuleType:
    """Returns the module of torch.export that prints the graph of a failed trace to stderr. Seen in torch 2.13.

    It has no ``print`` of its own: a function set under that name is called instead of Python's.
    """
    import torch.export._trace

    return torch.export._trace


def export_with_gradients(
    model: torch.nn.Module, arguments: dict[str, Any], dynamic_shapes: dict[str, Any], strict: bool
) -> torch.export.ExportedProgram:
    """Returns the program of a model that computes gradients: their operators are nodes of its graph.

    torch.export follows what a model calls, and the operators of a gradient are called by torch's own engine. This
    traces below it, as torch.export did before it kept the operators that a model calls. Seen in torch 2.13.
    """
    export = require(trace_module(), "_export")
    program: torch.export.ExportedProgram = export(
        model, (), arguments, dynamic_shapes=dynamic_shapes, strict=strict, pre_dispatch=False
    )
    return program
