"""The cost of recording a call, compared with ``torch.onnx.InputObserver`` in one interleaved run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from measure import Timing, cpu_seconds, interleaved

import exportkit

OBSERVERS = {"exportkit": exportkit.InputObserver, "torch": torch.onnx.InputObserver}
LAYERS = 80


class TwoTensors(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return x


class TakesCache(torch.nn.Module):
    def forward(self, input_ids: torch.Tensor, past_key_values: Any) -> torch.Tensor:  # noqa: ARG002
        return input_ids


class ReturnsCache(torch.nn.Module):
    def forward(self, input_ids: torch.Tensor, past_key_values: Any) -> dict[str, Any]:
        return {"logits": input_ids, "past_key_values": past_key_values}


@dataclass(frozen=True)
class Case:
    """A model, its arguments, and the number of tensors in them.

    One sample consists of ``calls`` calls in a row. All of them are stored or, if the budget is ``spent``, none.
    """

    name: str
    model: torch.nn.Module
    arguments: dict[str, Any]
    tensors: int
    calls: int
    rounds: int
    spent: int = 0


@dataclass(frozen=True)
class Overhead:
    """CPU microseconds of one call: unobserved, and with each observer."""

    case: str
    plain: Timing
    exportkit: Timing
    torch: Timing

    @property
    def ratio(self) -> float:
        """The time that exportkit adds to a call, divided by the time that torch's observer adds."""
        return (self.exportkit.median - self.plain.median) / (self.torch.median - self.plain.median)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


def cases() -> list[Case]:
    tensors = {"x": torch.ones(2, 3), "y": torch.ones(2, 3)}
    layers = [(torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 8)) for _ in range(LAYERS)]
    cache = {"input_ids": torch.ones(1, 1, dtype=torch.int64), "past_key_values": exportkit.make_dynamic_cache(layers)}
    return [
        Case("stored call, 2 tensors", TwoTensors(), tensors, 2, calls=20, rounds=200),
        Case(f"stored call, {LAYERS}-layer cache", TakesCache(), cache, 2 * LAYERS + 1, calls=4, rounds=100),
        Case("the same, cache returned too", ReturnsCache(), cache, 2 * LAYERS + 1, calls=4, rounds=100),
        Case("call after the budget is spent", TwoTensors(), tensors, 2, calls=500, rounds=200, spent=1),
    ]


def measure_observing() -> list[Overhead]:
    """Measures the cases. torch's observer needs the cache classes registered, so they are registered for both."""
    with exportkit.register_flattening_functions(patch_transformers=True), torch.no_grad():
        return [_overhead(case) for case in cases()]


def _overhead(case: Case) -> Overhead:
    blocks: dict[str, Callable[[], float]] = {"plain": lambda: _run(case)}
    for name, make in OBSERVERS.items():
        blocks[name] = lambda make=make: _observed(case, make())
    return Overhead(case.name, **interleaved(blocks, case.rounds))


def _run(case: Case) -> float:
    return cpu_seconds(lambda: case.model(**case.arguments), case.calls)


def _observed(case: Case, observer: Any) -> float:
    """Uses a new observer for each sample, so that recorded tensors do not affect the next one."""
    with observer(case.model, store_n_calls=case.spent or case.calls):
        for _ in range(case.spent):
            case.model(**case.arguments)
        seconds = _run(case)
    stored = {len(inputs.flat_list) for inputs in observer.info.inputs}
    assert observer.num_obs() == (case.spent or case.calls), "the observer did not store the measured calls"
    assert stored == {case.tensors}, "the observer did not store the tensors of the measured calls"
    return seconds
