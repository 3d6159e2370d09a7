"""Translates a traced program to an ONNX file whose inputs, outputs and axes carry the names of the plan."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from exportkit._torch_compat.graph import (
    asserts_recorded_path,
    asserts_values,
    copied_module,
    graphs_in,
    with_graph_module,
    without_guards,
)
from exportkit._torch_compat.onnx import (
    exact_no_ops,
    limits_kept,
    limits_with_names,
    quick_matches,
    quiet_onnx_export,
    slices_kept,
    tables_kept,
    versions_inside,
)
from exportkit._torch_compat.symbolic_shapes import SYMBOL_NAME, forget_pending_sizes, input_axes
from exportkit._torch_compat.traced_values import sizes_that_follow
from exportkit._torch_compat.tracing import dispatch_restored
from exportkit._torch_compat.transformers import ExporterTranslations, exporter_translations
from exportkit.errors import ExportError, InvalidRequestError, short_text
from exportkit.onnx_files.choices import choices_as_branches
from exportkit.onnx_files.contract import Contract, Runtime, input_names, output_names
from exportkit.onnx_files.decompositions import translatable
from exportkit.onnx_files.findings import operator_findings
from exportkit.onnx_files.preparation import prepared, without_assertions
from exportkit.onnx_files.refusals import refusing_result
from exportkit.overrides import attribute_slots, replaced
from exportkit.plan.expression import Expression
from exportkit.plan.leaves import Finding
from exportkit.programs.program import TracedProgram, without_gradients
from exportkit.rewrites.lists import operators_at_any_length
from exportkit.rewrites.model_code import line_of_node
from exportkit.rewrites.table import LIBRARY_PATCHES, RECORDED_PATHS, applied
from exportkit.running.session import FUSED_OPSET, require_fused_operators
from exportkit.trees import registered_caches

if TYPE_CHECKING:
    import onnx_ir

DOMAIN_KEY = "exportkit.domain"  # where the metadata of a file says for which calls it may be used


def translate(
    traced: TracedProgram,
    path: Path,
    opset: int | None = None,
    runtime: Runtime | None = None,
    branches: bool = True,
) -> Contract:
    """Writes a program as ONNX, with its weights as external data, and returns how the graph is called.

    Args:
        traced: The program.
        path: Where to write.
        opset: ONNX opset; by default torch's own choice.
        runtime: What the graph is fused for; None for a graph of operators that every runtime has.
        branches: Whether nodes that only one branch needs are moved into an ONNX ``If``.

    Raises:
        ExportError: if an operator cannot be translated.
    """
    from onnx_ir.passes.common import NameFixPass

    from exportkit.onnx_files.fused import fused_text

    extra = exporter_translations() if LIBRARY_PATCHES.name in traced.rules else None
    zeros = None if runtime is None else _zeros(traced)
    translated = functools.partial(onnx_program, opset=opset, extra=extra, zeros=zeros)
    program, unchecked = _with_assertions(traced.program, translated)
    written = int(program.model.opset_imports.get("") or 0)
    if opset is not None and written != opset:
        raise ExportError(
            "torch.onnx cannot write this opset.",
            expected=f"opset {opset}",
            got=f"opset {written}",
            hint="choose another opset, or leave it out to get the one that torch prefers.",
        )
    inputs, outputs = _name_values(program.model.graph, traced)
    _take_numbers(program.model.graph, inputs, traced.observation.signature.numbers)
    _name_axes(program.model, traced)
    axes = {
        path: tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape or ())
        for path, value in zip(outputs.values(), program.model.graph.outputs, strict=True)
    }
    program.model.metadata_props[DOMAIN_KEY] = json.dumps(traced.domain.to_json())
    if branches and any(name.startswith(RECORDED_PATHS.name) for name in traced.rules):
        choices_as_branches(program.model.graph)
    NameFixPass()(program.model)  # a new value may have the name of one in a loop
    path.parent.mkdir(parents=True, exist_ok=True)
    _copy_views_when_written(program.model.graph)
    program.save(path, external_data=True)
    findings = operator_findings(traced.program, program)
    if unchecked:
        lines = "; ".join(dict.fromkeys(map(_line_of, unchecked)))
        text = f"the graph does not check these assertions about values, as ONNX cannot express them: {lines}."
        findings.append(Finding("assertions", lines, text))
    if runtime is not None:
        findings.append(Finding("fused", "onnxruntime", f"fused for onnxruntime: {fused_text(program.model)}."))
    traced = replace(traced, plan=traced.plan.with_findings(findings))
    return Contract.of(traced, path, inputs, outputs, axes, written, runtime=runtime)


def _with_assertions(
    program: torch.export.ExportedProgram, translated: Callable[[torch.export.ExportedProgram], torch.onnx.ONNXProgram]
) -> tuple[torch.onnx.ONNXProgram, list[torch.fx.Node]]:
    """The program in ONNX, if need be without its assertions; and the assertions that it does not make."""
    whole, *parts = graphs_in(program.graph_module)
    try:
        return translated(program), _assertions([part for part in parts if refusing_result(part.graph) is None])
    except Exception as error:
        asserted = _assertions([whole])
        try:
            if not asserted or any(
                map(asserts_recorded_path, asserted)
            ):  # without it, the graph would take the wrong branch
                raise
            return translated(without_assertions(program)), [*_assertions(parts), *asserted]
        except Exception:
            raise ExportError(
                "The program could not be translated to ONNX.",
                got=_summary(error),
                hint="the full message of torch.onnx is the cause of this exception (__cause__).",
            ) from error


def _copy_views_when_written(graph: onnx_ir.Graph) -> None:
    """Lets weights that are views, such as transposed ones, be copied one at a time as they are written.

    numpy writes views number by number, in 4 to 18 ns for each: seconds for a large model.
    """
    import onnx_ir

    def copied(view: onnx_ir.TensorProtocol) -> onnx_ir.TensorProtocol:
        array = view.numpy()
        if min(array.strides) < 0:  # torch takes no arrays that are flipped
            array = array.copy()
        copy = torch.from_numpy(array.view(f"u{array.itemsize}")).contiguous()  # of any dtype, bfloat16 too
        return onnx_ir.Tensor(copy.numpy().view(array.dtype), dtype=view.dtype)

    for value in graph.initializers.values():
        held = value.const_value
        if type(held) is onnx_ir.Tensor and not held.numpy().flags.c_contiguous:
            value.const_value = onnx_ir.LazyTensor(
                functools.partial(copied, held), held.dtype, onnx_ir.Shape(held.shape), name=held.name
            )


def _assertions(graphs: Sequence[torch.fx.GraphModule]) -> list[torch.fx.Node]:
    """The assertions about values in some graphs of a program: the whole one, and those of loops and branches."""
    return [node for module in graphs for node in module.graph.nodes if asserts_values(node)]


def _line_of(node: torch.fx.Node) -> str:
    place = line_of_node(node)
    return "a line of torch" if place is None else f"{place.code} ({Path(place.file).name}:{place.line})"


def fused_opset(opset: int | None) -> int:
    """Returns the opset of graphs that are fused for onnxruntime.

    Args:
        opset: The opset that was asked for, if any.

    Raises:
        InvalidRequestError: if it is a different one.
        MissingPackageError: if the installed onnxruntime cannot run such graphs.
    """
    if opset not in (None, FUSED_OPSET):
        raise InvalidRequestError(
            "Graphs that are fused for onnxruntime require a specific opset.",
            where="opset",
            expected=FUSED_OPSET,
            got=opset,
            hint="leave out the opset, or the runtime.",
        )
    require_fused_operators()
    return FUSED_OPSET


def write_domain(contract: Contract) -> None:
    """Writes the domain of a graph into the metadata of its file, without touching the weights.

    Args:
        contract: The graph, whose proof may have narrowed its domain.
    """
    import onnx_ir

    model = onnx_ir.load(contract.path)
    model.metadata_props[DOMAIN_KEY] = json.dumps(contract.domain.to_json())
    onnx_ir.save(model, contract.path)


def onnx_program(
    program: torch.export.ExportedProgram,
    opset: int | None = None,
    extra: ExporterTranslations | None = None,
    zeros: Sequence[Mapping[Any, int]] | None = None,
) -> torch.onnx.ONNXProgram:
    """Returns a program in ONNX, with exportkit's translations where those of torch.onnx compute other numbers.

    Args:
        program: As torch.export.export returns it.
        opset: ONNX opset; by default torch's own choice.
        extra: The translations of transformers, for a program that was traced with its patches.
        zeros: The symbols of the program that may be 0 together, to fuse it for onnxruntime; None to leave it as it is.

    Raises:
        ExportError: if torch.onnx returns nothing.
    """
    from exportkit.onnx_files.fused import fuse_across_layers
    from exportkit.onnx_files.translations import keep_small_probabilities  # onnxscript takes half a second to import

    with (
        quiet_onnx_export(),
        dispatch_restored(),
        registered_caches(),
        without_gradients(program.parameters()),
        operators_at_any_length(),
        contextlib.ExitStack() as stack,
    ):
        # without these, epsilons, limits and slices may be left out, and large graphs take minutes
        changed = [*exact_no_ops(), *limits_kept(), *limits_with_names(), *quick_matches(), *slices_kept()]
        changed += [*sizes_that_follow(), *tables_kept(), *versions_inside()]
        stack.enter_context(replaced(attribute_slots(changed)))
        if extra is not None:
            stack.enter_context(applied([LIBRARY_PATCHES], torch.nn.Module()))
        forget_pending_sizes(program)
        found = _with_repeated_layers(program, opset, zeros) if extra is None else None
        found = found or _translated(program, opset, extra, zeros)
        if zeros is not None:
            fuse_across_layers(found.model)
        keep_small_probabilities(found.model)
        return found


def _with_repeated_layers(
    program: torch.export.ExportedProgram, opset: int | None, zeros: Sequence[Mapping[Any, int]] | None
) -> torch.onnx.ONNXProgram | None:
    """The program in ONNX, for which layers that are alike were translated once; None if that is not possible."""
    from exportkit.onnx_files.repeated_layers import RepeatedLayers

    with contextlib.suppress(Exception):
        repeated = RepeatedLayers(prepared(program), zeros)
        found = _translated(repeated.reduced, opset, None, zeros)
        repeated.repeat(found.model)
        return found
    return None


def _translated(
    program: torch.export.ExportedProgram,
    opset: int | None,
    extra: ExporterTranslations | None,
    zeros: Sequence[Mapping[Any, int]] | None,
) -> torch.onnx.ONNXProgram:
    """The program in ONNX, each node of it translated."""
    from exportkit.onnx_files.attention import ATTENTION_TRANSLATIONS, with_whole_attention
    from exportkit.onnx_files.fused import complete_fusions
    from exportkit.onnx_files.reduction_translations import count_axes_from_first, keep_padding_apart
    from exportkit.onnx_files.selected_matrices import with_selected_products
    from exportkit.onnx_files.translations import TRANSLATIONS

    # the domain has the conditions of the guards, and torch cannot evaluate all of them once more
    source = without_guards(with_selected_products(translatable(program)))
    translations = TRANSLATIONS if zeros is None else TRANSLATIONS | ATTENTION_TRANSLATIONS
    if zeros is not None:
        source = with_whole_attention(source, zeros)
    if extra is not None:
        source = with_graph_module(source, copied_module(source))
        extra.fix_nodes(source.graph_module)
        translations = {**translations, **extra.table}
    found = torch.onnx.export(source, (), verbose=False, opset_version=opset, custom_translation_table=translations)
    if found is None:
        raise ExportError("torch.onnx returned no program.", hint="this is a bug: please report it.")
    if extra is not None:
        extra.fix_program(found)
    count_axes_from_first(found.model)
    keep_padding_apart(found.model)
    if zeros is not None:
        complete_fusions(found.model)
    return found


def _zeros(traced: TracedProgram) -> list[dict[Any, int]]:
    """The symbols of a program that may be 0 together, one dict for each such pattern of its domain."""
    found = []
    for pattern in traced.domain.patterns:
        sizes = {variable.name: pattern.sizes.get(variable.name, 2) for variable in traced.plan.variables}
        found.append({symbol: 0 for symbol, size in _symbols(traced) if not size.evaluate(sizes)})
    return [symbols for symbols in found if symbols]


def _symbols(traced: TracedProgram) -> Iterator[tuple[Any, Expression]]:
    """Yields each symbol that is the size of an input by itself, with that size in the plan."""
    sizes = input_axes(traced.program)
    for placeholder, path in traced.paths_by_node.items():
        for symbol, size in zip(sizes[placeholder], traced.plan.by_path[path].sizes, strict=True):
            if SYMBOL_NAME.fullmatch(str(symbol)):
                yield symbol, size


def _summary(error: Exception) -> str:
    """The part of torch.onnx's message that names the operator, without its colours and advice."""
    text = re.sub(r"\x1b?\[\d+m", "", str(error))
    cause = text.partition("## Exception summary")[2].partition("(Refer to")[0] or text
    return short_text(cause, 500)


def _name_values(graph: onnx_ir.Graph, traced: TracedProgram) -> tuple[dict[str, str], dict[str, str]]:
    given = {value.name: value for value in graph.inputs}
    names = input_names(traced.input_paths)
    inputs = {}
    for (placeholder, path), name in zip(traced.paths_by_node.items(), names, strict=True):
        if placeholder in given:
            given[placeholder].name = name
            inputs[name] = path
    if len(graph.outputs) != len(traced.output_paths):
        raise ExportError(
            "The ONNX graph returns a different number of tensors from the model.",
            expected=len(traced.output_paths),
            got=len(graph.outputs),
        )
    outputs = dict(zip(output_names(traced.output_paths, inputs), traced.output_paths, strict=True))
    for value, name in zip(graph.outputs, outputs, strict=True):
        value.name = name
    return inputs, outputs


def _take_numbers(graph: onnx_ir.Graph, inputs: Mapping[str, str], numbers: Mapping[str, str]) -> None:
    """Makes inputs whose last size stands for a Python number this number, as an integer without axes."""
    import onnx_ir

    for position, value in enumerate(graph.inputs):
        if numbers.get(inputs[value.name or ""]) != "size":
            continue
        number = onnx_ir.val(value.name, onnx_ir.DataType.INT64, ())
        graph.inputs[position] = number
        if not value.uses():
            continue
        tape = onnx_ir.tape.Tape()
        zero, one = (tape.initializer(onnx_ir.tensor([n], name=f"{value.name}_{n}")) for n in (0, 1))
        last = tape.op("Reshape", [number, one])
        empty = tape.op("ConstantOfShape", [tape.op("Concat", [zero, last], {"axis": 0})])
        for each in tape.initializers:
            graph.register_initializer(each)
        first = graph[0]
        graph.insert_before(first, tape.nodes)
        value.replace_all_uses_with(empty)


def _name_axes(model: onnx_ir.Model, traced: TracedProgram) -> None:
    """Puts names of the plan in place of torch's symbols (``s27``); plain variables win over sums."""
    import onnx_ir

    variables: dict[str, str] = {}
    sums: dict[str, str] = {}
    for symbol, size in _symbols(traced):
        (sums if size.variable is None else variables).setdefault(str(symbol), str(size))
    names = {**sums, **variables}
    values = list(model.graph.inputs)
    for node in model.graph.all_nodes():
        values += node.outputs
    for value in values:
        if value.shape is None:
            continue
        dims: list[Any] = []
        for dim in value.shape:
            text = dim.value if isinstance(dim, onnx_ir.SymbolicDim) else None
            if text is None:
                dims.append(dim)
            elif text in names:
                dims.append(names[text])
            else:
                dims.append(SYMBOL_NAME.sub(lambda m: f"({n})" if " " in (n := names.get(m[0], m[0])) else n, text))
        if dims != list(value.shape):
            value.shape = onnx_ir.Shape(dims)
