"""The duration of each stage on small models, from recording to the proof, and the peak memory of the process."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import peak_mib

import exportkit

STAGES = ("observe", "plan", "arguments", "export", "onnx", "verify")


@dataclass(frozen=True)
class Demo:
    """A model, and a run of it as a user would write it."""

    name: str
    model: torch.nn.Module
    use: Callable[[torch.nn.Module], object]


@dataclass(frozen=True)
class StageTimes:
    """Seconds by stage, the verdict, and the peak memory of the process so far."""

    model: str
    seconds: Mapping[str, float]
    proven: bool
    rows: int
    peak_mib: float

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "total": sum(self.seconds.values())}


class Nested(torch.nn.Module):
    """Takes a dict and a list, returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, data: dict[str, torch.Tensor], extras: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        hidden = self.linear(data["x"]) * data["scale"]
        return {"hidden": hidden, "total": hidden.sum(dim=-1) + extras[0] - extras[1]}


def linear() -> Demo:
    """The first export in a process, which includes what torch and onnxscript import."""

    def use(model: torch.nn.Module) -> None:
        for rows in (3, 5):
            model(torch.rand(rows, 4))

    return Demo("first export (one Linear)", torch.nn.Linear(4, 2).eval(), use)


def llama() -> Demo:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99
    )
    ids, mask = torch.randint(3, 99, (1, 7)), torch.ones(1, 7, dtype=torch.int64)
    mask[0, 0] = 0  # generate drops a mask that is all ones

    def use(model: Any) -> None:
        model.generate(ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)

    return Demo("tiny Llama, batch 1", LlamaForCausalLM(config).eval(), use)


def bert() -> Demo:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99)

    def use(model: torch.nn.Module) -> None:
        for batch, length in ((2, 6), (3, 9)):
            ids = torch.randint(3, 99, (batch, length))
            model(input_ids=ids, attention_mask=torch.ones_like(ids))

    return Demo("tiny BERT", BertModel(config).eval(), use)


def nested() -> Demo:
    def use(model: torch.nn.Module) -> None:
        for batch, length in ((2, 5), (3, 7)):
            data = {"x": torch.rand(batch, length, 8), "scale": torch.rand(8)}
            model(data, extras=[torch.rand(batch, length), torch.rand(batch, length)])

    return Demo("nested inputs and outputs", Nested().eval(), use)


def measure_stages() -> list[StageTimes]:
    torch.manual_seed(0)
    return [_stage_times(demo()) for demo in (linear, llama, bert, nested)]


def _stage_times(demo: Demo) -> StageTimes:
    observer = exportkit.InputObserver()
    started = time.perf_counter()
    with observer(demo.model), torch.no_grad():
        demo.use(demo.model)
    observed = time.perf_counter() - started
    exported = exportkit.export(demo.model, observer)
    with tempfile.TemporaryDirectory() as folder:
        onnx_model = exported.to_onnx(Path(folder) / "model.onnx")
        started = time.perf_counter()
        report = onnx_model.verify()
        verified = time.perf_counter() - started
    seconds = {"observe": observed, **exported.seconds, "verify": verified}
    return StageTimes(demo.name, {stage: seconds[stage] for stage in STAGES}, report.ok, len(report.rows), peak_mib())
