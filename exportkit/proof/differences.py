"""How what a graph returns differs from what the model returns: tensors, other values, and those of a quantised graph.

Python values are compared by type and value, containers by what they hold. For a quantised graph, nothing is proven and
everything is measured.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from exportkit.calls.call import Call
from exportkit.onnx_files.graph import MeasuredCall, OnnxGraph
from exportkit.proof.figures import Figures, figures_of
from exportkit.proof.leeway import call_name, farther_from_float32, hidden_by_padding, measurements, most_allowed
from exportkit.running.bounds import fixed_bound, rounding_bound
from exportkit.running.compare import Difference, Tensors, close, compare_outputs
from exportkit.trees import Tree, fingerprint, text_of
from exportkit.trees.constants import difference, noted_values

# A folder is proven without the model, on machines and with kernels that round differently from those that saved it;
# so do kernels of a GPU and those of the CPU.
_ELSEWHERE = 4.0
_TENSOR = torch.empty(0)


def output_differences(graph: OnnxGraph, call: Call, expected: Tensors, got: Tensors) -> tuple[Difference, ...]:
    """Returns one difference for each output leaf.

    Where rounding in well-conditioned code does not explain a difference, the model runs again to measure what else
    changes its result, if it is at hand; what was found then is kept in ``graph.measured``.

    Args:
        graph: The graph.
        call: The call.
        expected: What the model returned, by path.
        got: What the graph returned, by path.
    """
    expected, got = graph.contract.simplified(expected), graph.contract.simplified(got)
    if graph.session.in_float32:
        expected, got = _in_float32(expected), _in_float32(got)
    is_near = graph.eager is not None and (graph.placement is None or graph.placement.is_cpu)
    is_near = is_near and not any(tensor.is_cuda for tensor in expected.values())
    bound = rounding_bound if is_near else functools.partial(rounding_bound, times=_ELSEWHERE)

    most = most_allowed(graph)

    def compared(measured: MeasuredCall) -> tuple[Difference, ...]:
        wanted = {**expected, **measured.ties}
        return tuple(compare_outputs(wanted, got, exactly=True, bound=bound, leeway=measured.leeway, most=most))

    name = call_name(call)
    if graph.eager is None:
        return compared(graph.measured.get(name, MeasuredCall()))
    found = compared(MeasuredCall())
    wrong = {difference.path for difference in found if difference.reason is not None}
    if expected.keys() != got.keys() or any(math.isnan(difference.absolute) for difference in found):
        return found  # outputs, shapes or dtypes differ, which nothing explains
    for measured in measurements(graph, call, expected) if wrong else ():
        explaining = measured.of(wrong)
        found = compared(explaining)
        if all(difference.reason is None for difference in found):
            farther = farther_from_float32(graph, call, expected, got, explaining.leeway)
            found = tuple(replace(d, reason=farther.get(d.path)) for d in found)
            graph.measured[name] = graph.measured.get(name, MeasuredCall()).updated(explaining)
            break
    return found


def _in_float32(tensors: Tensors) -> Tensors:
    return {path: t.to(torch.float32) if t.dtype is torch.float64 else t for path, t in tensors.items()}


def value_differences(graph: OnnxGraph, expected: Tree, got: Tree) -> Iterator[Difference]:
    """Yields a difference for each Python value that is not what the model returned; tensors are not compared.

    Numbers that the graph computes from tensors are compared like float32, which rounds in the graph as elsewhere. Of
    those of a quantised graph, only the type is compared.

    Args:
        graph: The graph.
        expected: What the model returned.
        got: What the graph returned.
    """
    wanted, found = expected.by_path(), got.by_path()
    computed = [path for path in graph.contract.numbers if path in wanted or path in found]
    are_equal = _are_close if graph.contract.quantised is None else _are_alike
    for path in computed:
        if not are_equal(wanted.get(path), found.get(path)):
            yield _difference(path, repr(wanted.get(path)), repr(found.get(path)))
    for path, noted in noted_values(expected).items():
        if path in found and noted != fingerprint(found[path]):
            yield _difference(path, text_of(noted), text_of(fingerprint(found[path])))
    compared = dict.fromkeys((*computed, *noted_values(expected)), _TENSOR)
    before, after = (fingerprint(tree.with_leaves(compared).build()) for tree in (expected, got))
    mismatch = difference(before, after, lists=graph.contract.joined_outputs, recorded=True)
    if mismatch is not None:
        yield _difference(*mismatch)


def _are_close(expected: Any, got: Any) -> bool:
    if type(expected) is not float or type(got) is not float:
        return fingerprint(expected) == fingerprint(got)
    return close(torch.tensor(expected), torch.tensor(got))


def _are_alike(expected: Any, got: Any) -> bool:
    return type(expected) is type(got)


def _difference(path: str, expected: str, got: str) -> Difference:
    return Difference(path, f"{expected} became {got}", math.nan)


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
    expected, got = graph.contract.simplified(expected), graph.contract.simplified(got)
    hidden = hidden_elements(graph, call)
    for found in compare_outputs(expected, got, exactly=True, bound=fixed_bound(math.inf, math.inf)):
        path = found.path
        if found.reason is None:
            figures[path] = measured = figures_of(expected[path], got[path], hidden.get(path), is_logits(graph, path))
            if not math.isfinite(measured.error):
                yield replace(found, reason="it has infinities or NaN where the model has numbers")
                continue
        yield found


def hidden_elements(graph: OnnxGraph, call: Call) -> dict[str, torch.Tensor]:
    """Returns infinity for elements of outputs that padding decides about, by path; what is found is kept.

    Args:
        graph: The graph.
        call: The call, with what the model returned.
    """
    name = call_name(call)
    if graph.eager is not None and name not in graph.measured:
        with contextlib.suppress(Exception):  # whatever the model raises for values that it was not made for
            found = hidden_by_padding(graph, call)
            if found:
                graph.measured[name] = MeasuredCall({}, found)
    return {**graph.measured.get(name, MeasuredCall()).leeway}


def is_logits(graph: OnnxGraph, path: str) -> bool:
    """Returns whether an output of a quantised graph has logits."""
    return graph.contract.quantised is not None and path in graph.contract.quantised.logits
