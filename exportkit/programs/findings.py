"""What users should know about a traced program: findings on its inputs, outputs, rewrites and model."""

from __future__ import annotations

from typing import Any

from exportkit._torch_compat.graph import schema_of
from exportkit.errors import UnregisteredClassError
from exportkit.overrides import replaced_classes
from exportkit.plan.leaves import Finding
from exportkit.programs.program import TracedProgram
from exportkit.programs.subject import STATE
from exportkit.running.program import tensor_placeholders
from exportkit.trees import check_opened


def findings_of(traced: TracedProgram) -> list[Finding]:
    """Returns the findings on rewrites in force, on missing inputs, and on the mode and the state of the model."""
    findings = rule_findings(traced)
    if traced.defaults.unproven:
        calls = ", ".join(map(str, traced.defaults.unproven))
        text = f"calls {calls} lack inputs, and no default gives the same result; the graph does not serve them."
        findings.append(Finding("missing input", f"calls {calls}", text))
    if traced.model.training:
        text = "the model is in training mode: dropout and batch statistics differ between calls; call model.eval()."
        findings.append(Finding("training mode", "", text))
    if traced.stateful:
        text = f"the model keeps its state on its modules; the graph takes it as {STATE} and returns it."
        findings.append(Finding("module state", STATE, text))
    return findings


def rule_findings(traced: TracedProgram) -> list[Finding]:
    """Returns the findings on rewrites that were in force, and on classes that were replaced."""
    swaps = [
        f"{original.__name__} replaced by {replacement.__name__} ({count} module{'s' if count > 1 else ''})"
        for original, replacement, count in replaced_classes(traced.model)
    ]
    rewrites = ", ".join((*traced.rules, *swaps))
    return [Finding("exported with", rewrites, f"exported with: {rewrites}.")] if rewrites else []


def audit_effects(traced: TracedProgram) -> list[Finding]:
    """Returns the findings on inputs without effect, outputs that are inputs, and outputs that are out of reach.

    Args:
        traced: The program.

    Raises:
        UnregisteredClassError: if the model returns nothing but an object that cannot be opened.
    """
    return [*_ignored(traced), *_unchanged(traced), *_lost(traced)]


def _ignored(traced: TracedProgram) -> list[Finding]:
    nodes = {node.name: node for node in traced.program.graph.nodes if node.op == "placeholder"}
    pairs = zip(tensor_placeholders(traced.program), traced.input_paths, strict=True)
    ignored = [path for name, path in pairs if not nodes[name].users]
    if not ignored:
        return []
    names = ", ".join(ignored)
    return [
        Finding(
            "ignored input", names, f"the model does not use these inputs, so the graph does not take them: {names}."
        )
    ]


def _unchanged(traced: TracedProgram) -> list[Finding]:
    """Outputs that are an input or a view of one: in the model they share memory, in the graph they do not."""
    inputs = dict(zip(tensor_placeholders(traced.program), traced.input_paths, strict=True))
    (returned,) = next(node for node in traced.program.graph.nodes if node.op == "output").args
    kinds = [spec.kind.name == "USER_OUTPUT" for spec in traced.program.graph_signature.output_specs]
    nodes = [node for node, is_user in zip(returned, kinds, strict=True) if is_user and hasattr(node, "op")]
    findings = []
    for node, path in zip(nodes, traced.output_paths, strict=True):
        source, is_view = _source(node)
        if source.name in inputs:
            what = "a view of" if is_view else "the same as"
            text = f"output {path or 'of the model'} is {what} input {inputs[source.name]}; the graph returns a copy."
            findings.append(Finding("unchanged output", path, text))
    return findings


def _lost(traced: TracedProgram) -> list[Finding]:
    """Outputs with tensors that are out of reach."""
    try:
        check_opened("output", traced.outputs)
    except UnregisteredClassError as error:
        if not traced.outputs.tensors():
            raise
        text = str(error).partition("\n")[0]
        return [Finding("lost output", "output", f"{text} The graph returns the others.")]
    return []


def _source(node: Any) -> tuple[Any, bool]:
    """The node whose memory a value shares, and whether through a view."""
    is_view = False
    while node.op == "call_function" and node.args:
        operator = schema_of(node.target)
        name = "" if operator is None else operator.name
        view = bool(getattr(node.target, "is_view", False))
        if not view and name not in ("aten::clone", "aten::alias", "aten::detach"):
            break
        is_view = is_view or (view and name not in ("aten::alias", "aten::detach"))
        node = node.args[0]
    return node, is_view
