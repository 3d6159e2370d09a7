"""What users should know about a traced program: rewrites in force, changed state, random numbers, lost outputs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from exportkit._torch_compat.graph import asserts_recorded_path, draws_numbers, operator_name, schema_of
from exportkit.errors import ExportError, UnregisteredClassError
from exportkit.overrides import replaced_classes
from exportkit.plan.leaves import Finding
from exportkit.plan.tables import count
from exportkit.probing.effects import changed_state
from exportkit.probing.missing import absent_patterns
from exportkit.programs.kept_state import STATE
from exportkit.programs.program import TracedProgram
from exportkit.rewrites.model_code import ModelLine, line_of_node
from exportkit.trees import check_opened, first_name
from exportkit.trees.structure import without_indices

_SAME_NUMBERS = "With export(..., random_numbers=True), both get the same numbers when they are compared."
_OVERWRITES = {"aten::copy_", "aten::fill_", "aten::zero_"}  # they read nothing of what they write to


def findings_of(traced: TracedProgram) -> list[Finding]:
    """Returns the findings on rewrites in force, on missing inputs, and on the mode and the state of the model."""
    findings = rule_findings(traced)
    recorded = absent_patterns(traced.plan, traced.observation)
    for pattern, reason in traced.absences.refused.items():
        names = ", ".join(sorted(pattern))
        calls = ", ".join(map(str, recorded[pattern]))
        text = f"calls {calls} leave out {names}, and no default fits ({reason}); the graph refuses these calls"
        is_stored = min(recorded[pattern]) < len(traced.observation.calls)
        text += "." if is_stored else "; store more calls to serve them (store_n_calls)."
        findings.append(Finding("missing input", names, text))
    findings += _refused_later(traced)
    if traced.model.training:
        text = "the model is in training mode: dropout and batch statistics differ between calls; call model.eval()."
        findings.append(Finding("training mode", "", text))
    inside = [name for name, item in traced.observation.written.items() if traced.wraps and item.place == name]
    if inside:
        text = (
            f"the model changes {', '.join(inside)} in place, so the graph returns the new values too; OnnxModel "
            "copies them back into the arguments, other runtimes do not."
        )
        findings.append(Finding("changed input", ", ".join(inside), text))
    modes = {bool(call.autocast): call for call in traced.observation.calls}
    if len(modes) > 1:
        text = (
            f"call {modes[True].index} was made under torch.autocast, and call {modes[False].index} was not; the graph "
            "computes as it would under autocast. Record each in its own observer."
        )
        findings.append(Finding("autocast", "", text))
    changed = dict.fromkeys(
        name for call in traced.observation.calls[:2] for name in changed_state(traced.model, traced.method, call)
    )
    if changed:
        text = (
            f"the model changes {', '.join(changed)} when it is called; a graph has no memory, so it does not. If the "
            "result depends on it, take it as an argument and return the new value."
        )
        findings.append(Finding("state", ", ".join(changed), text))
    if traced.stateful:
        text = f"the model keeps its state on its modules; the graph takes it as {STATE} and returns it."
        findings.append(Finding("module state", STATE, text))
    elif traced.begins_anew:
        text = "the model keeps state on its modules; as in the recorded calls, each call of the graph starts afresh."
        findings.append(Finding("module state", "", text))
    return findings


def _refused_later(traced: TracedProgram) -> list[Finding]:
    """Findings on constants and inputs of calls that were not stored, and that the graph refuses."""
    stored = {without_indices(path) for call in traced.observation.calls for path in call.shapes()}
    counts = Counter[tuple[str, str]]()
    for seen in traced.observation.further:
        for path, value in traced.domain.values.refused(traced.observation.constants_of(seen)).items():
            counts[path, f"{path}={value!r}"] += seen.count
        for path in dict.fromkeys(map(without_indices, seen.inputs)):
            if path not in stored:
                counts[path, path] += seen.count
    return [
        Finding(
            "refused call",
            path,
            f"{count(calls, 'call')} that {'was' if calls == 1 else 'were'} not stored gave {text}, "
            "which the graph refuses; store more calls to serve it (store_n_calls).",
        )
        for (path, text), calls in counts.items()
    ]


def rule_findings(traced: TracedProgram) -> list[Finding]:
    """Returns the findings on rewrites that were in force, and on classes that were replaced."""
    swaps = [
        f"{original.__name__} replaced by {replacement.__name__} ({count(modules, 'module')})"
        for original, replacement, modules in replaced_classes(traced.model)
    ]
    rewrites = ", ".join((*traced.rules, *swaps))
    return [Finding("exported with", rewrites, f"exported with: {rewrites}.")] if rewrites else []


def audit_effects(traced: TracedProgram) -> list[Finding]:
    """Returns the findings on random numbers, inputs without effect, outputs that are inputs or are out of reach.

    Raises:
        ExportError: if the model computes its result from buffers that it changes, or would refuse random numbers.
        UnregisteredClassError: if the model returns nothing but an object that cannot be opened.
    """
    if kept := _buffers_kept_between_calls(traced.program):
        raise ExportError(
            "The model keeps state in its buffers: it changes them, and its result depends on what the previous call "
            "left in them.",
            where=", ".join(kept),
            expected="a result that depends on the inputs alone",
            hint="take the state as an input and return the new one, as models do with caches.",
        )
    accepted = any(call.seed is not None for call in traced.observation.calls)
    if accepted and (decided := _decided_by_chance(traced.program)):
        raise ExportError(
            "The model branches on random numbers, and the recorded calls show only some of the branches. The graph "
            "would refuse the others.",
            where=", ".join(dict.fromkeys(map(str, decided))),
            expected="a choice among values that are computed in any case, such as torch.where",
            hint="record more calls, if there are only a few branches.",
        )
    inputs = traced.paths_by_node
    nodes = list(traced.program.graph.nodes)
    unused = {node.name for node in nodes if node.op == "placeholder" and not node.users}
    findings = []
    ignored = ", ".join(path for name, path in inputs.items() if name in unused)
    if ignored:
        text = f"the model does not use these inputs, so the graph does not take them: {ignored}."
        findings.append(Finding("ignored input", ignored, text))
    drawn = {operator_name(node.target): line_of_node(node) for node in nodes if node.users and draws_numbers(node)}
    if drawn:
        names = ", ".join(f"{name} in {place.owner}" if place else name for name, place in drawn.items())
        text = (
            f"the model draws random numbers ({names}): results differ from run to run, in the model and in the graph. "
        )
        text += "Both get the same numbers when they are compared." if accepted else _SAME_NUMBERS
        findings.append(Finding("random numbers", ", ".join(drawn), text))
    # outputs that share memory with an input in the model do not in the graph
    (returned,) = traced.program.graph.output_node().args
    paths = iter(traced.output_paths)
    for node, spec in zip(returned, traced.program.graph_signature.output_specs, strict=True):
        if spec.kind.name != "USER_OUTPUT" or not hasattr(node, "op"):
            continue
        path = next(paths)
        source, is_view = _source(node)
        if source.name in inputs and first_name(inputs[source.name]) not in {*traced.observation.written, STATE}:
            what = "a view of" if is_view else "the same as"
            text = f"output {path or 'of the model'} is {what} input {inputs[source.name]}; the graph returns a copy."
            findings.append(Finding("unchanged output", path, text))
    try:
        check_opened("output", traced.outputs)
    except UnregisteredClassError as error:
        if not traced.outputs.tensors():
            raise
        text = str(error).partition("\n")[0]
        findings.append(Finding("lost output", "output", f"{text} The graph returns the others."))
    return findings


def _buffers_kept_between_calls(program: torch.export.ExportedProgram) -> list[str]:
    """Names of the buffers that a program writes, after it has computed some of its result from the old values."""
    names = program.graph_signature.inputs_to_buffers
    results = {spec.arg.name for spec in program.graph_signature.output_specs if spec.kind.name == "USER_OUTPUT"}
    old: dict[str, frozenset[str]] = {}  # by node: the buffers that its value is computed from, as the call found them
    written, used = set[str](), set[str]()
    for node in program.graph.nodes:
        old[node.name] = frozenset({names[node.name]}) if node.name in names else frozenset()
        if node.op != "call_function":
            continue
        old[node.name] = frozenset().union(*(old[value.name] for value in node.all_input_nodes))
        schema = schema_of(node.target)
        if schema is None or not schema.is_mutable or not isinstance(node.args[0], torch.fx.Node):
            continue
        base, _ = _source(node.args[0], of_copies=False)
        if node.args[0] is base and schema.name in _OVERWRITES:
            others = [value for value in node.all_input_nodes if value is not base]
            old[node.name] = old[base.name] = frozenset().union(*(old[value.name] for value in others))
        else:
            old[base.name] |= old[node.name]
        written |= {names[base.name]} if base.name in names else set()
    for name in results & old.keys():
        used |= old[name]
    return sorted(written & used)


def _decided_by_chance(program: torch.export.ExportedProgram) -> list[ModelLine | str]:
    """The lines that draw random numbers, of which a program refuses some."""
    lines, found = dict[torch.fx.Node, ModelLine | str](), []
    for node in program.graph.nodes:
        source = next((lines[given] for given in node.all_input_nodes if given in lines), None)
        if source is not None or draws_numbers(node):
            lines[node] = source or line_of_node(node) or "a line of torch"
            if asserts_recorded_path(node):
                found.append(lines[node])
    return found


def _source(node: Any, of_copies: bool = True) -> tuple[Any, bool]:
    """The node whose memory a value shares, or of which it is a copy, and whether through a view."""
    is_view, same = False, ("aten::alias", "aten::detach", *(("aten::clone",) if of_copies else ()))
    while node.op == "call_function" and node.args:
        operator = schema_of(node.target)
        name = "" if operator is None else operator.name
        view = bool(getattr(node.target, "is_view", False))
        if not view and name not in same:
            break
        is_view = is_view or (view and name not in ("aten::alias", "aten::detach"))
        node = node.args[0]
    return node, is_view
