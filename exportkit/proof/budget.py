"""Finds out which layers have to keep more bits so that a quantised graph stays within a budget.

Each layer is quantised alone first, which shows its harm. The layers that do most harm for their size get more bits,
one after the other; how many of them need it is found by bisection.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from exportkit.calls.call import Call
from exportkit.onnx_files.graph import OnnxGraph
from exportkit.onnx_files.quantised import BITS, Quantised, WeightMatrix
from exportkit.onnx_files.runner import OnnxRunner
from exportkit.onnx_files.switches import RewrittenGraph, SwitchedGraph
from exportkit.proof.differences import hidden_elements
from exportkit.proof.figures import Figures, figures_of, over_budget, together, worst
from exportkit.proof.report import Kind
from exportkit.running.compare import Tensors

if TYPE_CHECKING:
    import onnx
    import torch


@dataclass(frozen=True)
class Case:
    """A call as the graph gets it, and what the model returned."""

    kind: Kind
    feeds: Mapping[str, torch.Tensor]
    expected: Tensors
    hidden: Tensors


def cases_of(graph: OnnxGraph, kind: Kind, call: Call) -> Iterator[Case]:
    """Yields the call as the graph gets it, unless it is not in the domain, or was not made."""
    if not call.is_made:
        return
    try:
        args, kwargs = call.args_kwargs_as_given()
        feeds = OnnxRunner({"": graph}).feeds(*args, **kwargs)
    except Exception:  # the proof, which makes the same call, says why
        return
    expected = graph.contract.simplified(call.outputs.tensors())
    yield Case(kind, feeds, expected, hidden_elements(graph, call))


def within_budget(graph: OnnxGraph, model: onnx.ModelProto, quantised: Quantised, cases: Sequence[Case]) -> Quantised:
    """Returns how a graph is quantised so that it stays within its budget, or as close to it as it gets.

    Args:
        graph: The graph before it is quantised.
        model: The graph, as `read_quantisable` returns it.
        quantised: How it is quantised without regard to the budget.
        cases: The calls that count, with what the model returned.
    """
    assert quantised.request is not None
    chosen = [layer for layer in quantised.layers if layer.stored in BITS]
    own = {layer.node: _precisions(layer) for layer in chosen}
    with tempfile.TemporaryDirectory(prefix="exportkit-switches-") as folder:
        switched: SwitchedGraph | RewrittenGraph
        if quantised.request.activations is None:
            switched = SwitchedGraph(model, chosen, quantised.request, own, Path(folder))
        else:
            calibration = calibration_of(cases)
            switched = RewrittenGraph(model, chosen, quantised.request, calibration, Path(folder))

        def figures(stored: Mapping[str, str], kinds: Sequence[Kind] = ()) -> dict[Kind, dict[str, Figures]]:
            return _figures(graph, quantised, switched, [c for c in cases if not kinds or c.kind in kinds], stored)

        def holds(stored: Mapping[str, str]) -> bool:
            found = figures(stored)
            return not any([*over_budget(found[kind], quantised.budget, kind)] for kind in found)

        first = {layer.node: layer.stored for layer in chosen}
        if holds(first):
            return quantised
        harms = {layer.node: _harm(figures({layer.node: layer.stored}, ("recorded", "given"))) for layer in chosen}
        order = sorted(chosen, key=lambda layer: -harms[layer.node] / layer.elements)
        steps = list(_steps(order, first, own))
        low, high = 0, len(steps) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(steps[middle]) else (middle + 1, high)
    return replace(
        quantised,
        layers=tuple(
            replace(layer, stored=steps[low].get(layer.node, layer.dtype), harm=harms[layer.node])
            if layer.node in first
            else layer
            for layer in quantised.layers
        ),
    )


def calibration_of(cases: Sequence[Case]) -> list[Tensors]:
    """Returns the inputs by which activations are calibrated: those of calls that were recorded, or given."""
    return [case.feeds for case in cases if case.kind != "unseen"]


def _precisions(layer: WeightMatrix) -> tuple[str, ...]:
    """What a layer can be stored in, from the fewest bits; onnxruntime quantises embeddings to int4 only."""
    return ("int4", "int8") if layer.stored == "int4" and layer.operator == "MatMul" else (layer.stored,)


def _steps(
    order: Sequence[WeightMatrix], first: Mapping[str, str], forms: Mapping[str, Sequence[str]]
) -> Iterator[dict[str, str]]:
    """Yields what layers are stored in, with one of them in more bits each time; at last none is quantised."""
    stored = dict(first)
    for kind in ("int8", None):
        for layer in order:
            if kind is None:
                del stored[layer.node]
            elif kind in forms[layer.node] and stored[layer.node] != kind:
                stored[layer.node] = kind
            else:
                continue
            yield dict(stored)


def _figures(
    graph: OnnxGraph,
    quantised: Quantised,
    switched: SwitchedGraph | RewrittenGraph,
    cases: Sequence[Case],
    stored: Mapping[str, str],
) -> dict[Kind, dict[str, Figures]]:
    found: dict[Kind, dict[str, list[Figures]]] = {}
    for case in cases:
        of_kind = found.setdefault(case.kind, {})
        for name, tensor in switched.run(case.feeds, stored).items():
            path = graph.contract.outputs[name]
            expected = case.expected.get(path)
            if expected is None:
                continue
            if expected.shape == tensor.shape:
                item = figures_of(expected, tensor, case.hidden.get(path), path in quantised.logits)
            else:
                item = Figures(math.inf, max(expected.numel(), 1))
            of_kind.setdefault(path, []).append(item)
    return {
        kind: {path: whole for path, items in by_path.items() if (whole := together(items)) is not None}
        for kind, by_path in found.items()
    }


def _harm(figures: Mapping[Kind, Mapping[str, Figures]]) -> float:
    """How far the outputs are from the model's: the KL divergence of logits, or the error if there are none."""
    found = [worst(items) for items in figures.values() if items]
    return max((item.error if item.kl is None else item.kl for item in found), default=0.0)
