"""The cost of comparing two traces, and of locating a fault in an exported model. `trace.py` runs both.

The model is the one in `trace.py`. The compared traces differ in all tensors. The fault to locate is one weight in the
attention of the sixth layer of the ONNX model, multiplied by 1.02.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

import exportkit
from exportkit import Trace, trace_model
from exportkit.divergence.locate import locate_divergence

ROUNDS = 7
FAULTY = "model.layers.5.self_attn.o_proj"


def comparing_milliseconds(model: Any, ids: torch.Tensor) -> dict[str, float]:
    """Median CPU time of comparing two traces with all values, loaded each time: equal traces, and one with a fault."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / name for name in ("right", "same", "wrong")}
        for name, path in paths.items():
            if name == "wrong":
                weight = model.model.layers[0].self_attn.q_proj.weight
                kept, weight.data = weight.data, weight.data * 1.02
            with torch.no_grad(), trace_model(model, path, values="all"):
                model(ids, use_cache=False)
        weight.data = kept
        return {
            name: 1000 * median_seconds(lambda name=name: Trace.load(paths["right"]).compare(Trace.load(paths[name])))
            for name in ("same", "wrong")
        }


def locating_seconds(model: Any, ids: torch.Tensor) -> dict[str, float]:
    """Median CPU time of locating in the ONNX model, with its program: without and with a fault."""
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for tokens in (ids, ids[:, :-3]):
            model(tokens, use_cache=False)
    exported = exportkit.export(model, observer)
    given = {"input_ids": ids}
    with tempfile.TemporaryDirectory() as folder:
        onnx_model = exported.to_onnx(Path(folder) / "model.onnx")
        seconds = {"sound": median_seconds(lambda: locate_divergence(model, onnx_model, given))}
        scale_weight(onnx_model.path)
        found = locate_divergence(model, onnx_model, given)
        if found.module != FAULTY:
            raise RuntimeError(f"the fault in {FAULTY} was not located:\n{found}")
        seconds["faulty"] = median_seconds(lambda: locate_divergence(model, onnx_model, given))
    return seconds


def scale_weight(path: Path) -> None:
    """Changes the weight of the faulty module in the weights file."""
    proto = onnx.load(path, load_external_data=False)
    weights = {value.name: value for value in proto.graph.initializer}
    node = next(node for node in proto.graph.node if node.op_type == "MatMul" and any(
        FAULTY in entry.value for entry in node.metadata_props))  # fmt: skip
    weight = next(weights[name] for name in node.input if name in weights)
    place = {entry.key: entry.value for entry in weight.external_data}
    values = np.memmap(
        path.with_name(place["location"]), np.float32, "r+", int(place["offset"]), (int(place["length"]) // 4,)
    )
    values *= np.float32(1.02)
    values.flush()


def median_seconds(step: Callable[[], object]) -> float:
    """CPU time of a step, over all threads of this process."""
    step()
    samples = []
    for _ in range(ROUNDS):
        started = time.process_time()
        step()
        samples.append(time.process_time() - started)
    return statistics.median(samples)
