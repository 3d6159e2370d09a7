"""The cost of recording a trace. Prints a table and writes ``results/trace.json``; part of `make bench`.

The model is a Llama with 12 layers of size 512, called with 128 tokens. All variants of a case run in turn, and each
overwrites a folder of its own. Times are medians of CPU time on one thread, next to those of the debugger in
transformers. As in capture.py, the allocator keeps freed memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from figures import Figure, publish
from locating import comparing_milliseconds, locating_seconds
from measure import cpu_seconds, forget_peak, interleaved, peak_mib
from transformers import LlamaConfig, LlamaForCausalLM, model_addition_debugger_context

from exportkit import Trace, trace_model

LAYERS, SIZE, TOKENS = 12, 512, 128
ROUNDS = 15
LARGE = 7 * 2**20  # numbers, in a tensor that lets glibc's malloc keep what is freed
DATA = "tensors.safetensors"


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:] == ["--memory"]:
        print(json.dumps(peaks()))
        return
    call = one_call()
    with torch.no_grad():
        figures = [figure for measured in CASES for figure in measured(*call)]
    title = f"Traces: Llama, {LAYERS} layers of size {SIZE}, {TOKENS} tokens"
    publish("trace", title, ("bare", "exportkit", "transformers"), figures)


def one_call() -> tuple[Any, Any]:
    """The model, and the tokens for its calls."""
    torch.manual_seed(0)
    torch.zeros(LARGE)
    config = LlamaConfig(
        hidden_size=SIZE, intermediate_size=1408, num_hidden_layers=LAYERS, num_attention_heads=8, vocab_size=1000
    )
    return LlamaForCausalLM(config).eval(), torch.randint(1000, (1, TOKENS))


def recorded(model: Any, ids: Any) -> list[Figure]:
    """Times of one call: with all values, with statistics only, and with both kinds of transformers' files.

    If values are stored, statistics are computed on request; the time that this takes has a row of its own.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        steps: dict[str, Callable[[], object]] = {
            "bare": lambda: model(ids, use_cache=False),
            "all values": lambda: traced(model, ids, folder / "all", values="all"),
            "statistics": lambda: traced(model, ids, folder / "statistics"),
            "files": lambda: debugged(model, ids, folder / "files", use_repr=False),
            "texts": lambda: debugged(model, ids, folder / "texts"),
            "asked": lambda: ask(folder / "all"),
        }
        blocks = {name: lambda step=step: cpu_seconds(step, 1) for name, step in steps.items()}
        times = {name: timing.median / 1000 for name, timing in interleaved(blocks, ROUNDS, warm_up=2).items()}
    asked = {"bare": times["bare"], "exportkit": times["asked"]}
    return [
        ratio("trace with the values of all tensors, to a bare call", times, "all values", "files", 1.4),
        ratio("trace with statistics only, to a bare call", times, "statistics", "texts", 1.5),
        Figure("all statistics of stored values, asked for afterwards", asked, "ms", times["asked"]),
    ]


def ask(folder: Path) -> None:
    """Loads a trace, and computes all statistics."""
    calls = Trace.load(folder).calls
    assert all(record.hash for call in calls for record in (*call.inputs, *call.outputs))


def stored(model: Any, ids: Any) -> list[Figure]:
    """Size of the values of one call."""
    with tempfile.TemporaryDirectory() as folder:
        traced(model, ids, Path(folder) / "ours", values="all")
        debugged(model, ids, Path(folder) / "theirs", use_repr=False)
        theirs = list((Path(folder) / "theirs").glob("*.safetensors"))
        megabytes = {
            "exportkit": (Path(folder) / "ours" / DATA).stat().st_size / 1e6,
            "transformers": sum(file.stat().st_size for file in theirs) / 1e6,
        }
    case = f"one file with all values (transformers: {len(theirs)} files)"
    return [Figure(case, megabytes, "MB", megabytes["exportkit"], 75)]


def memory(_model: Any, _ids: Any) -> list[Figure]:
    """The peak memory of a trace, in a process of its own."""
    output = subprocess.run([sys.executable, __file__, "--memory"], capture_output=True, text=True, check=True).stdout
    peak = json.loads(output)
    extra = peak["exportkit"] - peak["bare"]
    return [Figure("peak memory with all values, beyond that of a bare call", peak, "MiB", extra, 40)]


def peaks() -> dict[str, float]:
    """Peak memory of this process in MiB, for plain calls and for traced calls."""
    model, ids = one_call()
    found = {}
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for name, step in (
            ("bare", lambda: model(ids, use_cache=False)),
            ("exportkit", lambda: traced(model, ids, Path(folder), values="all")),
        ):
            forget_peak()
            for _ in range(3):
                step()
            found[name] = peak_mib()
    return found


def compared(model: Any, ids: Any) -> list[Figure]:
    """CPU time of comparing two traces with all values."""
    times = comparing_milliseconds(model, ids)
    return [Figure("comparing two traces with all values, all of which differ", times, "ms", times["wrong"], 150)]


def located(model: Any, ids: Any) -> list[Figure]:
    """CPU time of locating a fault in the ONNX model."""
    times = locating_seconds(model, ids)
    return [Figure("locating one scaled weight in the ONNX model", times, "s", times["faulty"], 1.5)]


CASES: list[Callable[[Any, Any], list[Figure]]] = [recorded, stored, memory, compared, located]


def traced(model: Any, ids: Any, folder: Path, **options: Any) -> None:
    with trace_model(model, folder, **options):
        model(ids, use_cache=False)


def debugged(model: Any, ids: Any, folder: Path, use_repr: bool = True) -> None:
    with model_addition_debugger_context(model, str(folder), do_prune_layers=False, use_repr=use_repr):
        model.forward(ids, use_cache=False)
    torch.set_printoptions(profile="default", sci_mode=None)
    for module in model.modules():
        vars(module).pop("forward", None)


def ratio(case: str, times: dict[str, float], ours: str, theirs: str, target: float) -> Figure:
    variants = {"bare": times["bare"], "exportkit": times[ours], "transformers": times[theirs]}
    return Figure(case, variants, "ms", times[ours] / times["bare"], target)


if __name__ == "__main__":
    main()
