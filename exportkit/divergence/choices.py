"""Why a graph chooses other elements than its model: in come the node and both choices; out goes the reason in words.

Which of equal elements ``torch.topk`` takes is left open by its documentation, and differs between devices. ONNX TopK
takes the first: https://onnx.ai/onnx/operators/onnx__TopK.html.
"""

from __future__ import annotations

import torch

from exportkit.divergence.graph_run import GraphRun, Node
from exportkit.module_traces.judge import PEAK, ROUNDING
from exportkit.running.compare import unit_of

EQUAL = "it chooses among equal values: torch leaves open which of them top-k takes, ONNX takes the first"
CLOSE = "it chooses among values that are equal up to rounding"
_TOP = ("TopK", "topk", "sort")


def reason_of_choice(run: GraphRun, node: Node, expected: torch.Tensor, got: torch.Tensor) -> str | None:
    """Returns what the elements are that two choices differ in, or None if they are not the same, or it is no choice.

    Args:
        run: A run of the graph.
        node: What makes the indices.
        expected: Those of the model.
        got: Those of the graph.
    """
    values = run.values.get(node.inputs[0]) if node.inputs else None
    axis = _axis(values, expected) if values is not None and any(name in node.operator for name in _TOP) else None
    if values is None or axis is None or expected.dtype != torch.int64 or got.dtype != torch.int64:
        return None
    chosen = [values.gather(axis, indices.cpu()).to(torch.float64) for indices in (expected, got)]
    apart = (chosen[0] - chosen[1]).abs().max().item()
    if apart == 0:
        return EQUAL
    scale = values.to(torch.float64).square().mean().sqrt().item()
    return CLOSE if apart <= PEAK * ROUNDING * unit_of(values.dtype) * scale else None


def _axis(values: torch.Tensor, indices: torch.Tensor) -> int | None:
    """The axis that elements are chosen along: the one with fewer of them, or the last; None if there are several."""
    if values.ndim != indices.ndim or not indices.numel():
        return None
    fewer = [axis for axis in range(values.ndim) if values.shape[axis] != indices.shape[axis]]
    return (fewer or [values.ndim - 1])[0] if len(fewer) < 2 else None
