"""Quantises the graphs of an export, each after it was proven, and within a budget if there is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from exportkit.calls.call import Call
from exportkit.errors import InvalidRequestError
from exportkit.onnx_files.graph import OnnxGraph
from exportkit.onnx_files.matrices import heads_of, read_quantisable
from exportkit.onnx_files.quantised import (
    Bits,
    Quantisation,
    Quantised,
    left_of,
    read_layers,
    write_quantised,
)
from exportkit.onnx_files.runner import OnnxRunner
from exportkit.proof.budget import within_budget
from exportkit.proof.calls import as_made, unseen_calls
from exportkit.proof.prove import prove
from exportkit.proof.report import Kind

Accuracy = float | Mapping[str, float]
_FIGURES = ("top1", "kl", "error")


def quantisation_of(weights: Bits | Quantisation | None, accuracy: Accuracy | None) -> Quantisation | None:
    """Returns what a user asks for, before any work is done; None for no quantisation.

    Args:
        weights: How weights are stored.
        accuracy: The budget.

    Raises:
        InvalidRequestError: if it makes no sense.
    """
    if budget_of(accuracy) and weights is None:
        raise InvalidRequestError(
            "A budget is for graphs that are quantised; all others are proven.",
            where="accuracy",
            got=repr(accuracy),
            hint='add weights="int4".',
        )
    return weights if weights is None or isinstance(weights, Quantisation) else Quantisation(weights)


def quantised_runner(
    runner: OnnxRunner, weights: Quantisation, accuracy: Accuracy | None = None, *, verify: bool = True
) -> OnnxRunner:
    """Returns graphs with quantised weights, whose files are written over.

    Args:
        runner: The graphs in the dtype of the model.
        weights: How they are quantised.
        accuracy: The budget; see `budget_of`.
        verify: Prove each graph before it is quantised, which also finds out where it may be used.

    Raises:
        InvalidRequestError: if no graph has weights that can be quantised, or the budget makes no sense.
    """
    budget = budget_of(accuracy)
    found = _quantised(runner, weights, budget, verify)
    graphs = [*_all_graphs(found)]
    if not any(graph.contract.quantised and graph.contract.quantised.layers for graph in graphs):
        left = dict.fromkeys(text for graph in graphs for text in left_of(read_quantisable(graph.path), ()))
        raise InvalidRequestError(
            "The model has no weights that can be quantised.",
            where="weights",
            expected="products with a constant matrix, such as linear layers",
            got=", ".join(left) or "no large weights",
            hint="leave out weights=.",
        )
    return found


def budget_of(accuracy: Accuracy | None) -> dict[str, float]:
    """Returns a budget by figure.

    Args:
        accuracy: The least top-1 agreement, as a number, or a limit for some of ``top1`` (the least), ``kl`` and
            ``error`` (the largest).

    Raises:
        InvalidRequestError: if there is no such figure, or its limit makes no sense.
    """
    budget = {} if accuracy is None else dict(accuracy) if isinstance(accuracy, Mapping) else {"top1": accuracy}
    for name, limit in budget.items():
        is_number = isinstance(limit, int | float) and limit >= 0
        if name not in _FIGURES or not is_number or (name == "top1" and limit > 1):
            raise InvalidRequestError(
                "This is not a budget.",
                where="accuracy",
                expected="the least top-1 agreement, up to 1, or a dict with limits of top1, kl and error",
                got=repr(accuracy),
            )
    return {name: float(limit) for name, limit in budget.items()}


def _quantised(runner: OnnxRunner, weights: Quantisation, budget: Mapping[str, float], verify: bool) -> OnnxRunner:
    return OnnxRunner(
        {name: _quantised_graph(graph, weights, budget, verify) for name, graph in runner.graphs.items()},
        {name: _quantised(part, weights, {}, verify) for name, part in runner.parts.items()},
        runner.edges,
        split=runner.split,
        attempts=runner.attempts,
        exported=runner.exported,
    )


def _quantised_graph(graph: OnnxGraph, weights: Quantisation, budget: Mapping[str, float], verify: bool) -> OnnxGraph:
    """The graph with quantised weights; if it has none that can be, it is measured together with the others."""
    model = read_quantisable(graph.path)
    outputs = {name: path for name, path in graph.contract.outputs.items() if _may_be_logits(graph, path)}
    layers = read_layers(model, outputs, weights)
    logits = tuple(outputs[name] for name in heads_of(model, outputs))
    if budget.keys() & {"top1", "kl"} and not logits:
        raise InvalidRequestError(
            "The budget is about logits, and the graph returns none.",
            where="accuracy",
            expected="an output that a linear layer makes",
            got=", ".join(graph.contract.outputs),
            hint='give a limit of the error instead: accuracy={"error": 0.01}.',
        )
    unseen = tuple(unseen_calls(graph.traced)) if graph.traced is not None and (verify or budget) else None
    proven = OnnxGraph(graph.contract, graph.observation, graph.traced, unseen=unseen, eager=graph.eager)
    problems = prove(OnnxRunner({"": proven})).problems() if verify else ()
    quantised = Quantised(weights, layers, left_of(model, layers), logits, tuple(problems), budget)
    if layers and budget:
        recorded = [as_made(proven.contract.plan, call) for call in proven.observation.calls]
        calls: list[tuple[Kind, Call]] = [("recorded", call) for call in recorded if proven.observation.has_values]
        quantised = within_budget(proven, model, quantised, [*calls, *(("unseen", call) for call in unseen or ())])
    if layers:
        write_quantised(model, quantised.layers, weights, graph.path)
    contract = replace(proven.contract, quantised=quantised)
    return OnnxGraph(contract, graph.observation, graph.traced, eager=graph.eager)


def _may_be_logits(graph: OnnxGraph, path: str) -> bool:
    """Whether an output has a last axis of one size, and is not a cache."""
    axes = graph.contract.output_axes.get(path, ())
    return bool(axes) and isinstance(axes[-1], int) and axes[-1] > 1 and path not in graph.contract.structure.growing


def _all_graphs(runner: OnnxRunner) -> list[OnnxGraph]:
    parts = [graph for part in runner.parts.values() for graph in _all_graphs(part)]
    return [*runner.graphs.values(), *parts]
