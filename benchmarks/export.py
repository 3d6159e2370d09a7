"""The cost of exporting. Prints a table and writes ``results/export.json``; part of `make bench`.

There are three comparisons, each of which alternates between its two sides in a single run: one traced program for both
formats and two traces; the whole export to ONNX and ``transformers.exporters``, which writes two graphs, prefill and
decode; and the peak memory of an export including its file and the size of the weights, each in a process of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from figures import Figure, publish
from measure import interleaved, peak_mib

import exportkit

ROUNDS = 3
MEMORY = {  # how the export is made: what the row is called, and how much memory is wanted at most
    "written": ("peak memory of export and folder, to the weights", 1.3),
    "files": ("the same, weights from files for a model on the meta device", 1.3),
    "proven": ("the same with the proof, where the runtime holds the weights too", math.inf),
}


def main() -> None:
    if sys.argv[1:2] == ["--memory"]:
        print(json.dumps(memory(sys.argv[2])))
        return
    if sys.argv[1:2] == ["--files"]:
        write_files(Path(sys.argv[2]), json.loads(sys.argv[3]))
        return
    logging.disable(logging.WARNING)  # of which the other side has many
    figures = [one_capture(), against_transformers(), *map(peak, MEMORY)]
    publish("export", "Export of a Llama: CPU time with 12 layers, memory with 1 GB", ("exportkit", "other"), figures)


def one_capture() -> Figure:
    """A program and an ONNX file from one trace, compared with one trace for each."""
    model, observer = observed(layers=12, hidden=64)

    def once() -> None:
        with tempfile.TemporaryDirectory() as folder:
            exported = exportkit.export(model, observer)
            assert exported.program
            exported.to_onnx(Path(folder) / "model.onnx")

    def twice() -> None:
        with tempfile.TemporaryDirectory() as folder:
            assert exportkit.export(model, observer).program
            exportkit.export(model, observer).to_onnx(Path(folder) / "model.onnx")

    return compared("one capture for both formats, to a capture for each", once, twice, 0.85)


def against_transformers() -> Figure:
    """From the model to ONNX files that serve prefill and decode, without a proof on either side."""
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter
    from transformers.exporters.utils import decompose_prefill_decode

    model, _ = observed(layers=12, hidden=64)
    ids = torch.randint(3, 99, (2, 7))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def ours() -> None:
        with tempfile.TemporaryDirectory() as folder:
            exportkit.export(model, observed_run(model)).to_onnx(Path(folder) / "model.onnx")

    def theirs() -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name, (part, example) in decompose_prefill_decode(model, dict(inputs)).items():
                exported = OnnxExporter().export(part, example, config=OnnxConfig(dynamic=True))
                exported.save_pretrained(Path(folder) / name)

    return compared("to ONNX files that serve prefill and decode, to transformers.exporters", ours, theirs, 0.7)


def compared(case: str, ours: Callable[[], None], other: Callable[[], None], target: float) -> Figure:
    blocks = {"exportkit": lambda: cpu(ours), "other": lambda: cpu(other)}
    times = interleaved(blocks, ROUNDS, warm_up=1)
    seconds = {name: timing.median / 1e6 for name, timing in times.items()}
    return Figure(case, seconds, "s", seconds["exportkit"] / seconds["other"], target)


def peak(how: str) -> Figure:
    """Peak memory of an export, in a process of its own."""
    command = [sys.executable, __file__, "--memory", how]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    case, target = MEMORY[how]
    values = {"exportkit": found["peak_mib"] - found["before_mib"], "other": found["weights_mib"]}
    return Figure(case, values, "MiB", values["exportkit"] / values["other"], target)


def cpu(step: Callable[[], None]) -> float:
    started = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        step()
    return time.process_time() - started


def memory(how: str) -> dict[str, float]:
    """MiB of the weights, the peak before they were loaded, and the peak of exporting and saving the model."""
    import transformers  # noqa: F401  # so that its memory does not count for the export

    with tempfile.TemporaryDirectory() as folder:
        saved(how, Path(folder) / "small", layers=1, hidden=32)
        before = peak_mib()
        weights = saved(how, Path(folder) / "large", layers=4, hidden=2304, intermediate=6912)
    return {"weights_mib": weights, "peak_mib": peak_mib(), "before_mib": before}


def saved(how: str, folder: Path, **sizes: int) -> float:
    """Exports and saves a model, and returns the size of its weights in MiB."""
    if how == "files":
        subprocess.run([sys.executable, __file__, "--files", str(folder), json.dumps(sizes)], check=True)
        observation = exportkit.Observation.load(folder / "calls")
        with torch.device("meta"):
            model = llama(**sizes)
        exported = exportkit.export(model, observation, weights=folder / "weights")
    else:
        model, observer = observed(**sizes)
        exported = exportkit.export(model, observer)
    exported.save(folder / "saved", verify=how == "proven")
    return sum(p.numel() * p.element_size() for p in exported.model.parameters()) / 2**20


def write_files(folder: Path, sizes: dict[str, int]) -> None:
    """Writes the weights of a model and its recorded calls."""
    model, observer = observed(**sizes)
    observer.observation.save(folder / "calls")
    model.save_pretrained(folder / "weights")


def observed(layers: int, hidden: int, intermediate: int = 128) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = llama(layers, hidden, intermediate)
    return model, observed_run(model)


def llama(layers: int, hidden: int, intermediate: int = 128) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        vocab_size=99,
    )
    return LlamaForCausalLM(config).eval()


def observed_run(model: Any) -> exportkit.InputObserver:
    observer = exportkit.InputObserver()
    ids, mask = torch.randint(3, 99, (2, 7)), torch.ones(2, 7, dtype=torch.int64)
    mask[0, 0] = 0
    with observer(model), torch.no_grad():
        model.generate(ids, attention_mask=mask, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    return observer


if __name__ == "__main__":
    main()
