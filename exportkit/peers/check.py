"""Recorded calls as users of ``torch.onnx.InputObserver`` know them: ``observer.info`` and ``check_discrepancies``.

The latter compares them with any ONNX model, also with one that exportkit did not make. Rows have the columns of
``torch.onnx.InputObserver``. Inputs are matched by name if the graph's names are the names of the leaves, otherwise by
order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.divergence.graph_run import read_onnx
from exportkit.errors import ArgumentError, ExportkitError
from exportkit.onnx_files.contract import input_names
from exportkit.onnx_files.runner import OnnxRunner
from exportkit.plan.plan import Plan
from exportkit.probing.missing import fill_missing
from exportkit.probing.planning import plan_calls
from exportkit.running.compare import compare_tensors
from exportkit.running.masks import Padding
from exportkit.running.session import GraphSession, Session
from exportkit.trees import string_type

_PLAIN = (bool, int, float, str)


class ObservedInput:
    """One recorded call: ``flat_list`` holds its own tensors, ``aligned_flat_list`` has None where it lacks one."""

    def __init__(self, call: Call, paths: tuple[str, ...]) -> None:
        self._call, self._paths = call, paths

    @property
    def args(self) -> tuple[Any, ...]:
        """What this call was given by position."""
        return self._given()[0]

    @property
    def kwargs(self) -> dict[str, Any]:
        """What this call was given by name, without None, and without what is in ``cst_kwargs``."""
        given = self._given()[1].items()
        return {name: value for name, value in given if value is not None and not isinstance(value, _PLAIN)}

    @property
    def cst_kwargs(self) -> dict[str, int | float | str | bool]:
        """The numbers, strings and booleans that this call was given by name."""
        return {name: value for name, value in self._given()[1].items() if isinstance(value, _PLAIN)}

    def _given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._call.signature.unbind(self._call.values(), self._call.named)

    @property
    def flat_list(self) -> list[torch.Tensor]:
        """The tensors of this call, in signature order."""
        return list(self._call.tensors().values())

    @property
    def aligned_flat_list(self) -> list[torch.Tensor | None]:
        """The tensors that any call had, None where this one lacks it."""
        tensors = self._call.tensors()
        return [tensors.get(path) for path in self._paths]

    @property
    def n_aligned_tensors(self) -> int:
        """How many tensors any call had."""
        return len(self._paths)

    def __len__(self) -> int:
        return len(self.flat_list)

    def str_obs(self) -> str:
        """Returns the inputs of the call in one line, constants included."""
        return f"call {self._call.index}: {string_type(self._call.values(), with_shape=True)}"


class ObservedInfo:
    """All recorded calls, in order."""

    def __init__(self, observation: Observation) -> None:
        self._observation = observation

    def __len__(self) -> int:
        return len(self._observation.calls)

    @property
    def inputs(self) -> list[ObservedInput]:
        """The inputs of each call."""
        paths = tuple(self._observation.tensor_paths())
        return [ObservedInput(call, paths) for call in self._observation.calls]

    @property
    def flat_outputs(self) -> list[list[torch.Tensor | None]]:
        """The output tensors of each call, None included."""
        kept = (torch.Tensor, type(None))
        return [[leaf for leaf in call.outputs.leaves if isinstance(leaf, kept)] for call in self._observation.calls]

    @property
    def latencies(self) -> list[float]:
        """Durations of the calls in seconds."""
        return [call.latency for call in self._observation.calls]

    @property
    def signature_names(self) -> list[str]:
        """Names of the method's parameters."""
        return list(self._observation.signature.names)


@dataclass(frozen=True)
class Tolerance:
    """When two outputs count as equal.

    Attributes:
        atol: Largest absolute difference.
        rtol: Largest relative difference, ``|a - b| / (|a| + rtol)``.
        skip_none: Whether an output that is None on the model's side is not compared.
    """

    atol: float
    rtol: float
    skip_none: bool = True


def check_recorded_calls(
    observation: Observation,
    onnx_model: Any,
    tolerance: Tolerance,
    progress_bar: bool,
    include_io: bool,
) -> list[dict[str, Any]]:
    """Returns one row for each recorded call, as `InputObserver.check_discrepancies` describes them."""
    observation.require_calls()
    if isinstance(onnx_model, OnnxRunner) and onnx_model.split is not None:  # each graph has calls of its own
        found = []
        for name, graph in onnx_model.graphs.items():
            calls = tuple(call for call in observation.calls if call.index in onnx_model.split.calls[name])
            if calls:
                some = replace(observation, calls=calls)
                found += check_recorded_calls(some, graph.session, tolerance, progress_bar, include_io)
        return sorted(found, key=lambda row: row["index"])
    session = _session(onnx_model)
    plan = plan_calls(observation)
    paths = _paths_of_inputs(session, observation)
    rows = []
    for call in _tracked(observation.calls, progress_bar):
        row, feeds, outputs = _best_attempt(call, session, paths, plan, tolerance)
        own = call.tensors()
        row["index"], row["duration_torch"], row["n_inputs"] = call.index, call.latency, len(paths)
        row["n_none"] = sum(path not in own for path in paths.values())
        row["n_empty"] = sum(tensor.numel() == 0 for tensor in feeds.values())
        if include_io:
            row |= {"inputs": feeds, "outputs_torch": _expected(call), "outputs_onnx": outputs}
        rows.append(row)
    return rows


def _session(onnx_model: Any) -> GraphSession:
    if isinstance(onnx_model, OnnxRunner):
        return onnx_model.session
    if isinstance(onnx_model, Session):
        return onnx_model
    if isinstance(onnx_model, str | os.PathLike):
        return Session(Path(onnx_model))  # onnxruntime reads the weights itself
    model, folder = read_onnx(onnx_model)
    return Session(model.SerializeToString(), folder)


def _paths_of_inputs(session: GraphSession, observation: Observation) -> dict[str, str]:
    """Leaf path by name of the graph's input: by exportkit's names, by torch's (``x_a_0``), otherwise by order."""
    paths = observation.tensor_paths()
    by_name = dict(zip(input_names(paths), paths, strict=True)) | {_torch_name(path): path for path in paths}
    names = session.inputs
    if all(name in by_name for name in names):
        return {name: by_name[name] for name in names}
    if len(names) == len(paths):
        return dict(zip(names, paths, strict=True))
    raise ArgumentError(
        f"The recorded calls have {len(paths)} tensors but the model expects {len(names)}.",
        expected=", ".join(names),
        got=", ".join(paths),
        hint="observer.remove_inputs leaves out inputs that the graph does not have.",
    )


def _torch_name(path: str) -> str:
    return "".join(c if c.isalnum() or c == "_" else "_" for c in path.replace("]", "").replace("[", "_"))


def _best_attempt(
    call: Call, session: GraphSession, paths: Mapping[str, str], plan: Plan, tolerance: Tolerance
) -> tuple[dict[str, Any], dict[str, torch.Tensor], list[torch.Tensor]]:
    """Row, feeds and outputs of a call; defaults for missing inputs are tried: empty or zeros, then ones."""
    own = call.tensors()
    attempts = []
    for value in (0, 1):
        missing = fill_missing(plan, own, {leaf.path: value for leaf in plan.leaves})
        complete = {**own, **missing}
        feeds = {name: complete[path] for name, path in paths.items()}
        row, outputs = _attempt(feeds, session, call, tolerance)
        attempts.append((row, feeds, outputs))
        if row["SUCCESS"] or not any(tensor.numel() for tensor in missing.values()):
            break
    return next((attempt for attempt in attempts if attempt[0]["SUCCESS"]), attempts[0])


def _attempt(
    feeds: Mapping[str, torch.Tensor], session: GraphSession, call: Call, tolerance: Tolerance
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    started = time.perf_counter()
    try:
        outputs = list(session.run(feeds).values())
    except ExportkitError as error:
        return {"SUCCESS": False, "error": str(error), "ort_duration": time.perf_counter() - started}, []
    duration = time.perf_counter() - started
    row = _verdict(_expected(call), outputs, tolerance, Padding.of_tensors(call.tensors()))
    return {**row, "ort_duration": duration}, outputs


def _expected(call: Call) -> list[torch.Tensor | None]:
    return [leaf for leaf in call.outputs.leaves if leaf is None or isinstance(leaf, torch.Tensor)]


def _verdict(
    expected: Sequence[torch.Tensor | None],
    got: Sequence[torch.Tensor],
    tolerance: Tolerance,
    padding: Padding,
) -> dict[str, Any]:
    if tolerance.skip_none and len(expected) != len(got):
        expected = [tensor for tensor in expected if tensor is not None]
    if len(expected) != len(got):
        return {"SUCCESS": False, "error": "not the same number of outputs"}
    absolute = relative = 0.0
    for a, b in zip(expected, got, strict=True):
        if a is None and tolerance.skip_none:
            continue
        error = _mismatch(a, b)
        if a is None or error:
            return {"SUCCESS": False, "error": error}
        found = compare_tensors("", a, b, padding(a), offset=tolerance.rtol)
        absolute, relative = max(absolute, found.absolute), max(relative, found.relative)
    success = absolute <= tolerance.atol and relative <= tolerance.rtol
    return {"SUCCESS": success, "error": "", "abs": absolute, "rel": relative}


def _mismatch(expected: torch.Tensor | None, got: torch.Tensor) -> str:
    if expected is None:
        return "missing output"
    if expected.shape != got.shape:
        return f"not the same shape: {tuple(expected.shape)} and {tuple(got.shape)}"
    if expected.dtype != got.dtype:
        return f"not the same type: {expected.dtype} and {got.dtype}"
    return ""


def _tracked(calls: Sequence[Call], progress_bar: bool) -> Iterable[Call]:
    if not progress_bar:
        return calls
    from rich.progress import track

    return track(calls, description="checking recorded calls")
