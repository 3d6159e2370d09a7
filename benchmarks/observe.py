"""The cost of recording in time and memory. Prints a table and writes ``results/observe.json``; part of `make bench`.

Each figure is a ratio to ``torch.onnx.InputObserver`` in the same interleaved run, with its target; yobx is included if
it is installed. Times are medians of CPU time. Memory is measured in a new process for each observer.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Literal

import psutil
import torch
from figures import Figure, publish
from measure import Timing, collector_off, cpu_seconds, empty_processor_caches, interleaved
from observing import LAYERS, OBSERVERS, ReturnsCache, TakesCache, TwoTensors

import exportkit

MIB = 2**20
PROCESSES = 3


class GrowsCache(torch.nn.Module):
    """Adds a token to each layer, as a decoder does."""

    def forward(self, input_ids: torch.Tensor, past_key_values: Any) -> dict[str, Any]:
        for layer in past_key_values.layers:
            layer.keys = torch.cat([layer.keys, layer.keys[:, :, :1]], dim=2)
            layer.values = torch.cat([layer.values, layer.values[:, :, :1]], dim=2)
        return {"logits": input_ids, "past_key_values": past_key_values}


class TakesNested(torch.nn.Module):
    def forward(self, data: Any) -> torch.Tensor:
        while "inner" in data:
            data = data["inner"]
        return data["x0"]


def main() -> None:
    torch.set_grad_enabled(False)
    with exportkit.register_flattening_functions(patch_transformers=True):
        figures = [*stored_calls(), growing_cache(), *after_the_budget(), *inference(), depth()]
    figures += [large_cache(), memory()]
    publish("observe", "Observing: what is added to a call, and what is held", ("exportkit", "torch", "yobx"), figures)


def observers() -> dict[str, Callable[[], Any]]:
    """Returns the observers to compare; yobx is included if it is installed."""
    found: dict[str, Callable[[], Any]] = dict(OBSERVERS)
    if importlib.util.find_spec("yobx") is not None:
        from yobx.torch import InputObserver

        found["yobx"] = InputObserver
    return found


def cache_arguments(layers: int, mib: float) -> dict[str, Any]:
    """Returns token ids and a cache with the given number of layers and total size."""
    tokens = max(1, round(mib * MIB / (layers * 2 * 8 * 128 * 4)))
    shape = (1, 8, tokens, 128) if mib else (1, 2, 4, 8)
    pairs = [(torch.rand(shape), torch.rand(shape)) for _ in range(layers)]
    return {"input_ids": torch.ones(1, 1, dtype=torch.int64), "past_key_values": exportkit.make_dynamic_cache(pairs)}


def stored_calls() -> list[Figure]:
    small, two = cache_arguments(LAYERS, 0), {"x": torch.ones(2, 3), "y": torch.ones(2, 3)}
    return [
        _stored("stored call, 2 small tensors", TwoTensors(), two, 10, 200, target=1),
        _stored(f"stored call, {LAYERS}-layer cache of small tensors", TakesCache(), small, 4, 100, target=1 / 8),
        _stored("the same, cache returned too", ReturnsCache(), small, 4, 100, target=1 / 8),
        _stored("the same not returned, first call of a block left out", TakesCache(), small, 4, 100, before="a call"),
        _stored("the same, caches of the processor emptied before", TakesCache(), small, 1, 50, before="emptying"),
        _stored("stored call, 1 GiB cache", TakesCache(), cache_arguments(LAYERS, 1024), 3, 3, target=1 / 500),
    ]


def _stored(
    case: str,
    model: torch.nn.Module,
    arguments: Any,
    calls: int,
    rounds: int,
    *,
    target: float = math.inf,
    before: Literal["nothing", "a call", "emptying"] = "nothing",
) -> Figure:
    """The time that recording adds to a stored call. ``before`` names what runs before each block, untimed.

    Without it, the first call of a block finds the processor caches filled by another observer.
    """

    def block() -> float:
        if before == "a call":
            model(**arguments)
        elif before == "emptying":
            empty_processor_caches()
        return cpu_seconds(lambda: model(**arguments), calls)

    def observed(make: Callable[[], Any]) -> float:
        observer, stored = make(), calls + (before == "a call")
        with observer(model, store_n_calls=stored):
            seconds = block()
        assert observer.num_obs() == stored, "the observer did not store the measured calls"
        return seconds

    blocks: dict[str, Callable[[], float]] = {"plain": block}
    blocks |= {name: lambda make=make: observed(make) for name, make in observers().items()}
    times = _times(blocks, rounds)
    plain = times.pop("plain")
    added = {name: value - plain for name, value in times.items()}
    return Figure(case, added, "µs", added["exportkit"] / added["torch"], target)


def growing_cache() -> Figure:
    """Each call gets different tensors from the previous one, as during generation."""
    model, filled = GrowsCache(), cache_arguments(LAYERS, 40)

    def block(make: Callable[[], Any] | None) -> float:
        pairs = [(layer.keys.clone(), layer.values.clone()) for layer in filled["past_key_values"].layers]
        arguments = {**filled, "past_key_values": exportkit.make_dynamic_cache(pairs)}
        with contextlib.nullcontext() if make is None else make()(model, store_n_calls=3):
            return cpu_seconds(lambda: model(**arguments), 3)

    blocks: dict[str, Callable[[], float]] = {"plain": lambda: block(None)}
    blocks |= {name: lambda make=make: block(make) for name, make in observers().items()}
    times = _times(blocks, 20)
    plain = times.pop("plain")
    added = {name: value - plain for name, value in times.items()}
    return Figure("stored call, 40 MiB cache that grows in it", added, "µs", added["exportkit"] / added["torch"])


def large_cache() -> Figure:
    """A process for each sample, as in the first call of a program: copies cannot reuse freed memory."""
    samples: dict[str, list[float]] = {name: [] for name in observers()}
    for _ in range(PROCESSES):
        for name, values in samples.items():
            values.append(in_process("--large-cache", name))
    added = {name: statistics.median(values) for name, values in samples.items()}
    ratio = added["exportkit"] / added["torch"]
    return Figure("stored call, 1 GiB cache, each in a fresh process", added, "µs", ratio)


def print_large_cache(name: str) -> None:
    """Prints the microseconds of a stored call, after one with a small cache."""
    torch.set_grad_enabled(False)
    model, make = TakesCache(), observers()[name]
    small, large = cache_arguments(LAYERS, 0), cache_arguments(LAYERS, 1024)
    with exportkit.register_flattening_functions(patch_transformers=True), collector_off():
        with make()(model):
            model(**small)
        with make()(model):
            print(1e6 * cpu_seconds(lambda: model(**large), 1))


def after_the_budget() -> list[Figure]:
    """Both modes as multiples of an unobserved call; torch's observer is shown for comparison."""
    model, arguments, calls = TwoTensors(), {"x": torch.ones(2, 3), "y": torch.ones(2, 3)}, 500

    def observed(make: Callable[[], Any], **options: Any) -> float:
        with make()(model, store_n_calls=1, **options):
            model(**arguments)
            return cpu_seconds(lambda: model(**arguments), calls)

    figures = []
    for shapes, target in (("stored", 1.02), ("all", 12.0)):
        blocks: dict[str, Callable[[], float]] = {
            "plain": lambda: cpu_seconds(lambda: model(**arguments), calls),
            "exportkit": lambda shapes=shapes: observed(exportkit.InputObserver, shapes=shapes),
            "torch": lambda: observed(OBSERVERS["torch"]),
        }
        times = interleaved(blocks, 200)
        ratio = times["exportkit"].median / times["plain"].median
        case = f'call after the budget, shapes="{shapes}" (ratio to an unobserved call)'
        figures.append(Figure(case, {name: times[name].median for name in ("exportkit", "torch")}, "µs", ratio, target))
    return figures


def inference() -> list[Figure]:
    """The first question after the calls, which includes everything that was deferred while they ran."""
    small = [cache_arguments(LAYERS, 0) for _ in range(3)]
    large = [cache_arguments(2, 960) for _ in range(2)]
    first = _inferred(f"infer_dynamic_shapes, {LAYERS} layers, 3 calls", small, 20, 1 / 10)
    second = _inferred("infer_dynamic_shapes, 960 MiB cache, 2 calls (ratio to 1 ms)", large, 5, 1.0)
    return [first, Figure(second.case, second.values, second.unit, second.values["exportkit"] / 1000, 1.0)]


def _inferred(case: str, calls: list[dict[str, Any]], rounds: int, target: float) -> Figure:
    model = TakesCache()

    def asked(make: Callable[[], Any]) -> float:
        observer = make()
        with observer(model):
            for arguments in calls:
                model(**arguments)
        return cpu_seconds(observer.infer_dynamic_shapes, 1)

    times = _times({name: lambda make=make: asked(make) for name, make in observers().items()}, rounds)
    return Figure(case, times, "µs", times["exportkit"] / times["torch"], target)


def depth() -> Figure:
    """The ratio of a value nested 32 levels deep to a flat value with the same number of tensors."""
    model, leaves, calls = TakesNested(), 64, 10
    values = {1: _nested(1, leaves), 32: _nested(32, leaves)}

    def observed(make: Callable[[], Any], levels: int) -> float:
        with make()(model, store_n_calls=calls):
            return cpu_seconds(lambda: model(values[levels]), calls)

    blocks: dict[str, Callable[[], float]] = {}
    for levels in (1, 32):
        blocks[f"plain {levels}"] = lambda levels=levels: cpu_seconds(lambda: model(values[levels]), calls)
        for name, make in observers().items():
            blocks[f"{name} {levels}"] = lambda make=make, levels=levels: observed(make, levels)
    times = interleaved(blocks, 100)

    def grown(name: str) -> float:
        deep, flat = (times[f"{name} {levels}"].median - times[f"plain {levels}"].median for levels in (32, 1))
        return deep / flat

    ratios = {name: grown(name) for name in observers()}
    return Figure(f"depth 32 to depth 1, {leaves} tensors", ratios, "times", ratios["exportkit"], 1.3)


def _nested(levels: int, leaves: int) -> dict[str, Any]:
    value: dict[str, Any] = {f"x{i}": torch.ones(2) for i in range(leaves - levels + 1)}
    for _ in range(levels - 1):
        value = {"inner": value, "x": torch.ones(2)}
    return value


def memory() -> Figure:
    """Resident memory after 3 calls with a growing cache, divided by the size of all distinct recorded tensors."""
    held = {name: in_process("--held-by", name) for name in observers()}
    return Figure("memory held after 3 calls, 960 MiB cache, to payload", held, "times", held["exportkit"], 1.1)


def in_process(task: str, name: str) -> float:
    """Returns the number that a new process prints."""
    output = subprocess.run([sys.executable, __file__, task, name], check=True, capture_output=True, text=True)
    return float(output.stdout.split()[-1])


def print_held(name: str) -> None:
    torch.set_grad_enabled(False)
    model, arguments = GrowsCache(), cache_arguments(LAYERS, 960)
    process = psutil.Process()
    payload = _size(arguments["past_key_values"])
    before = process.memory_info().rss - payload
    observer = observers()[name]()
    with exportkit.register_flattening_functions(patch_transformers=True), observer(model):
        for _ in range(3):
            arguments["past_key_values"] = model(**arguments)["past_key_values"]
            payload += _size(arguments["past_key_values"])
    del arguments
    gc.collect()
    print((process.memory_info().rss - before) / payload)


def _size(cache: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def _times(blocks: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    timings: dict[str, Timing] = interleaved(blocks, rounds, warm_up=1)
    return {name: timing.median for name, timing in timings.items()}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--held-by"]:
        print_held(sys.argv[2])
    elif sys.argv[1:2] == ["--large-cache"]:
        print_large_cache(sys.argv[2])
    else:
        main()
