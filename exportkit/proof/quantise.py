"""Quantises and converts the graphs of an export, each after it was proven, within a budget if there is one."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.errors import InvalidRequestError, InvalidTypeError
from exportkit.onnx_files.graph import OnnxGraph
from exportkit.onnx_files.quantised import (
    BITS,
    Bits,
    Dtype,
    Quantisation,
    Quantised,
    WeightMatrix,
    heads_of,
    left_of,
    part_of,
    read_layers,
    read_quantisable,
)
from exportkit.onnx_files.quantisers import (
    counting_nodes,
    in_float16,
    overflowing_nodes,
    pack_products,
    quantise,
    require_float32,
    write,
)
from exportkit.onnx_files.runner import OnnxRunner
from exportkit.onnx_files.switches import RewrittenGraph, SwitchedGraph
from exportkit.proof.calls import as_made, given_calls, unseen_calls
from exportkit.proof.differences import hidden_elements
from exportkit.proof.figures import Figures, figures_of, over_budget, together, worst
from exportkit.proof.prove import prove
from exportkit.proof.report import Kind
from exportkit.running.compare import Tensors

if TYPE_CHECKING:
    import onnx
    import torch

Accuracy = float | Mapping[str, float]
_FIGURES = ("top1", "kl", "error")


@dataclass(frozen=True)
class Lossy:
    """Options that trade exact results for size or speed.

    Attributes:
        weights: How weights are stored; None to leave them as they are.
        dtype: What the graph computes in; None for the dtype of the model.
        budget: How far the result may be from the model; see `budget_of`.
        given: Further calls at which the budget has to hold.
    """

    weights: Quantisation | None = None
    dtype: Dtype | None = None
    budget: Mapping[str, float] = field(default_factory=dict)
    given: tuple[Call, ...] = ()

    @classmethod
    def of(
        cls,
        weights: Bits | Quantisation | None,
        dtype: Dtype | torch.dtype | None,
        accuracy: Accuracy | None,
        data: Observation | None,
    ) -> Lossy | None:
        """Returns what a user asks for, before any work is done; None for a graph that is to be proven.

        Raises:
            InvalidRequestError: if it makes no sense.
        """
        budget, given = budget_of(accuracy), given_calls(data)
        half: Dtype | None = "float16" if dtype in ("float16", torch.float16) else None
        if dtype is not None and half is None:
            raise InvalidRequestError("Unsupported dtype.", where="dtype", expected="'float16'", got=str(dtype))
        if weights is None and half is None:
            if budget:
                raise InvalidRequestError(
                    "Only quantised graphs have a budget; all others are proven.",
                    where="accuracy",
                    got=repr(accuracy),
                    hint='add weights="int4".',
                )
            return None
        quantisation = weights if weights is None or isinstance(weights, Quantisation) else Quantisation(weights)
        if half is not None and quantisation is not None and quantisation.activations is not None:
            raise InvalidRequestError(
                "Quantised activations cannot be combined with `dtype`.",
                where="dtype",
                expected="None, because activations are quantised",
                got=half,
            )
        return cls(quantisation, half, budget, given)


def lossy_runner(runner: OnnxRunner, lossy: Lossy, verify: bool = True) -> OnnxRunner:
    """Returns graphs with quantised weights, or in another dtype, whose files are written over.

    Args:
        runner: The graphs in the dtype of the model.
        lossy: What the user asks for.
        verify: Prove each graph before that, which also finds out where it may be used.

    Raises:
        InvalidRequestError: if no graph has weights that can be quantised, or what the budget is about.
    """
    found = _lossy(runner, lossy, verify)
    graphs = [*found.all_graphs()]
    if lossy.weights and not any(graph.contract.quantised and graph.contract.quantised.layers for graph in graphs):
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
        InvalidRequestError: if a figure is unknown, or its limit is out of range.
        InvalidTypeError: if a limit is True or False.
    """
    budget = {} if accuracy is None else dict(accuracy) if isinstance(accuracy, Mapping) else {"top1": accuracy}
    if any(isinstance(limit, bool) for limit in budget.values()):
        raise InvalidTypeError("A limit must be a number.", where="accuracy", expected="a float", got=repr(accuracy))
    for name, limit in budget.items():
        is_number = isinstance(limit, int | float) and limit >= 0
        if name not in _FIGURES or not is_number or (name == "top1" and limit > 1):
            raise InvalidRequestError(
                "Not a valid budget.",
                where="accuracy",
                expected="the least top-1 agreement, up to 1, or a dict with limits of top1, kl and error",
                got=repr(accuracy),
            )
    return {name: float(limit) for name, limit in budget.items()}


def _lossy(runner: OnnxRunner, lossy: Lossy, verify: bool) -> OnnxRunner:
    # A budget is about the outputs of the model, on which a part alone has no effect that could be measured.
    exact = replace(lossy.weights, weights="int8", embedding=False) if lossy.weights and lossy.budget else lossy.weights
    of_parts = replace(lossy, weights=exact, budget={}, given=()) if runner.graphs else lossy
    graphs = {name: _lossy_graph(graph, lossy, verify) for name, graph in runner.graphs.items()}
    return runner.copied(OnnxRunner, graphs, {n: _lossy(part, of_parts, verify) for n, part in runner.parts.items()})


def _lossy_graph(graph: OnnxGraph, lossy: Lossy, verify: bool) -> OnnxGraph:
    """The graph with quantised weights; if it has none that can be, it is measured together with the others."""
    model = read_quantisable(graph.path)
    outputs = {name: path for name, path in graph.contract.outputs.items() if _may_be_logits(graph, path)}
    logits = tuple(outputs[name] for name in heads_of(model, outputs))
    if lossy.budget.keys() & {"top1", "kl"} and not logits:
        raise InvalidRequestError(
            "The budget requires logits, but the graph returns none.",
            where="accuracy",
            expected="an output that a linear layer computes",
            got=", ".join(graph.contract.outputs),
            hint='give a limit of the error instead: accuracy={"error": 0.01}.',
        )
    runs = lossy.budget or lossy.dtype is not None or (lossy.weights and lossy.weights.activations == "static")
    unseen = tuple(unseen_calls(graph.traced)) if graph.traced is not None and (verify or runs) else ()
    proven = OnnxGraph(graph.contract, graph.observation, graph.traced, unseen=unseen, eager=graph.eager)
    problems = prove(OnnxRunner({"": proven})).problems() if verify else ()
    cases = [*_cases(proven, lossy.given)] if runs else []
    kept: tuple[str, ...] = ()
    if lossy.dtype is not None:
        require_float32(model)
        nodes = overflowing_nodes(model, [case.feeds for case in cases])
        kept = tuple(dict.fromkeys(part_of(node) for node in model.graph.node if node.name in nodes))
        model = in_float16(model, nodes | counting_nodes(model))
    layers = read_layers(model, outputs, lossy.weights) if lossy.weights is not None else ()
    quantised = Quantised(lossy.weights, layers, left_of(model, layers), logits, tuple(problems), lossy.budget)
    quantised = replace(quantised, dtype=lossy.dtype, kept=kept)
    if layers and lossy.budget:
        quantised = within_budget(proven, model, quantised, cases)
    if lossy.weights is not None:
        model = quantise(model, quantised.layers, lossy.weights, calibration_of(cases))
        pack_products(model)
    write(model, graph.path)
    contract = replace(proven.contract, quantised=quantised)
    return OnnxGraph(contract, graph.observation, graph.traced, eager=graph.eager)


def _cases(graph: OnnxGraph, given: Sequence[Call]) -> Iterator[Case]:
    """Yields the calls at which a budget has to hold."""
    for call in graph.observation.calls_with_values:
        yield from cases_of(graph, "recorded", as_made(graph.contract.plan, call))
    for call in given:
        yield from cases_of(graph, "given", call)
    for call in graph.unseen or ():
        yield from cases_of(graph, "unseen", call)


def _may_be_logits(graph: OnnxGraph, path: str) -> bool:
    """Whether an output has a last axis of one size, and is not a cache."""
    axes = graph.contract.output_axes.get(path, ())
    return bool(axes) and isinstance(axes[-1], int) and axes[-1] > 1 and path not in graph.contract.structure.growing


# Layers that keep more bits, so that a quantised graph stays within a budget
#
# Each layer is quantised alone first, which shows its harm. The layers that do most harm for their size get more bits,
# one after the other; how many of them need it is found by bisection.


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
