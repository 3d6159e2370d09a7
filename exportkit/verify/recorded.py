"""``check_discrepancies``: recorded calls against any ONNX model, also one that exportkit did not make.

Rows have the columns of ``torch.onnx.InputObserver``. Inputs are matched by name where the graph's names are the leaves'
names, else by order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from exportkit.arguments import fill_missing, plan_calls
from exportkit.axes import Plan
from exportkit.errors import ArgumentError, ExportkitError, InvalidTypeError
from exportkit.export import OnnxModel, Session
from exportkit.export.names import input_names
from exportkit.observe import Call, Observation
from exportkit.verify.compare import find_mask, visible_by_shape


def check_recorded_calls(
    observation: Observation,
    onnx_model: Any,
    atol: float,
    rtol: float,
    progress_bar: bool = False,
    skip_none: bool = True,
    include_io: bool = False,
) -> list[dict[str, Any]]:
    """Returns one row for each recorded call; the arguments are those of `InputObserver.check_discrepancies`."""
    observation.require_calls()
    session = _session(onnx_model)
    plan = plan_calls(observation)
    paths = _paths_of_inputs(session, observation)
    rows = []
    for call in _tracked(observation.calls, progress_bar):
        rows.append(_row(call, session, paths, plan, (atol, rtol), skip_none, include_io))
    return rows


def _session(onnx_model: Any) -> Session:
    if isinstance(onnx_model, OnnxModel):
        return onnx_model.session
    if isinstance(onnx_model, Session):
        return onnx_model
    if isinstance(onnx_model, str | os.PathLike):
        return Session(Path(onnx_model))
    if hasattr(onnx_model, "model_proto"):  # torch.onnx.ONNXProgram
        return Session(onnx_model.model_proto.SerializeToString())
    if hasattr(onnx_model, "SerializeToString"):
        return Session(onnx_model.SerializeToString())
    raise InvalidTypeError(
        "Recorded calls can be checked against an ONNX model only.",
        expected="a path, an onnx.ModelProto, a torch.onnx.ONNXProgram or an OnnxModel",
        got=type(onnx_model).__name__,
    )


def _paths_of_inputs(session: Session, observation: Observation) -> dict[str, str]:
    """Leaf path by name of the graph's input: by exportkit's names, by torch's (``x_a_0``), else by order."""
    paths = observation.tensor_paths()
    by_name = dict(zip(input_names(paths), paths, strict=True)) | {_torch_name(path): path for path in paths}
    names = list(session.inputs)
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


def _row(
    call: Call,
    session: Session,
    paths: Mapping[str, str],
    plan: Plan,
    tolerance: tuple[float, float],
    skip_none: bool,
    include_io: bool,
) -> dict[str, Any]:
    own = call.tensors()
    complete = {**own, **fill_missing(plan, own, {})}
    attempts = [complete]
    if len(complete) > len(own):  # what stands for a missing input is tried: empty or zeros, then ones
        attempts.append({**own, **fill_missing(plan, own, dict.fromkeys(complete, 1))})
    results = [
        _attempt({n: t[p] for n, p in paths.items()}, session, call, tolerance, skip_none, include_io) for t in attempts
    ]
    row = next((result for result in results if result["SUCCESS"]), results[0])
    missing = sum(path not in own for path in paths.values())
    empty = sum(complete[path].numel() == 0 for path in paths.values())
    return row | {
        "index": call.index,
        "duration_torch": call.latency,
        "n_inputs": len(paths),
        "n_none": missing,
        "n_empty": empty,
    }


def _attempt(
    feeds: dict[str, torch.Tensor],
    session: Session,
    call: Call,
    tolerance: tuple[float, float],
    skip_none: bool,
    include_io: bool,
) -> dict[str, Any]:
    started = time.perf_counter()
    outputs: list[torch.Tensor] = []
    try:
        outputs = session.run(feeds)
        error = ""
    except ExportkitError as failure:
        error = str(failure)
    duration = time.perf_counter() - started
    expected = [leaf for leaf in call.outputs.leaves if leaf is None or isinstance(leaf, torch.Tensor)]
    mask = find_mask(call.tensors())
    hidden = None if mask is None else mask[1]
    row = {"SUCCESS": False, "error": error} if error else _verdict(expected, outputs, tolerance, skip_none, hidden)
    row["ort_duration"] = duration
    return row | ({"inputs": feeds, "outputs_torch": expected, "outputs_onnx": outputs} if include_io else {})


def _verdict(
    expected: Sequence[torch.Tensor | None],
    got: Sequence[torch.Tensor],
    tolerance: tuple[float, float],
    skip_none: bool,
    mask: torch.Tensor | None,
) -> dict[str, Any]:
    if skip_none and len(expected) != len(got):
        expected = [tensor for tensor in expected if tensor is not None]
    if len(expected) != len(got):
        return {"SUCCESS": False, "error": "not the same number of outputs"}
    atol, rtol = tolerance
    absolute = relative = 0.0
    for a, b in zip(expected, got, strict=True):
        if a is None:
            if not skip_none:
                return {"SUCCESS": False, "error": "missing output"}
            continue
        if a.shape != b.shape:
            return {"SUCCESS": False, "error": f"not the same shape: {tuple(a.shape)} and {tuple(b.shape)}"}
        if a.dtype != b.dtype:
            return {"SUCCESS": False, "error": f"not the same type: {a.dtype} and {b.dtype}"}
        visible = visible_by_shape(mask, tuple(a.shape))
        if visible is not None:  # what padding computes is arbitrary
            a, b = torch.where(visible, a, 0), torch.where(visible, b, 0)
        far, share = _distance(a, b, rtol)
        absolute, relative = max(absolute, far), max(relative, share)
    return {"SUCCESS": absolute <= atol and relative <= rtol, "error": "", "abs": absolute, "rel": relative}


def _distance(a: torch.Tensor, b: torch.Tensor, rtol: float) -> tuple[float, float]:
    """Largest absolute and relative difference; equal values, and NaN on both sides, are 0 apart."""
    if a.numel() == 0:
        return 0.0, 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.detach().cpu().to(wide), b.detach().cpu().to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    far = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=float("inf"))
    share = torch.where(same, 0.0, far / (a.abs() + rtol)).nan_to_num(nan=float("inf"))
    return far.max().item(), share.max().item()


def _tracked(calls: Sequence[Call], progress_bar: bool) -> Iterable[Call]:
    if not progress_bar:
        return calls
    from rich.progress import track

    return track(calls, description="checking recorded calls")
