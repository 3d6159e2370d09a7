"""Where an ONNX model begins to differ, by its outputs alone: for where there is no model to run.

In come inputs, and what the outputs should be; out goes a `Located` with the modules that the wrong outputs need and
the right ones do not. With a cache for each layer that is one layer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from exportkit.divergence.graph_run import Node
from exportkit.divergence.located import Located, Stage
from exportkit.divergence.onnx_run import nodes_of, read_onnx
from exportkit.module_traces.judge import JUMP, ROUNDING
from exportkit.module_traces.visible import Padding
from exportkit.running.compare import distance, unit_of
from exportkit.running.session import Session

NAME = "ONNX or onnxruntime"
_SHOWN = 4


def locate_outputs(
    graph: Any,
    inputs: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    *,
    wrong: Collection[str] = (),
) -> Located:
    """Returns which part of an ONNX model makes the outputs that are wrong, and none of those that are right.

    Args:
        graph: The ONNX model: a path, a ModelProto, or an ONNXProgram.
        inputs: Its inputs by name.
        expected: What its outputs should be, by name.
        wrong: Names of those that are known to be wrong, however close they are.

    Raises:
        InvalidRequestError: if this is no ONNX model, or an input is missing.
        RuntimeFailure: if onnxruntime refuses it.
    """
    proto, folder = read_onnx(graph)
    results = Session(proto.SerializeToString(), folder).run(inputs)
    visible = Padding.of_tensors(inputs.items())
    errors = {name: distance(tensor, results[name], visible(tensor)).rms for name, tensor in expected.items()}
    close = {name for name, error in errors.items() if error <= JUMP * ROUNDING * unit_of(str(expected[name].dtype))}
    right = {name for name in close if name not in wrong or errors[name] == 0}
    wrong = [value.name for value in proto.graph.output if value.name in errors and value.name not in right]
    if not wrong:
        return Located(None, stages=(Stage(NAME, "agrees", max(errors.values(), default=0.0)),))
    nodes = tuple(nodes_of(proto))
    needed = [node for node in _needed(nodes, wrong[:1]) if node not in set(_needed(nodes, right))]
    modules = list(dict.fromkeys(node.scopes[-1].path for node in needed if node.scopes))
    first = next(iter(needed), None)
    return Located(
        NAME,
        _common(modules),
        tensor=wrong[0],
        node=first.name if first and len(needed) == 1 else "",
        operator=first.operator if first else "",
        error=errors[wrong[0]],
        base=max((errors[name] for name in right), default=0.0),
        largest=distance(expected[wrong[0]], results[wrong[0]]).largest,
        reason=f"only this output needs {_listed(modules)}; with the model, the module can be named",
        stages=(Stage(NAME, "diverges", max(errors.values())),),
    )


def _needed(nodes: tuple[Node, ...], outputs: Iterable[str]) -> list[Node]:
    """The nodes that outputs are computed by, in order."""
    wanted = set(outputs)
    found = []
    for node in reversed(nodes):
        if wanted.intersection(node.outputs):
            wanted.update(node.inputs)
            found.append(node)
    return found[::-1]


def _common(paths: list[str]) -> str | None:
    """The innermost module that all paths are in; None if there is no path."""
    if not paths:
        return None
    shared: list[str] = []
    for parts in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _listed(paths: list[str]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(path or "the model itself" for path in paths[:_SHOWN]) + more
