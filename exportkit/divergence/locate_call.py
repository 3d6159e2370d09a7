"""Locates why one call of an exported model is not proven, with the model in PyTorch or by the outputs alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from exportkit.calls.application import module_at
from exportkit.calls.call import Call
from exportkit.divergence.diagnosis import Divergence, Stage
from exportkit.divergence.graph_run import GraphNode, nodes_of, read_onnx
from exportkit.divergence.locate import locate_divergence
from exportkit.module_traces.attribution import JUMP, ROUNDING
from exportkit.onnx_files.runner import OnnxRunner
from exportkit.plan.tables import first_of
from exportkit.proof.differences import output_differences
from exportkit.running.compare import Tensors, distance, unit_of
from exportkit.running.eager import run_eager
from exportkit.running.masks import Padding
from exportkit.running.placement import Placement
from exportkit.running.random_numbers import SEED, with_fixed_numbers
from exportkit.running.session import Session
from exportkit.trees import flatten

MODEL, GRAPH, AROUND = "The model", "onnxruntime", "The code around the graph"
CHANGED = "it no longer returns what was recorded: it was changed, is random, or its inputs shared memory"
SMALL = "it differs by more than the proof allows, but no module adds more than rounding"
ONNX = "ONNX or onnxruntime"
_SHOWN = 4  # modules that are named


def locate_call(
    runner: OnnxRunner,
    call: Call,
    expected: Tensors,
    wrong: Sequence[str],
    where: str,
    model: torch.nn.Module | None,
) -> Divergence:
    """Returns where a call that is not proven begins to differ from the model. There is always a result.

    Args:
        runner: The graph.
        call: The call.
        expected: What the model returned, by path.
        wrong: Paths of the outputs that the proof calls different; empty for a call that was refused.
        where: What the proof says about the call.
        model: The model in PyTorch; by default the one that was exported, if it is available.

    Raises:
        RuntimeFailure: if onnxruntime refuses the graph.
        UnknownMethodError: if the model does not have the module that was exported.
    """
    graph, contract = runner.graph, runner.contract
    if model is None and graph.traced is not None:
        model = graph.traced.model
    elif model is not None:
        path, _, _ = contract.target.rpartition(".")  # of a part, or of one of several modules
        model = module_at(model, path, contract.method, contract.model_name) if path else model
    agreeing = f"the graph by itself agrees, while the proof says: {where}"
    if model is None:
        tensors = contract.simplified(expected)
        wanted = {name: tensors[path] for name, path in contract.outputs.items() if path in tensors}
        names = [name for name, path in contract.outputs.items() if path in wrong]
        args, kwargs = call.args_kwargs()
        feeds = runner.feeds(*args, **kwargs)
        found = locate_outputs(runner.path, feeds, wanted, wrong=names, placement=graph.placement, seed=call.seed or 0)
        return found if found.diverges else replace(found, stage=AROUND, reason=agreeing)
    found = locate_divergence(model, runner, call, method=contract.method, wrong=wrong)
    if found.diverges:
        return found
    # No module differs: the model was changed, or an output differs by little, or the difference is around the graph.
    returned = flatten(run_eager(model, contract.method, call)).tensors()
    if any(difference.reason is not None for difference in output_differences(graph, call, expected, returned)):
        return replace(found, stage=MODEL, reason=CHANGED)
    args, kwargs = call.args_kwargs()
    seed, feeds = call.seed, runner.feeds(*args, **kwargs)
    if seed is None:
        results = graph.session.run(feeds)
    else:
        results = graph.session_with_fixed_numbers.run({**feeds, SEED: torch.tensor(seed)})
    outputs = {contract.outputs[name]: tensor for name, tensor in results.items()}
    known = contract.simplified(returned)
    for difference in output_differences(graph, call, known, outputs):
        if difference.reason is not None and difference.path in wrong:
            return replace(found, stage=GRAPH, tensor=difference.path, largest=difference.absolute, reason=SMALL)
    return replace(found, stage=AROUND, reason=agreeing)


def locate_outputs(
    graph: Any,
    inputs: Tensors,
    expected: Tensors,
    *,
    wrong: Collection[str] = (),
    placement: Placement | None = None,
    seed: int = 0,
) -> Divergence:
    """Returns which part of an ONNX model computes outputs that are wrong, for use without the model in PyTorch.

    These are the modules that the first wrong output needs and no right one does. With a cache for each layer, that is
    one layer.

    Args:
        graph: The ONNX model: a path, a ModelProto, or an ONNXProgram.
        inputs: Its inputs by name.
        expected: What its outputs should be, by name.
        wrong: Names of outputs that are known to be wrong, however close they are.
        placement: What computes it; the CPU by default.
        seed: Of the numbers that take the place of random ones.

    Raises:
        InvalidRequestError: if this is not an ONNX model, or an input is missing.
        RuntimeFailure: if onnxruntime refuses it.
    """
    proto, folder = read_onnx(graph)
    results = Session(with_fixed_numbers(proto, seed).SerializeToString(), folder, placement=placement).run(inputs)
    padding = Padding.of_tensors(inputs)
    errors = {name: distance(tensor, results[name], padding(tensor)).rms for name, tensor in expected.items()}
    close = {name for name, error in errors.items() if error <= JUMP * ROUNDING * unit_of(expected[name].dtype)}
    right = {name for name in close if name not in wrong or errors[name] == 0}
    differing = [value.name for value in proto.graph.output if value.name in errors and value.name not in right]
    if not differing:
        return Divergence(None, stages=(Stage(ONNX, "agrees", max(errors.values(), default=0.0)),))
    nodes = tuple(nodes_of(proto))
    for_right = set(_needed(nodes, right))
    needed = [node for node in _needed(nodes, differing[:1]) if node not in for_right]
    modules = list(dict.fromkeys(node.scopes[-1].path for node in needed if node.scopes))
    listed = first_of([path or "the model itself" for path in modules], _SHOWN)
    return Divergence(
        ONNX,
        _common(modules),
        tensor=differing[0],
        node=needed[0].name if len(needed) == 1 else "",
        operator=needed[0].operator if needed else "",
        error=errors[differing[0]],
        base=max((errors[name] for name in right), default=0.0),
        largest=distance(expected[differing[0]], results[differing[0]]).largest,
        reason=f"only this output needs {listed}; with the model, the module can be named",
        stages=(Stage(ONNX, "diverges", max(errors.values())),),
    )


def _needed(nodes: tuple[GraphNode, ...], outputs: Iterable[str]) -> list[GraphNode]:
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
