"""Translates one module of a program once more, without optimisations, as the whole program would take long.

In come a program, the values of a run, and a module; out goes how far its ONNX form is from it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from exportkit.divergence.graph_run import GraphRun, Inside
from exportkit.divergence.onnx_run import read_onnx
from exportkit.running.compare import distance
from exportkit.running.session import Session


def error_of_translation(program: torch.export.ExportedProgram, run: GraphRun, inside: Inside) -> float:
    """Returns the largest relative error of what the module's ONNX form returns, before optimisation.

    Args:
        program: The program.
        run: A run of it.
        inside: The module in it.

    Raises:
        Exception: whatever torch raises where the module cannot be translated by itself.
    """
    inputs, module = _part(program, run, inside)
    with _quiet(), torch.no_grad():
        part = torch.export.export(module, tuple(inputs.values()), strict=False)
        translated = torch.onnx.export(part, (), verbose=False, optimize=False)
    proto, folder = read_onnx(translated)
    names = [value.name for value in proto.graph.input]
    session = Session(proto.SerializeToString(), folder, optimised=False)
    results = session.run(dict(zip(names, inputs.values(), strict=True)))
    expected = [run.values[name] for name in inside.leaving if name in run.values]
    return max((distance(a, b).rms for a, b in zip(expected, results.values(), strict=True)), default=math.nan)


def _part(
    program: torch.export.ExportedProgram, run: GraphRun, inside: Inside
) -> tuple[dict[str, torch.Tensor], torch.fx.GraphModule]:
    """The nodes of a module as a module of their own, and the tensors that it takes."""
    nodes = {node.name: node for node in program.graph_module.graph.nodes}
    own = [nodes[node.name] for node in inside.nodes]
    graph = torch.fx.Graph()
    inputs: dict[str, torch.Tensor] = {}
    copies: dict[torch.fx.Node, Any] = {}

    def copy_of(node: torch.fx.Node) -> Any:
        if node not in copies:
            value = run.values.get(node.name, run.numbers.get(node.name))
            if isinstance(value, torch.Tensor):
                inputs[node.name] = value.detach()
                copies[node] = graph.placeholder(node.name)
            else:
                copies[node] = value
        return copies[node]

    for name in inside.entering:
        copy_of(nodes[name])
    for node in own:
        if node.users or node.name in inside.leaving:
            copies[node] = graph.node_copy(node, copy_of)
    graph.output(tuple(copies[nodes[name]] for name in inside.leaving if name in run.values))
    return inputs, torch.fx.GraphModule(program.graph_module, graph)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
