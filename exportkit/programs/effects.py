"""What a program does with its inputs and outputs: in comes what was exported, out go findings.

They name inputs that have no effect, outputs that are an input or a part of one, and outputs that are out of reach.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exportkit._torch_compat.graph import schema_of
from exportkit.errors import UnregisteredClassError
from exportkit.plan.leaves import Finding
from exportkit.running.program import tensor_placeholders
from exportkit.trees import check_opened

if TYPE_CHECKING:
    from exportkit.programs.exported import Exported


def audit_effects(exported: Exported) -> list[Finding]:
    """Returns findings about inputs and outputs.

    Args:
        exported: What was exported.

    Raises:
        UnregisteredClassError: if the model returns nothing but an object that cannot be opened.
    """
    return [*_ignored(exported), *_unchanged(exported), *_lost(exported)]


def _ignored(exported: Exported) -> list[Finding]:
    nodes = {node.name: node for node in exported.program.graph.nodes if node.op == "placeholder"}
    pairs = zip(tensor_placeholders(exported.program), exported.captured.input_paths, strict=True)
    ignored = [path for name, path in pairs if not nodes[name].users]
    if not ignored:
        return []
    names = ", ".join(ignored)
    return [Finding("ignored input", names, f"the model does not use it, so no input of the graph: {names}.")]


def _unchanged(exported: Exported) -> list[Finding]:
    """Outputs that are an input, or a view of one: for the model they share memory, for the graph they do not."""
    inputs = dict(zip(tensor_placeholders(exported.program), exported.captured.input_paths, strict=True))
    (returned,) = next(node for node in exported.program.graph.nodes if node.op == "output").args
    kinds = [spec.kind.name == "USER_OUTPUT" for spec in exported.program.graph_signature.output_specs]
    nodes = [node for node, is_user in zip(returned, kinds, strict=True) if is_user and hasattr(node, "op")]
    findings = []
    for node, path in zip(nodes, exported.captured.output_paths, strict=True):
        source, is_view = _source(node)
        if source.name in inputs:
            what = "a view of" if is_view else "the same as"
            text = f"output {path or 'of the model'} is {what} input {inputs[source.name]}; the graph returns a copy."
            findings.append(Finding("unchanged output", path, text))
    return findings


def _lost(exported: Exported) -> list[Finding]:
    """Outputs with tensors that are out of reach."""
    try:
        check_opened("output", exported.outputs)
    except UnregisteredClassError as error:
        if not exported.outputs.tensors():
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
