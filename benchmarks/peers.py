"""Three tools export the same models. Prints a table and writes ``results/peers.json``. Run it with `make peers`.

Each tool gets a tiny model as its documentation describes, once with batch 1 and once with batch 2, and nothing else by
hand. Its graphs then run in onnxruntime, at the recorded sizes, and with batch 3 at lengths that were not recorded. A
result counts if every output is within 1e-4 of eager PyTorch.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import environment
from rich.console import Console
from rich.table import Table

import exportkit

RESULTS = Path(__file__).parent / "results" / "peers.json"
TOLERANCE = 1e-4
UNSEEN = (3, 11)  # batch and length
OPTIONS = {"max_new_tokens": 4, "do_sample": False}


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    rows = []
    for name, make in MODELS.items():
        for batch in (1, 2):
            for tool, run in TOOLS.items():
                if run is with_transformers and "loop" in name:  # it drives generate itself
                    continue
                torch.manual_seed(0)
                with tempfile.TemporaryDirectory() as folder, torch.no_grad():
                    rows.append((name, batch, tool, outcome(lambda r=run, m=make, b=batch, f=folder: r(m(), b, f))))
                print(*rows[-1], sep=": ", file=sys.stderr)
    table = Table("model", "batch", "tool", "outcome", title="One run of each model, exported by three tools")
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=160).print(table)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=2) + "\n")


def outcome(run: Callable[[], str]) -> str:
    try:
        return run()
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        lines = [line.strip(" -") for line in str(error).splitlines()]
        reason = next((line for line in lines if "speciali" in line), lines[0] if lines else "")
        return f"{type(error).__name__}: {reason[:130]}"


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SMALL, num_key_value_heads=2, pad_token_id=0, eos_token_id=None)
    return LlamaForCausalLM(config).eval()


def bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**SMALL)).eval()


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    return model


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 99,
}
MODELS = {
    "llama, generate": llama,
    "llama, a loop": lambda: looped(llama()),
    "bert, two calls": bert,
    "t5, generate": t5,
}


def looped(model: Any) -> Any:
    """Marks a model that runs in a loop, which passes no cache first; ``generate`` passes an empty one."""
    model.looped = True
    return model


def inputs(model: Any, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Token ids with one position of padding, so that ``generate`` does not drop the mask."""
    ids, mask = torch.randint(3, 99, (batch, length)), torch.ones(batch, length, dtype=torch.int64)
    position = 0 if type(model).__name__.startswith("Llama") else -1
    ids[0, position] = mask[0, position] = 0
    return {"input_ids": ids, "attention_mask": mask}


def drive(model: Any, batch: int, length: int = 7) -> None:
    if hasattr(model, "looped"):
        given = inputs(model, batch, length)
        cache = model(**given).past_key_values
        for _ in range(3):
            ids = torch.randint(3, 99, (batch, 1))
            mask = given["attention_mask"] = torch.cat([given["attention_mask"], torch.ones_like(ids)], dim=1)
            cache = model(input_ids=ids, attention_mask=mask, past_key_values=cache).past_key_values
    elif model.can_generate():
        model.generate(**inputs(model, batch, length), **OPTIONS)
    else:
        for extra in (0, 3):
            model(**inputs(model, batch, length + extra))


def with_torch(model: Any, batch: int, _folder: str) -> str:
    """torch.onnx.InputObserver: its arguments and shapes are passed to torch.onnx.export; its own comparison."""
    observer, later = torch.onnx.InputObserver(), torch.onnx.InputObserver()
    with exportkit.register_flattening_functions():  # without it the observer raises at the first cache
        with observer(model):
            drive(model, batch)
        shapes = observer.infer_dynamic_shapes(set_batch_dimension_for=True)
        arguments = observer.infer_arguments()
        program = torch.onnx.export(model, (), kwargs=arguments, dynamic_shapes=shapes, dynamo=True, verbose=False)
        with later(model):
            drive(model, *UNSEEN)
        later.infer_dynamic_shapes()  # aligns the calls, which the comparison takes for granted
        recorded, unseen = (
            agreeing(each.check_discrepancies(program, progress_bar=False)) for each in (observer, later)
        )
    return f"recorded calls {recorded}, batch 3 {unseen}"


def agreeing(rows: Any) -> str:
    right = [row.get("abs") is not None and row["abs"] <= TOLERANCE for row in rows]
    return f"{sum(right)} of {len(right)}"


def with_transformers(model: Any, batch: int, _folder: str) -> str:
    """transformers.exporters: a graph for the prompt and one for the tokens after it."""
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    exporter, config, example = OnnxExporter(), OnnxConfig(dynamic=True), inputs(model, batch, 7)
    if not model.can_generate():
        exported = exporter.export(model, example, config=config)
        return ", ".join(f"batch {n} {verdict(exported, model, inputs(model, n, m))}" for n, m in ((batch, 7), UNSEEN))
    runners = exporter.export_for_generation(model, example, config=config).runners
    parts = []
    for sizes in ((batch, 7), UNSEEN):
        calls = calls_of(model, *sizes)
        stages = [verdict(runners["prefill" if i == 0 else "decode"], model, call) for i, call in enumerate(calls)]
        parts.append(f"batch {sizes[0]}: {', '.join(f'call {i} {stage}' for i, stage in enumerate(stages))}")
    return "; ".join(parts)


def calls_of(model: Any, batch: int, length: int) -> list[dict[str, Any]]:
    """The calls of one generate."""
    observer = exportkit.InputObserver()
    with observer(model):
        drive(model, batch, length)
    return [dict(observer.observation.signature.unbind(call.values())[1]) for call in observer.observation.calls]


def verdict(runner: Any, model: Any, call: dict[str, Any]) -> str:
    expected = model(**copy.deepcopy(call)).logits
    known = getattr(getattr(runner, "metadata", None), "kwargs", call)
    try:
        got = runner(**{name: value for name, value in call.items() if name in known}).logits
    except Exception as error:
        return f"refused ({type(error).__name__})"
    if expected.ndim == 3:  # some graphs return the last position only
        got, expected = got[:, -1], expected[:, -1]
    return "right" if got.shape == expected.shape and (got - expected).abs().max() <= TOLERANCE else "wrong"


def with_exportkit(model: Any, batch: int, folder: str) -> str:
    """exportkit: one observer, one export, its own proof, and the same calls with batch 3."""
    observer, later = exportkit.InputObserver(), exportkit.InputObserver()
    with observer(model):
        drive(model, batch)
    onnx_model = exportkit.export(model, observer).to_onnx(f"{folder}/model.onnx")
    report = onnx_model.verify()
    with later(model):
        drive(model, *UNSEEN)
    unseen = [
        verdict(onnx_model, model, dict(later.observation.signature.unbind(c.values())[1]))
        for c in later.observation.calls
    ]
    return f"{report.verdict()} ({len(report.rows)} rows), batch 3 {unseen.count('right')} of {len(unseen)}"


TOOLS: dict[str, Callable[[Any, int, str], str]] = {
    "torch.onnx.InputObserver": with_torch,
    "transformers.exporters": with_transformers,
    "exportkit": with_exportkit,
}

if __name__ == "__main__":
    main()
