"""Compares what a quantised graph returns with what the model returns: nothing is proven, everything is measured."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from exportkit.calls.call import Call
from exportkit.onnx_files.graph import Measured, OnnxGraph
from exportkit.probing.simplify import as_simplified
from exportkit.proof.figures import Figures, Tensors, figures_of
from exportkit.proof.leeway import hidden_by_padding, name_of
from exportkit.running.bounds import fixed_bound
from exportkit.running.compare import Difference, compare_outputs


def lossy_differences(
    graph: OnnxGraph, call: Call, expected: Tensors, got: Tensors, figures: dict[str, Figures]
) -> Iterator[Difference]:
    """Yields a difference for each output leaf; only shapes, dtypes and infinities that differ are wrong.

    Args:
        graph: The quantised graph.
        call: The call.
        expected: What the model returned, by path.
        got: What the graph returned, by path.
        figures: Takes how far each output is from the model's, by path.
    """
    joined = graph.contract.joined_outputs
    expected, got = as_simplified(expected, joined, ()), as_simplified(got, joined, ())
    hidden = hidden_elements(graph, call)
    for difference in compare_outputs(expected, got, exactly=True, bound=fixed_bound(math.inf, math.inf)):
        path = difference.path
        if difference.reason is None:
            figures[path] = measured = figures_of(expected[path], got[path], hidden.get(path), is_logits(graph, path))
            if not math.isfinite(measured.error):
                yield replace(difference, reason="it has infinities or NaN where the model has numbers")
                continue
        yield difference


def hidden_elements(graph: OnnxGraph, call: Call) -> dict[str, torch.Tensor]:
    """Returns infinity for elements of outputs that padding decides about, by path; what is found is kept.

    Args:
        graph: The graph.
        call: The call, with what the model returned.
    """
    name = name_of(call)
    if graph.eager is not None and name not in graph.measured:
        with contextlib.suppress(Exception):  # whatever the model raises for values that it was not made for
            found = hidden_by_padding(graph, call)
            if found:
                graph.measured[name] = Measured({}, found)
    return {**graph.measured.get(name, Measured()).leeway}


def is_logits(graph: OnnxGraph, path: str) -> bool:
    """Returns whether an output of a quantised graph has logits."""
    return graph.contract.quantised is not None and path in graph.contract.quantised.logits
