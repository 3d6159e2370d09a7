"""Operators whose values in onnxruntime are not always torch's: a finding for each that a program contains."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from exportkit._torch_compat.graph import schema_of
from exportkit.plan.leaves import Finding


def operator_findings(program: torch.export.ExportedProgram, translated: torch.onnx.ONNXProgram) -> list[Finding]:
    """Returns a finding for each kind of operator that onnxruntime computes differently for some values.

    Args:
        program: As torch.export returned it.
        translated: What it was translated to; its program has the operators that torch.onnx decomposed it to.
    """
    names = set(_operators(program))
    if translated.exported_program is not None:
        names |= set(_operators(translated.exported_program))
    return [Finding("operator", name, f"{name}: {_VALUES[name]}") for name in sorted(names) if name in _VALUES]


def _operators(program: torch.export.ExportedProgram) -> Iterator[str]:
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            schema = schema_of(node.target)
            if schema is not None:
                yield schema.name.partition("::")[2]


_VALUES: dict[str, str] = {}
