"""Half precision: what the model computes in float32 tells rounding from a wrong graph.

Elements of a result in float16 or bfloat16 move so far from one rounding to the next that few of them say anything by
themselves. Together they do: rounding errors of a right graph are about as large as those of the model, and both are
known if the model computes the same in float32.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping

import torch

from exportkit.calls.call import Call
from exportkit.onnx_files.graph import OnnxGraph
from exportkit.proof.figures import figures_of, worst
from exportkit.running.bounds import HALF, Bound, half_bound, index_means, usual_bound
from exportkit.running.compare import Tensors, elements_apart
from exportkit.trees.tree import dtype_name

# The graph's error may be this many times the model's: of all elements, and of those at the worst index of an axis.
# docs/proof.rst has the largest that were measured.
_TIMES, _TIMES_AT_INDEX = 2.0, 3.0


def distance_from_float32(graph: OnnxGraph) -> Iterator[str]:
    """Yields how far the results of a model in half precision are from those that it has in float32.

    Args:
        graph: The graph; nothing is known if the model is not at hand.
    """
    figures = []
    for call in graph.observation.calls_with_values:
        expected, got = _in_float32(graph, call), call.outputs.tensors()
        figures.append({p: figures_of(t, got[p].to(t.dtype), None, False) for p, t in expected.items() if p in got})
    if any(figures):
        dtypes = [dtype_name(dtype) for dtype in graph.half_dtypes]
        yield (
            f"the model computes in {' and '.join(dtypes)}: its results in the recorded calls are "
            f"{max(worst(found).error for found in figures if found):.2g} from those in float32, relative to these, "
            "as a root mean square."
        )


def most_allowed(graph: OnnxGraph) -> Bound:
    """Returns the bound that no measurement exceeds: in half precision, 64 rounding errors of it.

    Args:
        graph: The graph; where its model in float32 is not known, the usual bound has to do.
    """
    dtypes = graph.half_dtypes if graph.eager_in_float32 is not None else []
    return functools.partial(half_bound, dtype=dtypes[-1]) if dtypes else usual_bound


def farther_from_float32(
    graph: OnnxGraph, call: Call, expected: Tensors, got: Tensors, leeway: Tensors
) -> dict[str, str]:
    """Returns what is wrong with outputs that are farther from the model in float32 than rounding explains, by path.

    Args:
        graph: The graph.
        call: The call.
        expected: What the model returned, by path.
        got: What the graph returned, by path.
        leeway: How far the elements of outputs may be off, by path; elements with more than `most_allowed` say nothing.
    """
    found: dict[str, str] = {}
    paths = [path for path in leeway if expected[path].is_floating_point() and expected[path].numel()]
    dtypes, most = graph.half_dtypes, most_allowed(graph)
    if most is usual_bound:
        return found
    whole = {path: tensor.cpu() for path, tensor in _in_float32(graph, call).items()} if paths else {}
    for path in paths:
        true, model, returned = whole.get(path), expected[path].cpu(), got[path].cpu()
        visible = (leeway[path].cpu() <= most(model)).expand(model.shape)
        if true is None or true.shape != model.shape:
            apart = torch.where(visible, elements_apart(model, returned), 0.0)
            if bool((apart > usual_bound(model)).any()):
                found[path] = "it is off by more than is usual, and what the model returns in float32 is not known"
            continue
        visible = visible & true.isfinite() & model.isfinite()
        true = torch.where(visible, true, 0.0)
        unit = torch.finfo(dtypes[-1]).eps / 2 * true.square().mean().sqrt().item()
        own, its = (_errors(true, tensor, visible) for tensor in (model, returned))
        for times, error, least in zip((_TIMES, _TIMES_AT_INDEX), its, own, strict=True):
            if error > times * least + unit:
                relative = f"its error relative to the model in float32 is {error:.2g}"
                found[path] = f"{relative}; the model's own is {least:.2g}"
    return found


def _errors(true: torch.Tensor, got: torch.Tensor, visible: torch.Tensor) -> tuple[float, float]:
    """The root mean square error of all elements, and the largest one of those at an index of an axis."""
    squares = torch.where(visible, elements_apart(true, got.to(true.dtype)), 0.0).square()
    means = [mean.max().item() for mean in index_means(squares)]
    return math.sqrt(squares.mean().item()), math.sqrt(max(means, default=0.0))


def _in_float32(graph: OnnxGraph, call: Call) -> Mapping[str, torch.Tensor]:
    """What the model returns in float32, by path; nothing if that is not known."""
    runner = graph.eager_in_float32
    if runner is None:
        return {}
    given = {path: tensor.float() for path, tensor in call.tensors().items() if tensor.dtype in HALF}
    with contextlib.suppress(Exception):  # the model need not run in float32
        return graph.contract.simplified(runner(call.with_tensors(given)))
    return {}
